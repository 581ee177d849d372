//! Values: exact, finite, read from an unchanged file.

use std::{fs, io, ops::ControlFlow, time::Duration};

use moa_export::checkpoint::{Checkpoint, Dtype, ErrorKind};
use moa_graphs::{FloatType, Rounding, Runs, TensorDirectory, Weight, WeightError};
use tempfile::TempDir;

use super::{entry, file_of, folder, open_bytes, single};

/// The tensor "x" of a file, and the folder that must outlive it.
fn tensor(dtype: &str, shape: &str, data: &[u8]) -> (Weight, TempDir) {
    let folder = folder();
    let checkpoint = open_bytes(&folder, &single(dtype, shape, data)).unwrap();
    (checkpoint.tensor("x").unwrap(), folder)
}

/// A 16-bit float.
struct Half {
    dtype: &'static str,
    float: FloatType,
    exponent_bits: u32,
}

const HALVES: [Half; 2] = [
    Half { dtype: "F16", float: FloatType::F16, exponent_bits: 5 },
    Half { dtype: "BF16", float: FloatType::Bf16, exponent_bits: 8 },
];

impl Half {
    fn exponent(&self, bits: u16) -> i32 {
        i32::from((bits >> (15 - self.exponent_bits)) & ((1 << self.exponent_bits) - 1))
    }

    fn is_finite(&self, bits: u16) -> bool {
        self.exponent(bits) != (1 << self.exponent_bits) - 1
    }

    /// The value, computed from its fields.
    fn value(&self, bits: u16) -> f64 {
        let fraction_bits = 15 - self.exponent_bits;
        let bias = (1 << (self.exponent_bits - 1)) - 1;
        let fraction = f64::from(bits & ((1 << fraction_bits) - 1)) / f64::from(1u32 << fraction_bits);
        let size = match self.exponent(bits) {
            0 => fraction * 2f64.powi(1 - bias),
            exponent => (1.0 + fraction) * 2f64.powi(exponent - bias),
        };
        if bits >> 15 == 1 { -size } else { size }
    }

    /// A tensor of the patterns.
    fn tensor(&self, patterns: &[u16]) -> (Weight, TempDir) {
        let bytes: Vec<_> = patterns.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        tensor(self.dtype, &format!("[{}]", patterns.len()), &bytes)
    }
}

#[test]
fn every_finite_half_is_exact() {
    for half in HALVES {
        let patterns: Vec<_> = (0..=u16::MAX).filter(|bits| half.is_finite(*bits)).collect();
        let (weight, _folder) = half.tensor(&patterns);
        let (single, double) = (weight.to_f32().unwrap(), weight.to_f64().unwrap());
        assert_eq!((single.len(), double.len()), (patterns.len(), patterns.len()));
        for ((bits, single), double) in patterns.iter().zip(single).zip(double) {
            let expected = half.value(*bits).to_bits();
            assert_eq!(f64::from(single).to_bits(), expected, "{} {bits:#06x}", half.dtype);
            assert_eq!(double.to_bits(), expected, "{} {bits:#06x}", half.dtype);
        }
    }
}

#[test]
fn every_other_half_is_refused() {
    for half in HALVES {
        let patterns: Vec<_> = (0..=u16::MAX).filter(|bits| !half.is_finite(*bits)).collect();
        assert_eq!(patterns.len(), 1 << (16 - half.exponent_bits));
        let (weight, _folder) = half.tensor(&patterns);
        assert_non_finite(weight.to_f32(), patterns.len(), 0);
        assert_non_finite(weight.to_f64(), patterns.len(), 0);
        let copied = weight.read_runs(Runs::one(0, patterns.len()), half.float, &mut Vec::new());
        assert_non_finite(copied, patterns.len(), 0);
        let all: Vec<_> = (0..=u16::MAX).collect();
        let (weight, _folder) = half.tensor(&all);
        assert_non_finite(weight.to_f32(), patterns.len(), patterns[0].into());
    }
}

#[track_caller]
fn assert_non_finite<T: std::fmt::Debug>(read: Result<T, WeightError>, expected: usize, index: usize) {
    let error = read.expect_err("must be refused");
    assert_eq!(ErrorKind::from(&error), ErrorKind::Malformed);
    let WeightError::NonFinite { origin, tensor, count, first } = error else { panic!("{error}") };
    assert!(origin.ends_with("model.safetensors"));
    assert_eq!((tensor.as_str(), count, first), ("x", expected, index));
}

#[test]
fn f32_keeps_every_bit() {
    let values = [0.0, -0.0, 1.5, f32::MIN_POSITIVE, f32::from_bits(1), f32::MAX, f32::MIN, 0.1];
    let bytes: Vec<_> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let (weight, _folder) = tensor("F32", "[2,4]", &bytes);
    assert_eq!(weight.shape(), [2, 4]);
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&weight.to_f32().unwrap()), bits(&values));
    let wide: Vec<_> = values.iter().map(|value| f64::from(*value).to_bits()).collect();
    assert_eq!(weight.to_f64().unwrap().iter().map(|value| value.to_bits()).collect::<Vec<_>>(), wide);
}

#[test]
fn f64_is_rounded_once_to_nearest() {
    let half_ulp = 2f64.powi(-24);
    let values = [1.0 + half_ulp, 1.0 + 3.0 * half_ulp, 1.0 + half_ulp + 2f64.powi(-50), 0.1, -0.0, 1e-60];
    let bytes: Vec<_> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let (weight, _folder) = tensor("F64", "[6]", &bytes);
    assert_eq!(weight.to_f64().unwrap(), values);
    let ulp = f32::EPSILON;
    let single = weight.to_f32().unwrap();
    assert_eq!(single, [1.0, 1.0 + 2.0 * ulp, 1.0 + ulp, 0.1, -0.0, 0.0]);
    assert!(single[4].is_sign_negative());
}

#[test]
fn non_finite_values_are_counted() {
    let mut values = vec![1.0f32; 600_000];
    for index in [300_001, 300_002, 599_999] {
        values[index] = if index % 2 == 0 { f32::NAN } else { f32::NEG_INFINITY };
    }
    let bytes: Vec<_> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let (weight, _folder) = tensor("F32", "[600000]", &bytes);
    assert_non_finite(weight.to_f32(), 3, 300_001);
    assert_non_finite(weight.to_f64(), 3, 300_001);
    let (weight, _folder) = tensor("F64", "[2]", &[0f64.to_le_bytes(), 1e39f64.to_le_bytes()].concat());
    assert_non_finite(weight.to_f32(), 1, 1);
    assert_eq!(weight.to_f64().unwrap(), [0.0, 1e39]);
}

#[test]
fn other_element_types_are_no_weights() {
    let types = [
        ("BOOL", 8),
        ("F4", 4),
        ("F6_E2M3", 6),
        ("F6_E3M2", 6),
        ("U8", 8),
        ("I8", 8),
        ("F8_E5M2", 8),
        ("F8_E4M3", 8),
        ("F8_E8M0", 8),
        ("F8_E4M3FNUZ", 8),
        ("F8_E5M2FNUZ", 8),
        ("I16", 16),
        ("U16", 16),
        ("I32", 32),
        ("U32", 32),
        ("C64", 64),
        ("I64", 64),
        ("U64", 64),
    ];
    for (dtype, bits) in types {
        let (weight, _folder) = tensor(dtype, "[2,4]", &vec![0; bits]);
        assert_eq!(weight.shape(), [2, 4]);
        for error in [weight.to_f32().unwrap_err(), weight.to_f64().unwrap_err()] {
            assert_eq!(ErrorKind::from(&error), ErrorKind::Unsupported);
            let text = error.to_string();
            assert!(
                text.contains("\"x\"") && text.contains(dtype) && text.contains("weights are F16, BF16, F32, F64"),
                "{text}"
            );
        }
    }
}

#[test]
fn misaligned_tensors_are_read() {
    let header = format!(
        "{{{},{},{}}}",
        entry("a", "BOOL", "[1]", 0, 1),
        entry("x", "F32", "[2]", 1, 9),
        entry("y", "F64", "[]", 9, 17)
    );
    let data = [&[1][..], &1.5f32.to_le_bytes(), &(-2f32).to_le_bytes(), &0.1f64.to_le_bytes()].concat();
    for padding in 0..8 {
        let folder = folder();
        let checkpoint = open_bytes(&folder, &file_of(&format!("{header}{}", " ".repeat(padding)), &data)).unwrap();
        assert_eq!(checkpoint.names(), ["a", "x", "y"]);
        assert_eq!(checkpoint.tensor("x").unwrap().to_f32().unwrap(), [1.5, -2.0]);
        assert_eq!(checkpoint.tensor("y").unwrap().to_f64().unwrap(), [0.1]);
        assert_eq!(checkpoint.dtype("a"), Some(Dtype::Bool));
        assert_eq!(checkpoint.dtype("z"), None);
    }
}

#[test]
fn empty_tensors_and_scalars_are_read() {
    let (weight, _folder) = tensor("F32", "[0,3]", &[]);
    assert_eq!((weight.shape(), weight.to_f32().unwrap()), ([0, 3].as_slice(), vec![]));
    let (weight, _folder) = tensor("F32", "[]", &2f32.to_le_bytes());
    assert_eq!((weight.shape(), weight.to_f32().unwrap()), ([].as_slice(), vec![2.0]));
}

#[test]
fn a_file_that_changes_is_refused() {
    let bytes = single("F32", "[1]", &1f32.to_le_bytes());
    let other = single("F32", "[1]", &2f32.to_le_bytes());
    type Change = fn(&std::path::Path, &[u8]);
    let changes: [Change; 4] = [
        |path, _| fs::OpenOptions::new().write(true).open(path).unwrap().set_len(10).unwrap(),
        |path, other| fs::write(path, [other, b" "].concat()).unwrap(),
        |path, other| fs::write(path, other).unwrap(),
        |path, other| {
            let new = path.with_extension("new");
            fs::write(&new, other).unwrap();
            fs::rename(new, path).unwrap();
        },
    ];
    for change in changes {
        let folder = folder();
        let checkpoint = open_bytes(&folder, &bytes).unwrap();
        let weight = checkpoint.tensor("x").unwrap();
        assert_eq!(weight.to_f32().unwrap(), [1.0]);
        let path = folder.path().join("model.safetensors");
        let stamped = fs::metadata(&path).unwrap().modified().unwrap();
        change(&path, &other);
        // A clock of a file system may be as coarse as two seconds; the change is told by the time that it gives.
        let later = stamped + Duration::from_secs(3);
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_modified(later).unwrap();
        let error = weight.to_f32().unwrap_err();
        assert_eq!(ErrorKind::from(&error), ErrorKind::Io);
        assert!(error.to_string().contains("changed while its tensor \"x\" was read"), "{error}");
        let error = weight.read_bytes(&mut |_| ControlFlow::Continue(())).unwrap_err();
        assert!(error.to_string().contains("changed while its tensor \"x\" was read"), "{error}");
    }
}

#[test]
fn a_file_that_vanishes_is_refused() {
    let folder = folder();
    let checkpoint = open_bytes(&folder, &single("F32", "[1]", &[0; 4])).unwrap();
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let error = checkpoint.tensor("x").unwrap().to_f64().unwrap_err();
    let WeightError::Io { source, .. } = &error else { panic!("{error}") };
    assert_eq!(source.kind(), io::ErrorKind::NotFound);
}

#[test]
fn aliases_name_stored_tensors() {
    let metadata = r#""__metadata__":{"format":"pt","tied":"x","y":"x","other":"tied","lost":"nothing"}"#;
    let header = format!("{{{metadata},{},{}}}", entry("x", "F32", "[1]", 0, 4), entry("y", "F32", "[1]", 4, 8));
    let folder = folder();
    let data = [1f32.to_le_bytes(), 2f32.to_le_bytes()].concat();
    let checkpoint: Checkpoint = open_bytes(&folder, &file_of(&header, &data)).unwrap();
    assert_eq!(checkpoint.names(), ["x", "y"]);
    let tied = checkpoint.tensor("tied").unwrap();
    assert_eq!((tied.name(), tied.to_f32().unwrap()), ("x", vec![1.0]));
    assert_eq!(checkpoint.tensor("y").unwrap().to_f32().unwrap(), [2.0]);
    for name in ["format", "other", "lost", "pt", "__metadata__", ""] {
        assert!(checkpoint.tensor(name).is_none(), "{name}");
    }
}

/// The values that `runs` names of a tensor, one by one.
fn picked<T: Copy>(values: &[T], runs: Runs) -> Vec<T> {
    (0..runs.count).flat_map(|run| values[runs.start + run * runs.stride..][..runs.length].to_vec()).collect()
}

#[test]
fn runs_are_read_as_every_type() {
    let values: Vec<f64> = (0..700_000).map(|index| f64::from(index % 251 - 125) / 64.0 + 2f64.powi(-9)).collect();
    let stored: [(&str, Vec<u8>); 4] = [
        ("F64", values.iter().flat_map(|value| value.to_le_bytes()).collect()),
        ("F32", values.iter().flat_map(|value| (*value as f32).to_le_bytes()).collect()),
        ("F16", values.iter().flat_map(|value| half::f16::from_f64(*value).to_le_bytes()).collect()),
        ("BF16", values.iter().flat_map(|value| half::bf16::from_f64(*value).to_le_bytes()).collect()),
    ];
    for (dtype, bytes) in stored {
        let (weight, _folder) = tensor(dtype, "[700,1000]", &bytes);
        let values = weight.to_f32().unwrap();
        for runs in [
            Runs::one(0, 700_000),
            Runs::one(699_999, 1),
            Runs { start: 3, length: 5, count: 100, stride: 1000 },
            Runs { start: 1000, length: 1000, count: 600, stride: 1000 },
            Runs { start: 17, length: 983, count: 700, stride: 1000 },
            Runs { start: 9, length: 1, count: 0, stride: 1 },
        ] {
            for to in [FloatType::F32, FloatType::F16, FloatType::Bf16] {
                let (mut found, mut expected) = (vec![7], vec![7]);
                weight.read_runs(runs, to, &mut found).unwrap();
                to.append(&picked(&values, runs), &mut expected).unwrap();
                assert!(found == expected, "{dtype} as {to}, {runs:?}");
            }
        }
    }
}

#[test]
fn what_a_type_does_not_hold_is_named_wherever_reading_begins() {
    let mut values = vec![1f32; 4000];
    values[2000] = -65_520.0;
    values[3000] = 1e6;
    let bytes: Vec<_> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let (weight, _folder) = tensor("F32", "[4000]", &bytes);
    weight.read_runs(Runs::one(0, 2000), FloatType::F16, &mut Vec::new()).unwrap();
    weight.read_runs(Runs::one(0, 4000), FloatType::Bf16, &mut Vec::new()).unwrap();
    let error = weight.read_runs(Runs::one(2500, 1500), FloatType::F16, &mut Vec::new()).unwrap_err();
    assert_eq!(ErrorKind::from(&error), ErrorKind::Unsupported);
    let text = error.to_string();
    assert!(text.ends_with("tensor \"x\" holds -65520 at index 2000, and the largest float16 is 65504"), "{text}");

    values[3500] = f32::NAN;
    values[3600] = f32::INFINITY;
    let bytes: Vec<_> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let (weight, _folder) = tensor("F32", "[4000]", &bytes);
    for to in [FloatType::F32, FloatType::F16, FloatType::Bf16] {
        match weight.read_runs(Runs::one(3550, 100), to, &mut Vec::new()) {
            Err(WeightError::NonFinite { count: 2, first: 3500, .. }) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Blocks of a file hold a mebibyte.
#[test]
fn nothing_is_read_behind_a_break() {
    let (weight, _folder) = tensor("F32", "[1048576]", &[0; 4 << 20]);
    for most in 1..=5 {
        let mut blocks = 0;
        let mut take = |_: &[u8]| {
            blocks += 1;
            if blocks == most { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        weight.read_bytes(&mut take).unwrap();
        assert_eq!(blocks, most.min(4));
    }
}
