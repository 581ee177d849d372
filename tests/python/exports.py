"""Exporting the fixtures with the real program, and running what it wrote.

MOA_EXPORT names the program, MOA_ORT_LIBRARY the operator library.
"""

import functools
import json
import os
import pathlib
import subprocess
import tempfile

import numpy as np
import onnxruntime

DATA = pathlib.Path(__file__).parents[1] / "data"
FORMS = ["function", "fused", "standard"]
SAFETENSORS_TYPES = {"F32": np.float32, "I32": np.int32, "I64": np.int64, "U8": np.uint8}

_FOLDER = tempfile.TemporaryDirectory()


def setting(name):
    value = os.environ.get(name)
    if not value:
        raise RuntimeError(f"set {name}; `cargo xtask test` does")
    return value


def folder(name):
    return pathlib.Path(_FOLDER.name) / name


def read_json(path):
    return json.loads((DATA / path).read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=None)
def read_tensors(path):
    """All tensors of a safetensors file of the fixtures."""
    content = (DATA / path).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        values = np.frombuffer(content[start + begin : start + end], SAFETENSORS_TYPES[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def write_tensors(path, tensors):
    header, content = {}, b""
    for name, values in tensors.items():
        begin, content = len(content), content + values.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [begin, len(content)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


@functools.lru_cache(maxsize=None)
def layer_checkpoint(name):
    """A checkpoint folder of one layer of the fixtures."""
    case = next(case for case in read_json("layers/layers.json")["cases"] if case["name"] == name)
    place = folder(f"checkpoint-{name}")
    place.mkdir()
    config = {key: case[key] for key in ("embed_dim", "kdim", "num_expert", "head_dim", "causal")}
    config.update(model_type="moa_layer", top_k=case["k"], cross_attention=case["kind"] == "cross")
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    described = case["tensors"].items()
    weights = {key: generated(int(case["seed"]), key, **entry) for key, entry in described if "input." not in key}
    write_tensors(place / "model.safetensors", weights)
    return place


def generated(seed, name, shape, amplitude):
    """The values that the recipe of the layer fixtures gives a tensor: SplitMix64 from seed and name."""
    state = 0xCBF29CE484222325
    for byte in name.encode():
        state = (state ^ byte) * 0x100000001B3 % 2**64
    steps = np.arange(1, np.prod(shape) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = np.uint64(seed ^ state) + steps
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    unit = (z >> np.uint64(40)).astype(np.float64) * 2.0**-24
    return (-amplitude + 2 * amplitude * unit).astype(np.float32).reshape(shape)


def checkpoint(name):
    """The checkpoint of a fixture: a folder of tests/data, or `layers/NAME`."""
    kind, _, layer = name.partition("/")
    return layer_checkpoint(layer) if kind == "layers" else DATA / name


def program(*arguments):
    """Runs the program, which must end without an error."""
    command = [setting("MOA_EXPORT"), *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8")
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")


def run_export(name, out, *options):
    """Runs the program and returns the names of the files that it wrote."""
    program(str(checkpoint(name)), "-o", str(out), *options)
    return sorted(path.name for path in out.iterdir())


@functools.lru_cache(maxsize=None)
def export(name, form, *options):
    """The folder of an export, made once."""
    out = folder("-".join(["export", name.replace("/", "-"), form, *options]))
    run_export(name, out, "--form", form, *options)
    return out


def session(path, library):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    if library:
        options.register_custom_ops_library(setting("MOA_ORT_LIBRARY"))
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(running, feeds):
    """All outputs by name."""
    names = [output.name for output in running.get_outputs()]
    return dict(zip(names, running.run(names, feeds)))


def token_mask(ids):
    return (ids != 1).astype(np.int64)


class EncoderDecoder:
    """Both sessions of an exported encoder-decoder."""

    def __init__(self, place, library):
        self.encoder = session(place / "encoder_model.onnx", library)
        self.decoder = session(place / "decoder_model.onnx", library)

    def encode(self, source):
        return run(self.encoder, {"input_ids": source, "attention_mask": token_mask(source)})

    def decode(self, source, target, encoded, past=None):
        """The decoder for the last tokens of `target`, as many as `past` does not hold yet."""
        feeds = {"encoder_attention_mask": token_mask(source), "attention_mask": token_mask(target)}
        for name, value in {**encoded, **(past or {})}.items():
            if name.startswith("present."):
                feeds[name.replace("present.", "past_key_values.")] = value
        for value in self.decoder.get_inputs():
            if ".decoder." in value.name and past is None:
                _, heads, _, width = value.shape
                kind = np.float16 if value.type == "tensor(float16)" else np.float32
                feeds[value.name] = np.zeros((len(target), heads, 0, width), kind)
        done = next(value.shape[2] for name, value in feeds.items() if ".decoder." in name)
        feeds["input_ids"] = target[:, done:]
        return run(self.decoder, feeds)


def until_padding(tokens):
    """Up to the first padding token, whose embedding is zero: after it every router is a tie, which upstream breaks in
    no stated order."""
    return tokens[: tokens.index(0) + 1] if 0 in tokens else tokens
