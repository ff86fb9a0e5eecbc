"""What a change to a model may need to know beside the model."""

from dataclasses import dataclass

from ..tasks.language_model import DenseInit
from ..tasks.task import AdapterSetup


@dataclass(frozen=True, kw_only=True)
class ArmContext:
    """Where an arm's change happens."""

    setup: AdapterSetup | None = None
    """What the task knows of a pretrained model; None where the model is trained from scratch."""
    dense_init: DenseInit = "stock"
    """How the model's linears were drawn, for a change that draws more of them."""
    verbose: bool = False
    """Print what was changed."""
