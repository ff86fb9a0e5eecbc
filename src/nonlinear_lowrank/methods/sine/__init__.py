"""Sine low-rank weights (sine_lowrank.txt), `W = sin(omega U V^T) / g`; as adapters sine-LoRA and sine-DoRA."""

from .layer import SineLowRankConfig, SineLowRankLinear, SineLowRankMethod

__all__ = ["SineLowRankConfig", "SineLowRankLinear", "SineLowRankMethod"]
