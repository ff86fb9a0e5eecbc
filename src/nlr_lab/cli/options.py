"""Options from dataclasses, by tyro: short names for nested fields, integers like 1e3, errors in one line."""

import difflib
import inspect
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar

import tyro
from tyro import _errors as refusals  # its only structured account of an error; pyproject bounds the version

from nlr_lab.recipes import check_name, get_recipe, recipe_function, recipes_of
from nonlinear_lowrank.errors import UserError

Options = TypeVar("Options")

_REPEATED = ("train", "finetune")
_AGAIN = "\n\n    A run again, with its own recipe and arm: nlr {} --from RUN --out NEW."
_MOST_DIGITS = 100  # of an integer: 1e999999999 would fill the memory
_REGISTRY = tyro.constructors.ConstructorRegistry()


def parse(
    options: type[Options],
    arguments: Sequence[str],
    *,
    command: str,
    description: str | None = None,
    default: Options | None = None,
) -> Options:
    """Read a command line into a dataclass.

    A nested field may be given by the end of its name as long as that end is unique: `--lr` for
    `--train.lr`, `--text.source` for `--task.text.source`. Integers may be written as 1e3.

    Args:
        options: the dataclass; each field's documentation becomes its help.
        arguments: what follows the command's name.
        command: the words before the arguments, for the usage line.
        description: printed above the options by --help; None: the dataclass's docstring.
        default: values of the fields that the command line does not name.

    Raises:
        UserError: an unknown option, a value that does not fit, or a value that the dataclass refuses.
        SystemExit: after --help was printed.
    """
    # A recipe's labelled lines (Command, Hardware, Time, Expect) are paragraphs of their own.
    description = re.sub(r"(?<!\n)\n(?=[A-Z][a-z]+: )", "\n\n", inspect.cleandoc(description or options.__doc__ or ""))
    known = [field.name for field in fields(options)] if default is None else list(_leaves(default))  # type: ignore[arg-type]
    nested = next((name for name in known if name.startswith("train.")), None)
    if nested is not None:
        short = _option(nested.rpartition(".")[2])
        description += f"\n\nNames may be shortened where that is clear: {short} for {_option(nested)}."

    def refuse(event: refusals.ParseErrorEvent) -> None:
        raise UserError(f"{' '.join(_reason(event, known).split())} (see nlr {command} --help)")

    with refusals.on_parse_error(refuse):
        return tyro.cli(  # type: ignore[return-value]  # a default of None is left out
            options,
            prog=f"nlr {command}",
            description=description,
            args=[_lengthen(argument, known) for argument in arguments],
            default=default,
            config=(tyro.conf.PositionalMetavarFromFieldName,),
            registry=_REGISTRY,
        )


def parse_recipe(
    options: Any,
    arguments: Sequence[str],
    *,
    command: str,
    defaults: Callable[[Any], dict[str, Any]],
    nested: tuple[str, ...] = ("task", "train"),
) -> tuple[Any, Any]:
    """Read `RECIPE --option ...`, which several commands take.

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
        description=(recipe_function(name).__doc__ or "") + (_AGAIN.format(command) if command in _REPEATED else ""),
        default=options(**defaults(recipe), **own),
    )
    chosen = {each: getattr(parsed, each) for each in nested}
    if "task" in chosen:
        chosen["task"] = chosen["task"].with_data_known()
    return replace(recipe, **chosen), parsed


def take_recipe(arguments: Sequence[str], command: str) -> tuple[str, list[str]]:
    """Split `RECIPE --option ...` and check the name, before anything slow is imported.

    Raises:
        UserError: no recipe is named first, or there is none of that name.
    """
    known = recipes_of(command)
    first = arguments[0] if arguments else ""
    if first in ("-h", "--help"):
        # Options depend on the recipe; any of them shows what there is.
        return known[0], list(arguments)
    if not first or first.startswith("-"):
        raise UserError(f"name a recipe first: nlr {command} RECIPE; there are {', '.join(known)}")
    check_name(first, command)
    return first, list(arguments[1:])


def comparison_defaults(recipe: Any) -> dict[str, Any]:
    """Options of `nlr compare` that a recipe sets, of whatever kind it is."""
    return {
        "out": f"runs/compare-{recipe.name}",
        "arms": recipe.arms,
        "seeds": recipe.seeds,
        "tune_lr": recipe.tune_lr,
    }


def seconds_of(max_minutes: float | None) -> float | None:
    """Return --max-minutes in seconds, None for no limit; raise UserError unless it is above 0 and finite."""
    if max_minutes is not None and not 0 < max_minutes < math.inf:
        raise UserError(f"--max-minutes must be above 0 and finite, got {max_minutes:g}; omit it for no limit")
    return None if max_minutes is None else 60 * max_minutes


def table_width() -> int:
    """Columns for a table: the terminal's; where a file or a program reads it, enough that no name is folded."""
    return max(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 200


def _leaves(value: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of the fields that hold no dataclass."""
    for field in fields(value):
        inner = getattr(value, field.name)
        if is_dataclass(inner) and not isinstance(inner, type):
            yield from _leaves(inner, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def _lengthen(argument: str, known: Sequence[str]) -> str:
    """Return the argument with a shortened option name written out; tyro refuses what fits none."""
    match = re.fullmatch(r"--(no-)?([a-z][a-z0-9_.-]*)(=.*)?", argument, re.DOTALL)
    name = match[2].replace("-", "_") if match else ""
    ends = [leaf for leaf in known if leaf.endswith(f".{name}")]
    if not match or name in known or not ends:
        return argument
    if len(ends) > 1:
        raise UserError(f"--{match[2]} may be {' or '.join(map(_option, ends))}; write one of them")
    stem, _, last = ends[0].rpartition(".")
    return _option(f"{stem}.{match[1] or ''}{last}") + (match[3] or "")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _reason(event: refusals.ParseErrorEvent, known: Sequence[str]) -> str:
    """Why tyro refuses the arguments."""
    if isinstance(event, refusals.UnrecognizedArgs):
        options = [_option(name) for leaf in known for name in (leaf, leaf.rpartition(".")[2])]
        near = difflib.get_close_matches(event.tokens[0].partition("=")[0], options, n=1)
        return f"unrecognized argument {event.tokens[0]}{f'; did you mean {near[0]}?' if near else ''}"
    if isinstance(event, refusals.InvalidChoice):
        choices = ", ".join(map(repr, event.choices))
        return f"{event.argument.display_name()}: invalid choice {event.value!r}; choose one of {choices}"
    if isinstance(event, refusals.InstantiationFailure):
        # What a dataclass refuses names the field itself.
        return f"{event.argument.display_name()}: {event.message}" if event.argument else str(event.message)
    if isinstance(event, refusals.MissingArgs):
        names = [each.arg.display_name() for each in event.missing_arguments]
        return f"missing {', '.join(name if name.startswith('-') else name.upper() for name in names)}"
    if isinstance(event, refusals.BadValue):
        return f"{event.argument.display_name()}: a value is missing"
    return type(event).__name__


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
    try:
        number = Decimal(text)  # exact, unlike a float: 1e23 is 10**23
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite() or number.adjusted() > _MOST_DIGITS or number != int(number):
        raise ValueError(f"must be an integer, got {text!r}")
    return int(number)
