"""The modeling file of a saved model: `from_pretrained(folder, trust_remote_code=True)` without this package.

One readable Python file beside config.json, which names it in `auto_map`: plain formulas of the methods that the model
uses, put together from the parts in `portable` and what these import of this package. Files of weights are the same
with and without it.
"""

import ast
import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from nonlinear_lowrank.surgery.augment import read_entry

from .registration import CLASS_PREFIX, FIELD

MODELING_FILE = "modeling_nonlinear_lowrank.py"
_PARTS = f"{__package__}.portable"
_PACKAGE = __package__.partition(".")[0]
_CLASSES = f"{_PACKAGE}.methods.expert_classes"
_LINE = 120
_HEAD = '''"""{base} with {methods}, in plain PyTorch: no package but torch and transformers is needed.

Written by the package nonlinear-lowrank when the model was saved. With it installed and imported the same files load
into its own classes, which are faster and save less for backward: `import nonlinear_lowrank`.
"""
'''
_CONFIG = """
class {prefix}{config}(AugmentedConfig, {config}):
    model_type = "{model_type}"

    def __init__(self, *args: Any, nonlinear_lowrank: Any = None, modeling_file: bool = True, **kwargs: Any) -> None:
        {config}.__init__(self, *args, **kwargs)
        self.nonlinear_lowrank, self.modeling_file = nonlinear_lowrank, modeling_file
"""
_MODEL = """
class {prefix}{model}(AugmentedModel, {model}):
    config_class = {prefix}{config}
"""


def write_modeling_file(config: Any, base: Any, folder: str | Path) -> None:
    """Write the file into a folder for an augmented config of the plain class `base`, and set the config's `auto_map`.

    With `config.modeling_file = False`, a backbone that transformers lacks, or a method without a part, nothing is
    written and no `auto_map` set.
    """
    vars(config).pop("auto_map", None)
    entries = getattr(config, FIELD, None) or []
    models = _auto_models(base)
    parts = _parts(entries, base.__module__.rpartition(".")[0].rpartition(".")[2])
    if not (config.modeling_file and entries and models and parts and base.__module__.startswith("transformers.")):
        return
    text = _file(config, base, models, parts, entries)
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / MODELING_FILE).write_text(text, encoding="utf-8")
    module = MODELING_FILE.removesuffix(".py")
    names = {"AutoConfig": base.__name__} | {auto: model.__name__ for auto, model in models.items()}
    config.auto_map = {auto: f"{module}.{CLASS_PREFIX}{name}" for auto, name in names.items()}


def _auto_models(base: Any) -> dict[str, Any]:
    """Return the model classes of a config class, by the names of the Auto classes that build them."""
    found: dict[str, Any] = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if isinstance(auto, type) and mapping is not None and base in mapping:
            models = mapping[base] if isinstance(mapping[base], list | tuple) else [mapping[base]]
            if isinstance(models[0], type) and issubclass(models[0], PreTrainedModel):
                found[name] = models[0]
    return found


def _parts(entries: Iterable[Mapping[str, Any]], family: str) -> list[str]:
    """Return modules whose text these methods need, each after those it needs; none where a method has no part.

    `family` is the model's package in transformers.
    """
    own_class = f"{_CLASSES}.{family}"
    own_class = own_class if importlib.util.find_spec(own_class) else ""
    names = [f"{_PARTS}.core"]
    for entry in entries:
        part = f"{_PARTS}.{entry['method'].replace('-', '_')}"
        places = {name.rpartition(".")[2] for name in entry["modules"]}
        in_linears = bool(own_class) and not places.isdisjoint(("input_linear", "output_linear"))  # JetMoe's
        of_experts = entry["config"].get("experts") or in_linears or any("expert" in place for place in places)
        for each in (part, f"{part}_experts") if of_experts else (part,):
            if importlib.util.find_spec(each) is None:
                return []
            names += [*_needed(each), each]
        names += [own_class] * bool(of_experts and own_class)
    names += [f"{_PARTS}.split"] * any(entry.get("split") for entry in entries)
    return list(dict.fromkeys(names))


def _needed(part: str) -> list[str]:
    imports = [node for node in _tree(part)[1].body if isinstance(node, ast.ImportFrom)]
    found = [f"{_PARTS}.{each.module}" if each.level else str(each.module) for each in imports if _is_part(each)]
    return [name for each in found for name in (*_needed(each), each)]


def _is_part(node: ast.ImportFrom) -> bool:
    return bool(node.level) or str(node.module).startswith(f"{_PACKAGE}.")


@functools.cache
def _tree(part: str) -> tuple[str, ast.Module]:
    source = inspect.getsource(importlib.import_module(part))
    return source, ast.parse(source)


def _file(config: Any, base: Any, models: dict[str, Any], parts: list[str], entries: list[Any]) -> str:
    classes = list(dict.fromkeys(models.values()))
    direct, named, bodies = set(), dict[str, set[str]](), []
    for part in parts:
        source, tree = _tree(part)
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in imports:
            spelled = {f"{each.name} as {each.asname}" if each.asname else each.name for each in node.names}
            if isinstance(node, ast.Import):
                direct |= spelled
            elif not _is_part(node):
                named.setdefault(str(node.module), set()).update(spelled)
        last = max((node.end_lineno or 0 for node in imports), default=0)
        bodies.append("\n".join(source.splitlines()[last:]).strip("\n"))
    for each in (base, *classes):
        named.setdefault("transformers" if hasattr(transformers, each.__name__) else each.__module__, set()).add(
            each.__name__
        )
    named["transformers"] |= models.keys()
    names = {"prefix": CLASS_PREFIX, "config": base.__name__, "model_type": config.model_type}
    bodies.append(_CONFIG.format(**names).strip("\n"))
    bodies += [_MODEL.format(**names, model=each.__name__).strip("\n") for each in classes]
    rows = "".join(f"        {auto}: {CLASS_PREFIX}{model.__name__},\n" for auto, model in models.items())
    closing = f"register(\n    {CLASS_PREFIX}{base.__name__},\n    {{\n{rows}    }},\n)"
    bodies.append("\n".join([closing, *_fits(entries)]))
    head = _HEAD.format(base=base.__name__, methods=" and ".join(dict.fromkeys(entry["method"] for entry in entries)))
    text = "\n\n\n".join([f"{head}\n{_imports(direct, named)}", *bodies]) + "\n"
    return re.sub(r"  # type: ignore\[[\w, -]+\]", "", text)


def _imports(direct: Iterable[str], named: Mapping[str, Iterable[str]]) -> str:
    """Return import statements, those of the standard library first."""
    rows = {name: f"import {name}" for name in sorted(direct)}
    for module, names in sorted(named.items()):
        plain = sorted(name for name in names if " as " not in name)
        line = f"from {module} import {', '.join(plain)}"
        wrapped = f"from {module} import (\n" + "".join(f"    {name},\n" for name in plain) + ")"
        renamed = [f"from {module} import {name}" for name in sorted(names) if " as " in name]
        rows[f"{module} "] = "\n".join([*([line if len(line) <= _LINE else wrapped] if plain else []), *renamed])
    own = {key for key in rows if key.partition(".")[0].strip() in sys.stdlib_module_names}
    return "\n".join([*(rows[key] for key in rows if key in own), "", *(rows[key] for key in rows if key not in own)])


def _fits(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return lines with the coefficients that configs of these entries solve for."""
    found = {}
    for entry in entries:
        config = read_entry(entry)[1]
        if hasattr(config, "fit"):
            fit = config.fit()
            key = (config.activation, config.form, config.degrees, config.fit_range)
            found[key] = (list(fit.numerator), list(fit.denominator))
    rows = [f"{key!r}] = (\n    {above},\n    {below},\n)" for key, (above, below) in found.items()]
    return [f"RATIONAL_FITS[{row}".replace("'", '"') for row in rows]
