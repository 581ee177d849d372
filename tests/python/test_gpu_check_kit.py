"""tools/gpu_check without a GPU: what is packed for a machine, and what is counted there."""

import io
import json
import random
import sys
import tempfile
import unittest
import zipfile
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from gpu_check import barriers, conductor, counters, pieces, slim
from test_cuda_abi import archive


class Pieces(unittest.TestCase):
    def test_what_is_packed_is_unpacked(self):
        with tempfile.TemporaryDirectory() as folder:
            wheel, parts, target = (Path(folder, name) for name in ("wheel.whl", "parts", "target"))
            contents = {"a/b.so": random.Random(1).randbytes(5000), "a/c.so": bytes(3000), "d.py": b"x", "empty.so": b""}
            with zipfile.ZipFile(wheel, "w") as archive:
                for name, content in contents.items():
                    archive.writestr(name, content)
                archive.writestr("folder.so/", b"")
            made = pieces.pack(wheel, parts, ["*.so"], piece_bytes=2500, block_bytes=1000)
            self.assertEqual(len(made), 3)
            self.assertTrue(all(piece.stat().st_size <= 2500 for piece in made))
            pieces.unpack(parts, target)
            found = {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}
            self.assertEqual(found, {name: content for name, content in contents.items() if name != "d.py"})
            self.spoil(parts, made[1], target)

    def spoil(self, parts, piece, target):
        content = piece.read_bytes()
        piece.write_bytes(bytes(len(content)))
        with self.assertRaisesRegex(ValueError, "wheel.whl.part01 differs from what was packed"):
            pieces.unpack(parts, target)
        piece.write_bytes(content)
        manifest = (parts / pieces.MANIFEST).read_text()
        facts = json.loads(manifest)
        facts["files"]["a/b.so"]["sha256"] = "0"
        (parts / pieces.MANIFEST).write_text(json.dumps(facts))
        with self.assertRaisesRegex(ValueError, "a/b.so differs from what was packed"):
            pieces.unpack(parts, target)
        piece.unlink()
        with self.assertRaisesRegex(ValueError, "lacks wheel.whl.part01"):
            pieces.unpack(parts, target)
        (parts / pieces.MANIFEST).unlink()
        with self.assertRaisesRegex(ValueError, "holds no pieces.json"):
            pieces.unpack(parts, target)


class Counters(unittest.TestCase):
    HEADER = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'

    def test_kernels_belong_to_the_case_in_front_of_them(self):
        rows = [(0, "moa_a", 1500), (1, "moa_b", 2500), (2, "moa_a", "1,000")]
        lines = [counters.MARK + json.dumps({"name": name, "launches": count}) for name, count in (("x", 2), ("y", 1))]
        lines += [self.HEADER, *(f'"{place}","{name}","gpu__time_duration.sum","ns","{ns}"' for place, name, ns in rows)]
        found = counters.parse("\n".join(["==PROF== noise", *lines]))
        self.assertEqual([[one["ns"] for one in case["kernels"]] for case in found], [[1500.0, 2500.0], [1000.0]])
        self.assertIn("2.5 us", counters.table(found))

    def test_a_program_that_is_not_there_is_said(self):
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as printed:
            out = Path(folder, "counters.json")
            options = SimpleNamespace(kit=folder, out=out, cases=[0], no_wgmma=False, seconds=30.0)
            with mock.patch.object(conductor, "find_tool", return_value=str(Path(folder, "ncu"))):
                self.assertEqual(counters.watch(options), 1)
            self.assertIn("ncu", json.loads(out.read_text())["said"])
        self.assertTrue(printed.getvalue().startswith("nothing was counted: "))


class Barriers(unittest.TestCase):
    def test_races_belong_to_their_programs(self):
        line = "========= Error: Race reported between Write access at {}+0x1a0\n=========     and Read access at {}+0x2b0 [31 hazards]"
        text = "\n".join(line.format(name, name) for name in ["nobody_waits", "copies_arrive", "copies_arrive"])
        races = barriers.reported(text)
        self.assertEqual({name: count for name, count in races.items() if count}, {"nobody_waits": 1, "copies_arrive": 2})
        lines, follows = barriers.verdict(races)
        self.assertFalse(follows)
        self.assertEqual([one.split()[0] for one in lines if "the tool is wrong" in one], ["copies_arrive"])
        self.assertTrue(barriers.verdict(dict.fromkeys(barriers.PROGRAMS, 0) | {"nobody_waits": 3})[1])
        self.assertFalse(barriers.verdict(dict.fromkeys(barriers.PROGRAMS, 0))[1])

    def test_every_program_is_in_the_source(self):
        for name in barriers.PROGRAMS:
            self.assertIn(f"PROGRAM({name}, ", barriers.SOURCE)

    def test_a_sanitizer_that_is_not_there_is_said(self):
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as printed:
            out = Path(folder, "barriers.json")
            with mock.patch.object(conductor, "find_tool", return_value=str(Path(folder, "compute-sanitizer"))):
                self.assertEqual(barriers.watch(out), 1)
            found = json.loads(out.read_text())
            self.assertEqual((found["ended"], found["follows"]), (False, False))
        self.assertTrue(printed.getvalue().startswith("nothing was checked: "))


class Slim(unittest.TestCase):
    def test_machine_code_of_others_is_left_out(self):
        whole = archive(["one"], ["sm_80", "sm_90a", "compute_80"])
        manifest, images = self.parts(slim.slim(whole, ["sm_90a"]))
        self.assertEqual([image["target"] for image in manifest["images"]], ["sm_90a", "compute_80"] * 3)
        for image in manifest["images"]:
            code = images[image["offset"] : image["offset"] + image["bytes"]]
            self.assertEqual(code, f"{image['module']}-{image['target']}\0".encode())
        whole = archive(["one"], ["sm_90a", "compute_80", "compute_90"])
        manifest, _ = self.parts(slim.slim(whole, ["sm_90a", "compute_80"]))
        self.assertEqual([image["target"] for image in manifest["images"]], ["sm_90a", "compute_80"] * 3)
        with self.assertRaisesRegex(ValueError, "no sm_70; it has compute_80, compute_90, sm_90a"):
            slim.slim(whole, ["sm_70"])
        with self.assertRaisesRegex(ValueError, "no kernel archive"):
            slim.slim(b"x", ["sm_70"])

    def parts(self, archive):
        length = int.from_bytes(archive[8:16], "little")
        return json.loads(archive[16 : 16 + length]), archive[16 + length :]


if __name__ == "__main__":
    unittest.main()
