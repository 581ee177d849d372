"""The attention of the JetMoE class of `transformers`, as it is installed.

It is given its angles: from release 5 on as an argument, before that in place of the module that computes them, so that
every release does the same work.
"""

import inspect

import torch

from .. import cases


class HuggingFaceJetMoe:
    graph, exact = False, True

    def __init__(self, case, attributes, dtype, attention):
        from transformers import JetMoeConfig
        from transformers.models.jetmoe import modeling_jetmoe

        self.name = {"sdpa": cases.HF_SDPA, "eager": cases.HF_EAGER}[attention]
        self.case, self.dtype, self.attention = case, dtype, attention
        layer = case.layer
        self.config = JetMoeConfig(
            hidden_size=layer.width,
            num_key_value_heads=layer.heads,
            kv_channels=layer.head,
            num_local_experts=layer.experts,
            num_experts_per_tok=layer.top_k,
            attention_dropout=0.0,
        )
        self.config._attn_implementation = attention
        # Before release 5, every kind of attention has a class of its own.
        classes = getattr(modeling_jetmoe, "JETMOE_ATTENTION_CLASSES", {})
        self.make = classes.get(attention, modeling_jetmoe.JetMoeAttention)
        self.takes_angles = "position_embeddings" in inspect.signature(self.make.forward).parameters

    def load(self, feeds):
        x = feeds["hidden_states"]
        with torch.device(x.device):
            module = self.make(self.config, layer_idx=0).to(self.dtype).eval()
        experts = module.experts
        with torch.no_grad():
            experts.input_linear.weight.copy_(feeds["query_weight"].transpose(1, 2))
            experts.output_linear.weight.copy_(feeds["output_weight"].transpose(1, 2))
            experts.bias.copy_(feeds["output_bias"])
            experts.router.layer.weight.copy_(feeds["router_weight"].t())
            module.kv_proj.weight.copy_(feeds["kv_weight"].t())
        cos, sin = (feeds[name][feeds["position_ids"]] for name in ("cos_cache", "sin_cache"))
        doubled = tuple(torch.cat([half, half], dim=-1).to(x.dtype) for half in (cos, sin))
        if not self.takes_angles:
            module.rotary_emb = _Angles(doubled)
        cache = _Cache(feeds) if self.case.past else None
        state = {"x": x.clone(), "module": module, "cache": cache, "past": cache and cache.past}
        return {**state, "mask": self._mask(x), "angles": {"position_embeddings": doubled} if self.takes_angles else {}}

    def _mask(self, x):
        """Additive causal mask, which the eager path needs; SDPA has a flag of its own."""
        case = self.case
        if self.attention != "eager" or not case.causal or case.past:
            return None
        future = torch.full((case.tokens, case.tokens), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
        return future[None, None]

    def run(self, state):
        with torch.no_grad():
            output, *_ = state["module"](
                state["x"], attention_mask=state["mask"], past_key_values=state["cache"], **state["angles"]
            )
        return output


class _Angles(torch.nn.Module):
    """Cosines and sines that are there already, whatever is asked."""

    def __init__(self, angles):
        super().__init__()
        self.angles = angles

    def forward(self, *_):
        return self.angles


class _Cache:
    """The one method of a cache that the class calls; every call appends to the same past, as its own cache does."""

    def __init__(self, feeds):
        self.past = feeds["past_key"].clone(), feeds["past_value"].clone()

    def update(self, key, value, _layer, *_):
        return tuple(torch.cat([past, new], dim=2) for past, new in zip(self.past, (key, value)))
