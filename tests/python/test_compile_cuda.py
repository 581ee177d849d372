"""tools/compile_cuda.py: what it reads in the reports of its tools."""

import sys
import unittest
from pathlib import Path

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
        /*0020*/                   STL [R1], R0 ;
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


class Reports(unittest.TestCase):
    def test_instructions_are_counted_by_kernel(self):
        found = compile_cuda.instructions(DISASSEMBLY)
        none = {"all": 0, **dict.fromkeys(compile_cuda.COUNTED, 0), "float_atomics": 0}
        one = {"all": 7, "ldgsts": 1, "ldsm": 1, "hmma": 1, "local": 1}
        two = {"all": 3, "ffma": 1, "local": 1, "float_atomics": 1}
        self.assertEqual(found, {"one": {**none, **one}, "two": {**none, **two}})

    def test_resources_are_read_by_kernel(self):
        self.assertEqual(compile_cuda.resources(REPORT), {"one": (40, 1024, 16), "two": (255, 0, 0)})

    def test_a_report_that_says_less_is_refused(self):
        with self.assertRaisesRegex(RuntimeError, "report of one is not understood"):
            compile_cuda.resources("Compiling entry function 'one' for 'sm_80'")


if __name__ == "__main__":
    unittest.main()
