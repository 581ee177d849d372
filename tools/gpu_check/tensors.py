"""Safetensors files of plain lists, where no package reads them."""

import json
import struct

LETTERS = {"F32": "f", "F16": "e", "I64": "q"}


def write(path, tensors):
    """`tensors`: kind (F32, F16 or I64), shape and values of each name."""
    header, content = {}, b""
    for name, (kind, shape, values) in tensors.items():
        begin, content = len(content), content + struct.pack(f"<{len(values)}{LETTERS[kind]}", *values)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, len(content)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def read(path):
    """Shape and values of each name."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, one in json.loads(content[8:start]).items():
        if name != "__metadata__":
            begin, end = (start + place for place in one["data_offsets"])
            letter = LETTERS[one["dtype"]]
            values = struct.unpack(f"<{(end - begin) // struct.calcsize(letter)}{letter}", content[begin:end])
            found[name] = one["shape"], values
    return found


def furthest(found, expected):
    """The largest difference, over the largest value that is expected, of all tensors; infinite where they cannot be compared."""
    if found.keys() != expected.keys() or any(found[name][0] != expected[name][0] for name in expected):
        return float("inf")
    worst = 0.0
    for name, (_, values) in expected.items():
        size = max(map(abs, values), default=0.0) or 1.0
        differences = [abs(a - b) / size for a, b in zip(found[name][1], values)]
        # A comparison with what is not a number is false, and `max` would leave it out.
        worst = max([worst, *(one if one == one else float("inf") for one in differences)])
    return worst
