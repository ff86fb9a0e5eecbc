"""Options from dataclasses, by tyro: short names for nested fields, integers like 1e3, errors in one line."""

import argparse
import difflib
import inspect
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import field, fields, make_dataclass, replace
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_type_hints

import tyro
from tyro import _errors as refusals  # its only structured account of an error; pyproject bounds the version

from nlr_lab.recipes import RECIPES, check_name, get_recipe, recipe_function, recipes_of
from nlr_lab.runtime.processes import rank
from nlr_lab.runtime.storage import flatten
from nonlinear_lowrank.errors import UserError

from .settings_file import as_arguments, read_settings
from .spellings import find

Options = TypeVar("Options")

_NESTED = {
    "task": "The data and the model.",
    "problem": "The signal that is fitted, and the network.",
    "train": "The optimization.",
}
_CONFIG = """TOML, JSON or YAML file of settings, nested as here ([train] lr = 1e-3); options override it. A run's
recipe.json works too; RECIPE can then be omitted."""
_MOST_DIGITS = 100  # of an integer: 1e999999999 would fill the memory
LIST_OPTIONS = "--list-options"
"""Print the names of the options, for a shell's completion."""
_REGISTRY = tyro.constructors.ConstructorRegistry()


def parse(
    options: type[Options],
    arguments: Sequence[str],
    *,
    command: str,
    description: str | None = None,
    default: Options | None = None,
) -> Options:
    """Read a command line into a dataclass, whose fields' documentation becomes the help.

    A nested field may be given by the end of its name as long as that end is unique: `--lr` for
    `--train.lr`, `--text.source` for `--task.text.source`. Integers may be written as 1e3. Names of transformers'
    settings are accepted where they mean the same (`spellings`).

    Raises:
        UserError: an unknown option, a value that does not fit, or a value that the dataclass refuses.
        SystemExit: after --help or `LIST_OPTIONS` was printed.
    """
    # A recipe's labelled lines (Command, Hardware, Time, Expect) are paragraphs of their own.
    description = re.sub(r"(?<!\n)\n(?=[A-Z][a-z]+: )", "\n\n", inspect.cleandoc(description or options.__doc__ or ""))
    known = list(_named(options)) if default is None else list(flatten(default))
    if LIST_OPTIONS in arguments:
        print("\n".join(sorted({_option(name) for leaf in known for name in (leaf, leaf.rpartition(".")[2])})))
        raise SystemExit(0)
    nested = next((name for name in known if name.startswith("train.")), None)
    if nested is not None:
        short = _option(nested.rpartition(".")[2])
        description += f"\n\nNames may be shortened where that is clear: {short} for {_option(nested)}."

    def refuse(event: refusals.ParseErrorEvent) -> None:
        raise UserError(f"{' '.join(_reason(event, known).split())} (see nlr {command} --help)")

    arguments = [_lengthen(argument, known) for argument in arguments]
    for argument in arguments:  # tyro may take its value for a positional, and complain of that
        name = re.match(r"--([A-Za-z][^=]*)", argument)
        if name and name[1] != "help" and not _find_switch(name[1].replace("-", "_"), known):
            raise UserError(f"{_unrecognized(argument, known)} (see nlr {command} --help)")
    with refusals.on_parse_error(refuse):
        return tyro.cli(  # type: ignore[return-value]  # a default of None is left out
            options,
            prog=f"nlr {command}",
            description=description,
            args=arguments,
            default=default,
            config=(tyro.conf.PositionalMetavarFromFieldName,),
            registry=_REGISTRY,
        )


def parse_recipe(
    options: Any, arguments: Sequence[str], *, command: str, defaults: Callable[[Any], dict[str, Any]]
) -> tuple[Any, Any]:
    """Read `RECIPE --option ...`, where the recipe's own settings are options beside those of the command.

    Returns:
        The recipe with the settings that were asked for, and the options; `defaults` gives those of a recipe.

    Raises:
        UserError: no such recipe, `parse` refuses the rest, or the data do not determine the task.
    """
    known = recipes_of(command)
    name, rest, shown = "", list(arguments), None
    file = take_option("--config", rest)[0] or ""
    settings = read_settings(file) if file else {}
    if rest[:1] in (["-h"], ["--help"]):
        name, shown = known[0], "RECIPE"  # options depend on the recipe; any recipe shows which exist
    elif rest and not rest[0].startswith("-"):
        name = rest.pop(0)
    elif isinstance(settings.get("name"), str):  # a run's own
        name = settings["name"]
    if not name:
        raise UserError(f"name a recipe first: nlr {command} RECIPE; choose from {', '.join(known)}")
    check_name(name, command)
    recipe = get_recipe(name)
    if settings.get("name", name) != name:
        raise UserError(f"--config {file} is of the recipe {settings['name']!r}; name that one, or none")
    subject = "problem" if RECIPES[name].command == "fit" else "task"
    own = {each: getattr(recipe, each) for each in (subject, "train")}
    nested = [(each, Annotated[type(own[each]), tyro.conf.arg(help=_NESTED[each])]) for each in own]
    nested += [("config", Annotated[str, tyro.conf.arg(help=_CONFIG)], field(default=""))]  # type: ignore[list-item]
    options = make_dataclass("Options", nested, bases=(options,), frozen=True, kw_only=True)
    description = inspect.getdoc(recipe_function(name)) or ""
    if shown:
        description = f"Options and defaults of {name}; nlr {command} RECIPE --help shows another's.\n\n{description}"
    if command in ("train", "finetune"):
        description += f"\n\nA run again, with its own recipe and arm: nlr {command} --from RUN --out NEW."
    default = options(**defaults(recipe), **own)
    leaves = list(flatten(default))
    of_file = as_arguments(settings, [each for each in leaves if each != "config"], file, rest)
    of_file, rest = ([_lengthen(each, leaves) for each in texts] for texts in (of_file, rest))
    users = rest if "arm" in settings else [*of_file, *rest]  # a run's own file has all that there is
    rest = _with_lengths(of_file, rest, own["train"])
    parsed = parse(options, rest, command=f"{command} {shown or name}", description=description, default=default)
    chosen = {each: getattr(parsed, each) for each in own}
    if "task" in chosen:
        _check_used(chosen["task"], own["task"], users)
        chosen["task"] = chosen["task"].with_data_known()
    sources = [
        Path(str(value)).name or str(value)
        for key, value in flatten(chosen[subject]).items()
        if key.endswith("source") and value and value != flatten(own[subject]).get(key)
    ]
    about = {"description": f"The recipe {name} on {' and '.join(sources)}."} if sources else {}
    return replace(recipe, **chosen, **about), parsed


def _check_used(task: Any, before: Any, arguments: Sequence[str]) -> None:
    """Raise UserError for an option beside another that leaves it without effect."""
    given, text = {word.partition("=")[0] for word in arguments}, getattr(task, "text", None)
    unused: dict[str, str] = {}
    if getattr(task, "init_from", ""):
        names = [*(f"backbone.{each.name}" for each in fields(task.backbone)), "tie_embeddings"]
        unused |= dict.fromkeys(names, "--init-from brings the whole model")
    if getattr(text, "valid_source", None):
        unused["text.valid_fraction"] = "--valid-source is held out whole"
    if getattr(getattr(task, "instructions", None), "valid_source", None):
        unused["instructions.held_out"] = "--valid-source is held out whole"
    if text is not None and "--task.text.vocab-size" in given and text.vocab_size != (size := text.known_vocab_size()):
        unused["text.vocab_size"] = f"{text.tokenizer} has {size} tokens"
    for name, why in unused.items():
        option, value = _option(f"task.{name}"), attrgetter(name)
        if given & {option, re.sub(r"([^.]+)$", r"no-\1", option)} and value(task) != value(before):
            raise UserError(f"{option} does nothing: {why}; omit one of them")


def take_option(name: str, arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the value of one option, None where it is not given, and the other arguments; UserError if given twice."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(name, dest="values", nargs="?", const="", action="append", default=[])
    found, rest = parser.parse_known_args(list(arguments))
    if len(found.values) > 1:
        raise UserError(f"{name} is given {len(found.values)} times, {', '.join(found.values)}; give it once")
    return (found.values or [None])[0], rest


def gives(arguments: Sequence[str], name: str) -> bool:
    """Return whether the user set a setting, of this whole dotted name, in any spelling, or in a file of settings.

    A file that names an arm, as a run's own does, sets it for that arm and is not counted.
    """
    if any(_lengthen(each, [name]).partition("=")[0] == _option(name) for each in arguments):
        return True
    file = take_option("--config", arguments)[0]
    settings = read_settings(file) if file else {}
    return "arm" not in settings and any(find(each, [name]) for each in flatten(settings))


def table_width() -> int:
    """Columns for a table: the terminal's; where a file or a program reads it, enough that no name is folded."""
    return max(100, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 200


def _named(options: type[Any]) -> Iterator[str]:
    """Yield the names of the fields as options, which may be Python keywords, as in `--from`."""
    hints = get_type_hints(options, include_extras=True)
    for each in fields(options):
        marks = getattr(hints[each.name], "__metadata__", ())
        yield next((mark.name for mark in marks if getattr(mark, "name", None)), each.name)


def _lengthen(argument: str, known: Sequence[str]) -> str:
    """Return the argument with a shortened option name written out; tyro refuses what fits none."""
    match = re.fullmatch(r"--(no-)?([a-z][a-z0-9_.-]*)(=.*)?", argument, re.DOTALL)
    if not match:
        return argument
    ends = find(match[2].replace("-", "_"), known)
    if not ends:
        return argument
    if len(ends) > 1:
        raise UserError(f"--{match[2]} may be {' or '.join(map(_option, ends))}; write one of them")
    stem, dot, last = ends[0].rpartition(".")
    return _option(f"{stem}{dot}{match[1] or ''}{last}") + (match[3] or "")


def _with_lengths(of_file: Sequence[str], own: Sequence[str], train: Any) -> list[str]:
    """Return the options of a file and the user's own, with what a length of training implies.

    Epochs replace steps; a warm-up in steps replaces one as a share, and the reverse. A warm-up that is not given keeps
    its share of a training that is shorter or in epochs.

    Raises:
        UserError: the user gives steps and epochs.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("steps", "epochs", "warmup-steps", "warmup-share"):
        parser.add_argument(f"--train.{name}", nargs="?", default="None", const="None", dest=name)
    whole: list[str] = []
    steps, warmup = train.steps, train.warmup_steps
    for arguments in (of_file, own):
        given = {name: text for name, text in vars(parser.parse_known_args(arguments)[0]).items() if text != "None"}
        more: list[str] = []
        try:
            length = _integer(given.get("steps", "0"))
            asked = (
                _integer(given["warmup-steps"]) if "warmup-steps" in given else 0 if "warmup-share" in given else None
            )
        except ValueError:  # which the parser of all options refuses
            return [*of_file, *own]
        if "epochs" in given and length and arguments is own:
            raise UserError("--steps and --epochs are two ways to say one thing; omit one of them")
        if "epochs" in given and not length and steps:
            more = ["--train.steps=0"]
            if warmup and asked is None:
                more += ["--train.warmup-steps=0", f"--train.warmup-share={warmup / steps}"]
            steps = warmup = 0
        elif warmup and asked is None and 0 < length < steps:
            # The first step of a warm-up is at a learning rate of 0.
            steps, warmup, before = length, max(min(1, length - 1), round(warmup * length / steps)), warmup
            more = [f"--train.warmup-steps={warmup}"]
            if rank() == 0:
                print(f"note: warm-up shortened from {before} to {warmup} steps (--warmup-steps)", file=sys.stderr)
        if hasattr(train, "warmup_share") and len(warmups := [each for each in given if "warmup" in each]) == 1:
            more += [f"--train.{each}=0" for each in ("warmup-steps", "warmup-share") if each not in warmups]
        steps, warmup = length or steps, warmup if asked is None else asked
        whole += [*arguments, *more]
    return whole


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _reason(event: refusals.ParseErrorEvent, known: Sequence[str]) -> str:
    """Error of arguments that tyro refuses."""
    if isinstance(event, refusals.UnrecognizedArgs):
        return _unrecognized(event.tokens[0], known)
    if isinstance(event, refusals.InvalidChoice):
        choices = ", ".join(repr(each) for each in event.choices if each != "None")
        return f"{_shown(event.argument)}: invalid choice {event.value!r}; choose one of {choices}"
    if isinstance(event, refusals.InstantiationFailure):
        if event.argument:
            message = re.sub(r"^could not convert string to float:", "must be a number, got", str(event.message))
            message = re.sub(r"^Could not find valid parse for arguments: \[(.*)\]$", r"cannot be \1", message)
            return f"{_shown(event.argument)}: {message}"
        return _with_options(str(event.message), {leaf.rpartition(".")[2] for leaf in known})
    if isinstance(event, refusals.MissingArgs):
        return f"missing {', '.join(_shown(each.arg) for each in event.missing_arguments)}"
    if isinstance(event, refusals.BadValue):
        return f"{_shown(event.argument)}: a value is missing"
    return "the options cannot be read"


def _shown(argument: Any) -> str:
    """Name of an option, or of a positional argument in capitals, as in the help."""
    name = str(argument.display_name())
    return name if name.startswith("-") else name.upper()


def _unrecognized(token: str, known: Sequence[str]) -> str:
    if token.lower() in ("true", "false"):
        return f"unrecognized argument {token}; a switch takes no value, as in --bf16 and --no-bf16"
    options = [_option(name) for leaf in known for name in (leaf, leaf.rpartition(".")[2])]
    name = token.partition("=")[0]
    begun = sorted({each for each in options if name.startswith("--") and each.startswith(name)})
    near = sorted(begun, key=len)[:3] or difflib.get_close_matches(name, options, n=1)
    return f"unrecognized argument {token}" + (f"; did you mean {' or '.join(near)}?" if near else "")


def _find_switch(name: str, known: Sequence[str]) -> list[str]:
    """Return those of `known` that an option means, also the one that switches it off."""
    stem, dot, last = name.rpartition(".")
    return find(name, known) or find(f"{stem}{dot}{last.removeprefix('no_')}", known)


def _with_options(message: str, ours: Collection[str]) -> str:
    """Return a dataclass's message with fields, as its first word or with underscores, renamed to options."""
    return re.sub(r"^\w+|\w+_\w+", lambda word: _option(word[0]) if word[0] in ours else word[0], message)


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


@_REGISTRY.primitive_rule
def _optional(about: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """Read `none`, and show INT for `int | None`, where tyro shows {None}|INT."""
    kinds = [kind for kind in get_args(about.type) if kind is not NoneType]
    if about.type_origin not in (Union, UnionType) or len(kinds) != 1 or len(get_args(about.type)) != 2:
        return None
    one = tyro.constructors.PrimitiveTypeInfo.make(kinds[0], about.markers)
    spec = tyro.constructors.ConstructorRegistry.get_primitive_spec(one)
    if not isinstance(spec, tyro.constructors.PrimitiveConstructorSpec) or spec.nargs != 1:
        return None
    return replace(
        spec,
        choices=spec.choices and (*spec.choices, "none", "None"),
        instance_from_str=lambda texts: None if texts[0] in ("none", "None") else spec.instance_from_str(texts),
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: ["none"] if value is None else spec.str_from_instance(value),
    )


def _integer(text: str) -> int:
    try:
        number = Decimal(text)  # exact, unlike a float: 1e23 is 10**23
        if number.adjusted() <= _MOST_DIGITS and number == int(number):
            return int(number)
    except (ArithmeticError, ValueError):
        pass
    raise ValueError(f"must be an integer, got {text!r}")
