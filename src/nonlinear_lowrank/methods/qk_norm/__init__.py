"""QK-norm, a control for nonlinear queries: an RMSNorm over each head of queries and keys."""

from .layer import QKNormConfig, QKNormProjection
from .method import QKNormMethod

__all__ = ["QKNormConfig", "QKNormMethod", "QKNormProjection"]
