"""Our kernels on torch tensors: their addresses go through the C ABI to the current stream."""

import torch

from . import feeds
from .abi import SHARED


def stream():
    return torch.cuda.current_stream().cuda_stream


def poisoned(shape, dtype):
    """A tensor of bytes 0xFF: NaN in every float type, -1 in every integer type."""
    size = torch.empty((), dtype=dtype).element_size()
    count = 1
    for dim in shape:
        count *= dim
    return torch.full((count * size,), 0xFF, dtype=torch.uint8, device=feeds.DEVICE).view(dtype).view(shape)


def output_dtype(name, element):
    return {"topk_indices": torch.int64, "topk_weights": torch.float32}.get(name, feeds.DTYPES[element])


class Call:
    """One operator for one set of shapes, with outputs and a workspace of its own; `shared` caches are no outputs of its
    own, but grow where `feeds` has them."""

    def __init__(self, kernels, operator, attributes, element, feeds, wanted, tf32=False, multiprocessors=None, shared=False):
        shapes = {name: tuple(tensor.shape) for name, tensor in feeds.items()}
        self.plan = kernels.plan(operator, attributes, element, shapes, wanted, tf32, multiprocessors, shared)
        self.shared = SHARED if shared else {}
        self.outputs = {
            name: poisoned(shape, output_dtype(name, element))
            for name, shape in self.plan.output_shapes.items()
            if name not in self.shared
        }
        self.workspace = poisoned((self.plan.workspace_bytes + 256,), torch.uint8)
        start = self.workspace.data_ptr()
        self.workspace_address = start + -start % 256

    def bind(self, feeds):
        """A function that puts the call on the current stream; it keeps `feeds` alive."""
        for name, tensor in feeds.items():
            if not tensor.is_contiguous():
                raise ValueError(f"{name} is not contiguous")
        inputs = {name: tensor.data_ptr() for name, tensor in feeds.items()}
        outputs = {name: tensor.data_ptr() for name, tensor in self.outputs.items()}
        outputs |= {name: inputs[past] for name, past in self.shared.items()}
        launch = self.plan.bind(inputs, outputs, self.workspace_address)

        def run():
            launch(stream())
            return self.outputs["output"]

        run.keeps = feeds
        return run

    def poison(self, byte=0xFF):
        self.workspace.fill_(byte)
        for tensor in self.outputs.values():
            tensor.view(-1).view(torch.uint8).fill_(0xFF)

    def copies(self):
        return {name: tensor.clone() for name, tensor in self.outputs.items()}

    def close(self):
        self.plan.close()


def unaligned(feeds):
    """The same tensors, each one element behind an aligned address."""
    moved = {}
    for name, tensor in feeds.items():
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:]
        moved[name] = room.copy_(tensor.reshape(-1)).view(tensor.shape)
    return moved
