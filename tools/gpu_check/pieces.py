"""Members of a wheel that is too large to be carried at once: `pack WHEEL FOLDER [NAME...]` into pieces, each of which fits one
call, and `unpack FOLDER TARGET` into the files again.

A file is cut into blocks, and every block is compressed by itself, so that all processors compress and unpack. A piece holds
whole blocks; the manifest says where each one lies, and the hash of each file.
"""

import argparse
import fnmatch
import hashlib
import json
import lzma
import multiprocessing
import os
import shutil
import sys
import zipfile
from pathlib import Path

PIECE_BYTES = 43 << 20
BLOCK_BYTES = 8 << 20

MANIFEST = "pieces.json"


def pack(wheel, folder, names=("*",), piece_bytes=PIECE_BYTES, block_bytes=BLOCK_BYTES):
    """Writes the members of `wheel` that match one of `names`, and the manifest, into a fresh folder: the pieces."""
    folder = Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files, places = {}, []
    with zipfile.ZipFile(wheel) as archive, multiprocessing.Pool() as pool:
        # Entries of folders are no files; `unpack` makes the folders of files.
        every = [one for one in archive.namelist() if not one.endswith("/")]
        members = [one for one in every if any(fnmatch.fnmatch(one, name) for name in names)]
        writer = _Writer(folder, Path(wheel).name, piece_bytes)
        for member in members:
            with archive.open(member) as file:
                for block in pool.imap(lzma.compress, _blocks(file, member, files, places, block_bytes)):
                    writer.add(block)
    for place, lies in zip(places, writer.lies):
        place |= lies
    manifest = {"wheel": Path(wheel).name, "files": files, "blocks": places, "pieces": [one.name for one in writer.pieces]}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return writer.pieces


def _blocks(file, name, files, places, block_bytes):
    """The blocks of one file, in order; its size and hash go to `files`, where each block belongs to `places`."""
    digest, offset = hashlib.sha256(), 0
    while block := file.read(block_bytes):
        digest.update(block)
        places.append({"file": name, "offset": offset, "bytes": len(block)})
        offset += len(block)
        yield block
    files[name] = {"bytes": offset, "sha256": digest.hexdigest()}


class _Writer:
    """Puts each compressed block into the first piece that then holds at most so many bytes."""

    def __init__(self, folder, name, piece_bytes):
        self.folder, self.name, self.piece_bytes = folder, name, piece_bytes
        self.pieces, self.lies, self.sizes = [], [], []

    def add(self, block):
        room = (place for place, size in enumerate(self.sizes) if size + len(block) <= self.piece_bytes)
        place = next(room, len(self.sizes))
        if place == len(self.sizes):
            self.pieces.append(self.folder / f"{self.name}.part{place:02}")
            self.sizes.append(0)
        self.lies.append({"piece": self.pieces[place].name, "start": self.sizes[place], "packed": len(block)})
        with open(self.pieces[place], "ab") as piece:
            piece.write(block)
        self.sizes[place] += len(block)


def _unpack_block(folder, target, block):
    with open(folder / block["piece"], "rb") as piece:
        piece.seek(block["start"])
        packed = piece.read(block["packed"])
    try:
        content = lzma.decompress(packed)
    except lzma.LZMAError as error:
        raise ValueError(f"{block['piece']} differs from what was packed: {error}") from None
    with open(target / block["file"], "r+b") as file:
        file.seek(block["offset"])
        file.write(content)


def _hash(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(folder, target):
    """The files that the manifest in `folder` names, into the folder `target`; raises where a piece is missing or differs."""
    folder, target = Path(folder), Path(target)
    if not (folder / MANIFEST).exists():
        raise ValueError(f"{folder} holds no {MANIFEST}")
    manifest = json.loads((folder / MANIFEST).read_text())
    missing = [name for name in manifest["pieces"] if not (folder / name).exists()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}")
    for name, facts in manifest["files"].items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with open(target / name, "wb") as file:
            os.truncate(file.fileno(), facts["bytes"])
    with multiprocessing.Pool() as pool:
        pool.starmap(_unpack_block, [(folder, target, block) for block in manifest["blocks"]])
        hashes = pool.map(_hash, [target / name for name in manifest["files"]])
    for (name, facts), found in zip(manifest["files"].items(), hashes):
        if found != facts["sha256"]:
            raise ValueError(f"{name} differs from what was packed")
    return target


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pack", "unpack"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("names", nargs="*", default=["*"], help="patterns of the members that are packed (default: all)")
    options = parser.parse_args()
    if options.what == "pack":
        for piece in pack(options.source, options.target, options.names):
            print(piece)
    else:
        print(unpack(options.source, options.target))


if __name__ == "__main__":
    sys.exit(main())
