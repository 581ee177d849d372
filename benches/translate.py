#!/usr/bin/env python3
"""Sentences per second: `moa-export generate` beside the paper's maths in eager PyTorch.

Both decode the same lines of the same trained model with the same number of threads, in turns, under fairseq's
stopping rule, and must find the same translations. Each turn of ours is a new process, whose loading is not counted and
whose first batches are; PyTorch stays warm. So all lines are the default: few would count the start. A ratio is the
median over the rounds of ours / PyTorch's, between the least and the greatest.

The PyTorch side decodes incrementally as the released code does: tokens sorted by expert, one product per expert, results
concatenated and added back by index; keys and values cached, caches reordered by beam.

    python3 benches/translate.py tests/data/nmt OUT --program target/release/moa-export [--json FILE]
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
from greedy_translate import Tokenizer  # noqa: E402

PAD, END = 1, 2


def read_safetensors(path):
    """All float32 tensors of a file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    aliases = header.pop("__metadata__", {})
    tensors = {}
    for name, info in header.items():
        begin, end = (start + offset for offset in info["data_offsets"])
        assert info["dtype"] == "F32", name
        values = np.frombuffer(data[begin:end], np.float32).reshape(info["shape"])
        tensors[name] = torch.from_numpy(values.copy())
    tensors.update({alias: tensors[name] for alias, name in aliases.items() if name in tensors})
    return tensors


class Routed:
    """Routed projections of one attention layer: one matrix product per expert, in and out."""

    def __init__(self, weights, prefix, top_k):
        self.gate = weights[f"{prefix}.q_proj.w_gate"]
        self.input = weights[f"{prefix}.q_proj.experts.w"]
        self.output = weights[f"{prefix}.q_proj.output_experts.w"]
        self.top_k = top_k

    def into(self, x, padding):
        """`[tokens, k, D]` queries; `padding` is true where a token is routed nowhere."""
        probabilities = torch.softmax(x @ self.gate, dim=-1)
        if padding is not None:
            probabilities = probabilities.masked_fill(padding[:, None], 0.0)
        gates, experts = probabilities.topk(self.top_k, dim=-1)
        flat = gates.flatten()
        used = flat.nonzero().squeeze(-1)
        _, order = experts.flatten()[used].sort(0)
        self.slots = used[order]
        self.tokens = self.slots.div(self.top_k, rounding_mode="trunc")
        self.weights = flat[self.slots]
        self.sizes = torch.zeros_like(probabilities).scatter(1, experts, gates).gt(0).sum(0).tolist()
        queries = self.each(x[self.tokens], self.input)
        zeros = x.new_zeros(x.shape[0] * self.top_k, queries.shape[-1])
        return zeros.index_add(0, self.slots, queries).view(x.shape[0], self.top_k, -1)

    def each(self, rows, matrices):
        parts = rows.split(self.sizes, dim=0)
        return torch.cat([torch.mm(part, matrix) for part, matrix in zip(parts, matrices)], dim=0)

    def back(self, attended):
        """`[tokens, C]` of the `[tokens, k, D]` that the experts attended to."""
        tokens = attended.shape[0]
        results = self.each(attended.reshape(tokens * self.top_k, -1)[self.slots], self.output)
        zeros = results.new_zeros(tokens, results.shape[-1])
        return zeros.index_add(0, self.tokens, results * self.weights[:, None])


class Attention:
    def __init__(self, weights, prefix, top_k):
        self.routed = Routed(weights, prefix, top_k)
        self.key = weights[f"{prefix}.k_proj.weight"]
        self.value = weights[f"{prefix}.v_proj.weight"]

    def keys_and_values(self, x):
        return x @ self.key.T, x @ self.value.T

    def __call__(self, x, key, value, key_padding=None, query_padding=None):
        batch, length, width = x.shape
        query_padding = None if query_padding is None else query_padding.flatten()
        query = self.routed.into(x.reshape(-1, width), query_padding) * key.shape[-1] ** -0.5
        query = query.view(batch, length * self.routed.top_k, -1)
        scores = torch.bmm(query, key.transpose(1, 2))
        if key_padding is not None:
            scores = scores.masked_fill(key_padding[:, None], float("-inf"))
        attended = torch.bmm(torch.softmax(scores, dim=-1), value)
        return self.routed.back(attended.view(batch * length, self.routed.top_k, -1)).view(batch, length, width)


class Stack:
    """What encoder and decoder share."""

    def __init__(self, weights, config, side):
        self.weights, self.side = weights, side
        self.width = config[f"{side}_embed_dim"]
        self.layers = range(config[f"{side}_layers"])
        self.tokens = weights[f"{side}.embed_tokens.weight"]
        half = self.width // 2
        frequencies = torch.exp(torch.arange(half) * -(np.log(10000.0) / (half - 1)))
        angles = torch.arange(config["max_source_positions"] + 2)[:, None] * frequencies[None]
        self.positions = torch.cat([angles.sin(), angles.cos()], dim=1)
        self.positions[PAD] = 0

    def embed(self, ids, positions):
        return self.width**0.5 * torch.nn.functional.embedding(ids, self.tokens) + self.positions[positions]

    def norm(self, layer, name, x):
        prefix = f"{self.side}.layers.{layer}.{name}"
        weight, bias = self.weights[f"{prefix}.weight"], self.weights[f"{prefix}.bias"]
        return torch.nn.functional.layer_norm(x, (self.width,), weight, bias)

    def feed_forward(self, layer, x):
        for name, activation in (("fc1", torch.relu), ("fc2", lambda x: x)):
            prefix = f"{self.side}.layers.{layer}.{name}"
            weight, bias = self.weights[f"{prefix}.weight"], self.weights[f"{prefix}.bias"]
            x = activation(torch.nn.functional.linear(x, weight, bias))
        return x

    def attention(self, name, config):
        top_k = config[f"{self.side}_attention_heads"]
        return [Attention(self.weights, f"{self.side}.layers.{layer}.{name}", top_k) for layer in self.layers]


class Model:
    """The trained translator, post-norm, with incremental decoding."""

    def __init__(self, folder):
        config = json.loads((folder / "config.json").read_text())
        weights = read_safetensors(folder / "model.safetensors")
        self.encoder = Stack(weights, config, "encoder")
        self.decoder = Stack(weights, config, "decoder")
        self.encoder_attention = self.encoder.attention("self_attn", config)
        self.own_attention = self.decoder.attention("self_attn", config)
        self.cross_attention = self.decoder.attention("encoder_attn", config)
        self.output = weights["decoder.output_projection.weight"]

    def encode(self, ids):
        """Padding and each decoder layer's keys and values."""
        stack, padding = self.encoder, ids.eq(PAD)
        positions = PAD + (~padding).cumsum(1) * ~padding
        x = stack.embed(ids, positions) * ~padding[..., None]
        mask = padding if padding.any() else None
        for layer, attention in enumerate(self.encoder_attention):
            key, value = attention.keys_and_values(x)
            x = stack.norm(layer, "self_attn_layer_norm", x + attention(x, key, value, mask, mask))
            x = stack.norm(layer, "final_layer_norm", x + stack.feed_forward(layer, x))
        return mask, [attention.keys_and_values(x) for attention in self.cross_attention]

    def step(self, tokens, step, own, cross, padding):
        """Logits of one more token; `own` is extended in place."""
        stack = self.decoder
        x = stack.embed(tokens[:, None], torch.full_like(tokens[:, None], PAD + 1 + step))
        for layer, (attention, memory) in enumerate(zip(self.own_attention, self.cross_attention)):
            new = attention.keys_and_values(x)
            if own[layer] is not None:
                new = tuple(torch.cat([past, now], dim=1) for past, now in zip(own[layer], new))
            own[layer] = new
            x = stack.norm(layer, "self_attn_layer_norm", x + attention(x, *new))
            x = stack.norm(layer, "encoder_attn_layer_norm", x + memory(x, *cross[layer], padding))
            x = stack.norm(layer, "final_layer_norm", x + stack.feed_forward(layer, x))
        return x[:, 0] @ self.output.T


def search(model, sources, beam, max_len=200):
    """The best hypothesis of each source, as fairseq searches."""
    length = max(map(len, sources))
    ids = torch.tensor([[PAD] * (length - len(source)) + source for source in sources])
    padding, cross = model.encode(ids)
    rows = torch.arange(len(sources)).repeat_interleave(beam)
    select = lambda pairs: [tuple(x.index_select(0, rows) for x in pair) for pair in pairs]  # noqa: E731
    cross = select(cross)
    padding = None if padding is None else padding.index_select(0, rows)
    own = [None] * len(cross)
    live = list(range(len(sources)))
    finished = [[] for _ in sources]
    tokens = torch.full((len(rows),), END)
    history = torch.zeros(len(rows), 0, dtype=torch.long)
    scores = torch.zeros(len(live), beam)
    for step in range(max_len + 1):
        logits = model.step(tokens, step, own, cross, padding)
        log_probabilities = torch.log_softmax(logits, dim=-1)
        log_probabilities[:, PAD] = float("-inf")
        if step == 0:
            log_probabilities[:, END] = float("-inf")
        if step == max_len:
            log_probabilities[:, :END] = log_probabilities[:, END + 1 :] = float("-inf")
        vocabulary = log_probabilities.shape[-1]
        totals = log_probabilities.view(len(live), beam, vocabulary) + scores[..., None]
        totals = totals[:, :1] if step == 0 else totals
        values, places = totals.reshape(len(live), -1).topk(2 * beam, dim=1)
        beams, symbols = places.div(vocabulary, rounding_mode="trunc"), places.remainder(vocabulary)
        kept, parents, next_tokens, next_scores = [], [], [], []
        for number, (value, origin, symbol) in enumerate(zip(values.tolist(), beams.tolist(), symbols.tolist())):
            results = finished[live[number]]
            for rank in range(beam):
                if symbol[rank] == END and value[rank] > float("-inf") and len(results) < beam:
                    row = history[number * beam + origin[rank]].tolist()
                    results.append((value[rank] / (step + 1), row))
            going = [rank for rank in range(2 * beam) if symbol[rank] != END][:beam]
            if len(results) < beam and step < max_len:
                kept.append(live[number])
                parents += [number * beam + origin[rank] for rank in going]
                next_tokens += [symbol[rank] for rank in going]
                next_scores.append([value[rank] for rank in going])
        if not kept:
            break
        rows, tokens, scores = torch.tensor(parents), torch.tensor(next_tokens), torch.tensor(next_scores)
        if parents != list(range(len(live) * beam)):
            own = select(own)
            if len(kept) < len(live):
                cross = select(cross)
                padding = None if padding is None else padding.index_select(0, rows)
        history = torch.cat([history.index_select(0, rows), tokens[:, None]], dim=1)
        live = kept
    return [max(results, key=lambda result: result[0])[1] for results in finished]


def run_torch(model, tokenizer, lines, beam, batch):
    """Seconds, and the translations."""
    start = time.perf_counter()
    sources = sorted(((tokenizer.encode(line), place) for place, line in enumerate(lines)), key=lambda one: len(one[0]))
    texts = [""] * len(lines)
    for first in range(0, len(sources), batch):
        part = sources[first : first + batch]
        for (_, place), found in zip(part, search(model, [ids for ids, _ in part], beam)):
            texts[place] = tokenizer.decode(found)
    return time.perf_counter() - start, texts


def run_ours(arguments, path, beam, batch):
    """Seconds without loading, the translations, and the profile."""
    command = [arguments.program, "generate", arguments.export, "--input", path, "--stop", "fairseq", "--profile"]
    command += ["--beam", beam, "--batch", batch, "--threads", arguments.threads]
    command += ["--library", arguments.library] if arguments.library else []
    result = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    count, seconds = re.match(r"(\d+) sentences in ([\d.]+) s", result.stderr).groups()
    texts = result.stdout.splitlines()
    assert int(count) == len(texts)
    return float(seconds), texts, result.stderr


def measure(model, tokenizer, lines, arguments, path, beam, batch):
    """Sentences per second of both sides, round by round, and where our time went in the last one."""
    theirs, ours = [], []
    for _ in range(arguments.rounds):
        seconds, expected = run_torch(model, tokenizer, lines, beam, batch)
        theirs.append(len(lines) / seconds)
        seconds, found, profile = run_ours(arguments, path, beam, batch)
        ours.append(len(lines) / seconds)
        if found != expected:
            sys.exit(f"beam {beam}, batch {batch}: the translations differ")
    pairs = [a / b for a, b in zip(ours, theirs)]
    ratios = {"median": statistics.median(pairs), "range": [min(pairs), max(pairs)], "best": max(ours) / max(theirs)}
    return {
        "beam": beam,
        "batch": batch,
        "sentences_per_second": {"torch": theirs, "moa-export": ours},
        "ratio": ratios,
        "profile": profile.rstrip().splitlines(),
    }


def report(result):
    rates = result["sentences_per_second"]
    rates = [f"{name} {statistics.median(all):.1f} ({min(all):.1f} .. {max(all):.1f})" for name, all in rates.items()]
    ratio, (least, most) = result["ratio"], result["ratio"]["range"]
    print(f"\nbeam {result['beam']}, batch {result['batch']}: {', '.join(rates)} sentences/s; "
          f"ratio {ratio['median']:.2f} ({least:.2f} .. {most:.2f}), of the best rounds {ratio['best']:.2f}; "
          "same translations")
    print(*result["profile"], sep="\n", flush=True)


def machine(arguments, lines):
    names = (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    version = subprocess.run([arguments.program, "--version"], check=True, capture_output=True, text=True)
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": next(names, platform.processor()),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "lines": len(lines),
        "rounds": arguments.rounds,
        "load_before": os.getloadavg(),
        "versions": {"program": version.stdout.strip(), "torch": torch.__version__, "numpy": np.__version__,
                     "python": platform.python_version()},
    }


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=pathlib.Path, help="folder of the trained model, with its vocabulary")
    parser.add_argument("export", type=pathlib.Path, help="what moa-export made of it")
    parser.add_argument("--program", default="moa-export", help="the program (default: from PATH)")
    parser.add_argument("--library", type=pathlib.Path, help="operator library, where it is not beside the program")
    parser.add_argument("--lines", type=int, help="lines to translate (default: all of unseen_pairs.tsv)")
    parser.add_argument("--threads", type=int, default=1, help="threads of both sides (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (default: 3)")
    parser.add_argument("--json", type=pathlib.Path, help="where every figure is kept")
    return parser.parse_args()


def main():
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    folder = arguments.checkpoint
    pairs = (folder / "unseen_pairs.tsv").read_text(encoding="utf-8").splitlines()[: arguments.lines]
    lines = [pair.split("\t")[1] for pair in pairs]
    model, tokenizer = Model(folder), Tokenizer(folder / "dict.txt", folder / "bpe.codes")
    head, results = machine(arguments, lines), []
    print(", ".join(f"{name} {value}" for name, value in head.items()))
    with tempfile.TemporaryDirectory() as temporary:
        path = pathlib.Path(temporary) / "lines.txt"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for beam, batch in ((1, 1), (1, 32), (4, 1), (4, 32)):
            results.append(measure(model, tokenizer, lines, arguments, path, beam, batch))
            report(results[-1])
    head["load_after"] = os.getloadavg()
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"machine": head, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
