//! Whatever the bytes: no panic; and what the safetensors library writes is read back.

use std::collections::{BTreeMap, HashMap};

use half::{bf16, f16};
use moa_export::checkpoint::fuzzing;
use moa_graphs::TensorDirectory;
use proptest::prelude::*;
use safetensors::tensor::{Dtype, TensorView};

use super::{file_of, folder, open_bytes};

/// A tensor that another library writes, and what must be read.
#[derive(Debug, Clone)]
struct Case {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
    values: Vec<f64>,
}

fn case() -> impl Strategy<Value = Case> {
    let shape = prop::collection::vec(0usize..4, 0..5);
    let dtype = prop::sample::select(vec![Dtype::F16, Dtype::BF16, Dtype::F32, Dtype::F64]);
    (dtype, shape).prop_flat_map(|(dtype, shape)| {
        let size = shape.iter().product::<usize>();
        let values = prop::collection::vec(-6e4f64..6e4, size);
        values.prop_map(move |values| stored(dtype, shape.clone(), &values))
    })
}

fn stored(dtype: Dtype, shape: Vec<usize>, values: &[f64]) -> Case {
    let (mut bytes, mut kept) = (Vec::new(), Vec::new());
    for value in values {
        match dtype {
            Dtype::F16 => {
                let value = f16::from_f64(*value);
                bytes.extend(value.to_le_bytes());
                kept.push(value.to_f64());
            }
            Dtype::BF16 => {
                let value = bf16::from_f64(*value);
                bytes.extend(value.to_le_bytes());
                kept.push(value.to_f64());
            }
            Dtype::F32 => {
                let value = *value as f32;
                bytes.extend(value.to_le_bytes());
                kept.push(value.into());
            }
            _ => {
                bytes.extend(value.to_le_bytes());
                kept.push(*value);
            }
        }
    }
    Case { dtype, shape, bytes, values: kept }
}

/// Text that is often close to a header, an index or a configuration.
fn json() -> impl Strategy<Value = String> {
    let pieces = vec![
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        " ",
        "\"x\"",
        "\"y\"",
        "\"dtype\"",
        "\"shape\"",
        "\"data_offsets\"",
        "\"F32\"",
        "\"F4\"",
        "\"__metadata__\"",
        "\"weight_map\"",
        "\"metadata\"",
        "\"total_size\"",
        "\"a.safetensors\"",
        "0",
        "4",
        "8",
        "-1",
        "1.5",
        "18446744073709551615",
        "null",
        "true",
        "\\",
        "\u{0}",
        "é",
    ];
    prop::collection::vec(prop::sample::select(pieces), 0..40).prop_map(|pieces| pieces.concat())
}

/// A header whose entries have the right form and arbitrary contents.
fn header() -> impl Strategy<Value = String> {
    let dtype = prop::sample::select(vec!["F32", "F16", "BOOL", "F4", "I64", "F128"]);
    let number = prop_oneof![0u64..20, Just(u64::MAX), Just(1 << 62)];
    let shape = prop::collection::vec(number.clone(), 0..10);
    let entry = ("[a-c]{1,2}", dtype, shape, number.clone(), number);
    prop::collection::vec(entry, 0..4).prop_map(|entries| {
        let entries: Vec<_> = entries
            .into_iter()
            .map(|(name, dtype, shape, begin, end)| {
                format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#)
            })
            .collect();
        format!("{{{}}}", entries.join(","))
    })
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = fuzzing::header(&bytes);
        let _ = fuzzing::shard_index(&bytes);
        let _ = fuzzing::config(&bytes);
        let mut file = (bytes.len() as u64).to_le_bytes().to_vec();
        file.extend(bytes);
        let _ = fuzzing::header(&file);
    }

    #[test]
    fn arbitrary_text_never_panics(text in json()) {
        let _ = fuzzing::header(&file_of(&format!("{{{text}}}"), &[0; 8]));
        let _ = fuzzing::shard_index(text.as_bytes());
        let _ = fuzzing::config(text.as_bytes());
    }

    #[test]
    fn accepted_headers_are_accepted_by_the_safetensors_library(header in header(), size in 0usize..40) {
        let file = file_of(&header, &vec![0; size]);
        if let Ok(count) = fuzzing::header(&file) {
            prop_assert_eq!(safetensors::SafeTensors::deserialize(&file).unwrap().len(), count);
        }
    }

    #[test]
    fn written_tensors_are_read_back(
        cases in prop::collection::btree_map("[a-z./é]{1,12}", case(), 0..6),
        metadata in prop::option::of(prop::collection::hash_map("[A-Z]{1,4}", "[A-Z]{0,4}", 1..3)),
    ) {
        check_round_trip(&cases, metadata)?;
    }

    #[test]
    fn one_changed_byte_never_panics(
        cases in prop::collection::btree_map("[a-z]{1,4}", case(), 1..3),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut file = safetensors::serialize(views(&cases), None).unwrap();
        let at = at.index(file.len());
        file[at] = byte;
        let folder = folder();
        if let Ok(checkpoint) = open_bytes(&folder, &file) {
            for name in checkpoint.names() {
                let _ = checkpoint.tensor(name).unwrap().to_f32();
            }
        }
    }
}

fn views(cases: &BTreeMap<String, Case>) -> impl Iterator<Item = (&String, TensorView<'_>)> {
    cases.iter().map(|(name, case)| (name, TensorView::new(case.dtype, case.shape.clone(), &case.bytes).unwrap()))
}

fn check_round_trip(
    cases: &BTreeMap<String, Case>,
    metadata: Option<HashMap<String, String>>,
) -> Result<(), TestCaseError> {
    let folder = folder();
    let file = safetensors::serialize(views(cases), metadata).unwrap();
    let checkpoint = open_bytes(&folder, &file).unwrap();
    prop_assert_eq!(checkpoint.names(), cases.keys().collect::<Vec<_>>());
    for (name, case) in cases {
        let weight = checkpoint.tensor(name).unwrap();
        prop_assert_eq!(weight.shape(), &case.shape);
        prop_assert_eq!(weight.to_f64().unwrap(), case.values.clone());
        let single: Vec<_> = case.values.iter().map(|value| *value as f32).collect();
        prop_assert_eq!(weight.to_f32().unwrap(), single);
    }
    Ok(())
}
