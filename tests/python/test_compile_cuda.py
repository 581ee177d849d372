"""tools/compile_cuda.py: what it reads in the reports of its tools."""

import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import compile_cuda

DISASSEMBLY = """\
\t.section\t.text.one,"ax",@progbits
.text.one:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDGSTS.E.BYPASS.128 [R5], [R2.64] ;
.L_x_1:
        /*0020*/                   LDSM.16.M88.4 R8, [R4] ;
        /*0030*/             @!UP1 HMMA.16816.F32.BF16 R12, R8, R10, R12 ;
        /*0040*/                   ATOMG.E.ADD.STRONG.GPU PT, R0, [R2.64], R3 ;
        /*0050*/                   LDL.64 R2, [R1] ;
        /*10060*/                  EXIT ;
.text.two:
        /*0000*/               @P1 RED.E.ADD.F32.FTZ.RN.STRONG.GPU [R2.64], R3 ;
        /*0010*/                   FFMA R0, R0, R1, R2 ;
        /*0020*/                   FFMA.FTZ R0, R0, R1, R2 ;
        /*0030*/                   STL [R1], R0 ;
.text.three:
        /*0000*/                   MUFU.EX2 R1, R2 ;
        /*0010*/                   HGMMA.64x64x16.F32 R88, R120, gdesc[UR8], R88, gsb0 ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0030*/                   MUFU.EX2 R1, R2 ;
        /*0040*/               @P0 MUFU.EX2 R3, R4 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/                   MUFU.EX2 R1, R2 ;
"""

REPORT = """\
ptxas info    : Compiling entry function 'one' for 'sm_80'
ptxas info    : Function properties for one
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem, 744 bytes cmem[0]
ptxas info    : Compiling entry function 'two' for 'sm_80'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, 744 bytes cmem[0]
"""


def elf(capability, kernels):
    """The parts of an ELF file that are read: flags, and the sections of kernels given by their bytes."""
    names, sections = b"\0", [(0, 0)]
    for name, size in [*((f".text.{name}", size) for name, size in kernels.items()), (".nv.info", 8), (".shstrtab", 0)]:
        sections.append((len(names), size))
        names += name.encode() + b"\0"
    start = 64 + len(names)
    header = bytearray(64)
    struct.pack_into("<Q", header, 40, start)
    struct.pack_into("<I", header, 48, 0x05000500 | capability << 16 | capability)
    struct.pack_into("<3H", header, 58, 64, len(sections), len(sections) - 1)
    table = b"".join(struct.pack("<IIQQQQ24x", name, 1, 0, 0, 64, size) for name, size in sections)
    return bytes(header) + names + table


class Reports(unittest.TestCase):
    def test_instructions_are_counted_by_kernel(self):
        found = compile_cuda.instructions(DISASSEMBLY)
        one = {"LDGSTS.E.BYPASS.128": 1, "LDSM.16.M88.4": 1, "HMMA.16816.F32.BF16": 1, "ATOMG.E.ADD.STRONG.GPU": 1, "LDL.64": 1}
        two = {"RED.E.ADD.F32.FTZ.RN.STRONG.GPU": 1, "FFMA": 2, "STL": 1}
        three = {"HGMMA.64x64x16.F32": 1, compile_cuda.BESIDE_PRODUCTS: 2}
        counts = {"one": {"all": 7, "forms": one}, "two": {"all": 4, "forms": two}, "three": {"all": 7, "forms": three}}
        self.assertEqual(found, counts)

    def test_the_bytes_of_kernels_are_read(self):
        self.assertEqual(compile_cuda.kernel_bytes(elf(80, {"one": 112, "two": 64})), {"one": 112, "two": 64})

    def test_only_what_the_disassembler_does_not_know_is_relabelled(self):
        self.assertEqual(compile_cuda.readable(elf(70, {"one": 16}), "sm_70"), elf(75, {"one": 16}))
        self.assertEqual(compile_cuda.readable(elf(90, {"one": 16}), "sm_90a"), elf(90, {"one": 16}))

    def count(self, size):
        """What is counted where the first kernel has `size` bytes and `DISASSEMBLY` is all that is read."""
        reader = compile_cuda.Disassembler.__new__(compile_cuda.Disassembler)
        reader.program = "nvdisasm"
        done = subprocess.CompletedProcess([], 0, DISASSEMBLY, "")
        with tempfile.TemporaryDirectory() as folder, mock.patch("subprocess.run", return_value=done):
            path = Path(folder, "f16.sm_80")
            path.write_bytes(elf(80, {"one": size, "two": 4 * 16, "three": 7 * 16}))
            return reader.count(path, "sm_80")

    def test_bytes_that_are_not_read_are_refused(self):
        self.assertEqual(set(self.count(7 * 16)), {"one", "two", "three"})
        with self.assertRaisesRegex(RuntimeError, "reads .*'one': 112.* bytes of .* holds .*'one': 128"):
            self.count(8 * 16)

    def test_resources_are_read_by_kernel(self):
        self.assertEqual(compile_cuda.resources(REPORT), {"one": (40, 1024, 16), "two": (255, 0, 0)})

    def test_a_report_that_says_less_is_refused(self):
        with self.assertRaisesRegex(RuntimeError, "report of one is not understood"):
            compile_cuda.resources("Compiling entry function 'one' for 'sm_80'")


if __name__ == "__main__":
    unittest.main()
