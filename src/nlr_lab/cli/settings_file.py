"""Settings of a recipe from a file: TOML, JSON (a run's recipe.json too) or YAML."""

import difflib
import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nlr_lab.runtime.storage import as_option, flatten
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line

from .spellings import find

_OTHERS = ("name", "description", "arm", "arms", "seeds", "tune_lr")  # of a recipe: some are of other commands
_BY_HAND = ("overwrite", "resume", "allow_torch_checkpoints")  # what a stranger's file must not ask for
_CODE = re.compile(r"\s*[A-Za-z_][\w.]*:[A-Za-z_]\w*\s*(,.*)?", re.DOTALL)  # a module:function


def read_settings(path: str) -> dict[str, Any]:
    """Return a file's settings by their names, nested as the recipe is; raise UserError where it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        match Path(path).suffix:
            case ".toml":
                found: Any = tomllib.loads(text)
            case ".json":
                found = json.loads(text)
            case ".yaml" | ".yml":
                import yaml  # of transformers'

                found = yaml.safe_load(text)
            case suffix:
                raise UserError(f"--config {path}: {suffix or 'a bare name'} is not .toml, .json or .yaml")
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"--config {path}: there is no such file") from error
    except Exception as error:  # of three parsers
        raise UserError(f"--config {path} cannot be read: {one_line(error)}") from error
    if isinstance(found, dict) and isinstance(found.get("recipe"), dict):  # a run's own
        found = found["recipe"]
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in flatten(found)):
        raise UserError(f"--config {path} must hold settings by their names, as in [train] lr = 1e-3")
    if isinstance(found.get("arm"), dict):
        from nlr_lab.training.arms import Arm

        try:
            found = {**found, "arm": str(Arm(**found["arm"]))}
        except TypeError as error:
            raise UserError(f"--config {path} has no arm in its table: {one_line(error)}") from error
    return found


def as_arguments(settings: Mapping[str, Any], known: Sequence[str], path: str, given: Sequence[str]) -> list[str]:
    """Return a file's settings as options, to be read like those of the command line and before them.

    Args:
        settings: by their names, nested or dotted; the ends of names too where those are unique.
        known: the command's settings by their dotted names.
        path: the file, for errors.
        given: the command line's own.

    Raises:
        UserError: an unknown setting, or what the command line itself must say: an arm that calls a function, a flag
            that deletes or trusts.
    """
    arguments = []
    for name, value in flatten(settings).items():
        found = find(name, known)
        if not found:
            if name in _OTHERS:
                # A run's own recipe.json has all of a recipe; the name was checked.
                if not path.endswith(".json") and name not in ("name", "description"):
                    print(f"--config {path}: {name} is not a setting of this command, and is ignored", file=sys.stderr)
                continue
            near = difflib.get_close_matches(name, [*known, *(each.rpartition(".")[2] for each in known)], n=1)
            raise UserError(
                f"--config {path} has an unknown setting {name}{f'; did you mean {near[0]}?' if near else ''}"
            )
        name = found[0] if len(found) == 1 else name
        if name in _BY_HAND and value:
            raise UserError(f"--config {path} sets {name}, which the command line must: {as_option(name, True)[0]}")
        if name in ("arm", "arms") and any(each.partition("=")[0] == f"--{name}" for each in given):
            continue
        values = [str(each) for each in (value if isinstance(value, list) else [value])]
        if isinstance(value, list) and (other := [each for each in values if each.startswith("--")]):
            raise UserError(f"--config {path} has {other[0]!r} in the list {name}, which is an option; omit it")
        if code := [each for each in values if name in ("arm", "arms") and _CODE.fullmatch(each)]:
            hint = f"if you know what it does, give it as --{name}"
            raise UserError(f"an arm of --config {path} calls code, {code[0]}; {hint}")
        arguments += as_option(name, value)
    return arguments
