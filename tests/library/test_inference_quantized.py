"""`nlr.optimize_for_inference(dense=...)`: 8-bit dense weights by torchao under NOBLE branches of the model's type."""

import pytest
import torch
from torch import nn

import model_helpers
import nonlinear_lowrank as nlr

pytestmark = [pytest.mark.quantized, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torchao.*")]


@pytest.mark.parametrize(("dense", "error"), [("int8", 0.03), ("fp8", 0.1)])
def test_dense_weights_are_8_bits_and_branches_are_not(dense, error):
    pytest.importorskip("torchao.quantization")
    model = model_helpers.llama().to(torch.bfloat16)
    nlr.augment(model, nlr.NobleConfig(rank=4, up_scale=1.0), verbose=False)
    model.eval()
    inputs = model_helpers.batch(model)
    with torch.inference_mode():
        expected = model(**inputs).logits
        generated = model.generate(inputs["input_ids"][:1], max_new_tokens=4, do_sample=False)
    nlr.optimize_for_inference(model, dense=dense)
    layers = [each for each in model.modules() if isinstance(each, nlr.NobleLinear)]
    assert layers
    for each in layers:
        assert type(each.weight.data) is not torch.Tensor
        assert type(each.noble_down.data) is type(each.noble_up.data) is torch.Tensor
        assert each.noble_up.dtype == torch.bfloat16
    assert type(model.lm_head.weight.data) is torch.Tensor
    with torch.inference_mode():
        found = model(**inputs).logits
        assert model.generate(inputs["input_ids"][:1], max_new_tokens=4, do_sample=False).shape == generated.shape
    assert 0 < (found - expected).abs().max() <= error * expected.abs().max()
    with pytest.raises(nlr.UserError, match="cannot be saved"):
        model.save_pretrained("out")


def test_an_optimized_or_quantized_model_is_not_optimized_again():
    pytest.importorskip("torchao.quantization")
    model = model_helpers.llama()
    nlr.augment(model, nlr.NobleConfig(rank=4), verbose=False)
    nlr.optimize_for_inference(model, dense="int8")
    with pytest.raises(nlr.UserError, match="optimize the plain model first"):
        nlr.optimize_for_inference(model)
    assert isinstance(model.lm_head, nn.Linear)
