"""Builds the program and the operator library with cargo, where pip builds a package of this folder."""

import re
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools_rust import Binding, RustBin, RustExtension, build_rust

ROOT = Path(__file__).parent
LIBRARY = {"darwin": "libmoa_ort.dylib", "win32": "moa_ort.dll"}.get(sys.platform, "libmoa_ort.so")


class BuildRust(build_rust):
    """The operator library keeps the name that other programs load, since it is no module of Python."""

    def get_dylib_ext_path(self, ext, target_fname):
        return str(Path(super().get_dylib_ext_path(ext, target_fname)).with_name(LIBRARY))


class Wheel(bdist_wheel):
    """One wheel serves every version of Python: nothing in it is bound to one."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    version=re.search(r'^version = "(.+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1],
    cmdclass={"build_rust": BuildRust, "bdist_wheel": Wheel},
    rust_extensions=[
        RustBin("moa-export", path="Cargo.toml", args=["--locked"], debug=False),
        RustExtension(
            "moa_export.libmoa_ort",
            path="custom_ops/ort/Cargo.toml",
            binding=Binding.NoBinding,
            args=["--locked"],
            debug=False,
        ),
    ],
)
