//! Matrices in few bytes, and their products.

use moa_schema::IntegerType;

use super::*;
use crate::reference::{math::add_scaled, sequence::Draw};

/// Numbers from -1 to 1 with all digits of f32.
fn numbers(count: usize, seed: u64) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f64::from((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
    };
    (0..count).map(|_| next()).collect()
}

/// `x · matrix`, `[outputs]`, a term after the other: in f32 by fused multiply-adds where it holds all factors.
fn one_by_one(sums: Sums, x: &[f64], matrix: &[f64], outputs: usize) -> Vec<f64> {
    let mut y = vec![0.0; outputs];
    let fuses = sums == Sums::Single && [x, matrix].iter().all(|values| exact_singles(values).is_some());
    for (x, row) in x.iter().zip(matrix.chunks(outputs)) {
        match fuses {
            true => y.iter_mut().zip(row).for_each(|(y, weight)| {
                *y = f64::from(libm::fmaf(*x as f32, *weight as f32, *y as f32));
            }),
            false => add_scaled(sums, &mut y, *x, row),
        }
    }
    y
}

/// Whatever is computed beside a sum, and by however many threads, its terms are added in order.
#[test]
fn products_are_those_of_one_vector_after_the_other() {
    for (inputs, outputs, vectors) in
        [(1, 1, 1), (5, 3, 2), (16, 128, 16), (131, 257, 35), (512, 1030, 20), (17, 70, 260)]
    {
        let singles = numbers(3 * inputs * outputs, 1);
        let doubles: Vec<f64> = singles.iter().map(|value| value / 3.0).collect();
        for (values, scale) in [(&singles, 1.0), (&singles, 1.0 / 3.0), (&doubles, 1.0)] {
            let mut kept = Values::zeros(values.len());
            kept.hold(values);
            kept.fill(0, values);
            let matrices = Matrices { values: Kept::Floats(kept), inputs, outputs };
            let of_seed = |seed: u64| numbers(inputs, 7 + seed).iter().map(|value| value * scale).collect();
            let mut x: Vec<Vec<f64>> = (0..vectors).map(of_seed).collect();
            x[(vectors / 2) as usize] = numbers(inputs, 5);
            let x = slices(&x);
            for precision in [Precision::DOUBLE, Precision::SINGLE] {
                let sums = precision.sums();
                for index in 0..3 {
                    let matrix = &values[index * inputs * outputs..(index + 1) * inputs * outputs];
                    let expected: Vec<_> = x.iter().map(|x| one_by_one(sums, x, matrix, outputs)).collect();
                    assert_eq!(matrices.product(sums, index, &x), expected, "{inputs} {outputs} {vectors} {sums:?}");
                }
                let of: Vec<usize> = (0..x.len()).map(|place| place * 2 % 3).collect();
                let each = matrices.each(precision, &x, &of);
                let alone = |place: usize| matrices.product(sums, of[place], &x[place..=place]).remove(0);
                assert_eq!(each, (0..x.len()).map(alone).collect::<Vec<_>>());
            }
        }
    }
}

/// Of integers, and of nothing else: the same numbers kept as floats are multiplied with vectors as they are.
#[test]
fn vectors_are_rounded_for_matrices_of_integers_alone() {
    let (shape, [inputs, outputs]) = ([2, 70, 5], [70, 5]);
    let (values, x) = (numbers(2 * inputs * outputs, 3), [numbers(inputs, 4), numbers(inputs, 5)]);
    for kind in IntegerType::ALL {
        let scaled = Scaled::read(kind, shape, Outputs::Columns, |part| Ok(values[part.start..part.end].to_vec()));
        let scaled = Matrices { values: Kept::Scaled(scaled.unwrap()), inputs, outputs };
        let floats = (0..2 * inputs).flat_map(|row| scaled.row(row)).collect();
        let floats = Matrices { values: Kept::Floats(Values::Double(floats)), inputs, outputs };
        let rounded = x.each_ref().map(|x| scaled::factor(x, Draw::NEAREST));
        let each = |matrices: &Matrices, precision, x: &[Vec<f64>]| matrices.each(precision, &slices(x), &[1, 0]);
        let expected = each(&floats, Precision::SINGLE, &rounded);
        assert_ne!(expected, each(&floats, Precision::SINGLE, &x));
        assert_eq!(each(&scaled, Precision::INTEGERS, &x), expected);
        assert_eq!(each(&floats, Precision::INTEGERS, &x), each(&floats, Precision::SINGLE, &x));
        for precision in [Precision::SINGLE, Precision::PRODUCTS] {
            assert_eq!(each(&scaled, precision, &x), each(&floats, Precision::SINGLE, &x));
        }
        let sequence =
            |precision, x: &[Vec<f64>]| Sequence { precision, batch: 1, tokens: 2, width: inputs, values: x.concat() };
        let mapped = scaled.map_factors(&sequence(Precision::INTEGERS, &x));
        assert_eq!(mapped.values, floats.map(&sequence(Precision::SINGLE, &rounded)).values);
        assert_ne!(mapped.values, scaled.map(&sequence(Precision::INTEGERS, &x)).values);
    }
}

#[test]
fn tasks_come_back_in_order() {
    for work in [0, usize::MAX] {
        assert_eq!(in_order(100, work, |index| index * index), (0..100).map(|i| i * i).collect::<Vec<_>>());
    }
    assert!(in_order(0, usize::MAX, |index| index).is_empty());
}
