"""The operators of moa-export, for ONNX Runtime in Python.

    import moa_export, onnxruntime
    session = onnxruntime.InferenceSession("model.onnx", moa_export.session_options())
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnxruntime import SessionOptions

__all__ = ["library", "session_options"]

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

    Raises FileNotFoundError where it is not beside this file.
    """
    path = Path(__file__).with_name(_LIBRARY)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; install the package again: pip install .")
    return str(path)


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
