"""GPUs, by NVIDIA's data sheets (dense rates, without sparsity), and language models of known sizes.

These are GPT-2 and its medium size, GPT-3 XL's shape as a Llama, and Llama 2's three.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from nonlinear_lowrank.errors import UserError

PRESET_ARMS = ("baseline", "noble:rank=64", "noble:rank=256")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A size, and how it would be trained."""

    config: Callable[[], Any]
    """Function that returns the transformers config."""
    sequence_length: int
    batch_size: int
    """Sequences of a step, over all GPUs."""


def _gpt2(layers: int, width: int, heads: int) -> Any:
    from transformers import GPT2Config

    return GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=50257, n_positions=1024)


def _llama(layers: int, width: int, heads: int, hidden: int, length: int, key_value_heads: int | None = None) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=32000,
        max_position_embeddings=length,
    )


PRESETS = {
    "124m": Preset(config=partial(_gpt2, 12, 768, 12), sequence_length=1024, batch_size=512),
    "350m": Preset(config=partial(_gpt2, 24, 1024, 16), sequence_length=1024, batch_size=512),
    "1.3b": Preset(config=partial(_llama, 24, 2048, 16, 5504, 2048), sequence_length=2048, batch_size=512),
    "7b": Preset(config=partial(_llama, 32, 4096, 32, 11008, 4096), sequence_length=4096, batch_size=1024),
    "13b": Preset(config=partial(_llama, 40, 5120, 40, 13824, 4096), sequence_length=4096, batch_size=1024),
    "70b": Preset(config=partial(_llama, 80, 8192, 64, 28672, 4096, 8), sequence_length=4096, batch_size=4096),
}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One GPU, and what connects it to others."""

    name: str
    memory: float
    """GiB."""
    bf16: float
    """Matrix products in bfloat16 with float32 sums, FLOP/s."""
    float32: float
    """The same in float32 (no TF32, which PyTorch does not use unless told to), FLOP/s."""
    bandwidth: float
    """Bytes/s of the memory."""
    link: float
    """To the other GPUs of a node, bytes/s in each direction."""
    network: float
    """To other nodes, bytes/s in each direction, for each GPU."""
    node: int = 8
    """GPUs of a node."""

    def rate(self, bf16: bool) -> float:
        """Return the FLOP/s of matrix products."""
        return self.bf16 if bf16 else self.float32


HARDWARE = {
    each.name: each
    for each in (
        Hardware(name="a100", memory=80, bf16=312e12, float32=19.5e12, bandwidth=2.04e12, link=300e9, network=25e9),
        Hardware(name="h100", memory=80, bf16=989e12, float32=67e12, bandwidth=3.35e12, link=450e9, network=50e9),
        Hardware(name="h200", memory=141, bf16=989e12, float32=67e12, bandwidth=4.8e12, link=450e9, network=50e9),
        Hardware(name="b200", memory=180, bf16=2250e12, float32=75e12, bandwidth=7.7e12, link=900e9, network=50e9),
        Hardware(name="rtx4090", memory=24, bf16=165e12, float32=82.6e12, bandwidth=1.01e12, link=32e9, network=3.1e9),
    )
}


# Devices as CUDA names them, less "NVIDIA ": bfloat16 and float32 of their data sheets, as above.
_DEVICES: dict[str, tuple[float, float]] = {
    **dict.fromkeys((r"A100-(SXM4|PCIE)-\d+GB", "A100 80GB PCIe"), (HARDWARE["a100"].bf16, HARDWARE["a100"].float32)),
    "H100 80GB HBM3": (HARDWARE["h100"].bf16, HARDWARE["h100"].float32),
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H200": (HARDWARE["h200"].bf16, HARDWARE["h200"].float32),
    "B200": (HARDWARE["b200"].bf16, HARDWARE["b200"].float32),
    "GeForce RTX 4090": (HARDWARE["rtx4090"].bf16, HARDWARE["rtx4090"].float32),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "A10": (125e12, 31.2e12),
    "A40": (149.7e12, 37.4e12),
}


def device_rate(name: str, *, bf16: bool, tf32: bool = False) -> float | None:
    """Return the peak FLOP/s of matrix products of a device by its CUDA name, None where it is not in the table (a part
    of a GPU is not). `tf32` is for float32 products in TF32, half as fast as bfloat16 on all of these."""
    found = (rates for pattern, rates in _DEVICES.items() if re.fullmatch(pattern, name.removeprefix("NVIDIA ")))
    half, full = next(found, (None, None))
    if half is None or bf16:
        return half
    return half / 2 if tf32 else full


def find_hardware(name: str) -> Hardware:
    """Return a GPU of the table by its name, however it is written; UserError where it is not in it."""
    plain = name.lower().replace(" ", "").replace("-", "")
    if plain not in HARDWARE:
        raise UserError(f"unknown hardware {name!r}; choose from {', '.join(HARDWARE)}")
    return HARDWARE[plain]
