"""The model card of a saved model or adapter: README.md with method, settings, results and loading code.

What stands in the folder's own files is read from there (method, settings, class); who made it says the rest. No
path of the machine is written. peft's own card of an adapter is extended; any other README.md is kept.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import ModelCard

from nonlinear_lowrank.methods.base import method_named

from .adapter import CONFIG as ADAPTER_CONFIG
from .adapter import is_mergeable
from .files import read_json
from .registration import FIELD
from .storage import CARD
from .usage import PIPELINES, loading_code, needs_package
from .versions import versions

_PEFT_LOADING = re.compile(r"## Loading\n\n```python\n.*?\n```\n?", re.DOTALL)  # of our configs, which know less
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Of an adapter's config: what peft keeps for itself.
_NOT_SETTINGS = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Facts that the folder's own files do not have."""

    title: str
    summary: str
    """One sentence about what was done."""
    command: str
    """The call, without paths."""
    base: str | None = None
    """Folder or hub name of the model that it came from; None: as an adapter names it, or from scratch."""
    sections: Mapping[str, str] = field(default_factory=dict)
    """Headings and their texts, which come between the method and the loading."""
    limits: tuple[str, ...] = ()
    """A sentence each, beside those that follow from the method."""


def write_card(folder: Path, origin: Origin) -> None:
    """Write README.md into the folder of a model or an adapter, or extend what peft has written there."""
    place = folder / CARD
    adapter = read_json(folder / ADAPTER_CONFIG) if (folder / ADAPTER_CONFIG).is_file() else None
    if adapter is None and place.exists():
        return
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    former = place.read_text(encoding="utf-8") if place.exists() else ""
    card = ModelCard(former or "---\n{}\n---\n", ignore_metadata_errors=True)
    base = origin.base or (adapter or {}).get("base_model_name_or_path") or None
    methods = _methods(config, adapter)
    _fill(card.data, config, adapter, base, list(methods))
    limits = [*_limits(folder, config, adapter), *origin.limits]
    body = _body(folder, origin, config, methods, base, limits)
    text = f"{body}\n\n{_PEFT_LOADING.sub('', card.text).strip()}"
    card.text = f"{text.rstrip()}\n"
    place.write_text(str(card), encoding="utf-8")


def shown_name(name: str) -> str:
    """Return a name of the hub as it is, of a path its last part: a card goes to others."""
    local = name.startswith(("/", ".", "~")) or Path(name).exists() or not _HUB_NAME.fullmatch(name)
    return PureWindowsPath(name).name if local else name  # which knows both kinds of slashes


def table(values: Mapping[str, Any]) -> str:
    """Return a Markdown table of names and values."""
    cells = {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in values.items()}
    escaped = {name: cell.replace("|", "\\|").replace("\n", " ") for name, cell in cells.items()}
    rows = [f"| {name} | {cell} |" for name, cell in escaped.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _methods(config: Mapping[str, Any], adapter: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Return the settings of each method in the files, by its name."""
    found: dict[str, Mapping[str, Any]] = {}
    if adapter is not None:
        found[str(adapter.get("peft_type"))] = {
            name: value
            for name, value in adapter.items()
            if name not in _NOT_SETTINGS and value is not None and value is not False and value not in ({}, [], "")
        }
    for entry in config.get(FIELD) or []:
        named = entry["method"] if entry["method"] not in found else f"{entry['method']} ({len(found) + 1})"
        found[named] = {**entry["config"], "layers": len(entry["modules"])}
    return found


def _fill(data: Any, config: Mapping[str, Any], adapter: Any, base: str | None, methods: list[str]) -> None:
    data.library_name = "peft" if adapter is not None else "transformers"
    names = {re.sub(r"\W+", "-", name.partition(" (")[0].removeprefix("NLR_").lower()) for name in methods}
    data.tags = sorted({*(data.tags or []), "nonlinear-lowrank", *names})
    architecture = (config.get("architectures") or [""])[0]
    for head, pipeline in PIPELINES.items():
        if architecture.endswith(head) and not data.pipeline_tag:
            data.pipeline_tag = pipeline
    # The hub refuses a card whose base is a path; what peft wrote of one goes too.
    data.base_model = base if base is not None and shown_name(base) == base else None
    tagged = "base_model:adapter:"
    data.tags = [tag for tag in data.tags if not tag.startswith(tagged) or tag == f"{tagged}{data.base_model}"]


def _body(
    folder: Path,
    origin: Origin,
    config: Mapping[str, Any],
    methods: Mapping[str, Any],
    base: str | None,
    limits: Sequence[str],
) -> str:
    facts = {"made by": f"`{origin.command}`"}
    if base:
        facts["base model"] = shown_name(base)
    if architecture := (config.get("architectures") or [None])[0]:
        facts["architecture"] = f"{architecture} (`{config.get('model_type')}`)"
    parts = [f"# {origin.title}", origin.summary, table(facts)]
    for name, settings in methods.items():
        parts += [f"## Method: {name}", table(settings)]
    for heading, text in origin.sections.items():
        parts += [f"## {heading}", text]
    if config or methods:
        code = loading_code(folder).replace(f'"{folder}"', '"this folder"')
        parts += ["## Loading", f"```python\n{code}\n```"]
    parts += ["## Limits", "\n".join(f"- {line}" for line in limits)]
    parts += ["## Versions", table(versions())]
    return "\n\n".join(parts)


def _limits(folder: Path, config: Mapping[str, Any], adapter: Mapping[str, Any] | None) -> list[str]:
    lines = []
    saved = [method_named(entry["method"]) for entry in config.get(FIELD) or []]
    branches = any(method is not None and method.dense for method in saved)
    if branches or (adapter is not None and not is_mergeable(str(adapter.get("peft_type")))):
        lines.append(
            "The branch beside each dense weight is not linear in its input: it cannot be merged into the weight, and "
            "costs time at inference too."
        )
    if (config or adapter) and needs_package(folder):
        lines.append("Loading needs `import nonlinear_lowrank` (the package nonlinear-lowrank) first.")
        if config:
            lines.append("Concrete model classes would load the dense part alone and only warn: use the Auto classes.")
    return [*lines, "Nothing was checked beyond the numbers above: bias, safety and other data were not looked at."]
