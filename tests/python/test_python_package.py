"""`pip install .` gives the program, and a Python package with the operator library."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from exports import DATA

ROOT = pathlib.Path(__file__).parents[2]
INSTALL = "install the package again: pip install ., or let MOA_ORT_LIBRARY name the library"
# Runs the model in argv[1], which has nothing but our operators for its layers, and prints where they come from.
SCRIPT = """
import sys
import importlib.metadata
import moa_export, numpy, onnxruntime
options = onnxruntime.SessionOptions()
assert moa_export.session_options(options) is options
assert moa_export.__version__ == importlib.metadata.version("moa-export")
for chosen in (options, moa_export.session_options()):
    session = onnxruntime.InferenceSession(sys.argv[1], chosen, providers=["CPUExecutionProvider"])
    inputs = {value.name: numpy.ones((1, 2), numpy.int64) for value in session.get_inputs()}
    assert numpy.isfinite(session.run(None, inputs)[0]).all()
print(moa_export.library())
"""


class PythonPackage(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.prefix = pathlib.Path(folder.name, "environment")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command = [*pip, "--ignore-installed", "--prefix", str(cls.prefix), str(ROOT)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        [program] = cls.prefix.rglob("bin/moa-export")
        [package] = cls.prefix.rglob("*-packages/moa_export")
        cls.program, cls.package = program, package
        keep = {name: value for name, value in os.environ.items() if name not in ("MOA_ORT_LIBRARY", "VIRTUAL_ENV")}
        path = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
        cls.environment = keep | {"PYTHONPATH": path}

    def output(self, *command):
        found = subprocess.run(command, env=self.environment, capture_output=True, text=True, cwd=self.prefix)
        self.assertEqual(found.returncode, 0, found.stderr)
        return found.stdout

    def test_the_program_finds_the_library_of_its_package(self):
        self.assertIn(str(self.package / "libmoa_ort.so"), self.output(self.program, "ops"))

    def test_exports_run_in_python(self):
        model = self.prefix / "model.onnx"
        self.output(self.program, DATA / "mlm", "-o", model, "--form", "fused")
        printed = self.output(sys.executable, "-c", SCRIPT, model)
        self.assertEqual(printed.strip(), str(self.package / "libmoa_ort.so"))

    def test_types_are_told_and_a_missing_library_is_named(self):
        self.assertTrue((self.package / "py.typed").is_file())
        copy = self.prefix / "copy"
        shutil.copytree(self.package, copy / "moa_export", ignore=shutil.ignore_patterns("*.so"))
        script = f"import sys; sys.path.insert(0, {str(copy)!r}); import moa_export; moa_export.library()"
        found = subprocess.run([sys.executable, "-c", script], env=self.environment, capture_output=True, text=True)
        self.assertEqual(found.returncode, 1)
        told = found.stderr.strip().splitlines()[-1]
        missing = copy / "moa_export" / "libmoa_ort.so"
        self.assertEqual(told, f"FileNotFoundError: {missing} is missing; {INSTALL}")


class Sources(unittest.TestCase):
    """The package as it lies in the checkout, which nothing installed."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        shutil.copytree(ROOT / "python" / "moa_export", self.folder / "moa_export")

    def run_script(self, script, **variables):
        keep = {name: value for name, value in os.environ.items() if name != "MOA_ORT_LIBRARY"}
        begin = f"import sys; sys.path.insert(0, {str(self.folder)!r}); import moa_export; "
        command = [sys.executable, "-S", "-c", begin + script]
        return subprocess.run(command, env=keep | variables, capture_output=True, text=True)

    def test_what_is_not_installed_has_no_version(self):
        done = self.run_script("print(hasattr(moa_export, '__version__'), getattr(moa_export, '__version__', 1))")
        self.assertEqual((done.stdout, done.stderr), ("False 1\n", ""))

    def test_a_variable_names_the_library_before_the_package(self):
        script = "print(moa_export.library())"
        done = self.run_script(script, MOA_ORT_LIBRARY=__file__)
        self.assertEqual((done.stdout, done.stderr), (f"{pathlib.Path(__file__).absolute()}\n", ""))
        copy = self.folder / "moa_export"
        for named, told in [
            ("/nowhere/a.so", "/nowhere/a.so, which MOA_ORT_LIBRARY names, is missing; correct or unset it"),
            ("", f"{copy / 'libmoa_ort.so'} is missing; {INSTALL}"),
        ]:
            done = self.run_script(script, MOA_ORT_LIBRARY=named)
            self.assertEqual(done.stderr.strip().splitlines()[-1], f"FileNotFoundError: {told}")


if __name__ == "__main__":
    unittest.main()
