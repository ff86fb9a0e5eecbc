"""How a saved model is loaded again: the lines that `nlr finetune` prints, and every model card has."""

from pathlib import Path
from typing import Any

from .classes import CLASS_PREFIX, FIELD
from .files import read_json
from .registration import TYPE_PREFIX

_PEFT_CLASSES = {"SEQ_CLS": "AutoPeftModelForSequenceClassification", "CAUSAL_LM": "AutoPeftModelForCausalLM"}
_HEADS = ("ForCausalLM", "ForMaskedLM", "ForSequenceClassification", "ForImageClassification")
_OURS = "NLR_"
_POINTER = "nlr_mean_pooled"


def loading_code(folder: Path) -> str:
    """Python that loads a model's or an adapter's folder in a fresh process."""
    adapter = folder / "adapter_config.json"
    if not adapter.is_file():
        return _model_code(folder, read_json(folder / "config.json"))
    config = read_json(adapter)
    name = _PEFT_CLASSES.get(str(config.get("task_type")), "AutoPeftModel")
    # A base knows its own number of labels, or none: that of the adapter's head must be told.
    labels = None if (folder / "base").is_dir() else _labels(folder)
    more = "" if labels is None else f", num_labels={labels}, ignore_mismatched_sizes=True"
    lines = ["import nonlinear_lowrank"] if needs_package(folder) else []
    return "\n".join([*lines, f"from peft import {name}", f'model = {name}.from_pretrained("{folder}"{more})'])


def needs_package(folder: Path) -> bool:
    """Whether a model's or an adapter's folder is of a kind that only this package knows."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        return str(read_json(adapter).get("peft_type", "")).startswith(_OURS) or (folder / "base").is_dir()
    return _is_ours(read_json(folder / "config.json"))


def _model_code(folder: Path, config: Any) -> str:
    name = (config.get("architectures") or ["AutoModel"])[0].removeprefix(CLASS_PREFIX)
    if not _is_ours(config):
        return f'from transformers import {name}\nmodel = {name}.from_pretrained("{folder}")'
    # Concrete classes would load the dense part alone.
    head = "ForSequenceClassification" if config.get("model_type") == _POINTER else ""
    head = head or next((each for each in _HEADS if name.endswith(each)), "")
    if not head:
        return f'from nonlinear_lowrank.hub import load_model\nmodel = load_model("{folder}")'
    auto = f"AutoModel{head}"
    return f'import nonlinear_lowrank\nfrom transformers import {auto}\nmodel = {auto}.from_pretrained("{folder}")'


def _is_ours(config: Any) -> bool:
    return bool(config.get(FIELD)) or str(config.get("model_type", "")).startswith(("nlr_", TYPE_PREFIX))


def _labels(folder: Path) -> int | None:
    """Rows of the head that the adapter brings, if it brings one."""
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - no dict
            if name.endswith(("classifier.bias", "score.weight", "classifier.out_proj.bias")):
                return file.get_slice(name).get_shape()[0]
    return None
