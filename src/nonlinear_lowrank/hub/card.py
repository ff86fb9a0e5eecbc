"""The model card of a saved model or adapter: README.md with method, settings, results and loading code.

Method, settings and class are read from the folder's own files. No path of the machine is written. peft's own card of
an adapter is extended; any other README.md is kept.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import ModelCard

from nonlinear_lowrank.methods.base import method_named

from .loading import ADAPTER_CONFIG, BASE, base_class, head_labels, is_mergeable
from .modeling_file import MODELING_FILE
from .registration import CLASS_PREFIX, FIELD, TYPE_PREFIX
from .storage import CARD, read_json, versions

_PEFT_TEMPLATE = "# Model Card for Model ID"  # peft's own card from here on, which says nothing
_PEFT_LOADING = re.compile(r"## Loading\n\n```python\n.*?\n```\n?", re.DOTALL)  # of our configs, which know less
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_UNSAFE = re.compile(r"[^\w. /:,=+-]")  # Markdown, HTML and control characters in a stranger's names
# Fields of an adapter's config for peft alone.
_NOT_SETTINGS = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"}
_PIPELINES = {
    "ForCausalLM": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForImageClassification": "image-classification",
}


def write_card(
    folder: Path,
    *,
    title: str,
    summary: str,
    command: str,
    base: str | None = None,
    sections: Mapping[str, str] | None = None,
    limits: Sequence[str] = (),
) -> None:
    """Write README.md into the folder of a model or an adapter, or extend what peft has written there.

    `command` is the call without paths, `base` the folder or hub name of the model that it came from (None: as an
    adapter names it, or from scratch). `sections` are headings with their texts, which come between the method and the
    loading; `limits` are sentences beside those that follow from the method.
    """
    place, config, adapter = folder / CARD, _read(folder / "config.json"), _read(folder / ADAPTER_CONFIG)
    if place.exists() and not adapter:
        return
    former = place.read_text(encoding="utf-8") if place.exists() else "---\n{}\n---\n"
    card = ModelCard(former, ignore_metadata_errors=True)
    base = base or adapter.get("base_model_name_or_path") or None
    architecture = (config.get("architectures") or [""])[0]
    methods = _methods(config, adapter)

    data: Any = card.data
    tagged = "base_model:adapter:"
    data.library_name = "peft" if adapter else "transformers"
    pipelines = (pipeline for head, pipeline in _PIPELINES.items() if architecture.endswith(head))
    data.pipeline_tag = data.pipeline_tag or next(pipelines, None)
    # The hub refuses a card whose base is a path, so any path that peft wrote goes.
    data.base_model = base if base is not None and shown_name(base) == base else None
    names = {re.sub(r"\W+", "-", name.partition(" (")[0].removeprefix("NLR_").lower()) for name in methods}
    tags = {*(data.tags or []), "nonlinear-lowrank", *names}
    data.tags = sorted(tag for tag in tags if not tag.startswith(tagged) or tag == f"{tagged}{data.base_model}")

    facts = {"made by": f"`{command}`"}
    facts |= {"base model": shown_name(base)} if base else {}
    facts |= {"architecture": f"{architecture} (`{config.get('model_type')}`)"} if architecture else {}
    parts = [f"# {title}", summary, table(facts)]
    parts += [f"## Method: {name}\n\n{table(settings)}" for name, settings in methods.items()]
    parts += [f"## {heading}\n\n{text}" for heading, text in (sections or {}).items()]
    if config or methods:
        code = loading_code(folder).replace(f'"{folder}', '"this folder')
        parts.append(f"## Loading\n\n```python\n{code}\n```")
    limits = [*_limits(folder, config, adapter), *limits]
    parts += ["## Limits", "\n".join(f"- {line}" for line in limits), "## Versions", table(versions())]
    former = _PEFT_LOADING.sub("", card.text).partition(_PEFT_TEMPLATE)[0]
    card.text = "\n\n".join([*parts, former.strip()]).rstrip() + "\n"
    place.write_text(str(card), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def shown_name(name: str) -> str:
    """Return a hub name unchanged, of a path the model that it caches or its last part: cards are shared."""
    if cached := re.search(r"models--([^/\\]+)[/\\]snapshots[/\\]", name):
        name = cached[1].replace("--", "/")
        return _UNSAFE.sub("_", name)
    local = name.startswith(("/", ".", "~")) or Path(name).exists() or not _HUB_NAME.fullmatch(name)
    return _UNSAFE.sub("_", PureWindowsPath(name).name) if local else name  # splits at both kinds of slashes


def table(values: Mapping[str, Any]) -> str:
    """Return a Markdown table of names and values."""
    rows = ["| | |", "|---|---|"]
    for name, value in values.items():
        cell = f"{value:.6g}" if isinstance(value, float) else str(value)
        cell = cell.replace("|", "\\|").replace("\n", " ")
        rows.append(f"| {name} | {cell} |")
    return "\n".join(rows)


def _methods(config: Mapping[str, Any], adapter: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the settings of each method in the files, by its name."""
    found: dict[str, Mapping[str, Any]] = {}
    if adapter:
        given = {name: value for name, value in adapter.items() if name not in _NOT_SETTINGS and value is not False}
        found[str(adapter.get("peft_type"))] = {k: v for k, v in given.items() if v not in (None, {}, [], "")}
    alike: dict[str, list[Mapping[str, Any]]] = {}  # except for numbers, such as gains fitted to each layer
    for entry in config.get(FIELD) or []:
        kind = {name: "" if isinstance(value, float) else value for name, value in entry["config"].items()}
        alike.setdefault(f"{entry['method']} {kind}", []).append(entry)
    for entries in alike.values():
        name, configs = entries[0]["method"], [entry["config"] for entry in entries]
        settings = {key: _range([each[key] for each in configs]) for key in configs[0]}
        layers = sum(len(entry["modules"]) for entry in entries)
        found[name if name not in found else f"{name} ({len(found) + 1})"] = {**settings, "layers": layers}
    return found


def _range(values: Sequence[Any]) -> Any:
    """Return the common value, or the range of numbers that differ."""
    return values[0] if all(each == values[0] for each in values) else f"{min(values):.6g} to {max(values):.6g}"


def _limits(folder: Path, config: Mapping[str, Any], adapter: Mapping[str, Any]) -> list[str]:
    lines = []
    saved = [method_named(entry["method"]) for entry in config.get(FIELD) or []]
    branches = any(method is not None and method.dense for method in saved)
    if branches or (adapter and not is_mergeable(str(adapter.get("peft_type")))):
        lines.append(
            "The branch beside each dense weight is not linear in its input: it cannot be merged into the weight, and "
            "costs time at inference too."
        )
    if (config or adapter) and _needs_package(folder):
        without = ""
        if config.get("auto_map"):
            without = (
                f", or `trust_remote_code=True`, which runs {MODELING_FILE} of this folder instead: the same formulas "
                "in plain PyTorch"
            )
        lines.append(f"Loading needs `import nonlinear_lowrank` (the package nonlinear-lowrank) first{without}.")
        if config:
            lines.append("Concrete model classes would load the dense part alone and only warn: use the Auto classes.")
    return [*lines, "Nothing was checked beyond the numbers above: bias, safety and other data were not looked at."]


def loading_code(folder: Path, base: str | None = None) -> str:
    """Return Python that loads a model's or an adapter's folder in a fresh process; `base` is where an adapter's base
    is, None: as the adapter names it."""
    ours = ["import nonlinear_lowrank"] if _needs_package(folder) else []
    if adapter := _read(folder / ADAPTER_CONFIG):
        named = base or str(adapter.get("base_model_name_or_path"))
        name = base_class(adapter) or "AutoModel"
        # A base knows at most its own number of labels: pass that of the adapter's head.
        labels = head_labels(folder)
        more = "" if labels is None else f", num_labels={labels}, ignore_mismatched_sizes=True"
        if (folder / BASE).is_dir():
            more, named = "" if named == "minilm" else f', encoder_checkpoint="{named}"', str(folder / BASE)
        imports = ["from peft import PeftModel", f"from transformers import {name}"]
        code = [f'base = {name}.from_pretrained("{named}"{more})']
        return "\n".join([*ours, *imports, *code, f'model = PeftModel.from_pretrained(base, "{folder}")'])
    config = read_json(folder / "config.json")
    name = (config.get("architectures") or ["AutoModel"])[0].removeprefix(CLASS_PREFIX)
    if ours:  # concrete classes would load the dense part alone
        pooled = config.get("model_type") == "nlr_mean_pooled"
        head = "ForSequenceClassification" if pooled else next((each for each in _PIPELINES if name.endswith(each)), "")
        if not head:
            return f'from nonlinear_lowrank.hub import load_model\nmodel = load_model("{folder}")'
        name = f"AutoModel{head}"
    return "\n".join([*ours, f"from transformers import {name}", f'model = {name}.from_pretrained("{folder}")'])


def _needs_package(folder: Path) -> bool:
    """Return whether a model's or an adapter's folder is of a kind that only this package knows."""
    if adapter := _read(folder / ADAPTER_CONFIG):
        return str(adapter.get("peft_type", "")).startswith("NLR_") or (folder / BASE).is_dir()
    config = read_json(folder / "config.json")
    return bool(config.get(FIELD)) or str(config.get("model_type", "")).startswith(("nlr_", TYPE_PREFIX))
