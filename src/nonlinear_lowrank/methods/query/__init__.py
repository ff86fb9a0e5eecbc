"""Nonlinear queries (nonlinear_queries.md): a residual bottleneck in the place of the query projection."""

from .config import NonlinearQueryConfig
from .layer import NonlinearQKV, NonlinearQuery, NonlinearQueryMethod

__all__ = ["NonlinearQKV", "NonlinearQuery", "NonlinearQueryConfig", "NonlinearQueryMethod"]
