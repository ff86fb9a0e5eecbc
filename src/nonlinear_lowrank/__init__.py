"""Nonlinear low-rank pieces for transformers: NOBLE branches, honest comparisons, Hugging Face models.

    import nonlinear_lowrank as nlr
    nlr.augment(model, nlr.NobleConfig(rank=64))
    optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=3e-4, weight_decay=0.01))

Importing it registers the augmented model types with transformers' Auto classes.
"""

from . import hub
from .augment import AugmentReport, augment, branches_disabled
from .errors import UserError
from .layers import NobleConfig, NobleConv1D, NobleLinear
from .optim import MuonAdamW, param_groups

__version__ = "0.1.0"

__all__ = [
    "AugmentReport",
    "MuonAdamW",
    "NobleConfig",
    "NobleConv1D",
    "NobleLinear",
    "UserError",
    "augment",
    "branches_disabled",
    "hub",
    "param_groups",
]
