"""Options from dataclasses, by tyro: short names for nested fields, and errors in one line."""

import contextlib
import inspect
import io
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar

import tyro

from nlr_lab.recipes import check_name, get_recipe, recipe_function, recipes_of
from nonlinear_lowrank.errors import UserError

Options = TypeVar("Options")

_REPEATED = ("train", "finetune")
_AGAIN = "\n\n    A run again, with its own recipe and arm: nlr {} --from RUN --out NEW."

_MOST_DIGITS = 100  # of an integer: 1e999999999 would fill the memory

# tyro draws a box where stdout is UTF-8, and dashes elsewhere; the box's top and bottom are rules too.
_RULE = re.compile(r" *(\u2502 )?[-\u2500]{8,}( \u2502)? *|\u256d.*\u256e|\u2570.*\u256f")


def parse(
    options: type[Options],
    arguments: Sequence[str],
    *,
    command: str,
    description: str,
    default: Options | None = None,
) -> Options:
    """Reads a command line into a dataclass.

    A nested field may be given by the end of its name as long as that end is unique: `--lr` for
    `--train.lr`, `--text.source` for `--task.text.source`. Integers may be written as 1e3.

    Args:
        options: the dataclass; each field's documentation becomes its help.
        arguments: what follows the command's name.
        command: the words before the arguments, for the usage line.
        description: printed above the options by --help.
        default: values of the fields that the command line does not name.

    Raises:
        UserError: an unknown option, a value that does not fit, or a value that the dataclass refuses.
        SystemExit: after --help was printed.
    """
    description = _paragraphs(description)
    if default is not None:
        known = list(_leaves(default))
        arguments = _lengthen(arguments, known)
        nested = next((name for name in known if name.startswith("train.")), None)
        if nested is not None:
            short = _option(nested.rpartition(".")[2])
            description += f"\n\nNames may be shortened where that is clear: {short} for {_option(nested)}."

    def read() -> Options:
        return tyro.cli(  # type: ignore[return-value]  # a default of None is left out
            options,
            prog=f"nlr {command}",
            description=description,
            args=list(arguments),
            default=default,
            config=(tyro.conf.PositionalMetavarFromFieldName,),
            registry=_REGISTRY,
        )

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return read()
    except SystemExit as leaving:
        if leaving.code in (0, None):
            raise
    # tyro breaks its error box at the terminal's width, inside words if need be: once more, on a wide one.
    complaint = io.StringIO()
    with contextlib.redirect_stderr(complaint), contextlib.suppress(SystemExit), _columns(10_000):
        read()
    raise UserError(f"{_one_line(complaint.getvalue())} (see nlr {command} --help)")


def parse_recipe(
    options: Any,
    arguments: Sequence[str],
    *,
    command: str,
    defaults: Callable[[Any], dict[str, Any]],
    nested: tuple[str, ...] = ("task", "train"),
) -> tuple[Any, Any]:
    """Reads `RECIPE --option ...`: what the commands that take a recipe share.

    Args:
        options: the command's dataclass, generic in the kinds of its nested fields.
        arguments: what follows the command's name.
        command: the command's name.
        defaults: the other fields' values where the command line does not name them.
        nested: the recipe's own settings that are options.

    Returns:
        The recipe with the settings that were asked for, and the options.

    Raises:
        UserError: no such recipe, `parse` refuses the rest, or the data do not tell the task.
    """
    name, rest = take_recipe(arguments, command)
    recipe = get_recipe(name)
    own = {each: getattr(recipe, each) for each in nested}
    parsed: Any = parse(
        options[tuple(type(value) for value in own.values())],
        rest,
        command=f"{command} {name}",
        description=recipe_function(name).__doc__ + (_AGAIN.format(command) if command in _REPEATED else ""),
        default=options(**defaults(recipe), **own),
    )
    from nlr_lab.tasks.task import with_data_known

    return replace(recipe, **{each: with_data_known(getattr(parsed, each)) for each in nested}), parsed


def take_recipe(arguments: Sequence[str], command: str) -> tuple[str, list[str]]:
    """Splits `RECIPE --option ...` and checks the name, before anything slow is imported.

    Raises:
        UserError: no recipe is named first, or there is none of that name.
    """
    known = recipes_of(command)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        raise UserError(f"name a recipe first: nlr {command} RECIPE; there are {', '.join(known)}")
    if arguments[0] in ("-h", "--help"):
        # Options depend on the recipe; any of them shows what there is.
        return known[0], list(arguments)
    check_name(arguments[0], command)
    return arguments[0], list(arguments[1:])


def comparison_defaults(recipe: Any) -> dict[str, Any]:
    """The options of `nlr compare` that a recipe sets, of whatever kind it is."""
    return {
        "out": f"runs/compare-{recipe.name}",
        "arms": recipe.arms,
        "seeds": recipe.seeds,
        "tune_lr": recipe.tune_lr,
    }


def seconds_of(max_minutes: float | None) -> float | None:
    """A time limit as `compare` and `compare_fields` take it; None: no limit.

    Raises:
        UserError: it is not above 0, or not finite.
    """
    if max_minutes is not None and not 0 < max_minutes < math.inf:
        raise UserError(f"--max-minutes must be above 0 and finite, got {max_minutes:g}; leave it away for no limit")
    return None if max_minutes is None else 60 * max_minutes


def table_width() -> int:
    """Columns for a table: the terminal's; where a file or a program reads it, enough that no name is folded."""
    return max(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 200


def is_main_process() -> bool:
    """Whether this process prints: all but one of `torchrun`'s are silent."""
    return os.environ.get("RANK", "0") == "0"


def _leaves(value: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of the fields that hold no dataclass."""
    for field in fields(value):
        inner = getattr(value, field.name)
        name = f"{prefix}{field.name}"
        if is_dataclass(inner) and not isinstance(inner, type):
            yield from _leaves(inner, f"{name}.")
        else:
            yield name


def _lengthen(arguments: Sequence[str], known: Sequence[str]) -> list[str]:
    """Writes shortened option names out; leaves what it does not know to tyro's error."""
    result = []
    for argument in arguments:
        match = re.fullmatch(r"--(no-)?([a-z][a-z0-9_.-]*)(=.*)?", argument, re.DOTALL)
        name = match.group(2).replace("-", "_") if match else ""
        if not match or name in known:
            result.append(argument)
            continue
        ends = [leaf for leaf in known if leaf.endswith(f".{name}")]
        if len(ends) > 1:
            raise UserError(f"--{match.group(2)} may be {' or '.join(map(_option, ends))}; write one of them")
        if ends:
            stem, _, last = ends[0].rpartition(".")
            result.append(_option(f"{stem}.{match.group(1) or ''}{last}") + (match.group(3) or ""))
        else:
            result.append(argument)
    return result


_REGISTRY = tyro.constructors.ConstructorRegistry()


@_REGISTRY.primitive_rule
def _integers(
    about: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[int] | None:
    """Read integers also in scientific notation, where tyro's own rule takes digits alone."""
    if about.type is not int:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda texts: _integer(texts[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )


def _integer(text: str) -> int:
    """The integer that a text spells; ValueError for any other number or text."""
    try:
        number = Decimal(text)  # exact, unlike a float: 1e23 is 10**23
    except InvalidOperation:
        raise ValueError(f"must be an integer, got {text!r}") from None
    if not number.is_finite() or number.adjusted() > _MOST_DIGITS or number != int(number):
        raise ValueError(f"must be an integer, got {text!r}")
    return int(number)


@contextlib.contextmanager
def _columns(number: int) -> Iterator[None]:
    """A terminal of that width, for libraries that ask shutil."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(number)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _paragraphs(docstring: str) -> str:
    """A recipe's docstring with its labelled lines (Command, Hardware, Time, Expect) as paragraphs."""
    return re.sub(r"(?<!\n)\n(?=[A-Z][a-z]+: )", "\n\n", inspect.cleandoc(docstring))


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _one_line(box: str) -> str:
    """The message inside tyro's error box, without the frame, the title and the pointers to help."""
    parts: list[list[str]] = [[]]
    for line in box.splitlines():
        if _RULE.fullmatch(line):
            parts.append([])
        else:
            parts[-1].append(line.strip().strip("\u2502").strip())
    # Before the first rule there is at most the title; after the message's own come hints.
    message = " ".join(" ".join(parts[1]).split()) if len(parts) > 1 else " ".join(box.split())
    # What a dataclass refuses names the field itself; tyro puts the dataclass's place before it.
    message = re.sub(r"^Error parsing (?!--)\S+: ", "", message)
    near = [line.split()[0] for part in parts[2:] for line in part if line.startswith("--")]
    if near and message.startswith("Unrecognized"):
        message += f"; did you mean {near[0]}?"
    return message
