"""`optimize_for_inference`: compute once what need not be computed again for every token.

| part                                   | becomes                                                              |
|----------------------------------------|----------------------------------------------------------------------|
| sine-LoRA, sine-DoRA, LoRA of peft     | part of the base's weights                                           |
| NoRA, NoRA++                           | plain coefficients of a rational activation, LoRA in the weights     |
| sine low-rank weights                  | a plain linear: faster, and as large as the dense one                |
| NOBLE layers                           | one product for dense output and branch (methods/noble/fused.py)     |
| NOBLE adapters                         | stay: their branch cannot be merged                                  |
| layers with hooks or a changed inside  | stay: an adapter on NOBLE's dense part, branches switched off        |
| dense weights, with dense="int8"       | 8 bits by torchao, under NOBLE branches in the model's own type      |
"""

import sys
from typing import Any, Literal, get_args

import torch
from torch import nn

from .errors import UserError
from .methods.base import method_of_layer
from .surgery.targets import output_head_names
from .validation import check_choice, one_line, require

Dense = Literal["keep", "int8", "fp8"]


def optimize_for_inference(model: nn.Module, *, fuse_shared_inputs: bool = True, dense: Dense = "keep") -> Any:
    """Make a trained model faster to evaluate and to generate with, in place where it can be.

    Outputs stay the same up to rounding. The result is in evaluation mode, is not to be trained and cannot be saved
    (save the model before); `.to()`, torch.compile and `generate` work.

    Args:
        model: augmented by this package, or with adapters of peft on it; its layers are replaced.
        fuse_shared_inputs: NOBLE's query, key and value projections, and gate and up projections, become one product.
        dense: type of the weights of linears but the output head: "keep" leaves it; "int8" and "fp8" quantize them by
            torchao (weights alone, a scale a row), which halves what a token reads of a bfloat16 model. Branches stay
            as they are, and NOBLE layers then keep their own two products.

    Returns:
        The model; of a model with adapters that can be merged, the base model with these in it.

    Raises:
        UserError: there is no layer that can be made faster and no adapter in it, it is quantized or split over
            devices, or an adapter has weights that are not finite; or torchao is missing for dense.
    """
    check_choice("dense", dense, get_args(Dense))
    if dense != "keep":
        require("quantized", "torchao")
    if not isinstance(model, nn.Module):
        raise UserError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    merged, found = _merged(model), _has_adapters(model)
    for name, module in merged.named_modules():
        if _optimizable(module) and any(
            type(each.data) is not torch.Tensor or each.is_meta for each in module.parameters()
        ):
            raise UserError(f"{name} is quantized, split over devices or on meta; optimize the plain model first")
    if not (found or can_be_optimized(merged)):
        raise UserError(
            f"there is nothing to optimize in this {type(model).__name__}: no layer that can be made faster, and no "
            "adapter; use it as it is"
        )
    methods = {method for module in merged.modules() if (method := method_of_layer(module))}
    how = {"shared_inputs": fuse_shared_inputs, "quantized": dense != "keep"}
    changed = [method.optimize(merged, **how) for method in methods]
    if dense != "keep":
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        heads = output_head_names(merged)  # NOBLE's dense parts too are quantized
        config = Int8WeightOnlyConfig() if dense == "int8" else Float8WeightOnlyConfig()
        quantize_(merged, config, filter_fn=lambda each, name: isinstance(each, nn.Linear) and name not in heads)
    if any(changed) or dense != "keep":
        merged.save_pretrained = _refuse
    return merged.eval().requires_grad_(False)


def can_be_optimized(model: nn.Module) -> bool:
    """Return whether `optimize_for_inference` would change anything; nonlinear queries and QK-norm stay as they are."""
    return _has_adapters(model) or any(map(_optimizable, model.modules()))


def _optimizable(module: nn.Module) -> bool:
    return (method := method_of_layer(module)) is not None and method.optimizable


def _has_adapters(model: nn.Module) -> bool:
    return "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)


def _merged(model: Any) -> Any:
    """Return the base model with its adapters in the weights, where it has adapters that can be merged."""
    if not _has_adapters(model) or not all(getattr(each, "mergeable", True) for each in model.peft_config.values()):
        return model
    try:
        return model.merge_and_unload(safe_merge=True)
    except (ValueError, NotImplementedError, AttributeError) as error:  # peft's are long
        kinds = ", ".join(sorted({str(config.peft_type) for config in model.peft_config.values()}))
        raise UserError(f"adapters of {kinds} cannot be merged here: {one_line(error)}") from error


def _refuse(*_: Any, **__: Any) -> None:
    raise UserError("a model optimized for inference cannot be saved; save it before optimize_for_inference")
