"""Programs that are run, and how they ended."""

import os
import signal
import subprocess
import tempfile


def ended(command, environment, seconds):
    """How a program ended, and all that it said: its code, `time` where it was ended, `start` where it did not begin."""
    with tempfile.TemporaryFile() as said:
        places = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": subprocess.STDOUT}
        try:
            process = subprocess.Popen(command, env=environment, start_new_session=True, **places)
        except OSError as error:
            return "start", str(error)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = "time"
        said.seek(0)
        return code, said.read().decode(errors="replace")


def is_signal(code):
    return isinstance(code, int) and code < 0


def reason(text):
    """The line of `text` that says why a program failed: its error, what stopped it, or its last line."""
    lines = text.strip().splitlines() or [""]
    return next((line.strip() for line in lines if line.lstrip().startswith(("error[", "stopped:"))), lines[-1])
