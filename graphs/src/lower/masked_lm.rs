//! Masked language model: `input_ids`, `attention_mask` → `logits`, in one file.

use super::{BATCH, LowerAttention, LowerError, Lowering, NamedGraph, Options, SEQUENCE};
use crate::{bodies::activation, graph::Dim, model::MaskedLm, part::Part};

pub(super) fn lower<A: LowerAttention>(model: &MaskedLm<A>, options: Options) -> Result<Vec<NamedGraph>, LowerError> {
    let mut l = Lowering::new(options, SEQUENCE);
    let x = l.encoder(&model.encoder)?;
    let head = &model.head;
    l.b.set_prefix("lm_head");
    let x = l.linear(&head.dense, &x);
    let x = activation(&mut l.b, &x, head.activation);
    let x = l.norm(&head.norm, &x);
    let logits = l.output::<A>(&head.weight, &x)?;
    let bias = l.b.bias(head.bias.name(), &head.bias);
    let logits = l.b.op("Add", &[&logits, &bias], []);
    let shape = [Dim::from(BATCH), Dim::from(SEQUENCE), Dim::from(head.weight.shape()[0])];
    l.logits(&logits, &shape);
    Ok(vec![l.finish(Part::Model)])
}
