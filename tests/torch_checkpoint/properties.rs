//! Whatever the bytes: no panic; and any sound view is read back.

use std::{fs, ops::Range, sync::LazyLock};

use moa_export::checkpoint::fuzzing;
use moa_graphs::TensorDirectory;
use proptest::prelude::*;

use super::{data::data, f32s, file_of, keys, open_bytes, opened, root, tensors::single, writer::dict, zip};

static FILE: LazyLock<Vec<u8>> = LazyLock::new(|| fs::read(data("variants/v_postnorm/checkpoint.pt")).unwrap());

/// The pickle inside of [`FILE`].
fn pickle() -> Range<usize> {
    64..64 + 17_514
}

/// Bytes that are often opcodes.
fn opcodes() -> impl Strategy<Value = Vec<u8>> {
    let pieces: Vec<&[u8]> = vec![
        b"(",
        b".",
        b"0",
        b"1",
        b"2",
        b"N",
        b"K\x01",
        b"M\x01\x02",
        b"J\xff\xff\xff\xff",
        b"\x88",
        b"\x89",
        b"}",
        b"]",
        b")",
        b"t",
        b"\x85",
        b"\x86",
        b"\x87",
        b"a",
        b"e",
        b"s",
        b"u",
        b"b",
        b"R",
        b"\x81",
        b"\x92",
        b"Q",
        b"\x8f",
        b"\x90",
        b"\x91",
        b"\x93",
        b"\x94",
        b"h\x00",
        b"q\x00",
        b"h\x01",
        b"q\x01",
        b"X\x05\0\0\0model",
        b"X\x03\0\0\0cfg",
        b"X\x04\0\0\0arch",
        b"X\x0f\0\0\0moa_transformer",
        b"X\x07\0\0\0storage",
        b"X\x01\0\0\x000",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctorch\nFloatStorage\n",
        b"ccollections\nOrderedDict\n",
        b"cargparse\nNamespace\n",
        b"\x8a\x01\xff",
        b"G\0\0\0\0\0\0\0\0",
        b"C\x01a",
    ];
    prop::collection::vec(prop::sample::select(pieces), 0..60).prop_map(|pieces| {
        let mut bytes = b"\x80\x02".to_vec();
        bytes.extend(pieces.concat());
        bytes
    })
}

/// Reads everything that a file holds.
fn read_all(bytes: &[u8]) {
    let folder = tempfile::tempdir().unwrap();
    if let Ok(checkpoint) = open_bytes(&folder, bytes) {
        for name in checkpoint.names() {
            let _ = checkpoint.tensor(name).unwrap().to_f32();
        }
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = fuzzing::torch_pickle(&bytes);
        let _ = fuzzing::torch_pickle(&[b"\x80\x02", bytes.as_slice()].concat());
        let _ = fuzzing::torch_zip(&bytes);
        let _ = fuzzing::torch_zip(&[b"PK\x03\x04", bytes.as_slice()].concat());
        let _ = fuzzing::torch_zip(&zip(&bytes, &[]));
    }

    #[test]
    fn arbitrary_opcodes_never_panic(pickle in opcodes()) {
        let _ = fuzzing::torch_pickle(&pickle);
        let _ = fuzzing::torch_pickle(&[&pickle, b".".as_slice()].concat());
    }

    #[test]
    fn changed_bytes_of_a_pickle_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = FILE[pickle()].to_vec();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = fuzzing::torch_pickle(&bytes);
    }

    #[test]
    fn a_changed_file_is_refused_or_read(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..3),
    ) {
        let mut bytes = FILE.clone();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        read_all(&bytes);
    }

    #[test]
    fn any_view_is_read_back(
        shape in prop::collection::vec(1usize..4, 0..4),
        order in any::<u64>(),
        spread in prop::collection::vec(1usize..3, 4),
        offset in 0usize..5,
    ) {
        let mut axes: Vec<usize> = (0..shape.len()).collect();
        axes.sort_by_key(|axis| order.wrapping_mul(2 * *axis as u64 + 1) >> 7);
        let (mut strides, mut step) = (vec![0; shape.len()], 1);
        for axis in axes {
            step *= spread[axis];
            strides[axis] = step;
            step *= shape[axis];
        }
        let count = offset + step;
        let values: Vec<f32> = (0..count).map(|index| index as f32).collect();
        let mut expected = vec![offset];
        for (size, stride) in shape.iter().zip(&strides) {
            expected = expected.iter().flat_map(|at| (0..*size).map(move |index| at + index * stride)).collect();
        }
        let wide = |numbers: &[usize]| numbers.iter().map(|number| *number as i64).collect::<Vec<_>>();
        let x = single(offset as i64, &wide(&shape), &wide(&strides), count as i64);
        let (checkpoint, _folder) = opened(&file_of([("x", x)], &[("0", &f32s(&values))]));
        let read = checkpoint.tensor("x").unwrap().to_f32().unwrap();
        prop_assert_eq!(read, expected.into_iter().map(|at| at as f32).collect::<Vec<_>>());
    }
}

#[test]
fn the_pickle_is_where_the_mutations_look() {
    assert!(fuzzing::torch_pickle(&FILE[pickle()]).unwrap() > 50);
    assert_eq!(fuzzing::torch_zip(&FILE).unwrap(), fuzzing::torch_pickle(&FILE[pickle()]).unwrap());
    assert_eq!(fuzzing::torch_pickle(&root(dict([]), keys()).pickle()).unwrap(), 0);
}

#[test]
fn every_changed_byte_of_a_small_file_is_refused_or_harmless() {
    let file = file_of([("x", single(0, &[2], &[1], 2))], &[("0", &f32s(&[1.0, 2.0]))]);
    let folder = tempfile::tempdir().unwrap();
    for at in 0..file.len() {
        let mut bytes = file.clone();
        bytes[at] ^= 1 << (at % 8);
        let Ok(checkpoint) = open_bytes(&folder, &bytes) else { continue };
        match checkpoint.tensor("x").unwrap().to_f32() {
            Ok(values) => assert_eq!(values, [1.0, 2.0], "byte {at}"),
            Err(error) => assert!(error.to_string().contains("checksum"), "{error}"),
        }
    }
}
