"""Fills the folder that `tensorrt_stage` runs from: checkpoints, libraries that stand in for cuBLAS and cuDNN, and TensorRT's
wheel in pieces.

    python3 tools/gpu_check/tensorrt_kit.py KIT WHEEL

TensorRT 8.6's parser is linked to libnvinfer_plugin, and that to cuBLAS and cuDNN, of which none of our engines calls a
function. They are larger than all the rest, so libraries with the same names and symbols stand for them: every function
returns an error.
"""

import argparse
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/python"))

from gpu_check import pieces

ROOT = Path(__file__).resolve().parents[2]

#: In the wheel; only this one names libraries of CUDA.
LINKED = "libnvinfer_plugin.so.8"

#: What engines are built, read and run with.
PACKED = ["tensorrt/libnvinfer*.so*", "tensorrt/libnvonnxparser.so*"]

#: The code of cuBLAS and of cuDNN for a library that was not initialised.
REFUSED = 1


def undefined(symbols):
    """The functions of other libraries in what `readelf --dyn-syms` writes, by library."""
    found = {}
    for name, library in re.findall(r"UND (\w+)@+(lib(?:cublas|cublasLt|cudnn)\.so\.\d+)", symbols):
        found.setdefault(library, set()).add(name)
    return {library: sorted(names) for library, names in sorted(found.items())}


def stand_in(library, names, folder):
    """A library with these functions, which do nothing, under the symbol version that callers ask for."""
    with tempfile.TemporaryDirectory() as place:
        source, versions = Path(place, "stand_in.c"), Path(place, "versions.map")
        source.write_text("".join(f"int {name}(void) {{ return {REFUSED}; }}\n" for name in names))
        versions.write_text(f"{library} {{ global: {' '.join(name + ';' for name in names)} local: *; }};\n")
        options = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{library}", f"-Wl,--version-script={versions}"]
        subprocess.run([os.environ.get("CC", "cc"), *options, source, "-o", Path(folder, library)], check=True)


def stand_ins(wheel, folder):
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(wheel) as archive:
        linked = archive.extract(f"tensorrt/{LINKED}", place)
        symbols = subprocess.run(["readelf", "--dyn-syms", "-W", linked], check=True, capture_output=True, text=True)
    for library, names in undefined(symbols.stdout).items():
        stand_in(library, names, folder)


def checkpoints(folder):
    """The paper's base layer with the values of its fixture, the masked LM, and the model that reads numbers in words."""
    import exports

    made = {"base_layer": exports.layer_checkpoint("paper_base_self"), "masked_lm": ROOT / "tests/data/mlm"}
    made["number_words"] = ROOT / "tests/data/nmt"
    for name, source in made.items():
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        for file in ["config.json", "model.safetensors"]:
            (target / file).write_bytes((Path(source) / file).read_bytes())
        for file in Path(source).glob("dict*.txt"):
            (target / file.name).write_bytes(file.read_bytes())


def pack(program):
    """Leaves `PROGRAM.xz` in place of a program, without its symbols."""
    if shutil.which("strip"):
        subprocess.run(["strip", program], check=True)
    program.with_name(f"{program.name}.xz").write_bytes(lzma.compress(program.read_bytes(), preset=1))
    program.unlink()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kit", type=Path)
    parser.add_argument("wheel", type=Path)
    options = parser.parse_args()
    stand_ins(options.wheel, options.kit / "stand_ins")
    checkpoints(options.kit / "checkpoints")
    pack(options.kit / "moa-export")
    parts = pieces.pack(options.wheel, options.kit.with_name(options.kit.name + "-pieces"), PACKED)
    print(json.dumps({"pieces": len(parts), "folder": str(parts[0].parent)}))


if __name__ == "__main__":
    main()
