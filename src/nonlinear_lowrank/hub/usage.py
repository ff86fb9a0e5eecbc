"""Code that loads a saved model, as `nlr finetune` prints it and every model card has it."""

from pathlib import Path
from typing import Any

from .adapter import CONFIG as ADAPTER_CONFIG
from .adapter import head_labels
from .files import read_json
from .registration import CLASS_PREFIX, FIELD, TYPE_PREFIX

_PEFT_CLASSES = {"SEQ_CLS": "AutoPeftModelForSequenceClassification", "CAUSAL_LM": "AutoPeftModelForCausalLM"}
PIPELINES = {
    "ForCausalLM": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForImageClassification": "image-classification",
}
"""The hub's tasks by the ends of model classes' names."""


def loading_code(folder: Path) -> str:
    """Return Python that loads a model's or an adapter's folder in a fresh process."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return _model_code(folder, read_json(folder / "config.json"))
    config = read_json(folder / ADAPTER_CONFIG)
    name = _PEFT_CLASSES.get(str(config.get("task_type")), "AutoPeftModel")
    # A base knows its own number of labels, or none: that of the adapter's head must be told.
    labels = None if (folder / "base").is_dir() else head_labels(folder)
    more = "" if labels is None else f", num_labels={labels}, ignore_mismatched_sizes=True"
    lines = ["import nonlinear_lowrank"] if needs_package(folder) else []
    return "\n".join([*lines, f"from peft import {name}", f'model = {name}.from_pretrained("{folder}"{more})'])


def needs_package(folder: Path) -> bool:
    """Return whether a model's or an adapter's folder is of a kind that only this package knows."""
    if (folder / ADAPTER_CONFIG).is_file():
        config = read_json(folder / ADAPTER_CONFIG)
        return str(config.get("peft_type", "")).startswith("NLR_") or (folder / "base").is_dir()
    return _is_ours(read_json(folder / "config.json"))


def _model_code(folder: Path, config: dict[str, Any]) -> str:
    name = (config.get("architectures") or ["AutoModel"])[0].removeprefix(CLASS_PREFIX)
    if not _is_ours(config):
        return f'from transformers import {name}\nmodel = {name}.from_pretrained("{folder}")'
    # Concrete classes would load the dense part alone.
    head = "ForSequenceClassification" if config.get("model_type") == "nlr_mean_pooled" else ""
    head = head or next((each for each in PIPELINES if name.endswith(each)), "")
    if not head:
        return f'from nonlinear_lowrank.hub import load_model\nmodel = load_model("{folder}")'
    auto = f"AutoModel{head}"
    return f'import nonlinear_lowrank\nfrom transformers import {auto}\nmodel = {auto}.from_pretrained("{folder}")'


def _is_ours(config: dict[str, Any]) -> bool:
    return bool(config.get(FIELD)) or str(config.get("model_type", "")).startswith(("nlr_", TYPE_PREFIX))
