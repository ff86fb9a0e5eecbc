"""Nonlinear low-rank pieces for transformers: NOBLE branches, honest comparisons, Hugging Face models.

    import nonlinear_lowrank as nlr
    nlr.augment(model, nlr.NobleConfig(rank=64))
    optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=3e-4, weight_decay=0.01))

Importing it registers the augmented model types with transformers' Auto classes, and the fine-tuning methods
(`SineLoraConfig`, `NoraConfig`, `NobleAdapterConfig`) with peft, which is imported only when it is used.
"""

from typing import TYPE_CHECKING, Any

from . import hub
from .augment import AugmentReport, augment, branches_disabled
from .errors import UserError
from .layers import NobleConfig, NobleConv1D, NobleLinear
from .optim import MuonAdamW, param_groups
from .registration import CONFIG_CLASSES, config_class

if TYPE_CHECKING:
    from .adapters.noble import NobleAdapterConfig
    from .adapters.nora import NoraConfig
    from .adapters.sine import SineLoraConfig

__version__ = "0.1.0"

__all__ = [
    "AugmentReport",
    "MuonAdamW",
    "NobleAdapterConfig",
    "NobleConfig",
    "NobleConv1D",
    "NobleLinear",
    "NoraConfig",
    "SineLoraConfig",
    "UserError",
    "augment",
    "branches_disabled",
    "hub",
    "param_groups",
]


def __getattr__(name: str) -> Any:
    """The config classes of the adapters: they are peft's dataclasses, and importing peft takes seconds."""
    if name in CONFIG_CLASSES:
        return config_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
