#!/usr/bin/env python3
"""Continues token ids with an exported causal language model, on ONNX Runtime with the operator library, and NumPy.

The caches are written in place: each is one buffer, bound as past_key_values.* and as present.*, with room for all tokens
of the text. attention_mask says how many of them are filled, so that nothing grows and nothing is copied.

    python3 greedy_generate.py FOLDER --max-new 20 5 9 11 3

The library is that of the package `moa_export`, or the one that --library names.
"""

import argparse
import os
import pathlib
import sys

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
try:
    import numpy as np
    import onnxruntime
except ImportError as error:
    sys.exit(f"{error}; install it with: python3 -m pip install onnxruntime numpy")

TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def packaged_library():
    """The operator library of the package `moa_export`, if that is installed."""
    try:
        import moa_export

        return pathlib.Path(moa_export.library())
    except (ImportError, FileNotFoundError):
        return None


def present(past):
    return past.replace("past_key_values.", "present.")


class Generator:
    """A decoder with the operator library, which writes caches where it reads them."""

    def __init__(self, model, library, threads=0):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.register_custom_ops_library(str(library))
        self.session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        inputs = self.session.get_inputs()
        self.caches = [value for value in inputs if value.name.startswith("past_key_values.")]
        self.has_positions = any(value.name == "position_ids" for value in inputs)

    def bind(self, rows, capacity):
        """Every cache as one buffer `[rows, heads, capacity, width]`, and a binding whose first outputs they are.

        The binding knows addresses: the buffers must live as long as it.
        """
        binding, buffers = self.session.io_binding(), []
        for cache in self.caches:
            _, heads, _, width = cache.shape
            buffer = np.zeros((rows, heads, capacity, width), TYPES[cache.type])
            place = ("cpu", 0, buffer.dtype.type, buffer.shape, buffer.ctypes.data)
            binding.bind_input(cache.name, *place)
            binding.bind_output(present(cache.name), *place)
            buffers.append(buffer)
        return buffers, binding

    def step(self, binding, ids, done):
        """Logits `[rows, tokens, vocabulary]` of `ids`, which follow `done` tokens in the caches."""
        rows, tokens = ids.shape
        positions = np.arange(done, done + tokens, dtype=np.int64)
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("attention_mask", np.ones((rows, done + tokens), np.int64))
        if self.has_positions:
            binding.bind_cpu_input("position_ids", np.broadcast_to(positions, (rows, tokens)).copy())
        binding.bind_output("logits")
        self.session.run_with_iobinding(binding)
        return binding.get_outputs()[len(self.caches)].numpy()

    def generate(self, prompts, count):
        """`count` further tokens for each of equally long prompts: the likeliest of each step."""
        ids = np.array(prompts, np.int64)
        _buffers, binding = self.bind(len(ids), ids.shape[1] + count)
        done, found = 0, []
        for _ in range(count):
            logits = self.step(binding, ids, done)
            done += ids.shape[1]
            ids = logits[:, -1:].argmax(-1)
            found.append(ids)
        return np.concatenate(found, axis=1).tolist() if found else [[] for _ in prompts]


def natural(text):
    """A number from 0, for an option."""
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def main():
    parser = argparse.ArgumentParser(description="Continue token ids with an exported causal language model.")
    parser.add_argument("folder", type=pathlib.Path, help="folder with model.onnx")
    parser.add_argument("ids", nargs="+", type=int, help="token ids of the prompt")
    parser.add_argument("--library", type=pathlib.Path,
                        help="operator library, whose path `moa-export ops` prints (default: that of moa_export)")
    parser.add_argument("--threads", type=natural, default=0, help="threads of ONNX Runtime (default: all cores)")
    parser.add_argument("--max-new", type=natural, default=32, help="new tokens (default: 32)")
    arguments = parser.parse_intermixed_args()
    library = arguments.library or packaged_library()
    if library is None:
        parser.error("name the operator library with --library, or install the package moa_export")
    for path in [arguments.folder / "model.onnx", library]:
        if not path.is_file():
            parser.error(f"{path} is not there")
    try:
        generator = Generator(arguments.folder / "model.onnx", library.resolve(), arguments.threads)
        if not generator.caches:
            parser.error(f"{arguments.folder} holds no causal language model")
        found = generator.generate([arguments.ids], arguments.max_new)
    except Exception as error:  # Those of ONNX Runtime have no other class in common.
        sys.exit(f"{error}\nThe model must be of the form function or fused, and the ids and positions be its own.")
    print(*found[0])


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
