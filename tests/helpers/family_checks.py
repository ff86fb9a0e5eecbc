"""Checks of a family's model: its outputs, its branches, a training step, its row in the record."""

import json
import os
import re
import struct
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

import nonlinear_lowrank as nlr
from family_helpers import FAMILIES, Inputs

RANK = 4
TENSORS_OF_A_BRANCH = 7  # down, up, mix, two frequencies, two phases; of each linear of experts


def quantized(test: Any) -> Any:
    """Mark a test that needs torchao or bitsandbytes, which warn."""
    ignored = ("ignore::DeprecationWarning", "ignore:.*torchao.*")
    return pytest.mark.quantized(pytest.mark.filterwarnings(*ignored)(test))


def augmented(name: str, **settings: Any) -> tuple[PreTrainedModel, nlr.AugmentReport]:
    """The family's model with branches, nothing excluded by hand; the same each time."""
    model = FAMILIES[name].build(**settings)
    torch.manual_seed(2)
    return model, nlr.augment(model, nlr.NobleConfig(rank=RANK), verbose=False)


def branches(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that have a branch, each once."""
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "branch_enabled")}


def branch_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that branches add to the model."""
    return {name: value for name, value in model.named_parameters() if name.rpartition(".")[2].startswith("noble_")}


@torch.no_grad()
def enlarge_branches(model: PreTrainedModel) -> PreTrainedModel:
    """Draw each up projection large, so that what its branch adds is far above rounding."""
    for name, value in branch_tensors(model).items():
        if name.endswith("_up"):
            value.normal_(std=0.3)
    return model


def floats(value: Any) -> Iterator[torch.Tensor]:
    """Every floating tensor in what a model returns, except caches."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, ModelOutput | dict | tuple | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from floats(each)


@torch.no_grad()
def outputs(model: PreTrainedModel, inputs: Inputs) -> list[torch.Tensor]:
    """Return the model's outputs, in its present mode."""
    torch.manual_seed(0)  # some attentions hash at random
    found = list(floats(model(**inputs)))
    assert found
    assert all(each.isfinite().all() for each in found)
    return found


def same(left: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> bool:
    """Return whether they are bit-equal."""
    left, right = list(left), list(right)
    return len(left) == len(right) and all(map(torch.equal, left, right))


def without_effect(model: PreTrainedModel, inputs: Inputs) -> list[str]:
    """The layers whose branch, switched off alone, changes nothing that the model returns."""
    before = outputs(model, inputs)
    dead = []
    for name, layer in branches(model).items():
        layer.branch_enabled = False  # type: ignore[assignment]
        if same(outputs(model, inputs), before):
            dead.append(name)
        layer.branch_enabled = True  # type: ignore[assignment]
    assert same(outputs(model, inputs), before)
    return dead


def train_a_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, inputs: Inputs) -> None:
    """Assert that the loss is finite, and that each branch tensor has a gradient and moves."""
    before = {name: value.detach().clone() for name, value in branch_tensors(model).items()}
    loss = model.train()(**inputs).loss
    assert loss.isfinite()
    loss.backward()
    gradients = {name: value.grad for name, value in branch_tensors(model).items()}
    idle = [name for name, gradient in gradients.items() if gradient is None or not gradient.any()]
    assert not idle, f"without gradient: {idle}"
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    optimizer.step()
    optimizer.zero_grad()
    still = [name for name, value in branch_tensors(model).items() if torch.equal(value, before[name])]
    assert not still, f"not moved: {still}"


@torch.no_grad()
def generated(model: PreTrainedModel, inputs: Inputs, **settings: Any) -> list[list[int]]:
    """Five tokens, greedily."""
    given = {name: value for name, value in inputs.items() if name in ("input_ids", "input_features")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of generation settings, and of paddings that are not there
        ids = model.generate(**given, max_new_tokens=5, min_new_tokens=5, do_sample=False, **settings)
    return ids.tolist()


def realigned(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its tensors in memory of their own.

    Those that were loaded start anywhere in the file, and matrix products round differently by their alignment.
    """
    for value in model.parameters():
        value.data = value.data.clone()
    return model


def names_on_disk(folder: Path) -> set[str]:
    """Names of the tensors in a folder's safetensors."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        names |= json.loads(content[8 : 8 + size]).keys() - {"__metadata__"}
    return names


RECORD = Path(__file__).resolve().parents[1] / "library" / "surgery" / "families.md"
COLUMNS = (
    *("family", "class", "swapped", "skipped", "reached", "step", "save, load", "generates"),
    *("float8", "QAT", "bitsandbytes"),
)
_SHORT = {
    r"output head|tied to an embedding|named like an output head": "output head",
    r"rank \d+ is too high for .*": "too small for the rank",
    r"the forward of (\w+) takes its .*": r"bypassed by \1",
    r"is a (\w+), a linear with a forward of its own": r"\1",
}


def skipped(report: nlr.AugmentReport) -> str:
    """The report's reasons, shortened and counted."""
    reasons: Counter[str] = Counter()
    for reason in report.skipped.values():
        for pattern, short in _SHORT.items():
            reason = re.sub(rf"^(?:{pattern})$", short, reason)
        reasons[reason] += 1
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"


def record() -> tuple[list[str], dict[str, dict[str, str]]]:
    """Return the record's lines before its rows, and its rows by family."""
    lines = RECORD.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|---")) + 1
    rows = {line.split("|")[1].strip(): dict(zip(COLUMNS, map(str.strip, line.split("|")[1:-1]), strict=True))
            for line in lines[start:] if line.startswith("|")}  # fmt: skip
    return lines[:start], rows


def check_cells(name: str, cells: Mapping[str, str]) -> None:
    """Compare what was measured with the family's row in the record; with NLR_FAMILIES=write, write it there."""
    head, rows = record()
    if os.environ.get("NLR_FAMILIES") != "write":
        found = {column: rows.get(name, {}).get(column) for column in cells}
        assert found == cells, f"run this test with NLR_FAMILIES=write, and look at the difference in {RECORD.name}"
        return
    rows[name] = {**dict.fromkeys(COLUMNS, "-"), **rows.get(name, {}), **cells, "family": name}
    ordered = [rows[each] for each in FAMILIES if each in rows]
    table = ["| " + " | ".join(row[column] for column in COLUMNS) + " |" for row in ordered]
    RECORD.write_text("\n".join([*head, *table, ""]), encoding="utf-8")
