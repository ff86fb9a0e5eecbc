"""Entry point: `nlr COMMAND ...`.

This file knows the commands by name, and how an error leaves the program; the
file of a command is imported only when it runs, since torch and the Trainer take seconds to import.

Exit codes: 0 done; 2 bad input, one line on stderr and nothing written; 130 interrupted, 143 terminated (128 and the
signal's number), one line that says how to resume; 1 a bug or a failing machine, one line that names a file with the
traceback.
"""

import difflib
import importlib
import io
import logging
import os
import re
import shlex
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from nlr_lab.recipes import KINDS, RECIPES
from nlr_lab.runtime.processes import rank
from nlr_lab.runtime.signals import StoppedBySignal
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import install_hint, one_line, printable

from . import COMMANDS, FILES

_GO_ON = ("scale", "reproduce")
"""Commands without --resume: they continue in the folder that they were stopped in."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of these arguments, or of sys.argv's, and return the exit code."""
    # In quotes and after "=" a shell leaves ~, and a folder of that name would be made.
    given = sys.argv[1:] if arguments is None else arguments
    arguments = [re.sub(r"^(--[\w.-]+=)?~(?=/)", rf"\g<1>{os.path.expanduser('~')}", each) for each in given]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a table without its rules is worth more than none
    try:
        if not os.environ.get("NLR_DEBUG"):  # one line, without the place in the code that warned
            warnings.formatwarning = lambda message, *_, **__: f"nlr: warning: {' '.join(str(message).split())}\n"
        _dispatch(arguments)
    except SystemExit as leaving:  # --help, printed by tyro
        return leaving.code if isinstance(leaving.code, int) else 0
    except KeyboardInterrupt as error:
        what, code = str(error) or "interrupted", getattr(error, "exit_code", 130)
        if rank() != 0:
            return code
        how = _how_to_resume(arguments)
        if "--overwrite" in arguments and not isinstance(error, StoppedBySignal):
            # Nobody here knows whether it has deleted the former runs yet.
            how += " (where no new run had begun, run the command itself again: --resume would take the former runs)"
        return _fail(f"{what}; {how}", code)
    except BrokenPipeError:
        # The reader (`| head`) has gone. Without this, the interpreter complains again while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("NLR_DEBUG"):
            raise
        if isinstance(error, OSError) and error.strerror is not None:
            # `No such file or directory: x` rather than `[Errno 2] No such file or directory: 'x'`.
            return _fail(error.strerror + (f": {error.filename}" if error.filename is not None else ""), 2)
        if isinstance(error, UserError | OSError):
            message = one_line(error, most=2000)
            if arguments and arguments[0] in _GO_ON:  # the message is of a comparison or a run inside them
                message = message.replace("continue with --resume", "run the same command again")
            return _fail(message, 2)
        if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith(("nlr_", "nonlinear_")):
            return _fail(f"{error.name.partition('.')[0]} is needed here: {install_hint('lab')}", 2)
        log = Path(tempfile.mkdtemp(prefix="nlr-"), "error.log")  # outside the user's folders
        log.write_text(f"nlr {shlex.join(arguments)}\n\n{traceback.format_exc()}", encoding="utf-8")
        return _fail(f"{type(error).__name__}: {one_line(error)} (traceback in {log})", 1)
    return 0


def _dispatch(arguments: Sequence[str]) -> None:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_help())
    elif name in ("-V", "--version"):
        from importlib.metadata import version

        print(f"nlr {version('nonlinear-lowrank')}")
    elif name in COMMANDS:
        # peft reads a name that transformers has renamed: nothing that a user of the command could fix.
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        # And takes layers of ours for linears, as they are.
        warnings.filterwarnings("ignore", "Unsupported layer type '<class 'nonlinear_lowrank", UserWarning)
        if sys.stderr.isatty() and rank() == 0:
            _show_notes()
        getattr(importlib.import_module(f".{FILES.get(name, name)}", __package__), f"run_{name}")(rest)
    elif name in RECIPES:
        raise UserError(f"{name} is a recipe: nlr {RECIPES[name].command} {name}, or nlr compare {name}")
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {name!r}; {hint}")


def _show_notes() -> None:
    """Print what the library logs: that it builds operators, which would look like a hang."""
    shown, notes = logging.StreamHandler(), logging.getLogger("nonlinear_lowrank")
    shown.setFormatter(logging.Formatter("nlr: %(message)s"))
    notes.setLevel(logging.INFO)
    notes.addHandler(shown)


def _help() -> str:
    lines = ["usage: nlr COMMAND ...", "", "commands (nlr COMMAND --help for its options):"]
    lines += [f"  {usage:<32} {summary}" for usage, summary in COMMANDS.values()]
    lines += [
        "",
        "nlr -V prints the version. NLR_DEBUG=1 shows the traceback of any error, and where a warning comes from.",
    ]
    return "\n".join(lines)


def _fail(message: str, code: int) -> int:
    print(f"nlr: {printable(message)}", file=sys.stderr)
    return code


def _how_to_resume(arguments: Sequence[str]) -> str:
    """Return what to type after Ctrl-C: the same command, with --resume where it has that."""
    if arguments and arguments[0] in _GO_ON:
        return f"resume from the last checkpoint with: nlr {shlex.join(arguments)}"
    if not arguments or arguments[0] not in (*KINDS, "compare"):
        return "nothing was kept"
    again = [argument for argument in arguments if argument not in ("--resume", "--overwrite")]
    return f"resume from the last checkpoint with: nlr {shlex.join(again)} --resume"
