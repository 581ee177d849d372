//! Functions of one vector, in f64. Every sum runs over ascending indices.

use moa_schema::Activation;

/// What a sum is rounded to after every term.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sums {
    /// Nothing: it is f64.
    Double,
    /// f32, as a runtime that adds each product to a register does: products of f32 are exact in f64, so a term costs
    /// what a fused multiply-add does, but where the sum in f64 falls halfway between two f32.
    Single,
}

impl Sums {
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)]
    pub(super) fn rounded(self, sum: f64) -> f64 {
        match self {
            Self::Double => sum,
            Self::Single => f64::from(sum as f32),
        }
    }

    /// `Σ terms`.
    pub(super) fn sum(self, terms: impl IntoIterator<Item = f64>) -> f64 {
        terms.into_iter().fold(0.0, |sum, term| self.rounded(sum + term))
    }
}

/// `x · w`: `x` is `[I]`, `w` is `[I, O]`, the result `[O]`.
pub(super) fn vector_matrix(sums: Sums, x: &[f64], w: &[f64], outputs: usize) -> Vec<f64> {
    let mut y = vec![0.0; outputs];
    for (x, row) in x.iter().zip(w.chunks_exact(outputs)) {
        add_scaled(sums, &mut y, *x, row);
    }
    y
}

/// `y += factor · x`.
pub(super) fn add_scaled(sums: Sums, y: &mut [f64], factor: f64, x: &[f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = sums.rounded(*y + factor * x);
    }
}

/// `Σ a[i] · b[i]`.
pub(super) fn dot(sums: Sums, a: &[f64], b: &[f64]) -> f64 {
    sums.sum(a.iter().zip(b).map(|(a, b)| a * b))
}

/// `[R, C]` to `[C, R]`, in tiles that stay near.
pub(super) fn transpose(matrix: &[f64], columns: usize) -> Vec<f64> {
    const TILE: usize = 32;
    let rows = matrix.len() / columns.max(1);
    let mut transposed = vec![0.0; matrix.len()];
    for first_row in (0..rows).step_by(TILE) {
        for first_column in (0..columns).step_by(TILE) {
            for row in first_row..rows.min(first_row + TILE) {
                for column in first_column..columns.min(first_column + TILE) {
                    transposed[column * rows + row] = matrix[row * columns + column];
                }
            }
        }
    }
    transposed
}

/// `exp(x[i]) / Σ exp(x[j])`, shifted by the maximum; nothing for no value.
pub(super) fn softmax(sums: Sums, x: &[f64]) -> Vec<f64> {
    let maximum = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = x.iter().map(|x| (x - maximum).exp()).collect();
    let sum = sums.sum(powers.iter().copied());
    powers.iter().map(|power| power / sum).collect()
}

/// Weights of stick-breaking attention for scores in the order of their keys (Shen et al., "ModuleFormer", 2023):
/// `sigmoid(x[i]) · Π (1 - sigmoid(x[j]))` over `j > i`.
pub(super) fn stick_breaking(sums: Sums, x: &[f64]) -> Vec<f64> {
    let mut stick = 1.0;
    let mut weights: Vec<f64> = x
        .iter()
        .rev()
        .map(|x| {
            let weight = stick / (1.0 + (-x).exp());
            stick = sums.rounded(stick / (1.0 + x.exp()));
            weight
        })
        .collect();
    weights.reverse();
    weights
}

/// Indices of the `k` largest values, largest first; among equal values the lower index comes first.
pub(super) fn top_k(values: &[f64], k: usize) -> Vec<usize> {
    let mut left: Vec<usize> = (0..values.len()).collect();
    let mut chosen = Vec::with_capacity(k);
    while chosen.len() < k && !left.is_empty() {
        let best = (1..left.len()).fold(0, |best, at| if values[left[at]] > values[left[best]] { at } else { best });
        chosen.push(left.remove(best));
    }
    chosen
}

/// `(x - mean) / sqrt(variance + epsilon) · weight + bias`, with the biased variance.
pub(super) fn layer_norm(sums: Sums, x: &[f64], weight: &[f64], bias: &[f64], epsilon: f64) -> Vec<f64> {
    let count = x.len() as f64;
    let mean = sums.sum(x.iter().copied()) / count;
    let variance = sums.sum(x.iter().map(|x| (x - mean) * (x - mean))) / count;
    let deviation = (variance + epsilon).sqrt();
    let scales = weight.iter().zip(bias);
    x.iter().zip(scales).map(|(x, (weight, bias))| (x - mean) / deviation * weight + bias).collect()
}

/// The element-wise function `activation` of `x`.
pub(super) fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Relu => x.max(0.0),
        Activation::Gelu => x * normal_distribution(x),
        Activation::GeluTanh => {
            let argument = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
            x / (1.0 + (-2.0 * argument).exp())
        }
        Activation::Silu => x / (1.0 + (-x).exp()),
    }
}

/// `Φ(x) = (1 + erf(x / √2)) / 2`, as `erfc(-x / √2) / 2`, which keeps its digits for negative `x`.
fn normal_distribution(x: f64) -> f64 {
    0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_close(found: f64, expected: f64, relative: f64) {
        assert!((found - expected).abs() <= relative * expected.abs(), "{found:e} instead of {expected:e}");
    }

    /// `erf(x) = 2/√π · exp(-x²) · Σ 2ⁿ x²ⁿ⁺¹ / (2n+1)!!`, Abramowitz and Stegun 7.1.6: no term is negative.
    fn erf_series(x: f64) -> f64 {
        let (mut term, mut sum) = (x, 0.0);
        for n in 1..200 {
            sum += term;
            term *= 2.0 * x * x / f64::from(2 * n + 1);
        }
        std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
    }

    #[test]
    fn normal_distribution_agrees_with_published_values() {
        assert_eq!(normal_distribution(0.0), 0.5);
        assert_close(normal_distribution(1.0), 0.841_344_746_068_542_9, 1e-15);
        assert_close(normal_distribution(-1.0), 0.158_655_253_931_457_05, 1e-15);
        assert_close(normal_distribution(-6.0), 9.865_876_450_376_98e-10, 1e-14);
        assert_eq!(normal_distribution(40.0), 1.0);
    }

    #[test]
    fn normal_distribution_agrees_with_the_series_of_erf() {
        for step in -300..=300 {
            let x = f64::from(step) / 100.0;
            let expected = 0.5 * (1.0 + erf_series(x * std::f64::consts::FRAC_1_SQRT_2));
            assert!((normal_distribution(x) - expected).abs() <= 1e-15, "at {x}");
        }
    }

    #[test]
    fn activations_have_their_values_and_limits() {
        assert_eq!(activate(Activation::Relu, -2.0), 0.0);
        assert_eq!(activate(Activation::Relu, 2.0), 2.0);
        assert_close(activate(Activation::Gelu, -0.5), -0.154_268_769_362_993_45, 1e-15);
        assert_close(activate(Activation::GeluTanh, -0.5), -0.154_285_990_174_856_06, 1e-12);
        assert_close(activate(Activation::Silu, 1.0), 0.731_058_578_630_004_9, 1e-15);
        for activation in Activation::ALL {
            assert_eq!(activate(activation, -1e4), 0.0);
            assert_eq!(activate(activation, 1e4), 1e4);
        }
    }

    #[test]
    fn sums_are_rounded_after_every_term() {
        let ulp = f64::from(f32::EPSILON);
        let terms = [1.0, ulp / 4.0, ulp / 4.0, ulp / 4.0, ulp / 4.0];
        assert_eq!((Sums::Double.sum(terms), Sums::Single.sum(terms)), (1.0 + ulp, 1.0));
        let (x, ones) = ([1.0, 0.75 * ulp], [1.0; 2]);
        for (sums, expected) in [(Sums::Double, 1.0 + 0.75 * ulp), (Sums::Single, 1.0 + ulp)] {
            assert_eq!(dot(sums, &x, &ones), expected);
            assert_eq!(vector_matrix(sums, &x, &ones, 1), [expected]);
        }
    }

    #[test]
    fn softmax_sums_to_one_and_survives_extremes() {
        let p = softmax(Sums::Double, &[1.0, 2.0, 3.0]);
        assert_close(p[2], 0.665_240_955_774_821_9, 1e-15);
        assert_close(p.iter().sum(), 1.0, 1e-15);
        assert_eq!(softmax(Sums::Double, &[1e300, -1e300]), [1.0, 0.0]);
        assert_eq!(softmax(Sums::Double, &[-7.0]), [1.0]);
        assert!(softmax(Sums::Double, &[]).is_empty());
    }

    #[test]
    fn sticks_are_broken_from_the_last_key_on() {
        let weights = stick_breaking(Sums::Double, &[2.0, 0.0, -1.0]);
        let [a, b, c] = [2.0, 0.0, -1.0_f64].map(|x| 1.0 / (1.0 + (-x).exp()));
        for (found, expected) in weights.into_iter().zip([a * (1.0 - b) * (1.0 - c), b * (1.0 - c), c]) {
            assert_close(found, expected, 1e-15);
        }
        assert_eq!(stick_breaking(Sums::Double, &[5.0, 1e3]), [0.0, 1.0]);
        assert_eq!(stick_breaking(Sums::Double, &[-1e3, -1e3]), [0.0, 0.0]);
        assert!(stick_breaking(Sums::Double, &[]).is_empty());
    }

    #[test]
    fn top_k_prefers_the_lower_index_among_equals() {
        assert_eq!(top_k(&[0.5; 5], 3), [0, 1, 2]);
        assert_eq!(top_k(&[0.1, 0.4, 0.2, 0.4], 3), [1, 3, 2]);
        assert_eq!(top_k(&[-0.0, 0.0, -1.0], 2), [0, 1]);
        assert_eq!(top_k(&[1.0, 2.0], 2), [1, 0]);
    }

    #[test]
    fn layer_norm_uses_the_biased_variance() {
        let y = layer_norm(Sums::Double, &[1.0, 3.0], &[2.0, 2.0], &[0.5, 0.5], 0.0);
        assert_eq!(y, [-1.5, 2.5]);
        assert_eq!(layer_norm(Sums::Double, &[4.0, 4.0], &[1.0, 1.0], &[0.0, 7.0], 1e-5), [0.0, 7.0]);
    }

    #[test]
    fn products_follow_their_layouts() {
        let w = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        assert_eq!(transpose(&w, 3), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        let wide: Vec<f64> = (0..70 * 45).map(f64::from).collect();
        let tall = transpose(&wide, 45);
        assert!((0..70).all(|row| (0..45).all(|column| tall[column * 70 + row] == wide[row * 45 + column])));
        assert_eq!(transpose(&tall, 70), wide);
        assert_eq!(vector_matrix(Sums::Double, &[1.0, 10.0], &w, 3), [41.0, 52.0, 63.0]);
        assert_eq!(dot(Sums::Double, &[1.0, 2.0], &[3.0, 4.0]), 11.0);
    }
}
