"""Copies a kernel archive with the machine code of some architectures only; all of its PTX stays unless some is named."""

import argparse
import json
import struct
import sys
from pathlib import Path

MAGIC = b"MOACUDA1"


def slim(archive, targets):
    """The archive, as bytes, with `targets` alone, and all PTX unless they name some; raises where one is not there."""
    if not archive.startswith(MAGIC):
        raise ValueError("this is no kernel archive")
    (length,) = struct.unpack_from("<Q", archive, len(MAGIC))
    start = len(MAGIC) + 8
    manifest = json.loads(archive[start : start + length])
    images = archive[start + length :]
    known = {image["target"] for image in manifest["images"]}
    if missing := sorted(set(targets) - known):
        raise ValueError(f"the archive has no {', '.join(missing)}; it has {', '.join(sorted(known))}")
    wanted = set(targets)
    if not any(target.startswith("compute_") for target in targets):
        wanted |= {target for target in known if target.startswith("compute_")}
    kept, payload = [], b""
    for image in manifest["images"]:
        if image["target"] in wanted:
            code = images[image["offset"] : image["offset"] + image["bytes"]]
            kept.append({**image, "offset": len(payload)})
            payload += code
    text = json.dumps({**manifest, "images": kept}).encode()
    return MAGIC + struct.pack("<Q", len(text)) + text + payload


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive")
    parser.add_argument("output")
    parser.add_argument("targets", nargs="+")
    options = parser.parse_args()
    try:
        Path(options.output).write_bytes(slim(Path(options.archive).read_bytes(), options.targets))
    except ValueError as error:
        return f"error: {error}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
