"""Every Python file of the repository, also those that no test runs: the benches, and the checks of machines with a GPU."""

import ast
import unittest
from pathlib import Path

from pyflakes.checker import Checker

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["benches", "examples", "python", "tests", "tools"]


def findings(source, name):
    """Names that nothing defines, imports and variables that nothing uses, and the like, but in lines that say `noqa`."""
    lines = source.splitlines()
    messages = Checker(ast.parse(source, name), name).messages
    return [str(message) for message in messages if "# noqa" not in lines[message.lineno - 1]]


class PythonFiles(unittest.TestCase):
    def test_every_name_is_defined_and_used(self):
        files = [ROOT / "setup.py", *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
        self.assertIn(ROOT / "benches" / "jetmoe.py", files)
        for path in files:
            with self.subTest(str(path.relative_to(ROOT))):
                self.assertEqual(findings(path.read_text(encoding="utf-8"), str(path)), [])

    def test_a_name_that_nothing_defines_is_found(self):
        source = "import os\n\n\ndef report(head):\n    print(f'{cpu} {head}')\n"
        self.assertEqual(len(findings(source, "report.py")), 2)
        self.assertEqual(len(findings(source.replace("import os", "import os  # noqa: F401"), "report.py")), 1)


if __name__ == "__main__":
    unittest.main()
