"""A file too large to be carried at once: `split FILE FOLDER` into pieces, `join FOLDER TARGET` into the file again."""

import argparse
import hashlib
import json
import sys
from pathlib import Path

PIECE_BYTES = 45 << 20


def split(source, folder, piece_bytes=PIECE_BYTES):
    """Writes `FILE.partNN` and `FILE.pieces.json`, and returns the pieces."""
    source, folder = Path(source), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    digest, pieces = hashlib.sha256(), []
    with open(source, "rb") as file:
        while block := file.read(piece_bytes):
            digest.update(block)
            piece = folder / f"{source.name}.part{len(pieces):02}"
            piece.write_bytes(block)
            pieces.append(piece)
    manifest = {"file": source.name, "pieces": [piece.name for piece in pieces], "sha256": digest.hexdigest()}
    (folder / f"{source.name}.pieces.json").write_text(json.dumps(manifest))
    return pieces


def join(folder, target):
    """Puts together what the one manifest in `folder` names, into the folder `target`; raises where it differs."""
    folder, target = Path(folder), Path(target)
    manifests = sorted(folder.glob("*.pieces.json"))
    if len(manifests) != 1:
        raise ValueError(f"{folder} holds {len(manifests)} files *.pieces.json, and one is needed")
    manifest = json.loads(manifests[0].read_text())
    missing = [name for name in manifest["pieces"] if not (folder / name).exists()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}")
    target.mkdir(parents=True, exist_ok=True)
    fresh, digest = target / f"{manifest['file']}.tmp", hashlib.sha256()
    with open(fresh, "wb") as file:
        for name in manifest["pieces"]:
            block = (folder / name).read_bytes()
            digest.update(block)
            file.write(block)
    if digest.hexdigest() != manifest["sha256"]:
        fresh.unlink()
        raise ValueError(f"{manifest['file']} differs from what was split")
    return fresh.rename(target / manifest["file"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["split", "join"])
    parser.add_argument("source")
    parser.add_argument("target")
    options = parser.parse_args()
    if options.what == "split":
        for piece in split(options.source, options.target):
            print(piece)
    else:
        print(join(options.source, options.target))


if __name__ == "__main__":
    sys.exit(main())
