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
    """What the task knows of a pretrained model; None where the model is trained from scratch."""
    dense_init: DenseInit = "stock"
    """How the model's linears were drawn, for a change that draws more of them."""
    verbose: bool = False
    """Print what was changed."""


class ArmKind:
    """One kind of change to a model; the defaults are those of a way to tune a pretrained one."""

    name: str
    """On the command line."""
    control: bool = False
    """Whether it is there to be compared with: none of the methods of this library."""
    own_init: bool = False
    """Whether its settings have an `init` of their own; else `init=` is the dense init."""
    stage: int | None = None
    """When it is applied where an arm has several, the lowest first; None: it can only be alone."""

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings with their full names and JSON's types; raise UserError where they do not fit."""
        return dict(settings)

    def label(self, settings: Mapping[str, Any]) -> list[str]:
        """Return the parts of the arm's name."""
        return [self.name]

    def apply(self, model: nn.Module, settings: Mapping[str, Any], context: ArmContext) -> nn.Module:
        """Return the changed model; raise UserError where the change does not fit it."""
        raise NotImplementedError
