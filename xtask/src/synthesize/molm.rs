//! Shapes of MoLM.

use serde_json::{Value, json};

use super::{NORM, Tensor};

/// Sizes of a MoLM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) layers: usize,
    pub(crate) width: usize,
    /// Experts of attention and of the feed-forward block.
    pub(crate) experts: [usize; 2],
    pub(crate) top_k: usize,
    pub(crate) hidden: usize,
    pub(crate) gate: usize,
    pub(crate) vocabulary: usize,
}

impl Sizes {
    /// ibm/MoLM-350M-4B.
    pub(crate) const MOLM_350M_4B: Self =
        Self { layers: 24, width: 1024, experts: [16, 32], top_k: 2, hidden: 2048, gate: 256, vocabulary: 50_295 };

    /// The configuration, with the keys of the released files.
    pub(super) fn config(&self) -> Value {
        json!({
            "activation_function": "gelu_new",
            "architectures": ["ModuleFormerForCausalLM"],
            "att_hidden": self.width,
            "block_size": 512,
            "bos_token_id": 50_256,
            "eos_token_id": 50_256,
            "ffd_hidden": self.hidden,
            "gate_type": "mlp",
            "gating_size": self.gate,
            "history_length": 512,
            "k_att": self.top_k,
            "k_mlp": self.top_k,
            "layer_norm_epsilon": 1e-5,
            "model_type": "moduleformer",
            "n_att_experts": self.experts[0],
            "n_embd": self.width,
            "n_head": 1,
            "n_layer": self.layers,
            "n_mlp_experts": self.experts[1],
            "tie_word_embeddings": false,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
        })
    }

    /// All weights, in the order of the layers; the buffers that the released files hold too are left out.
    pub(super) fn tensors(&self) -> Vec<Tensor> {
        let Self { width, experts: [attention, feed_forward], hidden, gate, vocabulary, .. } = *self;
        let mut tensors = vec![Tensor::new("transformer.wte.weight".into(), &[vocabulary, width], 1)];
        for layer in 0..self.layers {
            let mut add = |name: &str, shape: &[usize], fan_in| {
                tensors.push(Tensor::new(format!("transformer.h.{layer}.{name}"), shape, fan_in));
            };
            for (norm, module, experts, hidden) in
                [("ln_1", "attn.q_proj", attention, width), ("ln_2", "mlpf", feed_forward, hidden)]
            {
                add(&format!("{norm}.weight"), &[width], NORM);
                add(&format!("{norm}.bias"), &[width], width);
                add(&format!("{module}.experts.weight"), &[experts, width, hidden], width);
                add(&format!("{module}.gate.w_gate.0.bias"), &[gate], width);
                add(&format!("{module}.gate.w_gate.0.weight"), &[gate, width], width);
                add(&format!("{module}.gate.w_gate.3.weight"), &[experts, gate], gate);
                add(&format!("{module}.output_experts.weight"), &[experts, hidden, width], hidden);
            }
        }
        tensors.push(Tensor::new("transformer.ln_f.weight".into(), &[width], NORM));
        tensors.push(Tensor::new("transformer.ln_f.bias".into(), &[width], width));
        tensors.push(Tensor::new("lm_head.weight".into(), &[vocabulary, width], width));
        tensors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_released_shapes_are_right() {
        let tensors = Sizes::MOLM_350M_4B.tensors();
        let parameters: u64 = tensors.iter().map(Tensor::bytes).sum::<u64>() / 2;
        assert_eq!((tensors.len(), parameters), (4 + 24 * 14, 4_142_526_464));
    }
}
