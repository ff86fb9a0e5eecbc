"""NOBLE branches (noble.txt): `y = W x + b + up(CosNet(down(x)))`."""

from .config import NobleConfig
from .layer import NobleConv1D, NobleLinear, NobleMethod

__all__ = ["NobleConfig", "NobleConv1D", "NobleLinear", "NobleMethod"]
