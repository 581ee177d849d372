"""What the program writes, seen by the `onnx` package and by ONNX Runtime in Python."""

import unittest

import numpy as np
import onnx

from exports import (
    FORMS,
    EncoderDecoder,
    export,
    folder,
    read_json,
    read_tensors,
    run,
    run_export,
    session,
    token_mask,
)

INT64, FLOAT = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
FLOAT16, BFLOAT16 = onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16
LAYERS = ["layers/self_pad_right_B3", "layers/cross_pad_B3"]
TRANSLATORS = ["nmt", "variants/v_ffd_moe", "variants/v_prenorm"]
MODELS = [*TRANSLATORS, "mlm", *LAYERS]

BATCHES = {"nmt": ["b0.", "b2.", "s0."]}
ATOL = {"mlm": 1e-4}

# Form, and whether the operator library is registered.
SETTINGS = [("function", True), ("function", False), ("fused", True), ("standard", False)]

TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32}

# Smallest gap between the last chosen expert and the next at which the choice must be upstream's.
DECIDED = 1e-5


def caches(layers, side, length, width, stem):
    return [
        (f"{stem}.{layer}.{side}.{part}", FLOAT, ["batch", 1, length, width])
        for layer in range(layers)
        for part in ("key", "value")
    ]


def past(layers, width):
    kinds = [("decoder", "past_sequence"), ("encoder", "source")]
    by_side = [caches(layers, side, length, width, "past_key_values") for side, length in kinds]
    pairs = [by_side[side][2 * layer : 2 * layer + 2] for layer in range(layers) for side in (0, 1)]
    return [entry for pair in pairs for entry in pair]


def translator_contract(config):
    layers, head = config["decoder_layers"], config["head_dim"]
    vocabulary = config.get("tgt_vocab_size", config["vocab_size"])
    total = "past_sequence + sequence"
    encoder = (
        [("input_ids", INT64, ["batch", "source"]), ("attention_mask", INT64, ["batch", "source"])],
        [
            ("last_hidden_state", FLOAT, ["batch", "source", config["encoder_embed_dim"]]),
            *caches(layers, "encoder", "source", head, "present"),
        ],
    )
    decoder = (
        [
            ("input_ids", INT64, ["batch", "sequence"]),
            ("attention_mask", INT64, ["batch", total]),
            ("encoder_attention_mask", INT64, ["batch", "source"]),
            *past(layers, head),
        ],
        [
            ("logits", FLOAT, ["batch", "sequence", vocabulary]),
            *caches(layers, "decoder", total, head, "present"),
        ],
    )
    return {"encoder_model": encoder, "decoder_model": decoder}


def layer_golden(name):
    """Upstream's tensors of a layer, and its inputs as an export takes them."""
    golden = read_tensors(f"{name}.safetensors")
    feeds = {key[len("input.") :]: value for key, value in golden.items() if key.startswith("input.")}
    feeds["attention_mask"] = 1 - golden["key_padding_mask"].astype(np.int64)
    if layer_case(name)["kind"] == "cross":
        feeds["query_attention_mask"] = 1 - golden["query_padding_mask"].astype(np.int64)
    return golden, feeds


def layer_contract(name):
    case = layer_case(name)
    width = case["embed_dim"]
    inputs = [("query", FLOAT, ["batch", "sequence", width])]
    if case["kind"] == "cross":
        inputs.append(("memory", FLOAT, ["batch", "source", case["kdim"]]))
        inputs.append(("attention_mask", INT64, ["batch", "source"]))
        inputs.append(("query_attention_mask", INT64, ["batch", "sequence"]))
    else:
        inputs.append(("attention_mask", INT64, ["batch", "sequence"]))
    return {"model": (inputs, [("output", FLOAT, ["batch", "sequence", width])])}


def contract(name):
    """Inputs and outputs of every file of an export."""
    if name in LAYERS:
        return layer_contract(name)
    config = read_json(f"{name}/config.json")
    if name != "mlm":
        return translator_contract(config)
    ids = [(input_name, INT64, ["batch", "sequence"]) for input_name in ("input_ids", "attention_mask")]
    return {"model": (ids, [("logits", FLOAT, ["batch", "sequence", config["vocab_size"]])])}


def layer_case(name):
    cases = read_json("layers/layers.json")["cases"]
    return next(case for case in cases if case["name"] == name.partition("/")[2])


def signature(values):
    tensors = [(value.name, value.type.tensor_type) for value in values]
    dims = [[dim.dim_param or dim.dim_value for dim in tensor.shape.dim] for _, tensor in tensors]
    return [(name, tensor.elem_type, shape) for (name, tensor), shape in zip(tensors, dims)]


def all_nodes(nodes):
    """The nodes and those of their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in [attribute.g, *attribute.graphs]:
                yield from all_nodes(graph.node)


def files(name, form):
    place = export(name, form)
    return {stem: place / f"{stem}.onnx" for stem in contract(name)}


class Structure(unittest.TestCase):
    def each(self, check):
        """Calls `check(name, form, stem, path)` for every file of every export."""
        for name in MODELS:
            for form in FORMS:
                for stem, path in files(name, form).items():
                    with self.subTest(name=name, form=form, stem=stem):
                        check(name, form, stem, path)

    def test_the_onnx_package_accepts_every_file(self):
        def check(_name, _form, _stem, path):
            onnx.checker.check_model(str(path), full_check=True)
            model = onnx.load(path)
            inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
            self.assertEqual(signature(inferred.graph.output), signature(model.graph.output))

        self.each(check)

    def test_inputs_and_outputs_are_the_contract(self):
        def check(name, _form, stem, path):
            graph = onnx.load(path).graph
            inputs, outputs = contract(name)[stem]
            self.assertEqual(signature(graph.input), inputs)
            self.assertEqual(signature(graph.output), outputs)

        self.each(check)

    def test_shapes_are_whole(self):
        """TensorRT 8.6's parser reads over `start` and `end` of `Shape`."""

        def check(_name, _form, _stem, path):
            model = onnx.load(path)
            nodes = [*all_nodes(model.graph.node), *(node for one in model.functions for node in all_nodes(one.node))]
            shapes = [node for node in nodes if node.op_type == "Shape"]
            self.assertEqual([node.name for node in shapes if node.attribute], [])

        self.each(check)

    def each_reduced(self, dtypes, check):
        """Calls `check(name, form, dtype, path)` for every file of exports in some precisions."""
        for name in ["nmt", "variants/v_ffd_moe", "mlm", "jetmoe/sharded", "molm/mlp", *LAYERS]:
            for form in FORMS:
                for dtype in dtypes:
                    if form == "standard" and dtype.endswith("-products"):
                        continue
                    for path in sorted(export(name, form, "--dtype", dtype).glob("*.onnx")):
                        with self.subTest(name=name, form=form, dtype=dtype, stem=path.stem):
                            check(name, form, dtype, path)

    def test_the_onnx_package_accepts_every_precision(self):
        def check(_name, _form, _dtype, path):
            onnx.checker.check_model(str(path), full_check=True)
            model = onnx.load(path)
            inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
            self.assertEqual(signature(inferred.graph.output), signature(model.graph.output))

        dtypes = ["fp16", "bf16", "bf16-products", "int8", "int8-products", "int4", "int4-products"]
        self.each_reduced(dtypes, check)

    def test_precisions_keep_names_and_shapes_and_change_the_types_that_they_should(self):
        def check(name, form, dtype, path):
            wide, narrow = (onnx.load(place) for place in (export(name, form) / path.name, path))
            for values, widened in [(narrow.graph.input, wide.graph.input), (narrow.graph.output, wide.graph.output)]:
                for found, (value, kind, shape) in zip(signature(values), signature(widened), strict=True):
                    half = dtype == "fp16" and kind == FLOAT and value != "logits"
                    self.assertEqual(found, (value, FLOAT16 if half else kind, shape))
            stored = FLOAT16 if dtype == "fp16" else BFLOAT16
            kinds = {weight.name: weight.data_type for weight in narrow.graph.initializer}
            routers = {node.input[2] for node in narrow.graph.node if node.op_type == "MoASelfAttention"}
            for weight in wide.graph.initializer:
                if weight.name in routers:
                    self.assertEqual(kinds[weight.name], FLOAT, weight.name)
                elif len(weight.dims) == 3:
                    self.assertEqual(kinds[weight.name], stored, weight.name)

        self.each_reduced(["fp16", "bf16", "bf16-products"], check)

    def test_nothing_but_the_models_and_their_vocabulary_is_written(self):
        for name in MODELS:
            written = sorted(path.name for path in export(name, "function").iterdir())
            beside = ["bpe.codes", "dict.txt", "generation.json"] if name == "nmt" else []
            self.assertEqual(written, sorted([*beside, *(f"{stem}.onnx" for stem in contract(name))]), name)

    def test_metadata_says_what_the_file_is(self):
        hashes = {}

        def check(name, form, stem, path):
            model = onnx.load(path)
            entries = {entry.key: entry.value for entry in model.metadata_props}
            source = entries.pop("moa.source.sha256")
            self.assertRegex(source, "^[0-9a-f]{64}$")
            self.assertEqual(hashes.setdefault(name, source), source)
            family = "moa_layer" if name in LAYERS else read_json(f"{name}/config.json")["model_type"]
            expected = {
                "moa.dtype": "fp32",
                "moa.family": family,
                "moa.form": form,
                "moa.part": stem,
                "moa.router_outputs": "false",
            }
            self.assertEqual(entries, expected)
            self.assertEqual(model.producer_name, "moa-export")

        self.each(check)
        self.assertEqual(len(set(hashes.values())), len(MODELS))

    def test_there_is_no_control_flow(self):
        def check(_name, _form, _stem, path):
            model = onnx.load(path)
            bodies = [node for function in model.functions for node in function.node]
            kinds = {node.op_type for node in all_nodes([*model.graph.node, *bodies])}
            self.assertFalse(kinds & {"If", "Loop", "Scan"})

        self.each(check)

    def test_each_form_has_its_operators(self):
        def check(_name, form, _stem, path):
            model = onnx.load(path)
            ours = {node.op_type for node in model.graph.node if node.domain == "ai.moa"}
            bodies = {function.name for function in model.functions if function.domain == "ai.moa"}
            others = {node.domain for node in model.graph.node} - {"ai.moa"}
            inside = {node.domain for function in model.functions for node in function.node}
            domains = {entry.domain for entry in model.opset_import}
            self.assertEqual(others | inside, {""})
            self.assertEqual(len(model.functions), len(bodies))
            self.assertEqual(bool(ours), form != "standard")
            self.assertEqual(bodies, ours if form == "function" else set())
            self.assertEqual(domains, {""} if form == "standard" else {"", "ai.moa"})

        self.each(check)

    def test_the_same_command_writes_the_same_bytes(self):
        for name in MODELS:
            for form in FORMS:
                again = folder("again") / f"{name.replace('/', '-')}-{form}"
                run_export(name, again, "--form", form)
                for stem, path in files(name, form).items():
                    with self.subTest(name=name, form=form, stem=stem):
                        self.assertEqual((again / f"{stem}.onnx").read_bytes(), path.read_bytes())

    def test_external_data_is_one_file_beside_the_model(self):
        tokens = read_tensors("mlm/goldens.safetensors")["single.tokens"]
        feeds = {"input_ids": tokens, "attention_mask": token_mask(tokens)}
        inside = export("mlm", "function") / "model.onnx"
        for form, library in SETTINGS:
            out = export("mlm", form, "--external-data", "always")
            with self.subTest(form=form, library=library):
                self.assertEqual(sorted(path.name for path in out.iterdir()), ["model.onnx", "model.onnx.data"])
                self.assertLess((out / "model.onnx").stat().st_size, inside.stat().st_size // 4)
                onnx.checker.check_model(str(out / "model.onnx"), full_check=True)
                found = run(session(out / "model.onnx", library), feeds)
                expected = run(session(export("mlm", form) / "model.onnx", library), feeds)
                np.testing.assert_array_equal(found["logits"], expected["logits"])


class Numbers(unittest.TestCase):
    """Goldens of the upstream code."""

    def each(self, names, check):
        """Calls `check(name, form, library)` in every setting."""
        for name in names:
            for form, library in SETTINGS:
                with self.subTest(name=name, form=form, library=library):
                    check(name, form, library)

    def close(self, found, expected, name, what):
        atol = ATOL.get(name, 1e-5)
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol, equal_nan=False, err_msg=what)

    def same_experts(self, outputs, golden, prefix):
        """The chosen experts and their weights; returns the number of decided tokens."""
        decided = 0
        for name in [name for name in outputs if name.startswith("router.") and name.endswith(".indices")]:
            stem = name[: -len("indices")]
            probs, gates = golden[f"{prefix}{stem}probs"], golden[f"{prefix}{stem}gates"]
            upstream, found = golden[f"{prefix}{stem}indices"], outputs[name]
            self.assertEqual((found.dtype, found.shape), (np.int64, upstream.shape))
            ranked, top_k = -np.sort(-probs, axis=-1), found.shape[-1]
            margin = ranked[..., top_k - 1] - (ranked[..., top_k] if top_k < ranked.shape[-1] else -np.inf)
            clear = (margin > DECIDED) & (probs.sum(axis=-1) > 0.5)
            np.testing.assert_array_equal(np.sort(found[clear]), np.sort(upstream[clear]), name)
            np.testing.assert_allclose(outputs[f"{stem}weights"], gates, rtol=0, atol=1e-5, err_msg=name)
            decided += int(clear.sum())
        return decided

    def translators(self, check, *options):
        """Calls `check(name, model, golden)` for every translation model in every setting."""

        def check_setting(name, form, library):
            model = EncoderDecoder(export(name, form, *options), library)
            check(name, model, read_tensors(f"{name}/goldens.safetensors"))

        self.each(TRANSLATORS, check_setting)

    def test_translators(self):
        def check(name, model, golden):
            for prefix in BATCHES.get(name, ["left.", "right.", "single."]):
                source, target = golden[f"{prefix}src_tokens"], golden[f"{prefix}prev_output_tokens"]
                encoded = model.encode(source)
                outputs = model.decode(source, target, encoded)
                self.close(encoded["last_hidden_state"], golden[f"{prefix}encoder_out"], name, prefix)
                self.close(outputs["logits"], golden[f"{prefix}logits"], name, prefix)

        self.translators(check)

    def test_single_steps_with_a_cache(self):
        def check(name, model, golden):
            prefix = "s0." if name == "nmt" else "single."
            source, target = golden[f"{prefix}src_tokens"], golden[f"{prefix}prev_output_tokens"]
            encoded, kept, logits = model.encode(source), None, []
            for length in range(1, target.shape[1] + 1):
                kept = model.decode(source, target[:, :length], encoded, kept)
                logits.append(kept.pop("logits"))
            self.close(np.concatenate(logits, axis=1), golden[f"{prefix}logits"], name, prefix)

        self.translators(check)

    def test_masked_language_model(self):
        golden = read_tensors("mlm/goldens.safetensors")

        def check(name, form, library):
            running = session(export(name, form) / "model.onnx", library)
            for prefix in ("pad.", "padleft.", "single.", "long."):
                tokens = golden[f"{prefix}tokens"]
                outputs = run(running, {"input_ids": tokens, "attention_mask": token_mask(tokens)})
                self.close(outputs["logits"], golden[f"{prefix}logits"], name, prefix)

        self.each(["mlm"], check)

    def test_layers(self):
        def check(name, form, library):
            golden, feeds = layer_golden(name)
            found = run(session(export(name, form) / "model.onnx", library), feeds)["output"]
            self.close(found, golden["output"], name, name)
            padded = feeds.get("query_attention_mask", feeds["attention_mask"]) == 0
            self.assertTrue(padded.any())
            self.assertTrue((found[padded] == 0).all())

        self.each(LAYERS, check)

    def test_masks_of_another_shape_are_refused(self):
        """A runtime would spread the mask of one token over all of them."""

        def check(name, form, library):
            _, feeds = layer_golden(name)
            running = session(export(name, form) / "model.onnx", library)
            run(running, feeds)
            for mask in [key for key in feeds if key.endswith("attention_mask")]:
                whole = feeds[mask]
                for other in (whole[:, :1], whole[:1], whole.T, whole[:, :-1]):
                    with self.subTest(mask=mask, shape=other.shape), self.assertRaises(Exception):
                        run(running, {**feeds, mask: np.ascontiguousarray(other)})
            memory = {key: feeds[key][:1] for key in ("memory", "attention_mask") if "memory" in feeds}
            with self.assertRaises(Exception):
                run(running, {**feeds, **(memory or {"query": feeds["query"][:1]})})

        self.each(LAYERS, check)

    def test_tokens_of_another_shape_than_their_mask_are_refused(self):
        """A runtime would spread the token of one row or column over all of them."""

        def size(axis, past):
            sizes = {"batch": 2, "sequence": 3, "source": 3, "past_sequence": past}
            return sizes.get(axis, past + 3 if axis == "past_sequence + sequence" else axis)

        def check(name, form, library):
            for path in sorted(export(name, form).glob("*.onnx")):
                running = session(path, library)
                for past in (0, 2) if path.stem == "decoder_model" else (0,):
                    feeds = {
                        value.name: np.ones([size(axis, past) for axis in value.shape], TYPES[value.type])
                        for value in running.get_inputs()
                    }
                    run(running, feeds)
                    memory = [name for name in feeds if "encoder" in name]
                    caches = [[name] for name in memory if ".encoder." in name]
                    for names in [*caches, memory] if memory else []:
                        with self.subTest(names=names), self.assertRaises(Exception):
                            run(running, {**feeds, **{name: feeds[name][:1] for name in names}})
                    for shape in ((1, 3), (2, 1), (1, 1), (3, 2), (1, 6)):
                        with self.subTest(graph=path.stem, past=past, shape=shape), self.assertRaises(Exception):
                            run(running, {**feeds, "input_ids": np.ones(shape, np.int64)})

        self.each([*TRANSLATORS, "mlm", "variants/v_learned_pos_lnemb", "variants/v_nopos_kE"], check)

    def test_positions_of_another_shape_are_refused(self):
        """A runtime would spread the position of one token over all of them."""

        def check(name, form, library):
            running = session(export(name, form) / "model.onnx", library)
            ids = np.arange(6).reshape(2, 3) + 1
            feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.tile(np.arange(3), (2, 1))}
            for value in running.get_inputs():
                if value.name.startswith("past_key_values."):
                    feeds[value.name] = np.zeros([2, value.shape[1], 0, value.shape[3]], np.float32)
            run(running, feeds)
            for shape in ((2, 1), (1, 3), (1, 1), (3, 2), (2, 2)):
                other = np.broadcast_to(np.arange(shape[1]), shape).copy()
                with self.subTest(shape=shape), self.assertRaises(Exception):
                    run(running, {**feeds, "position_ids": other})

        self.each(["jetmoe/sharded"], check)

    def test_masks_of_other_numbers_and_negative_ids(self):
        golden = read_tensors("mlm/goldens.safetensors")

        def check(name, form, library):
            tokens = golden["padleft.tokens"]
            running = session(export(name, form) / "model.onnx", library)
            feeds = {"input_ids": tokens, "attention_mask": token_mask(tokens)}
            expected = run(running, feeds)["logits"]
            for factor in (2, -1):
                found = run(running, {**feeds, "attention_mask": factor * feeds["attention_mask"]})["logits"]
                np.testing.assert_array_equal(found, expected)
            for wrong in (-1, 1000):
                ids = tokens.copy()
                ids[0, -1] = wrong
                with self.subTest(id=wrong), self.assertRaises(Exception):
                    run(running, {**feeds, "input_ids": ids})

        self.each(["mlm"], check)

    def test_experts_of_translators(self):
        def check(name, model, golden):
            decided = 0
            for prefix in BATCHES.get(name, ["left.", "right.", "single."]):
                source, target = golden[f"{prefix}src_tokens"], golden[f"{prefix}prev_output_tokens"]
                encoded = model.encode(source)
                decided += self.same_experts(encoded, golden, prefix)
                decided += self.same_experts(model.decode(source, target, encoded), golden, prefix)
            self.assertGreater(decided, 200)

        self.translators(check, "--router-outputs")

    def test_experts_of_the_masked_language_model(self):
        golden = read_tensors("mlm/goldens.safetensors")

        def check(name, form, library):
            running = session(export(name, form, "--router-outputs") / "model.onnx", library)
            decided = 0
            for prefix in ("pad.", "padleft."):
                tokens = golden[f"{prefix}tokens"]
                outputs = run(running, {"input_ids": tokens, "attention_mask": token_mask(tokens)})
                decided += self.same_experts(outputs, golden, prefix)
            self.assertGreater(decided, 1000)

        self.each(["mlm"], check)


if __name__ == "__main__":
    unittest.main()
