"""Standard Transformers of random weights, beside a NumPy statement of their maths."""

import json
import unittest

import numpy as np
import onnx

from exports import EncoderDecoder, folder, program, run, session, token_mask

PAD, LAYERS, VOCABULARY = 1, 2, 60
FORMS = ["standard", "fused"]
ATOL = 2e-5

# fairseq pads sources on the left and targets on the right.
SOURCE = np.array([[5, 9, 33, 12, 7, 2], [PAD, PAD, 41, 8, 59, 2], [PAD, PAD, PAD, PAD, 6, 2]], np.int64)
TARGET = np.array([[2, 17, 4, 30, 11], [2, 8, 25, PAD, PAD], [2, 3, 3, 58, PAD]], np.int64)


WIDTH, HEADS = 48, 4
SMALL = {
    "transformer": {"share_all_embeddings": True},
    "roberta": {
        "activation_fn": "gelu",
        "encoder_learned_pos": True,
        "layernorm_embedding": True,
        "max_source_positions": 20,
        "no_scale_embedding": True,
    },
}


def build(name, form, *options):
    """A preset of one layer, or a small model of the family `name`."""
    place = folder("-".join(["baseline", name, form, *options]))
    if place.exists():
        return place
    if name in SMALL:
        config = folder(f"{name}.json")
        sizes = {"encoder_embed_dim": WIDTH, "encoder_ffn_embed_dim": 80, "model_type": name}
        heads = {f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")}
        config.write_text(json.dumps({**sizes, **heads, **SMALL[name]}), encoding="utf-8")
        chosen = ["--config", str(config), "--layers", str(LAYERS)]
    else:
        chosen = [name, "--layers", "1"]
    program("baseline", *chosen, "-o", str(place), "--form", form, "--vocab", str(VOCABULARY), *options)
    return place


class Weights(dict):
    """Initializers of the files of a folder under their names in a checkpoint, in float64."""

    def __init__(self, place):
        super().__init__()
        for path in sorted(place.glob("*.onnx")):
            for tensor in onnx.load(str(path)).graph.initializer:
                name, _, order = tensor.name.partition("/transposed.")
                values = onnx.numpy_helper.to_array(tensor).astype(np.float64)
                self[name] = values.T if order == "10" else values

    def linear(self, name, x):
        return x @ self[f"{name}.weight"].T + self[f"{name}.bias"]

    def norm(self, name, x):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * self[f"{name}.weight"] + self[f"{name}.bias"]

    def attention(self, name, x, memory, visible):
        """Multi-head attention of `x` over `memory`; `visible` is [batch, queries or 1, keys]."""
        batch, _, width = x.shape

        def split(part, rows):
            return self.linear(f"{name}.{part}", rows).reshape(batch, -1, HEADS, width // HEADS).transpose(0, 2, 1, 3)

        query, key, value = split("q_proj", x), split("k_proj", memory), split("v_proj", memory)
        scores = query @ key.transpose(0, 1, 3, 2) / np.sqrt(width // HEADS)
        scores = np.where(visible[:, None], scores, -1e300)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self.linear(f"{name}.out_proj", (weights @ value).transpose(0, 2, 1, 3).reshape(batch, -1, width))

    def feed_forward(self, layer, x, activation):
        return self.linear(f"{layer}.fc2", activation(self.linear(f"{layer}.fc1", x)))


def relu(x):
    return np.maximum(x, 0)


def gelu(x):
    """With the error function as its Maclaurin series, which is exact enough below 4."""
    z = x / np.sqrt(2)
    terms, total = z.copy(), z.copy()
    for n in range(1, 120):
        terms = -terms * z * z / n
        total += terms / (2 * n + 1)
    return x * 0.5 * (1 + 2 / np.sqrt(np.pi) * total)


def positions(ids):
    real = ids != PAD
    return np.where(real, np.cumsum(real, 1) + PAD, PAD)


def sinusoids(ids, width):
    half = width // 2
    frequencies = np.exp(np.arange(half) * -(np.log(10000.0) / (half - 1)))
    angles = positions(ids)[..., None] * frequencies
    rows = np.concatenate([np.sin(angles), np.cos(angles)], -1)
    return np.where((ids == PAD)[..., None], 0, rows)


def encoder_layers(weights, prefix, x, visible, activation):
    for index in range(LAYERS):
        layer = f"{prefix}.layers.{index}"
        x = weights.norm(
            f"{layer}.self_attn_layer_norm", x + weights.attention(f"{layer}.self_attn", x, x, visible)
        )
        x = weights.norm(f"{layer}.final_layer_norm", x + weights.feed_forward(layer, x, activation))
    return x


def translate(weights, source, target):
    """Hidden states of the encoder, and logits."""
    table = weights["decoder.embed_tokens.weight"]
    width = table.shape[1]

    def embed(ids):
        return np.sqrt(width) * table[ids] + sinusoids(ids, width)

    seen = (source != PAD)[:, None]
    memory = embed(source) * (source != PAD)[..., None]
    memory = encoder_layers(weights, "encoder", memory, seen, relu)
    x, length = embed(target), target.shape[1]
    visible = np.tril(np.ones((length, length), bool))[None] & (target != PAD)[:, None]
    for index in range(LAYERS):
        layer = f"decoder.layers.{index}"
        x = weights.norm(
            f"{layer}.self_attn_layer_norm", x + weights.attention(f"{layer}.self_attn", x, x, visible)
        )
        x = weights.norm(
            f"{layer}.encoder_attn_layer_norm", x + weights.attention(f"{layer}.encoder_attn", x, memory, seen)
        )
        x = weights.norm(f"{layer}.final_layer_norm", x + weights.feed_forward(layer, x, relu))
    return memory, x @ table.T


class Translators(unittest.TestCase):
    def models(self):
        for form in FORMS:
            place = build("transformer", form)
            yield place, EncoderDecoder(place, library=False)

    def test_outputs_are_those_of_the_maths(self):
        for place, model in self.models():
            memory, logits = translate(Weights(place), SOURCE, TARGET)
            encoded = model.encode(SOURCE)
            found = model.decode(SOURCE, TARGET, encoded)["logits"]
            self.assertGreater(np.std(logits), 0.05)
            np.testing.assert_allclose(
                encoded["last_hidden_state"][SOURCE != PAD], memory[SOURCE != PAD], rtol=0, atol=ATOL
            )
            np.testing.assert_allclose(found[TARGET != PAD], logits[TARGET != PAD], rtol=0, atol=ATOL)

    def test_steps_with_a_cache_equal_a_full_pass(self):
        for _, model in self.models():
            encoded = model.encode(SOURCE)
            expected = model.decode(SOURCE, TARGET, encoded)["logits"]
            past, found = None, []
            for length in [2, 3, 5]:
                step = model.decode(SOURCE, TARGET[:, :length], encoded, past)
                past = {name: value for name, value in step.items() if name.startswith("present.")}
                found.append(step["logits"])
            found = np.concatenate(found, 1)
            np.testing.assert_allclose(found[TARGET != PAD], expected[TARGET != PAD], rtol=0, atol=ATOL)

    def test_no_target_token_sees_a_later_one(self):
        for _, model in self.models():
            encoded = model.encode(SOURCE)
            changed = TARGET.copy()
            changed[:, -2:] = 20
            first, second = (model.decode(SOURCE, ids, encoded)["logits"][:, :3] for ids in (TARGET, changed))
            real = TARGET[:, :3] != PAD
            np.testing.assert_allclose(first[real], second[real], rtol=0, atol=ATOL)

    def test_names_are_those_of_every_translator(self):
        place = build("transformer", "standard")
        for stem, inputs, outputs in [
            ("encoder_model", ["input_ids", "attention_mask"], ["last_hidden_state", "present.0.encoder.key"]),
            (
                "decoder_model",
                ["input_ids", "attention_mask", "encoder_attention_mask", "past_key_values.0.decoder.key"],
                ["logits", "present.0.decoder.key", "present.0.decoder.value", "present.1.decoder.key"],
            ),
        ]:
            model = onnx.load(str(place / f"{stem}.onnx"))
            onnx.checker.check_model(model, full_check=True)
            self.assertEqual([value.name for value in model.graph.input][: len(inputs)], inputs)
            self.assertLessEqual(set(outputs), {value.name for value in model.graph.output})
            self.assertEqual({node.domain for node in model.graph.node}, {""})

    def test_every_opset_runs(self):
        for opset in ["18", "20"]:
            place = build("transformer", "standard", "--opset", opset)
            self.assertEqual(onnx.load(str(place / "decoder_model.onnx")).opset_import[0].version, int(opset))
            model = EncoderDecoder(place, library=False)
            self.assertTrue(np.isfinite(model.decode(SOURCE, TARGET, model.encode(SOURCE))["logits"]).all())


class MaskedLanguageModels(unittest.TestCase):
    def test_logits_are_those_of_the_maths(self):
        for form in FORMS:
            place = build("roberta", form)
            weights, prefix = Weights(place), "encoder.sentence_encoder"
            table = weights["encoder.lm_head.weight"]
            x = table[SOURCE] + weights[f"{prefix}.embed_positions.weight"][positions(SOURCE)]
            x = weights.norm(f"{prefix}.layernorm_embedding", x) * (SOURCE != PAD)[..., None]
            x = encoder_layers(weights, prefix, x, (SOURCE != PAD)[:, None], gelu)
            x = weights.norm("encoder.lm_head.layer_norm", gelu(weights.linear("encoder.lm_head.dense", x)))
            expected = x @ table.T + weights["encoder.lm_head.bias"]
            feeds = {"input_ids": SOURCE, "attention_mask": token_mask(SOURCE)}
            found = run(session(place / "model.onnx", library=False), feeds)["logits"]
            with self.subTest(form=form):
                np.testing.assert_allclose(found[SOURCE != PAD], expected[SOURCE != PAD], rtol=0, atol=ATOL)


class Values(unittest.TestCase):
    def test_values_follow_the_recipe(self):
        """SplitMix64 over seed, FNV-1a of the name, and index; Glorot's bound."""

        def mix(state):
            state = state + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return state ^ (state >> np.uint64(31))

        name, shape = "encoder.layers.0.fc1.weight", (2048, 512)
        fnv = 0xCBF29CE484222325
        for byte in name.encode():
            fnv = (fnv ^ byte) * 0x100000001B3 % 2**64
        key = mix(mix(np.array([7], np.uint64)) ^ np.uint64(fnv))
        steps = np.arange(np.prod(shape), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        unit = (mix(key + steps) >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1
        expected = unit.reshape(shape) * np.sqrt(6 / sum(shape))
        place = build("transformer-base", "standard", "--seed", "7")
        np.testing.assert_allclose(Weights(place)[name], expected, rtol=0, atol=1e-8)


if __name__ == "__main__":
    unittest.main()
