"""onnxruntime-genai runs exported folders of causal language models and generates upstream's tokens."""

import importlib.util
import json
import subprocess
import unittest

import numpy as np
import onnxruntime

from exports import export, read_json, setting, until_padding

NEEDED = (1, 31)
MODELS = ["jetmoe/bf16", "jetmoe/sharded", "molm/mlp", "molm/linear"]
# Form and further options.
SETTINGS = [
    ("function", ()),
    ("function", ("--with-library",)),
    ("fused", ("--with-library",)),
    ("standard", ()),
    ("function", ("--with-library", "--last-logits")),
]
# What weights are stored in, and factors of products rounded to.
DTYPES = ["bf16", "fp16", "int8", "int4", "bf16-products", "int8-products", "int4-products"]


def why_not():
    """Why the tests cannot run, if so."""
    if importlib.util.find_spec("onnxruntime_genai") is None:
        return "onnxruntime-genai has no wheel for this Python"
    if tuple(int(number) for number in onnxruntime.__version__.split(".")[:2]) < NEEDED:
        return f"onnxruntime-genai needs ONNX Runtime {'.'.join(map(str, NEEDED))}"
    return None


@unittest.skipIf(why_not(), why_not())
class Genai(unittest.TestCase):
    def generate(self, place, prompts, expected, **options):
        """As many new tokens as expected, for each of equally long prompts."""
        import onnxruntime_genai as genai

        # When upstream made its tokens, none ended a text: one that is not expected takes the place of the end.
        unused = min(set(range(3, 128)) - {token for row in expected for token in row})
        config = genai.Config(str(place))
        config.overlay(json.dumps({"model": {"eos_token_id": unused}}))
        model = genai.Model(config)
        params = genai.GeneratorParams(model)
        length = len(prompts[0]) + len(expected[0])
        params.set_search_options(batch_size=len(prompts), max_length=length, do_sample=False, **options)
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [generator.get_sequence(row).tolist()[len(prompts[0]) :] for row in range(len(prompts))]

    def test_tokens_are_upstreams(self):
        for name in MODELS:
            singles = read_json(f"{name}/goldens.json")["generate"]["singles"]
            for form, options in SETTINGS:
                with self.subTest(model=name, form=form, options=options):
                    place = export(name, form, *options)
                    for single in singles:
                        expected = until_padding(single["new_tokens"])
                        self.assertEqual(self.generate(place, [single["prompt"]], [expected]), [expected])

    def test_batches_give_upstreams_tokens(self):
        # Of equal length: genai marks the padding of rows that are padded already as real.
        for name in MODELS:
            singles = read_json(f"{name}/goldens.json")["generate"]["singles"]
            single = singles[min(3, len(singles) - 1)]
            prompts, expected = [single["prompt"]] * 3, [single["new_tokens"]] * 3
            for form, options in SETTINGS:
                with self.subTest(model=name, form=form, options=options):
                    self.assertEqual(self.generate(export(name, form, *options), prompts, expected), expected)

    def test_every_dtype_gives_the_programs_tokens(self):
        for name in ["jetmoe/bf16", "molm/mlp"]:
            prompt = read_json(f"{name}/goldens.json")["generate"]["singles"][0]["prompt"]
            for dtype in DTYPES:
                with self.subTest(model=name, dtype=dtype):
                    place = export(name, "function", "--dtype", dtype, "--with-library")
                    text = " ".join(map(str, prompt))
                    command = [setting("MOA_EXPORT"), "generate", str(place), "--token-ids", "--input", text]
                    told = subprocess.run([*command, "--max-new", "12"], check=True, capture_output=True, text=True)
                    expected = [int(token) for token in told.stdout.split()]
                    self.assertGreater(len(expected), 3)
                    self.assertEqual(self.generate(place, [prompt], [expected]), [expected])

    def test_beams_are_those_of_caches_that_are_not_shared(self):
        """genai shares no caches between beams, whatever the configuration says."""
        prompts, unknown = [[5, 9, 11, 3], [7, 8, 100, 64]], [[0] * 12] * 2
        alone, shared = (export(MODELS[0], "function", *options) for options in ((), ("--with-library",)))
        found = [self.generate(place, prompts, unknown, num_beams=3) for place in (alone, shared)]
        self.assertEqual(found[0], found[1])
        self.assertNotEqual(found[0], self.generate(alone, prompts, unknown))

    def test_the_folder_names_the_library_where_it_is_needed(self):
        for form, options in SETTINGS:
            with self.subTest(form=form, options=options):
                place = export(MODELS[0], form, *options)
                config = json.loads((place / "genai_config.json").read_text(encoding="utf-8"))
                named = config["model"]["decoder"]["session_options"].get("custom_ops_library")
                self.assertEqual(named is not None, "--with-library" in options)
                self.assertEqual(config["search"]["past_present_share_buffer"], named is not None)
                if named:
                    self.assertTrue((place / named).is_file())


if __name__ == "__main__":
    unittest.main()
