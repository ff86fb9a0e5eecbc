"""Nonlinear low-rank pieces for transformers: NOBLE branches, honest comparisons, Hugging Face models.

    import nonlinear_lowrank as nlr
    nlr.augment(model, nlr.NobleConfig(rank=64))
    optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=3e-4, weight_decay=0.01))

Importing it registers the augmented model types with transformers' Auto classes, and the fine-tuning methods
(`SineLoraConfig`, `NoraConfig`, `NobleAdapterConfig`) with peft. torch, transformers and peft take seconds to import:
that happens when something here is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import registration
from .errors import LearningRateWarning, UserError

if TYPE_CHECKING:
    from . import analysis, hub
    from .adapters.noble import NobleAdapterConfig
    from .adapters.nora import NoraConfig
    from .adapters.sine import SineLoraConfig
    from .augmentation import AugmentReport, augment, branches_disabled
    from .inference import optimize_for_inference
    from .layers import (
        NobleConfig,
        NobleConv1D,
        NobleLinear,
        NonlinearQKV,
        NonlinearQuery,
        NonlinearQueryConfig,
        QKNormConfig,
        QKNormProjection,
        RationalActivation,
        RationalConfig,
        SineLowRankConfig,
        SineLowRankLinear,
    )
    from .optim import MuonAdamW, param_groups
    from .trainer import LearningRateCallback, TrainerMixin

__version__ = "0.1.0"

__all__ = [
    "AugmentReport",
    "LearningRateCallback",
    "LearningRateWarning",
    "MuonAdamW",
    "NobleAdapterConfig",
    "NobleConfig",
    "NobleConv1D",
    "NobleLinear",
    "NonlinearQKV",
    "NonlinearQuery",
    "NonlinearQueryConfig",
    "NoraConfig",
    "QKNormConfig",
    "QKNormProjection",
    "RationalActivation",
    "RationalConfig",
    "SineLoraConfig",
    "SineLowRankConfig",
    "SineLowRankLinear",
    "TrainerMixin",
    "UserError",
    "analysis",
    "augment",
    "branches_disabled",
    "hub",
    "optimize_for_inference",
    "param_groups",
]


_FILES = {
    **dict.fromkeys(("AugmentReport", "augment", "branches_disabled"), "augmentation"),
    **dict.fromkeys(("NobleConfig", "NobleConv1D", "NobleLinear"), "layers"),
    **dict.fromkeys(("NonlinearQKV", "NonlinearQuery", "NonlinearQueryConfig"), "layers"),
    **dict.fromkeys(("QKNormConfig", "QKNormProjection"), "layers"),
    **dict.fromkeys(("RationalActivation", "RationalConfig"), "layers"),
    **dict.fromkeys(("SineLowRankConfig", "SineLowRankLinear"), "layers"),
    **dict.fromkeys(("MuonAdamW", "param_groups"), "optim"),
    **dict.fromkeys(("LearningRateCallback", "TrainerMixin"), "trainer"),
    "optimize_for_inference": "inference",
    **{name: f"adapters.{entry.file}" for name, entry in registration.CONFIG_CLASSES.items()},
}
"""Where a name of `__all__` is; the others are here, or are files themselves."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = importlib.import_module(f".{_FILES.get(name, name)}", __name__)
    value = globals()[name] = getattr(found, name) if name in _FILES else found
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
