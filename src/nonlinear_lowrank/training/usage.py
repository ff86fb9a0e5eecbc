"""How a tuned model is loaded again: the lines that `nlr finetune` prints and writes into the folder's README."""

import json
from pathlib import Path
from typing import Any

_PEFT_CLASSES = {"SEQ_CLS": "AutoPeftModelForSequenceClassification", "CAUSAL_LM": "AutoPeftModelForCausalLM"}
_OURS = "NLR_"
_POINTER = "nlr_mean_pooled"


def loading_code(folder: Path) -> str:
    """Python that loads a model's or an adapter's folder in a fresh process."""
    adapter = folder / "adapter_config.json"
    if not adapter.is_file():
        config = _read(folder / "config.json")
        name = (config.get("architectures") or ["AutoModel"])[0]
        if config.get("model_type") != _POINTER:
            return f'from transformers import {name}\nmodel = {name}.from_pretrained("{folder}")'
        auto = "AutoModelForSequenceClassification"
        return f'import nonlinear_lowrank\nfrom transformers import {auto}\nmodel = {auto}.from_pretrained("{folder}")'
    config = _read(adapter)
    ours = str(config.get("peft_type", "")).startswith(_OURS) or (folder / "base").is_dir()
    name = _PEFT_CLASSES.get(config.get("task_type"), "AutoPeftModel")
    # A base knows its own number of labels, or none: that of the adapter's head must be told.
    labels = None if (folder / "base").is_dir() else _labels(folder)
    more = "" if labels is None else f", num_labels={labels}, ignore_mismatched_sizes=True"
    lines = ["import nonlinear_lowrank"] if ours else []
    return "\n".join([*lines, f"from peft import {name}", f'model = {name}.from_pretrained("{folder}"{more})'])


def write_usage(folder: Path) -> None:
    """Adds the lines to README.md of an adapter's folder, which peft has written."""
    readme = folder / "README.md"
    if readme.is_file():
        text = readme.read_text(encoding="utf-8").rstrip()
        code = loading_code(folder).replace(f'"{folder}"', '"this folder"')
        readme.write_text(f"{text}\n\n## Loading\n\n```python\n{code}\n```\n", encoding="utf-8")


def _labels(folder: Path) -> int | None:
    """Rows of the head that the adapter brings, if it brings one."""
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - no dict
            if name.endswith(("classifier.bias", "score.weight", "classifier.out_proj.bias")):
                return file.get_slice(name).get_shape()[0]
    return None


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
