"""Rational activations (nora.txt), `P(x) / Q(x)` by groups of channels; as adapters NoRA and NoRA++."""

from .layer import RationalActivation, RationalConfig, RationalMethod

__all__ = ["RationalActivation", "RationalConfig", "RationalMethod"]
