"""Nonlinear low-rank pieces for transformers: NOBLE branches, honest comparisons, Hugging Face models.

    import nonlinear_lowrank as nlr
    nlr.augment(model, nlr.NobleConfig(rank=64))
    optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=3e-4, weight_decay=0.01))

Importing it registers the augmented model types with transformers' Auto classes, and the fine-tuning methods
(`SineLoraConfig`, `NoraConfig`, `NobleAdapterConfig`) with peft. torch, transformers and peft take seconds to import:
they load when something here is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .errors import LearningRateWarning, UserError
from .hub import registration as _registration  # noqa: F401 - registers our types with transformers and peft
from .validation import require

if TYPE_CHECKING:
    from nonlinear_lowrank.integrations.trainer import LearningRateCallback, TrainerMixin
    from nonlinear_lowrank.methods.noble import NobleConfig, NobleConv1D, NobleLinear
    from nonlinear_lowrank.methods.noble.adapter import NobleAdapterConfig
    from nonlinear_lowrank.methods.qk_norm import QKNormConfig, QKNormProjection
    from nonlinear_lowrank.methods.query import NonlinearQKV, NonlinearQuery, NonlinearQueryConfig
    from nonlinear_lowrank.methods.rational import RationalActivation, RationalConfig
    from nonlinear_lowrank.methods.rational.adapter import NoraConfig
    from nonlinear_lowrank.methods.sine import SineLowRankConfig, SineLowRankLinear
    from nonlinear_lowrank.methods.sine.adapter import SineLoraConfig
    from nonlinear_lowrank.surgery.augment import augment, branches_disabled
    from nonlinear_lowrank.surgery.report import AugmentReport

    from . import analysis, hub
    from .inference import optimize_for_inference
    from .optim import MuonAdamW, param_groups

__version__ = "0.2.0"

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
    **dict.fromkeys(("augment", "branches_disabled"), "surgery.augment"),
    "AugmentReport": "surgery.report",
    **dict.fromkeys(("NobleConfig", "NobleConv1D", "NobleLinear"), "methods.noble"),
    **dict.fromkeys(("NonlinearQKV", "NonlinearQuery", "NonlinearQueryConfig"), "methods.query"),
    **dict.fromkeys(("QKNormConfig", "QKNormProjection"), "methods.qk_norm"),
    **dict.fromkeys(("RationalActivation", "RationalConfig"), "methods.rational"),
    **dict.fromkeys(("SineLowRankConfig", "SineLowRankLinear"), "methods.sine"),
    **dict.fromkeys(("MuonAdamW", "param_groups"), "optim"),
    **dict.fromkeys(("LearningRateCallback", "TrainerMixin"), "integrations.trainer"),
    "optimize_for_inference": "inference",
    "NobleAdapterConfig": "methods.noble.adapter",
    "NoraConfig": "methods.rational.adapter",
    "SineLoraConfig": "methods.sine.adapter",
}
"""File that defines each name of `__all__`; other names are defined here or are modules."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _FILES.get(name, "").endswith(".adapter"):
        require("peft", "peft")
    found = importlib.import_module(f"{__name__}.{_FILES.get(name, name)}")
    value = globals()[name] = getattr(found, name) if name in _FILES else found
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
