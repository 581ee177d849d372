"""`libmoa_cuda.so` through ctypes: the structures of `custom_ops/cuda/include/moa_cuda.h`, and its calls on plain
device addresses. Needs neither torch nor numpy."""

import contextlib
import ctypes
import os
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)

ABI_VERSION = 1
MAX_RANK = 4
CODES = {1: "argument", 2: "unsupported", 3: "missing", 4: "driver", 5: "internal"}
OPERATORS = ["MoASelfAttention", "MoACrossAttention", "MoEFeedForward"]
ELEMENTS = ["f32", "f16", "bf16"]
GATE_MODES = ["softmax_topk", "softmax_topk_renorm", "topk_softmax"]
ACTIVATIONS = ["relu", "gelu", "silu", "gelu_tanh"]
ATTENTION_MODES = ["softmax", "stick_breaking"]
REGIMES = ["dense", "sparse", "grouped", "grouped-reduce"]
TF32 = 1
SHARED_CACHES = 2

#: Outputs that are the memory of inputs where caches are shared.
SHARED = {"present_key": "past_key", "present_value": "past_value"}

#: Makes small calls take the kernels of large ones (custom_ops/cuda/driver).
MULTIPROCESSORS = "MOA_CUDA_MULTIPROCESSORS"

#: Inputs and outputs in the order of the schema.
INPUTS = {
    "MoASelfAttention": [
        "hidden_states",
        "attention_mask",
        "router_weight",
        "query_weight",
        "kv_weight",
        "output_weight",
        "output_bias",
        "past_key",
        "past_value",
        "cos_cache",
        "sin_cache",
        "position_ids",
        "router_input",
    ],
    "MoACrossAttention": [
        "hidden_states",
        "key",
        "value",
        "key_mask",
        "query_mask",
        "router_weight",
        "query_weight",
        "output_weight",
        "output_bias",
    ],
    "MoEFeedForward": [
        "hidden_states",
        "router_weight",
        "input_weight",
        "output_weight",
        "output_bias",
        "router_input",
    ],
}
CHOICE = ["topk_indices", "topk_weights"]
OUTPUTS = {
    "MoASelfAttention": ["output", "present_key", "present_value", *CHOICE],
    "MoACrossAttention": ["output", *CHOICE],
    "MoEFeedForward": ["output", *CHOICE],
}


@contextlib.contextmanager
def variable(name, value):
    """A variable of the environment for a while; nothing is touched where the value is None."""
    if value is None:
        yield
        return
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Error(Structure):
    _fields_ = [("text", c_char * 512)]


class Sized(Structure):
    """A structure that says its size in its first field."""

    def __init__(self, **values):
        super().__init__(struct_size=ctypes.sizeof(self), **values)


class Options(Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("device", c_int32),
        ("compute_major", c_uint32),
        ("compute_minor", c_uint32),
        ("archive", c_void_p),
        ("archive_bytes", c_uint64),
    ]


class Device(Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("compute_major", c_uint32),
        ("compute_minor", c_uint32),
        ("device_major", c_uint32),
        ("device_minor", c_uint32),
        ("multiprocessors", c_uint32),
        ("shared_bytes_per_block", c_uint32),
        ("l2_bytes", c_uint32),
    ]


class Node(Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("operator_id", c_uint32),
        ("element", c_uint32),
        ("flags", c_uint32),
        ("top_k", c_uint32),
        ("kv_num_heads", c_uint32),
        ("gate_mode", c_uint32),
        ("activation", c_uint32),
        ("causal", c_uint32),
        ("skip_padded_queries", c_uint32),
        ("gated", c_uint32),
        ("scale", c_float),
        ("attention_mode", c_uint32),
    ]


class Shape(Structure):
    _fields_ = [("rank", c_int32), ("reserved", c_int32), ("dims", c_int64 * MAX_RANK)]

    @classmethod
    def of(cls, dims):
        """A shape; `None` is an absent tensor."""
        if dims is None:
            return cls(rank=-1)
        return cls(rank=len(dims), dims=(c_int64 * MAX_RANK)(*dims))


class PlanInfo(Sized):
    _fields_ = [
        ("struct_size", c_uint32),
        ("launches", c_uint32),
        ("regime", c_uint32),
        ("reserved", c_uint32),
        ("workspace_bytes", c_uint64),
    ]


STRUCTURES = {
    "moa_cuda_error": Error,
    "moa_cuda_options": Options,
    "moa_cuda_device": Device,
    "moa_cuda_node": Node,
    "moa_cuda_shape": Shape,
    "moa_cuda_plan_info": PlanInfo,
}

_SIGNATURES = {
    "moa_cuda_create": [POINTER(Options), POINTER(c_void_p)],
    "moa_cuda_load": [c_void_p, c_uint32],
    "moa_cuda_device_facts": [c_void_p, POINTER(Device)],
    "moa_cuda_faults": [c_void_p, POINTER(c_uint32)],
    "moa_cuda_output_shapes": [POINTER(Node), POINTER(Shape), c_size_t, POINTER(Shape), c_size_t],
    "moa_cuda_plan_create": [
        c_void_p,
        POINTER(Node),
        POINTER(Shape),
        c_size_t,
        POINTER(c_uint8),
        c_size_t,
        POINTER(c_void_p),
    ],
    "moa_cuda_plan_describe": [c_void_p, POINTER(PlanInfo)],
    "moa_cuda_enqueue": [
        c_void_p,
        POINTER(c_void_p),
        c_size_t,
        POINTER(c_void_p),
        c_size_t,
        c_void_p,
        c_size_t,
        c_void_p,
    ],
}


class CallError(RuntimeError):
    """A call of the library that failed."""

    def __init__(self, code, text):
        super().__init__(f"{text} ({CODES.get(code, code)})")
        self.code = code


class Library:
    """The shared library."""

    def __init__(self, path):
        self.raw = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(self.raw, name)
            function.argtypes, function.restype = [*arguments, POINTER(Error)], c_int32
        for name in ("moa_cuda_destroy", "moa_cuda_plan_destroy"):
            function = getattr(self.raw, name)
            function.argtypes, function.restype = [c_void_p], None
        self.raw.moa_cuda_abi_version.restype = c_uint32
        found = self.raw.moa_cuda_abi_version()
        if found != ABI_VERSION:
            raise RuntimeError(f"{path} has version {found} of the C ABI, this script knows {ABI_VERSION}")

    def call(self, name, *arguments):
        error = Error()
        code = getattr(self.raw, name)(*arguments, byref(error))
        if code:
            raise CallError(code, error.text.decode(errors="replace"))


class Kernels:
    """The kernels of one context; `path` runs those of an older architecture, as (major, minor)."""

    def __init__(self, library, archive=None, device=-1, path=None):
        self.library, self.handle = library, c_void_p()
        options = Options(device=device)
        if path is not None:
            options.compute_major, options.compute_minor = path
        if archive is not None:
            self._archive = ctypes.create_string_buffer(archive, len(archive))
            options.archive = ctypes.cast(self._archive, c_void_p)
            options.archive_bytes = len(archive)
        library.call("moa_cuda_create", byref(options), byref(self.handle))

    def close(self):
        self.library.raw.moa_cuda_destroy(self.handle)
        self.handle = c_void_p()

    def load(self, element):
        self.library.call("moa_cuda_load", self.handle, ELEMENTS.index(element))

    def facts(self):
        device = Device()
        self.library.call("moa_cuda_device_facts", self.handle, byref(device))
        return {name: getattr(device, name) for name, _ in Device._fields_ if name != "struct_size"}

    def faults(self):
        bits = c_uint32()
        self.library.call("moa_cuda_faults", self.handle, byref(bits))
        return bits.value

    def plan(self, operator, attributes, element, shapes, wanted, tf32=False, multiprocessors=None, shared=False):
        """A plan, as for a device of so many multiprocessors where a number is given; `shared`: caches may have room."""
        flags = (TF32 if tf32 else 0) | (SHARED_CACHES if shared else 0)
        with variable(MULTIPROCESSORS, None if multiprocessors is None else str(multiprocessors)):
            return Plan(self, operator, attributes, element, shapes, wanted, flags)


def node_of(operator, attributes, element, flags=0):
    """The structure for an operator, its attributes by name and an element type."""
    node = Node(operator_id=OPERATORS.index(operator), element=ELEMENTS.index(element), flags=flags)
    names = {"gate_mode": GATE_MODES, "activation": ACTIVATIONS, "attention_mode": ATTENTION_MODES}
    for name, value in attributes.items():
        setattr(node, name, names[name].index(value) if name in names else value)
    return node


class Plan:
    """One node for one set of shapes, by names of the schema; `wanted` names the outputs that somebody asks for."""

    def __init__(self, kernels, operator, attributes, element, shapes, wanted, flags):
        self.library, self.handle = kernels.library, c_void_p()
        self.operator, self.inputs, self.outputs = operator, INPUTS[operator], OUTPUTS[operator]
        node = node_of(operator, attributes, element, flags)
        raw = (Shape * len(self.inputs))(*[Shape.of(shapes.get(name)) for name in self.inputs])
        asked = (c_uint8 * len(self.outputs))(*[name in wanted for name in self.outputs])
        count, outputs = len(raw), (Shape * len(self.outputs))()
        self.library.call("moa_cuda_output_shapes", byref(node), raw, count, outputs, len(outputs))
        dims = {name: tuple(shape.dims[: shape.rank]) for name, shape in zip(self.outputs, outputs)}
        self.output_shapes = {name: dims[name] for name in self.outputs if name in wanted}
        handle = byref(self.handle)
        self.library.call("moa_cuda_plan_create", kernels.handle, byref(node), raw, count, asked, len(asked), handle)
        info = PlanInfo()
        self.library.call("moa_cuda_plan_describe", self.handle, byref(info))
        self.workspace_bytes, self.launches = info.workspace_bytes, info.launches
        self.regime = REGIMES[info.regime]

    def close(self):
        self.library.raw.moa_cuda_plan_destroy(self.handle)
        self.handle = c_void_p()

    def bind(self, inputs, outputs, workspace):
        """A call with device addresses by name: a function of a stream that puts it there."""
        given = (c_void_p * len(self.inputs))(*[inputs.get(name) or None for name in self.inputs])
        wanted = (c_void_p * len(self.outputs))(*[outputs.get(name) or None for name in self.outputs])
        enqueue, handle, size = self.library.raw.moa_cuda_enqueue, self.handle, self.workspace_bytes
        error = Error()

        def launch(stream):
            code = enqueue(handle, given, len(given), wanted, len(wanted), workspace, size, stream, byref(error))
            if code:
                raise CallError(code, error.text.decode(errors="replace"))

        return launch
