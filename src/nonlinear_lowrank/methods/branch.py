"""Layers that put a branch beside a plain linear, which stays an ordinary linear that converters may take."""

from typing import Any

from torch import nn


class BranchLayer(nn.Module):
    """Base of layers with a branch beside their child `dense`, a plain linear.

    `weight` and `bias` read the dense part's tensors, and files have them under these names, so plain checkpoints load.
    The branch's parameters are the layer's own; with `branch_enabled` off, forward gives the dense part alone.
    """

    dense: nn.Module
    plain_names: bool
    """Whether `state_dict()` has the dense part's tensors under the plain layer's names; where transformers saves the
    model, it renames them itself (`hub.names`)."""

    def put_beside(self, dense: nn.Module) -> None:
        """Take the linear; called once, after `nn.Module.__init__`."""
        self.dense = dense
        self.plain_names = self.branch_enabled = True
        # A loop over all modules would undo the layer's init of the dense part.
        dense.reset_parameters = _drawn_by_the_layer  # type: ignore[assignment]
        self.register_state_dict_post_hook(_with_plain_names)

    @property
    def weight(self) -> Any:
        """The dense part's weight, in its own shape."""
        return self.dense.weight

    @property
    def bias(self) -> Any:
        """The dense part's bias (d_out), or None."""
        return self.dense.bias

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take the dense part's tensors under either name."""
        for name in ("weight", "bias"):
            if (plain := prefix + name) in state_dict:
                state_dict[f"{prefix}dense.{name}"] = state_dict.pop(plain)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _drawn_by_the_layer() -> None:
    pass


def _with_plain_names(layer: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Rename the dense part's tensors in what `state_dict()` returns."""
    assert isinstance(layer, BranchLayer)
    if layer.plain_names:
        for name in ("weight", "bias"):
            if (inside := f"{prefix}dense.{name}") in state_dict:
                state_dict[prefix + name] = state_dict.pop(inside)
