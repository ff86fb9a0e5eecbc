"""Layer of adapters that add a sine delta to a weight: sine-LoRA, and NoRA++ with lora_sine."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from nonlinear_lowrank.ops.sine import effective_weights, sine_layer
from nonlinear_lowrank.ops.sine_delta import SineFactors

from .weights import WeightLayer


class SineDeltaLayer(WeightLayer):
    """Adapters around linears and 1x1 convolutions; subclasses have parameters, and give `factors`.

    With a plain base and no dropout there is one product, with the weight that merging would give. Else there are
    two, the base's and the delta's; both save no more for backward than the input.
    """

    @property
    def stride(self) -> tuple[int, int] | None:
        """Stride of a convolution, else None."""
        return None

    def factors(self, name: str) -> SineFactors:
        """Return an adapter's delta."""
        raise NotImplementedError

    def source(self, names: Sequence[str]) -> Tensor | Callable[[], Tensor] | None:
        """Return where these deltas, beside the base's own product, get the weight from, if they need it."""
        return None

    @property
    def transposed(self) -> bool:
        """Return whether the module stores its weight as (d_in, d_out)."""
        return self.matrix.kind == "conv1d"

    def adapted(self, x: Tensor, names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
        """Return the output with these adapters, see `AdapterLayer`."""
        dropped = [name for name in names if self.training and self.configs[name].lora_dropout > 0]
        rest = [name for name in names if name not in dropped]
        layout: dict[str, Any] = {"transposed": self.transposed, "stride": self.stride}
        if not dropped and self.base_is_plain():
            base: Any = self.base_layer
            return sine_layer(x, base.weight, base.bias, [self.factors(name) for name in rest], **layout)
        y = self.base_layer(x, *args, **kwargs)
        if self.quantization_backend is not None:
            y = self.quantization_backend.maybe_clone_base_result(y)
        parts = [(x, rest)] if rest else []
        parts += [(F.dropout(x, self.configs[name].lora_dropout), [name]) for name in dropped]
        for part, together in parts:
            factors = [self.factors(name) for name in together]
            y = y + sine_layer(part, self.source(together), None, factors, base=False, **layout).to(y.dtype)
        return y

    def merged_weight(self, weight: Tensor, names: Sequence[str]) -> Tensor:
        """Return the merged matrix, see `WeightLayer`; formed in the module's layout, as `adapted` does."""
        factors = [self.factors(name) for name in names]
        return self.matrix.of(effective_weights(self.matrix.back(weight), factors, transposed=self.transposed))
