"""Optimizer and random states as safetensors and JSON: nothing is pickled."""

import base64
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file


def write_optimizer(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes what get_optimizer_state_dict gave: tensors as "exp_avg/<parameter>", the rest as JSON."""
    tensors, plain = {}, {}
    for name, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{key}/{name}"] = value.contiguous()
            else:
                plain[f"{key}/{name}"] = value
    save_file(tensors, folder / "optimizer.safetensors")
    write_plain(folder / "optimizer.json", {"param_groups": state["param_groups"], "state": plain})


def read_optimizer(folder: Path) -> dict[str, Any]:
    """Reads it back, for set_optimizer_state_dict."""
    saved = read_plain(folder / "optimizer.json")
    state: dict[str, dict[str, Any]] = {}
    for path, value in (*load_file(folder / "optimizer.safetensors").items(), *saved["state"].items()):
        key, _, name = path.partition("/")
        state.setdefault(name, {})[key] = value
    groups = [
        {key: tuple(value) if key == "betas" else value for key, value in group.items()}  # JSON has no tuples
        for group in saved["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def write_plain(path: Path, data: Any) -> None:
    """JSON that Python reads back exactly."""
    path.write_text(json.dumps(data) + "\n", encoding="utf-8")


def read_plain(path: Path) -> Any:
    """The contents of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def random_state(device: torch.device) -> dict[str, Any]:
    """Of Python, numpy, torch and this process's device, as JSON values."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 # type: ignore[misc]
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],  # type: ignore[union-attr]
        "torch": _encode(torch.get_rng_state()),
    }
    if device.type not in ("cpu", "meta"):
        state[device.type] = _encode(getattr(torch, device.type).get_rng_state(device))
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Sets what `random_state` gave."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numbers, *rest = state["numpy"]
    np.random.set_state((kind, np.array(numbers, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(_decode(state["torch"]))
    if device.type in state:
        getattr(torch, device.type).set_rng_state(_decode(state[device.type]), device)


def seed_all(seed: int) -> None:
    """Seeds Python, numpy and torch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
