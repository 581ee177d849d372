"""The operators of moa-export, for ONNX Runtime in Python.

    import moa_export, onnxruntime
    session = onnxruntime.InferenceSession("model.onnx", moa_export.session_options())
"""

from pathlib import Path

__all__ = ["library", "session_options"]


def library() -> str:
    """The path of the operator library, for `SessionOptions.register_custom_ops_library` and `custom_ops_library`."""
    return str(Path(__file__).with_name("libmoa_ort.so"))


def session_options(options=None):
    """`options`, or new `onnxruntime.SessionOptions`, with the operators registered.

    Raises ImportError where ONNX Runtime is not installed.
    """
    if options is None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(library())
    return options
