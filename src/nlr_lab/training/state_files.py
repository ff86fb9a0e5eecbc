"""Optimizer and random states as safetensors and JSON, for the checkpoints of any run: nothing is pickled."""

import base64
import json
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from nlr_lab.runtime.processes import rank

_TENSORS, _GROUPS = "optimizer", "optimizer.json"
_FILE = 2 << 30  # bytes of a file, by all processes


def write_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write optimizer/*.safetensors, tensors as "exp_avg/<parameter>", and the groups as optimizer.json.

    All processes call it. Each writes its own part, so no process need hold the whole.
    """
    state = get_optimizer_state_dict(model, optimizer)
    tensors = {name: tensor.contiguous() for name, tensor in _tensors(state).items()}
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors.values()]
    # torch copies a whole file in memory before it writes it.
    files = {name: 1 + before // _FILE for name, before in zip(tensors, accumulate(sizes, initial=0), strict=False)}
    writer = HuggingFaceStorageWriter(str(folder / _TENSORS), files, save_distributed=True)
    with _plain_errors():
        dcp.save(tensors, storage_writer=writer)
    if rank() == 0:
        write_plain(folder / _GROUPS, state["param_groups"])


def read_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read what `write_optimizer` wrote, by any number of processes."""
    state: Any = get_optimizer_state_dict(model, optimizer)
    read_tensors(folder / _TENSORS, _tensors(state))
    state["param_groups"] = [
        {key: tuple(value) if key == "betas" else value for key, value in group.items()}  # JSON has no tuples
        for group in read_plain(folder / _GROUPS)
    ]
    set_optimizer_state_dict(model, optimizer, state)


def tensor_names(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder's safetensors files."""
    return set(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def read_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    """Fill tensors, whole or sharded, from a folder's safetensors files. All processes call it."""
    with _plain_errors():
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{key}/{name}": tensor for name, own in state["state"].items() for key, tensor in own.items()}


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the error of the process that failed, which torch wraps into a BaseException in every process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*in a single process")
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None


def write_plain(path: Path, data: Any) -> None:
    """Write JSON that Python reads back exactly."""
    path.write_text(json.dumps(data) + "\n", encoding="utf-8")


def read_plain(path: Path) -> Any:
    """Return the contents of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the random states of Python, numpy, torch and this process's device, as JSON values."""
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
    """Set what `random_state` returned."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numbers, *rest = state["numpy"]
    np.random.set_state((kind, np.array(numbers, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(_decode(state["torch"]))
    if device.type in state:
        getattr(torch, device.type).set_rng_state(_decode(state[device.type]), device)


def seed_all(seed: int) -> None:
    """Seed Python, numpy and torch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
