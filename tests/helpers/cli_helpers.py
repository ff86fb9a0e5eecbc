"""Commands in this process, and Python in a new one."""

import subprocess
import sys

from nlr_lab.cli import main as cli

HIDE_THE_PACKAGE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("nonlinear_lowrank", "nlr_lab"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run(capsys, *arguments):
    """Exit code, stdout, stderr of one command in this process."""
    capsys.readouterr()  # what went before is none of the command's
    code = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def succeed(capsys, *arguments):
    """Return what a command prints; it must succeed."""
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    return out


def refused(capsys, *arguments):
    """Return the one line by which a command refuses its input; nothing else may be printed."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("nlr: ")
    assert err.count("\n") == 1
    return err


def python_prints(code, *arguments):
    """Return what a new interpreter prints; it must succeed."""
    done = run_python(code, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_python(code, *arguments):
    """Return the finished process of a new interpreter."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
