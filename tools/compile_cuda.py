"""Compiles the CUDA kernels for every architecture with NVRTC and writes them into one archive.

No GPU, driver or host compiler is needed. The archive's layout is that of custom_ops/cuda/src/archive.rs.
"""

import argparse
import concurrent.futures
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import time

MAGIC = b"MOACUDA1"
MODULES = ["f32", "f16", "bf16"]
CODE = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"]
PTX = ["compute_70", "compute_75", "compute_80", "compute_90"]
#: Every module for every target; what differs between 7.0 and 7.5 is f16 alone.
IMAGES = [
    (module, target)
    for target in CODE + PTX
    for module in MODULES
    if target != "compute_75" or module == "f16"
]
OPTIONS = ["--std=c++17", "--ptxas-options=-v"]

#: Machine code that the disassembler does not know, and by how much its capability falls short of one that it knows and
#: that encodes instructions alike.
RELABELLED = {"sm_70": 5}

#: Instructions that are counted by their whole names: products, copies to shared memory, loads of matrices, local memory,
#: atomic operations, and what orders grids; as `Instructions` in archive.rs.
COUNTED = re.compile(r"([DHIQ]?G?MMA|LDSM|LDGSTS|UBLKCP|UTMA\w+|LDL|STL|ATOM[GS]?|REDG?|REDUX|ACQBULK|PREEXIT)\b")

#: Instructions that are counted by the name in front of the first dot.
COUNTED_BRIEFLY = re.compile(r"FFMA\b")

#: A wait of a warpgroup, with the number of groups of products that it leaves under way.
PRODUCTS_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")

#: The form of an exponential that passes beside products: behind a wait that left some, in front of the next one.
BESIDE_PRODUCTS = "MUFU.EX2 beside products"

#: Bytes of one instruction.
INSTRUCTION_BYTES = 16


class Nvrtc:
    """The run-time compiler, as a library that never runs anything."""

    def __init__(self):
        package = importlib.util.find_spec("nvidia.cuda_nvrtc")
        if package is None:
            sys.exit("error: NVRTC is not installed; `cargo xtask cuda` installs it")
        folder = pathlib.Path(package.submodule_search_locations[0]) / "lib"
        names = sorted(folder.glob("libnvrtc.so.*"))
        if not names:
            sys.exit(f"error: {folder} holds no libnvrtc")
        self.library = ctypes.CDLL(str(names[0]))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def check(self, code, log=""):
        if code != 0:
            raise RuntimeError(f"{self.library.nvrtcGetErrorString(code).decode()}\n{log}")

    def version(self):
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.check(self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return f"NVRTC {major.value}.{minor.value}"

    def text(self, program, kind):
        """One result of a program: its log, its PTX or its machine code."""
        size = ctypes.c_size_t()
        self.check(getattr(self.library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self.check(getattr(self.library, f"nvrtcGet{kind}")(program, buffer))
        return buffer.raw

    def compile(self, name, source, headers, target):
        """Machine code or PTX, and the log."""
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*[text.encode() for text in headers.values()])
        names = (ctypes.c_char_p * len(headers))(*[name.encode() for name in headers])
        create = self.library.nvrtcCreateProgram
        self.check(create(ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names))
        try:
            words = [f"--gpu-architecture={target}", *OPTIONS]
            options = (ctypes.c_char_p * len(words))(*[word.encode() for word in words])
            code = self.library.nvrtcCompileProgram(program, len(words), options)
            log = self.text(program, "ProgramLog").rstrip(b"\0").decode()
            self.check(code, log)
            kind = "CUBIN" if target.startswith("sm_") else "PTX"
            return self.text(program, kind), log
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))


class Disassembler:
    """Reads machine code back."""

    def __init__(self):
        try:
            files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
            version = importlib.metadata.version("nvidia-cuda-nvdisasm")
        except importlib.metadata.PackageNotFoundError:
            sys.exit("error: nvdisasm is not installed; `cargo xtask cuda` installs it")
        self.program = next(str(file.locate()) for file in files if file.name == "nvdisasm")
        self.version = f"nvdisasm {version}"

    def count(self, path, target):
        """The instructions of every kernel of a file of machine code; fails where it does not read every byte."""
        code = readable(path.read_bytes(), target)
        with tempfile.NamedTemporaryFile() as file:
            file.write(code)
            file.flush()
            done = subprocess.run([self.program, "-c", file.name], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"nvdisasm does not read {path}: {done.stderr.strip()}")
        found = instructions(done.stdout)
        read = {name: kernel["all"] * INSTRUCTION_BYTES for name, kernel in found.items()}
        if read != (whole := kernel_bytes(code)):
            raise RuntimeError(f"nvdisasm reads {read} bytes of {path}, which holds {whole}")
        return found


def readable(code, target):
    """Machine code as the disassembler takes it: what it does not know gets the label of what is encoded alike."""
    place, (flags,) = 48, struct.unpack_from("<I", code, 48)
    older = RELABELLED.get(target, 0)
    return code[:place] + struct.pack("<I", flags + (older << 16 | older)) + code[place + 4:]


def kernel_bytes(code):
    """Bytes of the machine code of every kernel of an ELF file."""
    (start,) = struct.unpack_from("<Q", code, 40)
    size, count, names = struct.unpack_from("<3H", code, 58)
    sections = [struct.unpack_from("<IIQQQQ", code, start + index * size) for index in range(count)]
    texts = sections[names][4]
    named = {code[texts + each[0]:].split(b"\0", 1)[0].decode(): each[5] for each in sections}
    return {name.removeprefix(".text."): length for name, length in named.items() if name.startswith(".text.")}


def instructions(text):
    """How many instructions the disassembly `text` has, and how many of each counted form, by kernel."""
    kernels, own, under_way = {}, None, 0
    for line in text.splitlines():
        if wait := PRODUCTS_WAIT.search(line):
            under_way = int(wait.group(1), 16)
        if start := re.match(r"\.text\.(\w+):", line):
            own, under_way = kernels.setdefault(start.group(1), {"all": 0, "forms": {}}), 0
        elif (found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line)) and own:
            own["all"] += 1
            form = found.group(1)
            if brief := COUNTED_BRIEFLY.match(form):
                form = brief.group()
            elif form == "MUFU.EX2" and under_way:
                form = BESIDE_PRODUCTS
            elif not COUNTED.match(form):
                continue
            own["forms"][form] = own["forms"].get(form, 0) + 1
    return kernels


def resources(log):
    """What the assembler says of each entry point: registers, shared and local bytes."""
    kernels = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        name = part.split("'", 1)[0]
        used = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        local = [int(number) for number in re.findall(r"(\d+) bytes (?:stack frame|cumulative stack size|spill)", part)]
        if used is None or not local:
            raise RuntimeError(f"the assembler's report of {name} is not understood:\n{part}")
        kernels[name] = (int(used.group(1)), int(shared.group(1)) if shared else 0, max(local))
    return kernels


def refuse_lost_overlap(log, place):
    """Fails where the assembler makes asynchronous warpgroup products wait for each other."""
    lost = [line for line in log.splitlines() if "Potential Performance Loss" in line]
    if lost:
        raise RuntimeError(f"{place}: {lost[0]}")


def compile_image(job):
    """One module for one target: its bytes, its kernels and the seconds that it took; kept for a next time."""
    source, headers, module, target, cache = job
    start = time.monotonic()
    kept = cache / f"{module}.{target}"
    if kept.with_suffix(kept.suffix + ".json").is_file():
        return kept.read_bytes(), json.loads(kept.with_suffix(kept.suffix + ".json").read_text()), 0.0
    image, log = Nvrtc().compile(f"{module}.cu", source, headers, target)
    refuse_lost_overlap(log, f"{module} {target}")
    if target.startswith("sm_"):
        found = resources(log)
    else:
        found = {name.decode(): (0, 0, 0) for name in re.findall(rb"\.entry (\w+)\(", image)}
    threads = {name: int(count) for name, count in re.findall(r"^KERNEL\((\w+), (\d+),", source, re.M)}
    kernels = [
        {"name": name, "registers": numbers[0], "shared_bytes": numbers[1], "local_bytes": numbers[2],
         "max_threads": threads[name]}
        for name, numbers in sorted(found.items())
    ]
    write_whole(kept, image)
    write_whole(kept.with_suffix(kept.suffix + ".json"), json.dumps(kernels).encode())
    return image, kernels, time.monotonic() - start


def add_instructions(job, kernels, disassembler):
    """Counts the instructions of one compiled image, and keeps them for a next time; None in PTX."""
    _, _, module, target, cache = job
    if not target.startswith("sm_"):
        return [{**kernel, "instructions": None} for kernel in kernels]
    kept = cache / f"{module}.{target}.{disassembler.version.replace(' ', '-')}.{script_hash()[:16]}.json"
    if not kept.is_file():
        write_whole(kept, json.dumps(disassembler.count(cache / f"{module}.{target}", target)).encode())
    counts = json.loads(kept.read_text())
    return [{**kernel, "instructions": counts[kernel["name"]]} for kernel in kernels]


def script_hash():
    """SHA-256 of this file: an archive that another version of it wrote may lack what this one writes."""
    return hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()


def source_hash(sources):
    """SHA-256 over the names and texts of the sources."""
    digest = hashlib.sha256()
    for name, text in sorted(sources.items()):
        digest.update(name.encode() + b"\0" + text.encode() + b"\0")
    return digest.hexdigest()


def is_current(archive, digest, compiler, disassembler):
    """Whether the archive holds these sources, compiled and read by these tools, for all targets."""
    try:
        content = archive.read_bytes()
        length = struct.unpack_from("<Q", content, len(MAGIC))[0]
        manifest = json.loads(content[len(MAGIC) + 8:][:length])
    except (OSError, struct.error, ValueError):
        return False
    found = {(image["module"], image["target"]) for image in manifest["images"]}
    tools = [manifest.get(key) for key in ("source_hash", "script_hash", "compiler", "disassembler")]
    return (tools, found) == ([digest, script_hash(), compiler, disassembler], set(IMAGES))


def write_whole(path, content):
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=pathlib.Path, help="folder of the .cu and .cuh files")
    parser.add_argument("archive", type=pathlib.Path, help="file to write")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="compilers at a time")
    arguments = parser.parse_args()
    paths = [*arguments.sources.glob("*.cu"), *arguments.sources.glob("*.cuh")]
    sources = {path.name: path.read_text() for path in paths}
    digest = source_hash(sources)
    compiler, disassembler = Nvrtc().version(), Disassembler()
    if is_current(arguments.archive, digest, compiler, disassembler.version):
        print(f"{arguments.archive}: there")
        return
    key = hashlib.sha256(f"{digest} {compiler} {OPTIONS}".encode()).hexdigest()[:16]
    cache = arguments.archive.parent / "images" / key
    headers = {name: text for name, text in sources.items() if name.endswith(".cuh")}
    jobs = [(sources[f"{module}.cu"], headers, module, target, cache) for module, target in IMAGES]
    compiled = {}
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs) as pool:
        for job, (image, kernels, seconds) in zip(jobs, pool.map(compile_image, jobs)):
            module, target = job[2:4]
            kernels = add_instructions(job, kernels, disassembler)
            registers = max((kernel["registers"] for kernel in kernels), default=0)
            local = max((kernel["local_bytes"] for kernel in kernels), default=0)
            counts = [kernel["instructions"]["all"] for kernel in kernels if kernel["instructions"]]
            read = f", {sum(counts)} instructions" if counts else ""
            print(f"{module} {target}: {len(kernels)} kernels, {len(image)} bytes{read}, at most {registers} registers "
                  f"and {local} bytes of local memory, {seconds:.1f} s", flush=True)
            compiled[module, target] = image, kernels
    offset, entries, images = 0, [], []
    for module, target in sorted(IMAGES, key=lambda image: MODULES.index(image[0])):
        image, kernels = compiled[module, target]
        entries.append({"module": module, "target": target, "offset": offset, "bytes": len(image), "kernels": kernels})
        images.append(image)
        offset += len(image)
    tools = {"script_hash": script_hash(), "compiler": compiler, "disassembler": disassembler.version}
    text = json.dumps({"source_hash": digest, **tools, "images": entries}, separators=(",", ":")).encode()
    write_whole(arguments.archive, MAGIC + struct.pack("<Q", len(text)) + text + b"".join(images))
    print(f"{arguments.archive}: {offset} bytes in {len(entries)} images")


if __name__ == "__main__":
    main()
