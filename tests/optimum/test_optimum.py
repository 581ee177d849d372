"""Optimum's ORTModelForCausalLM loads exported folders of causal language models and generates upstream's tokens.

`cargo xtask test --optimum` runs this: it needs PyTorch.
"""

import pathlib
import sys
import unittest

import onnxruntime
import torch
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import AutoConfig

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))

from exports import export, read_json, setting, until_padding

MODELS = ["jetmoe/bf16", "jetmoe/sharded"]
# Form, and whether the operator library is registered.
SETTINGS = [("function", True), ("function", False), ("fused", True), ("standard", False)]


def load(name, form, library, *options):
    session_options = onnxruntime.SessionOptions()
    if library:
        session_options.register_custom_ops_library(setting("MOA_ORT_LIBRARY"))
    place = export(name, form, *options)
    return ORTModelForCausalLM.from_pretrained(place, session_options=session_options)


def generate(model, ids, mask, count, **options):
    options = {"do_sample": False, "eos_token_id": None, **options}
    found = model.generate(ids, attention_mask=mask, max_new_tokens=count, **options)
    return found[:, ids.shape[1] :].tolist()


class Optimum(unittest.TestCase):
    def test_the_configuration_keeps_its_family(self):
        for name in MODELS:
            config = AutoConfig.from_pretrained(export(name, "function"))
            original = read_json(f"{name}/config.json")
            self.assertEqual(type(config).__name__, "JetMoeConfig")
            for key in ("vocab_size", "num_hidden_layers", "num_key_value_heads", "kv_channels", "eos_token_id"):
                self.assertEqual(getattr(config, key), original[key], key)
            for key in ("hidden_size", "num_attention_heads"):
                self.assertEqual(config.moa_export["replaced"][key], original[key], key)

    def test_tokens_are_pytorchs(self):
        for name in MODELS:
            goldens = read_json(f"{name}/goldens.json")["generate"]
            for form, library in SETTINGS:
                with self.subTest(model=name, form=form, library=library):
                    model = load(name, form, library)
                    for single in goldens["singles"]:
                        ids = torch.tensor([single["prompt"]])
                        expected = until_padding(single["new_tokens"])
                        found = generate(model, ids, torch.ones_like(ids), len(expected))
                        self.assertEqual(found, [expected])
                    batch = goldens["left_padded_batch"]
                    ids, mask = torch.tensor(batch["input_ids"]), torch.tensor(batch["attention_mask"])
                    self.assertEqual(generate(model, ids, mask, len(batch["new_tokens"][0])), batch["new_tokens"])

    def test_without_a_cache_and_with_the_last_logits_only(self):
        single = read_json("jetmoe/bf16/goldens.json")["generate"]["singles"][2]
        ids = torch.tensor([single["prompt"]])
        for options in ({"use_cache": True}, {"use_cache": False}):
            model = load("jetmoe/bf16", "function", True, "--last-logits")
            found = generate(model, ids, torch.ones_like(ids), 12, **options)
            self.assertEqual(found, [single["new_tokens"][:12]])


if __name__ == "__main__":
    unittest.main()
