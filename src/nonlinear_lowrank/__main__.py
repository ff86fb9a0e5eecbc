"""Other tools with our adapters and models registered: `python -m nonlinear_lowrank COMMAND ...`.

| COMMAND             | run                                                                                        |
|---------------------|--------------------------------------------------------------------------------------------|
| train.py            | the file, as `python train.py ...` does                                                    |
| -m package.module   | the module, as `python -m package.module ...` does                                         |
| lm_eval, trl, ...   | the console script of that name, of this interpreter's packages                            |
| accelerate launch,  | the launcher, which starts `python -m nonlinear_lowrank SCRIPT ...` in place of the script |
| torchrun            |                                                                                            |

Everything runs in this process, where importing the package has registered its types. Processes that a tool starts as
`python ...` are not covered, except those of the launchers above.
"""

import difflib
import importlib.util
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from nonlinear_lowrank.errors import UserError

_USAGE = "usage: python -m nonlinear_lowrank COMMAND ..., a Python file, -m MODULE, or a console script such as lm_eval"


def _accelerate() -> Any:
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser()


def _torchrun() -> Any:
    from torch.distributed.run import get_args_parser

    return get_args_parser()


# Words that start a launcher -> its parser, which names the script and its arguments as torchrun does.
_LAUNCHERS: dict[tuple[str, ...], Callable[[], Any]] = {
    ("accelerate", "launch"): _accelerate,
    ("accelerate-launch",): _accelerate,
    ("torchrun",): _torchrun,
}


def main(arguments: Sequence[str]) -> int:
    """Run a command line that omits the interpreter and this module; return 2 after printing why it cannot run."""
    try:
        _run(list(arguments))
    except UserError as error:
        print(f"nonlinear_lowrank: {error}", file=sys.stderr)
        return 2
    return 0


def _run(arguments: list[str]) -> None:
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name == "-m" and rest:
        _check_module(rest[0])
        sys.argv = rest  # runpy replaces the first
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif name.endswith(".py") or "/" in name:
        if not Path(name).is_file():
            raise UserError(f"no such file: {name}")
        _enter(name, rest)
        runpy.run_path(name, run_name="__main__")
    elif name in ("-h", "--help"):
        print(_USAGE)
    elif not name or name.startswith("-"):
        raise UserError(_USAGE)
    else:
        function = _console_script(name)
        for words, parser in _LAUNCHERS.items():
            if tuple(arguments[: len(words)]) == words:
                options = rest[len(words) - 1 :]
                rest = [*words[1:], *_children_too(parser(), options)]
        _enter(str(Path(sys.executable).parent / name), rest)
        sys.exit(function())


def _enter(program: str, arguments: list[str]) -> None:
    """Set `sys.argv` and, unless Python's safe path is on, the first import folder to the program's own."""
    sys.argv = [program, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(program).resolve().parent)


def _check_module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise UserError(f"no module named {name}; install the package that provides it")


def _console_script(name: str) -> Any:
    """Return the function behind a console script; raise UserError where no installed package has one of that name."""
    known = {entry.name: entry for entry in metadata.entry_points(group="console_scripts")}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? Else" if near else "install its package, or"
        why = f"no installed package has a console script {name!r}"
        raise UserError(f"{why}; {hint} name a Python file or -m MODULE")
    return known[name].load()


def _children_too(parser: Any, arguments: list[str]) -> list[str]:
    """Return a launcher's arguments with this module as its script, and the script as this module's argument."""
    parsed = parser.parse_args(arguments)
    if parsed.no_python:
        raise UserError("--no-python starts a program that need not be Python; omit it, and name a Python file or -m")
    script = len(arguments) - len(parsed.training_script_args) - 1
    options = arguments[:script] if parsed.module else [*arguments[:script], "-m"]
    return [*options, "nonlinear_lowrank", *(["-m"] if parsed.module else []), *arguments[script:]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
