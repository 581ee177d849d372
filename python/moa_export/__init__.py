"""The operators of moa-export, for ONNX Runtime in Python.

    import moa_export, onnxruntime
    session = onnxruntime.InferenceSession("model.onnx", moa_export.session_options())
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnxruntime import SessionOptions

__all__ = ["library", "session_options"]

_VARIABLE = "MOA_ORT_LIBRARY"
_LIBRARY = {"darwin": "libmoa_ort.dylib", "win32": "moa_ort.dll"}.get(sys.platform, "libmoa_ort.so")


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("moa-export")
        except PackageNotFoundError:
            raise AttributeError(f"{Path(__file__).parent} is not installed and has no version") from None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def library() -> str:
    """The path of the operator library, for `SessionOptions.register_custom_ops_library` and `custom_ops_library`.

    It is what the variable MOA_ORT_LIBRARY names, else the file beside this one. Raises FileNotFoundError where it is
    not there.
    """
    named = os.environ.get(_VARIABLE)
    path = Path(named) if named else Path(__file__).with_name(_LIBRARY)
    if path.is_file():
        return str(path.absolute())
    if named:
        raise FileNotFoundError(f"{path}, which {_VARIABLE} names, is missing; correct or unset it")
    raise FileNotFoundError(
        f"{path} is missing; install the package again: pip install ., or let {_VARIABLE} name the library"
    )


def session_options(options: SessionOptions | None = None) -> SessionOptions:
    """`options`, or new `onnxruntime.SessionOptions`, with the operators registered.

    Raises ImportError where ONNX Runtime is not installed, FileNotFoundError as `library` does, and what ONNX Runtime
    raises where it cannot load the library.
    """
    if options is None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(library())
    return options
