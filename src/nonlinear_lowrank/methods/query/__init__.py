"""Nonlinear queries (nonlinear_queries.md): `Q(x) = (x + LN(GELU(RMSNorm(x) W1) W2)) / 2`."""

from .config import NonlinearQueryConfig
from .layer import NonlinearQKV, NonlinearQuery
from .method import NonlinearQueryMethod

__all__ = ["NonlinearQKV", "NonlinearQuery", "NonlinearQueryConfig", "NonlinearQueryMethod"]
