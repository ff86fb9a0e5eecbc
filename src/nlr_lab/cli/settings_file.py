"""Settings of a recipe from a file: TOML, JSON (a run's recipe.json too) or YAML."""

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line


def read_settings(path: str) -> dict[str, Any]:
    """Return a file's settings by their names, nested as the recipe is; raise UserError where it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        match Path(path).suffix:
            case ".toml":
                found: Any = tomllib.loads(text)
            case ".json":
                found = json.loads(text)
            case ".yaml" | ".yml":
                import yaml  # of transformers'

                found = yaml.safe_load(text)
            case suffix:
                raise UserError(f"--config {path}: {suffix or 'a name without an end'} is none of .toml, .json, .yaml")
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"--config {path}: there is no such file") from error
    except Exception as error:  # of three parsers
        raise UserError(f"--config {path} cannot be read: {one_line(error)}") from error
    if isinstance(found, dict) and isinstance(found.get("recipe"), dict):  # a run's own
        found = found["recipe"]
    if not isinstance(found, dict):
        raise UserError(f"--config {path} must hold settings by their names, as in [train] lr = 1e-3")
    return found


def with_settings(recipe: Any, settings: Mapping[str, Any], path: str, *, arm_is_given: bool = False) -> Any:
    """Return the recipe with a file's settings.

    Raises:
        UserError: a setting that it does not have; or an arm that calls a function, which the command line must name.
    """
    from nlr_lab.training.arms import Arm

    plain = recipe.to_dict()
    arm = plain["arm"] if arm_is_given else settings.get("arm", plain["arm"])
    method = Arm.parse(arm).method if isinstance(arm, str) else arm.get("method", "")
    if ":" in method and not arm_is_given:
        raise UserError(f"the arm of --config {path} calls code, {method}; if you know what it does, give it as --arm")
    given = {name: value for name, value in settings.items() if name not in ("arm", "name", "description")}
    merged = _merged(plain, given, "", path)
    merged["arm"] = plain["arm"] if isinstance(arm, str) else arm
    found = type(recipe).from_dict(merged)
    return replace(found, arm=Arm.parse(arm)) if isinstance(arm, str) else found


def _merged(plain: Mapping[str, Any], given: Mapping[str, Any], where: str, path: str) -> dict[str, Any]:
    merged = dict(plain)
    for name, value in given.items():
        if name not in plain:
            near = difflib.get_close_matches(name, plain, n=1)
            hint = f"did you mean {where}{near[0]}?" if near else f"there are {', '.join(plain)}"
            raise UserError(f"--config {path} has an unknown setting {where}{name}; {hint}")
        nested = isinstance(plain[name], Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(plain[name], value, f"{where}{name}.", path) if nested else value
    return merged
