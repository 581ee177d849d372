//! Inputs that follow from others.

use moa_schema::interface::{ATTENTION_MASK, INPUT_IDS, POSITION_IDS, is_own_past};

use super::{BackendError, signature::misfit};
use crate::{
    onnx::{
        proto::tensor_proto::DataType,
        read::{Dim, ValueInfo},
    },
    tensor::{NamedTensors, Tensor, TensorData},
};

/// Adds what a graph takes, as `declared`, and `inputs` leave out where it follows from them: empty caches of earlier
/// tokens, and `position_ids`, for each of `input_ids` the number of real tokens before it in `attention_mask`, 0 at
/// padding.
///
/// # Errors
///
/// Where positions are left out and the mask does not tell them: it needs `[batch, tokens]`, int64, with a value for
/// each token of `input_ids`.
pub fn add_implied(declared: &[ValueInfo], inputs: &mut NamedTensors) -> Result<(), BackendError> {
    for input in declared {
        if inputs.contains_key(&input.name) {
            continue;
        }
        let implied = match input.name.as_str() {
            POSITION_IDS => positions(inputs)?,
            name if is_own_past(name) => empty_cache(input, inputs),
            _ => None,
        };
        inputs.extend(implied.map(|tensor| (input.name.clone(), tensor)));
    }
    Ok(())
}

/// A cache of no tokens, for as many rows as there are ids.
fn empty_cache(input: &ValueInfo, inputs: &NamedTensors) -> Option<Tensor> {
    let batch = *inputs.get(INPUT_IDS)?.shape().first()?;
    let [_, Dim::Fixed(heads), _, Dim::Fixed(width)] = input.dims.as_deref()? else { return None };
    let none = match input.data_type {
        DataType::Float => TensorData::F32(Vec::new()),
        DataType::Float16 => TensorData::F16(Vec::new()),
        _ => return None,
    };
    Tensor::new([batch, *heads, 0, *width], none).ok()
}

/// Positions of the ids, where there are ids and a mask.
fn positions(inputs: &NamedTensors) -> Result<Option<Tensor>, BackendError> {
    let Some((mask, ids)) = inputs.get(ATTENTION_MASK).zip(inputs.get(INPUT_IDS)) else { return Ok(None) };
    let misfit = || {
        let found = format!("{} {:?} beside {INPUT_IDS} {:?}", mask.data().type_name(), mask.shape(), ids.shape());
        misfit(ATTENTION_MASK, "int64 [batch, tokens] with a value for each token".into(), found)
    };
    let (&[batch, all], &[rows, tokens]) = (mask.shape(), ids.shape()) else { return Err(misfit()) };
    let real = mask.as_i64().filter(|_| rows == batch && all >= tokens).ok_or_else(misfit)?;
    let mut positions = Vec::with_capacity(batch * tokens);
    for row in real.chunks(all.max(1)) {
        let mut before = 0;
        for (column, value) in row.iter().enumerate() {
            if column >= all - tokens {
                positions.push(if *value == 0 { 0 } else { before });
            }
            before += i64::from(*value != 0);
        }
    }
    Ok(Tensor::new([batch, tokens], TensorData::I64(positions)).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn integers(shape: [usize; 2], values: &[i64]) -> Tensor {
        Tensor::new(shape, TensorData::I64(values.to_vec())).unwrap()
    }

    fn given(mask: Tensor, ids: [usize; 2]) -> NamedTensors {
        let ids = integers(ids, &vec![7; ids[0] * ids[1]]);
        NamedTensors::from([(ATTENTION_MASK.to_owned(), mask), (INPUT_IDS.to_owned(), ids)])
    }

    #[test]
    fn positions_count_the_real_tokens_before() {
        let mask = integers([3, 4], &[1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0]);
        let found = positions(&given(mask, [3, 4])).unwrap().unwrap();
        assert_eq!((found.shape(), found.as_i64().unwrap()), (&[3, 4][..], &[0, 1, 2, 3, 0, 0, 0, 1, 0, 0, 1, 0][..]));
        let cached = integers([2, 5], &[1, 1, 1, 1, 1, 0, 1, 1, 0, 1]);
        assert_eq!(positions(&given(cached, [2, 2])).unwrap().unwrap().as_i64(), Some(&[3, 4, 0, 2][..]));
    }

    #[test]
    fn a_mask_that_tells_no_position_is_named() {
        let wrong = [
            integers([2, 1], &[1; 2]),
            integers([1, 2], &[1; 2]),
            Tensor::new([2, 2], TensorData::F32(vec![1.0; 4])).unwrap(),
            Tensor::new([4], TensorData::I64(vec![1; 4])).unwrap(),
        ];
        for mask in wrong {
            let text = positions(&given(mask.clone(), [2, 2])).unwrap_err().to_string();
            assert!(text.contains("attention_mask") && text.contains("a value for each token"), "{mask:?}: {text}");
        }
        assert_eq!(positions(&NamedTensors::new()).unwrap(), None, "what is missing is said by who runs the graph");
    }

    #[test]
    fn caches_of_a_source_do_not_follow() {
        let cache = |name: &str, data_type| ValueInfo {
            name: name.to_owned(),
            data_type,
            dims: Some(vec![
                Dim::Symbolic("batch".into()),
                Dim::Fixed(2),
                Dim::Symbolic("past_sequence".into()),
                Dim::Fixed(16),
            ]),
        };
        let declared = [
            cache("past_key_values.0.decoder.key", DataType::Float16),
            cache("past_key_values.0.encoder.key", DataType::Float),
            cache("past_key_values.1.key", DataType::Float),
        ];
        let mut inputs = given(integers([3, 1], &[1; 3]), [3, 1]);
        add_implied(&declared, &mut inputs).unwrap();
        let of = |name: &str| inputs.get(name).map(|tensor| (tensor.data().type_name(), tensor.shape().to_vec()));
        assert_eq!(of("past_key_values.0.decoder.key"), Some(("float16", vec![3, 2, 0, 16])));
        assert_eq!(of("past_key_values.1.key"), Some(("float32", vec![3, 2, 0, 16])));
        assert_eq!(of("past_key_values.0.encoder.key"), None);
    }
}
