"""A JetMoE of two layers, exported, beside its rivals, in one run.

    python3 -m pip install numpy onnx onnxruntime torch "transformers==4.57.6" mobius-onnx==0.1.0
    python3 benches/jetmoe.py [--threads 2] [--rounds 9] [--only CASE ...] [--rivals NAME ...] [--dtype DTYPE ...]
        [--compact] [--json FILE]

Random weights whose values are bf16, as those of jetmoe/jetmoe-8b, d 2048, 16 key/value heads of 128, E 8, k 2, MLP 1408,
vocabulary 4096. The rivals: PyTorch eager of transformers in f32; the same model in bf16, with its own attention and
with torch's ("eager bf16", "sdpa bf16"); mobius' graph in f32 on the same ONNX Runtime; torch.onnx with dynamo and eager
attention. Every output is compared first with PyTorch's in f32, and what is wrong is not timed. Bursts take turns as in
cpu_operator.py, which see for ratios. `--dtype bf16` adds our export with weights stored in bf16, `bf16-products` one
whose products may have factors of bf16, `int8` and `int4` those with matrices in integers, `int8-products` and
`int4-products` these with other factors that may be int8; integers are compared with PyTorch on the weights that they
stand for. `--compact` adds the export in bf16 with MOA_CPU_PACKING=compact. A decode step of ours writes its caches in
place; beside it stands "copying", where past and present are buffers of their own.
"""

import argparse
import copy
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import onnxruntime

import cpu_operator as bench
import packed_weights

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIZES = dict(
    vocab_size=4096, hidden_size=2048, num_hidden_layers=2, num_key_value_heads=16, kv_channels=128,
    intermediate_size=1408, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=4096,
)
# Tokens and past of each case.
CASES = {"T1": (1, 0), "T16": (16, 0), "T128": (128, 0), "T512": (512, 0), "T2048": (2048, 0), "decode-past128": (1, 128)}
PYTORCH = ["eager", "eager bf16", "sdpa bf16"]
RIVALS = [*PYTORCH, "mobius", "dynamo"]
DTYPES = ["bf16", "bf16-products", "int8", "int8-products", "int4", "int4-products"]
INTEGERS = ["int8", "int4"]
BLOCK = 32
# What the head is beside either.
HEAD = "int8"
DYNAMO = "dynamo.onnx"
TOLERANCE = 2e-4
# Of a token, where factors of products are rounded.
TOLERANCE_ROUNDED = 0.05
COMPACT = "ours bf16 compact"
ROUNDS = ("eager bf16", "sdpa bf16", "ours bf16-products", "ours int8-products", "ours int4-products")
GOALS = [
    ("decode-past128", "mobius", 3.5), ("T128", "mobius", 2.5), ("T512", "mobius", 2.5), ("T128", "eager", 1.6),
    ("T512", "eager", 1.6),
]
READ_GOAL = 0.75


def make_checkpoint(folder):
    """A folder of transformers, and the model that it holds."""
    import torch
    from transformers import JetMoeConfig, JetMoeForCausalLM

    torch.manual_seed(0)
    config = JetMoeConfig(**SIZES, tie_word_embeddings=False, attn_implementation="eager")
    model = JetMoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(0, 0.02)
        # Scores apart, so that rounding alone moves no token to another expert.
        for name, tensor in model.named_parameters():
            if "router" in name:
                tensor.mul_(5)
        for tensor in model.parameters():
            tensor.copy_(tensor.to(torch.bfloat16))
    model.save_pretrained(folder)
    return model


def rounded(tensor, dtype):
    """Matrices as an export in integers has them: in transformers' layout, int8 has a scale for each row and int4 one for each
    block of it."""
    import torch

    if dtype == "int8":
        scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return torch.round(tensor / scale).clamp(-127, 127) * scale
    blocks = tensor.unflatten(-1, (-1, BLOCK))
    largest, smallest = blocks.amax(-1, keepdim=True), blocks.amin(-1, keepdim=True)
    scale = (torch.where(largest >= -smallest, largest, smallest) / -8).bfloat16().float()
    return (torch.round(blocks / scale.where(scale != 0, 1)).clamp(-8, 7) * scale).flatten(-2)


def in_integers(model, dtype):
    """A copy whose matrices of experts, keys, values and the head are those of an export."""
    import torch

    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if ".layers." in name and tensor.dim() >= 2 and "router" not in name:
                tensor.copy_(rounded(tensor, dtype))
        model.lm_head.weight.copy_(rounded(model.lm_head.weight, HEAD))
    return model


def in_pytorch(model, rival, folder):
    import torch
    from transformers import JetMoeForCausalLM

    attention, *halved = rival.split()
    dtype = torch.bfloat16 if halved else torch.float32
    if attention == "eager":
        return copy.deepcopy(model).to(dtype) if halved else model
    return JetMoeForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=dtype).eval()


class Inputs:
    """What every contender gets in one case."""

    def __init__(self, model, tokens, past, seed):
        import torch

        random = np.random.default_rng(seed)
        ids = random.integers(3, SIZES["vocab_size"], (1, past + tokens))
        self.ids, self.tokens, self.past = ids[:, past:], tokens, past
        with torch.no_grad():
            whole = model(torch.from_numpy(ids), use_cache=True)
        self.logits = whole.logits[:, past:].numpy()
        layers = whole.past_key_values
        keep = lambda tensor: np.ascontiguousarray(tensor[:, :, :past].numpy())
        self.cache = [(keep(layers[i][0]), keep(layers[i][1])) for i in range(SIZES["num_hidden_layers"])]

    def feeds(self, session):
        """Inputs of a graph with the names of the ecosystem."""
        total = self.past + self.tokens
        feeds = {
            "input_ids": self.ids,
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(self.past, total, dtype=np.int64)[None],
        }
        for layer, pair in enumerate(self.cache):
            feeds |= {f"past_key_values.{layer}.{part}": value for part, value in zip(("key", "value"), pair)}
        return {value.name: feeds[value.name] for value in session.get_inputs()}

    def shape(self, name):
        if name.startswith("present"):
            return (1, SIZES["num_key_value_heads"], self.past + self.tokens, SIZES["kv_channels"])
        return (1, self.tokens, SIZES["vocab_size"])


class OrtRun:
    """A session with the inputs of one case and all outputs bound once; `shared`: each cache is one buffer, past and
    present at once, with room for the tokens of the case."""

    def __init__(self, session, inputs, shared=False):
        self.session, self.binding = session, session.io_binding()
        self.feeds = {name: np.ascontiguousarray(value) for name, value in inputs.feeds(session).items()}
        self.values = {}
        for name, value in self.feeds.items():
            if shared and name.startswith("past_key_values"):
                present = name.replace("past_key_values", "present")
                buffer = self.values[present] = np.zeros(inputs.shape(present), np.float32)
                buffer[:, :, : inputs.past] = value
                value = buffer
            pointer = value.ctypes.data if value.size else np.zeros(1, value.dtype).ctypes.data
            self.binding.bind_input(name, "cpu", 0, value.dtype, value.shape, pointer)
        for output in session.get_outputs():
            value = self.values.setdefault(output.name, np.zeros(inputs.shape(output.name), np.float32))
            self.binding.bind_output(output.name, "cpu", 0, np.float32, value.shape, value.ctypes.data)
        self.logits = session.get_outputs()[0].name

    def __call__(self):
        self.session.run_with_iobinding(self.binding)
        return self.values[self.logits]


class EagerRun:
    def __init__(self, model, inputs):
        import torch
        from transformers import DynamicCache

        self.torch, self.model, self.cache_type = torch, model, DynamicCache
        self.ids = torch.from_numpy(inputs.ids)
        self.cache = tuple(tuple(torch.from_numpy(value).to(model.dtype) for value in pair) for pair in inputs.cache)
        self.past = inputs.past

    def __call__(self):
        cache = self.cache_type.from_legacy_cache(self.cache) if self.past else None
        with self.torch.no_grad():
            return self.model(self.ids, past_key_values=cache, use_cache=True).logits


def open_session(path, args, library=None):
    options = bench.session_options(args.threads)
    if library:
        options.register_custom_ops_library(library)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def ours(work, args, dtype):
    out = work / f"moa-export-{dtype}"
    extra = [] if dtype == "fp32" else ["--dtype", dtype]
    subprocess.run([args.program, work / "checkpoint", "-o", out, "--force", *extra], check=True)
    return open_session(out / "model.onnx", args, LIBRARY)


def mobius(work, args):
    """mobius reads no rotary base from JetMoE's configuration and fails on tied weights: it gets the base under a newer
    key, and weights that are not tied."""
    source, out = work / "for-mobius", work / "mobius"
    source.mkdir(exist_ok=True)
    config = json.loads((work / "checkpoint/config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    (source / "config.json").write_text(json.dumps(config))
    weights = source / "model.safetensors"
    weights.unlink(missing_ok=True)
    weights.symlink_to((work / "checkpoint/model.safetensors").resolve())
    command = [sys.executable, "-m", "mobius", "build", "--config", source, out, "--dtype", "f32", "--ep", "cpu"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return open_session(out / "model.onnx", args)


def dynamo(work, args, model):
    import torch

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids):
            return self.model(input_ids, use_cache=False).logits

    path = work / DYNAMO
    ids = torch.arange(3, 19)[None]
    length = torch.export.Dim("length", min=2, max=SIZES["max_position_embeddings"])
    shapes = {"input_ids": {1: length}}
    with torch.no_grad():
        torch.onnx.export(Logits().eval(), (ids,), str(path), input_names=["input_ids"], output_names=["logits"],
                          dynamic_shapes=shapes, dynamo=True, external_data=True, verbose=False)
    return open_session(path, args)


def error(found, expected):
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))


def maker(of, shared):
    """What makes a run of inputs that gives logits in f32, for a session or a model of PyTorch."""
    if isinstance(of, onnxruntime.InferenceSession):
        return lambda inputs: OrtRun(of, inputs, shared)
    return lambda inputs: lambda: EagerRun(of, inputs)().float().numpy()


def error_of_tokens(run, model, name):
    """The median over tokens of what rounding changes: it moves some tokens to other experts, whose logits say
    nothing. A case of one token is judged by eight of them. `run` makes a contender of inputs."""
    tokens, past = CASES[name]
    errors = []
    for seed in range(1, 2 if tokens > 1 else 9):
        inputs = Inputs(model, tokens, past, seed)
        found = np.asarray(run(inputs)())
        errors.append(np.abs(found - inputs.logits).max(-1) / np.max(np.abs(inputs.logits)))
    return float(np.median(np.concatenate(errors, axis=None)))


def judge(session, model, lengths=(8, 29, 128, 512), repeats=6):
    """In how many runs a graph of logits is wrong, and by how much at most: random inputs, each of them several times."""
    errors = []
    for seed, length in enumerate(lengths):
        inputs = Inputs(model, length, 0, 100 + seed)
        run = OrtRun(session, inputs)
        for _ in range(repeats):
            try:
                errors.append(error(run(), inputs.logits))
            except Exception as failure:
                print(f"  dynamo stops at {inputs.tokens} tokens: {str(failure).splitlines()[0][:160]}")
                errors.append(float("inf"))
    wrong = sum(not value <= TOLERANCE for value in errors)
    return {"runs": len(errors), "wrong": wrong, "largest_relative_error": max(errors)}


def prepare(work, args, model):
    """Sessions by name, and what is known of rivals that are not timed."""
    os.environ.pop("MOA_CPU_PACKING", None)
    sessions, notes = {"ours": ours(work, args, "fp32")}, {}
    for dtype in args.dtype:
        sessions[f"ours {dtype}"] = ours(work, args, dtype)
    if args.compact:
        os.environ["MOA_CPU_PACKING"] = "compact"
        sessions[COMPACT] = open_session(work / "moa-export-bf16/model.onnx", args, LIBRARY)
    makers = {"mobius": lambda: mobius(work, args), "dynamo": lambda: dynamo(work, args, model)}
    for name in [name for name in args.rivals if name in makers]:
        try:
            sessions[name] = makers[name]()
        except Exception as failure:
            notes[name] = {"failed": str(failure).splitlines()[0] if str(failure) else type(failure).__name__}
    if "dynamo" in sessions:
        # ONNX Runtime adds in a race where the graph scatters; with one thread the graph itself is judged.
        alone = open_session(work / DYNAMO, argparse.Namespace(threads=1))
        judged = {f"threads {args.threads}": judge(sessions["dynamo"], model), "threads 1": judge(alone, model)}
        notes["dynamo"] = judged
        if judged["threads 1"]["wrong"]:
            del sessions["dynamo"]
    return sessions, notes


def weights_read(work, args):
    """Bytes of weights that one token reads of each of our exports, as they are packed."""
    kept = {"ours": ("fp32", "plain")} | {f"ours {dtype}": (dtype, "plain") for dtype in args.dtype}
    kept |= {COMPACT: ("bf16", "compact")} if args.compact else {}
    of_step = lambda dtype, packing: packed_weights.of_step(work / f"moa-export-{dtype}/model.onnx", packing)
    return {contender: of_step(*one) for contender, one in kept.items()}


def cache_bytes(past):
    return SIZES["num_hidden_layers"] * 4 * 2 * past * SIZES["num_key_value_heads"] * SIZES["kv_channels"]


def measure(name, sessions, models, eager, args, weights, bandwidth):
    tokens, past = CASES[name]
    given = {stored: Inputs(model, tokens, past, 1) for stored, model in models.items()}
    stored_as = lambda contender: next((stored for stored in INTEGERS if stored in contender), "fp32")
    of = lambda contender: given[stored_as(contender)]
    inputs, runs = given["fp32"], {}
    for contender, session in sessions.items():
        if contender == "dynamo" and (past or tokens < 2):
            continue
        shared = contender.startswith("ours") and past > 0
        runs[contender] = OrtRun(session, of(contender), shared)
        if shared:
            runs[f"{contender} copying"] = OrtRun(session, of(contender))
    runs |= {contender: EagerRun(of_pytorch, inputs) for contender, of_pytorch in eager.items()}
    result = {"tokens": tokens, "past": past, "load": os.getloadavg(), "relative_error": {}}
    wrong = []
    for contender, run in runs.items():
        plain = contender.removesuffix(" copying")
        rounds = plain in ROUNDS
        if rounds:
            run_of = maker((sessions | eager)[plain], past > 0 and plain == contender)
            found = error_of_tokens(run_of, models[stored_as(contender)], name)
        else:
            found = error(np.asarray(run()), of(contender).logits)
        result["relative_error"][contender] = found
        if found <= (TOLERANCE_ROUNDED if rounds else TOLERANCE):
            continue
        if contender != "dynamo":
            sys.exit(f"{name}: {contender} differs from PyTorch by {found:.2e}")
        wrong.append(contender)
    for contender in wrong:
        print(f"{name}: {contender} is wrong ({result['relative_error'][contender]:.1e}) and is not timed")
        del runs[contender]
    bursts = bench.interleave(runs, args.rounds, args.seconds, args.threads)
    result["times"] = {contender: bench.summary(times) for contender, times in bursts.items()}
    ours = result["times"]["ours"]
    result["ratios"] = {n: bench.ratio(times, ours) for n, times in result["times"].items() if n != "ours"}
    for dtype, way in [(dtype, way) for dtype in args.dtype for way in ["", " copying"]]:
        pair = [result["times"].get(f"ours{kind}{way}") for kind in ("", f" {dtype}")]
        if all(pair):
            result.setdefault(dtype, {})[f"{dtype}{way}"] = bench.ratio(*pair)
    if COMPACT in result["times"] and "ours bf16" in result["times"]:
        result["compact"] = bench.ratio(*(result["times"][name] for name in ("ours bf16", COMPACT)))
    if tokens == 1:
        for contender in [name for name in runs if name.startswith("ours")]:
            amount = weights[contender.removesuffix(" copying")] + cache_bytes(past)
            rate = amount / result["times"][contender]["median_ms"] * 1e3
            result.setdefault("read", {})[contender] = {"bytes": amount, "rate": rate, "share": rate / bandwidth}
    return result


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def report(name, result):
    print(f"\n{name}: {result['tokens']} tokens, past {result['past']}")
    for contender, t in result["times"].items():
        line = f"  {contender:17} {t['median_ms']:9.3f} ms  [{t['quartiles_ms'][0]:.3f}, {t['quartiles_ms'][1]:.3f}]"
        line += f"  min {t['min_ms']:.3f}  error {result['relative_error'][contender]:.1e}"
        if contender in result["ratios"]:
            r = result["ratios"][contender]
            line += f"   ratio {r['median']:.2f} (min/min {r['min']:.2f}, {r['range'][0]:.2f} .. {r['range'][1]:.2f})"
        print(line)
    for contender, read in result.get("read", {}).items():
        megabytes, rate = read["bytes"] / 1e6, read["rate"] / 1e9
        print(f"  {contender} reads {megabytes:.1f} MB: {rate:.1f} GB/s, {100 * read['share']:.0f} % of a plain read")
    for name, r in [pair for dtype in DTYPES for pair in result.get(dtype, {}).items()]:
        print(f"  f32 / {name}: {r['median']:.2f} (min/min {r['min']:.2f}, {r['range'][0]:.2f} .. {r['range'][1]:.2f})")
    if r := result.get("compact"):
        print(f"  bf16 / compact: {r['median']:.2f} (min/min {r['min']:.2f}, {r['range'][0]:.2f} .. {r['range'][1]:.2f})")
    sys.stdout.flush()


def report_goals(results):
    print()
    for case, rival, goal in GOALS:
        if rival in results.get(case, {}).get("ratios", {}):
            found = results[case]["ratios"][rival]["median"]
            print(f"{case}: {found:.2f} x {rival}, goal {goal}: {'met' if found >= goal else 'NOT met'}")
    read = results.get("decode-past128", {}).get("read", {}).get("ours")
    if read:
        verdict = "met" if read["share"] >= READ_GOAL else "NOT met"
        print(f"decode-past128: {100 * read['share']:.0f} % of a plain read, goal {100 * READ_GOAL:.0f} %: {verdict}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a burst")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rivals", nargs="*", default=RIVALS, choices=RIVALS)
    parser.add_argument("--dtype", nargs="*", default=[], choices=DTYPES, help="further exports of ours")
    parser.add_argument("--compact", action="store_true", help="the export in bf16 with weights packed in 12 bits too")
    parser.add_argument("--program", default=str(ROOT / "target/release/moa-export"))
    parser.add_argument("--work", type=pathlib.Path, help="folder for checkpoint and graphs, 4 GB, which is kept")
    parser.add_argument("--json", type=pathlib.Path)
    return parser.parse_args()


def main():
    global LIBRARY
    args = arguments()
    if args.compact and "bf16" not in args.dtype:
        sys.exit("--compact stands beside --dtype bf16")
    LIBRARY = bench.library()
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    versions = {"onnxruntime": onnxruntime.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    versions |= {"mobius-onnx": version("mobius-onnx")}
    head = {"cpu": bench.cpu_name(), "cores": os.cpu_count(), "threads": args.threads, "versions": versions, "rounds": args.rounds}
    head |= {"sizes": SIZES, "build": bench.build_of(LIBRARY), "load_before": os.getloadavg()}
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or pathlib.Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        model = make_checkpoint(work / "checkpoint")
        sessions, head["rivals"] = prepare(work, args, model)
        print(f"{head['cpu']}, {os.cpu_count()} cores, {args.threads} threads; {versions}")
        print(f"{LIBRARY}, {head['build'][:12]}")
        for name, note in head["rivals"].items():
            print(f"{name}: {note}")
        stored = [integers for integers in INTEGERS if any(integers in dtype for dtype in args.dtype)]
        models = {"fp32": model} | {integers: in_integers(model, integers) for integers in stored}
        eager = {name: in_pytorch(model, name, work / "checkpoint") for name in args.rivals if name in PYTORCH}
        weights = weights_read(work, args)
        results, reads = {}, [bench.read_bandwidth(args.threads)]
        for name in args.only:
            reads.append(bench.read_bandwidth(args.threads))
            results[name] = measure(name, sessions, models, eager, args, weights, reads[-1])
            report(name, results[name])
    head |= {"read_gigabytes_per_second": [read * 1e-9 for read in reads], "load_after": os.getloadavg()}
    report_goals(results)
    if args.json:
        bench.write_json(args.json, head, results)


if __name__ == "__main__":
    main()
