"""What a change to a model is to an arm, and what it may need to know beside the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from nlr_lab.tasks.task import AdapterSetup
from nlr_lab.tasks.text.language_model import DenseInit


@dataclass(frozen=True, kw_only=True)
class ArmContext:
    """Where an arm's change happens."""

    setup: AdapterSetup | None = None
    """What the task knows of a pretrained model; None where the model is trained from scratch."""
    dense_init: DenseInit = "stock"
    """How the model's linears were drawn, for a change that draws more of them."""
    verbose: bool = False
    """Print what was changed."""


class ArmMethod(Protocol):
    """One kind of change to a model."""

    @property
    def name(self) -> str:
        """On the command line."""
        ...

    @property
    def control(self) -> bool:
        """Whether it is there to be compared with: none of the methods of this library."""
        ...

    @property
    def own_init(self) -> bool:
        """Whether the method's settings have an `init` of their own; else `init=` is the dense init."""
        ...

    @property
    def stage(self) -> int | None:
        """When it is applied where an arm has several methods, the lowest first; None: it can only be alone."""
        ...

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with their full names and JSON's types; raises UserError when they do not fit."""
        ...

    def label(self, settings: Mapping[str, Any]) -> list[str]:
        """Parts of the arm's name."""
        ...

    def apply(self, model: nn.Module, settings: Mapping[str, Any], context: ArmContext) -> nn.Module:
        """The changed model; UserError when the method does not fit it."""
        ...
