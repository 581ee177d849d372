"""Fills the folder that `tensorrt_stage` runs from: checkpoints, a library that stands in for TensorRT's own plugins, and
TensorRT's wheel in pieces.

    python3 tools/gpu_check/tensorrt_kit.py KIT WHEEL

TensorRT 8.6's parser is linked to libnvinfer_plugin, and that to cuBLAS and cuDNN, which are larger than all the rest. None of
our engines has one of those plugins, so a library of the same name, which registers none, stands for it.
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

#: Links cuBLAS and cuDNN, and is linked by the parser.
PLUGINS = "libnvinfer_plugin.so.8"

PARSER = "libnvonnxparser.so.8"

#: All that the parser calls of TensorRT's plugins; it registers them, and is true where it did.
CALLED = "initLibNvInferPlugins"

#: What engines are built, read and run with.
PACKED = ["tensorrt/libnvinfer.so*", "tensorrt/libnvinfer_builder_resource.so*", f"tensorrt/{PARSER}*"]


def functions(symbols, defined):
    """The functions that a library defines, or else takes from others, in what `readelf --dyn-syms` writes."""
    found = re.findall(r"^ *\d+: .* (?:FUNC|NOTYPE) +\w+ +DEFAULT +(\w+) +([\w.]+)", symbols, re.MULTILINE)
    return {name for section, name in found if (section != "UND") == defined}


def stand_in(folder):
    """A library of the name of TensorRT's plugins that has none."""
    source = f"int {CALLED}(void *logger, const char *space) {{ (void)logger; (void)space; return 1; }}\n"
    options = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{PLUGINS}", "-x", "c", "-"]
    command = [os.environ.get("CC", "cc"), *options, "-o", Path(folder, PLUGINS)]
    subprocess.run(command, input=source, text=True, check=True)


def stand_ins(wheel, folder):
    """The folder with the stand-in, where the wheel's parser calls nothing that it lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    symbols = {}
    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(wheel) as archive:
        for name in (PARSER, PLUGINS):
            library = archive.extract(f"tensorrt/{name}", place)
            found = subprocess.run(["readelf", "--dyn-syms", "-W", library], check=True, capture_output=True, text=True)
            symbols[name] = found.stdout
    if more := functions(symbols[PARSER], False) & functions(symbols[PLUGINS], True) - {CALLED}:
        raise ValueError(f"{PARSER} calls {', '.join(sorted(more))} of {PLUGINS}, which its stand-in lacks")
    stand_in(folder)


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
