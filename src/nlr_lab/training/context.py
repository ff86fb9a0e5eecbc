"""Kinds of changes to a model, and what one may need to know beside the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from nlr_lab.tasks.task import AdapterSetup
from nlr_lab.tasks.text.language_model import DenseInit


@dataclass(frozen=True, kw_only=True)
class ArmContext:
    """The surroundings of an arm's change."""

    setup: AdapterSetup | None = None
    """The task's facts of a pretrained model; None where the model is trained from scratch."""
    dense_init: DenseInit = "stock"
    """Init that the model's linears were drawn by, for a change that draws more of them."""
    verbose: bool = False
    """Print what was changed."""


class ArmKind:
    """One kind of change to a model; the defaults are those of a way to tune a pretrained one."""

    name: str
    """Name on the command line."""
    control: bool = False
    """It is there to be compared with: none of the methods of this library."""
    own_init: bool = False
    """Its settings have an `init` of their own; else `init=` is the dense init."""
    stage: int | None = None
    """Order in which an arm of several applies them, the lowest first; None: it can only be alone."""

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings with their full names and JSON's types; raise UserError where they do not fit."""
        return dict(settings)

    def label(self, settings: Mapping[str, Any]) -> list[str]:
        """Return the parts of the arm's name."""
        return [self.name]

    def apply(self, model: nn.Module, settings: Mapping[str, Any], context: ArmContext) -> nn.Module:
        """Return the changed model; raise UserError where the change does not fit it."""
        raise NotImplementedError
