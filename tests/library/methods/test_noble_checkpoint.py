"""State dicts of the authors' release: their computation, written anew, against our model."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import model_helpers
import nonlinear_lowrank as nlr
from nonlinear_lowrank.methods.noble.checkpoint import load_released

PARTS = {
    "cos": ("",),
    "cos_net": ("act.", "second_act."),
    "cos_net_double": ("act.", "second_act.", "third_act."),
}


class Released(nn.Module):
    """The release's layer: y = W x + b + up cos(f (M ... + c) + p), every product with its bias but the last."""

    def __init__(self, plain: nn.Linear, rank: int, kind: str, middle: str) -> None:
        super().__init__()
        self.linear = plain
        self.lora_down, self.lora_up = (
            nn.Linear(plain.in_features, rank),
            nn.Linear(rank, plain.out_features, bias=False),
        )
        net = nn.Module()
        self.add_module(middle, net)
        net.cosines, net.products = [], []
        for name in PARTS[kind]:
            holder = net if name == "" else nn.Module()
            if name:
                net.add_module(name[:-1], holder)
            holder.freq_scale, holder.freq_bias = (nn.Parameter(torch.randn(rank)) for _ in range(2))
            net.cosines.append(holder)
        for name in ("fc",) if kind == "cos_net" else ("fc1", "fc2") if kind == "cos_net_double" else ():
            net.add_module(name, nn.Linear(rank, rank))
            net.products.append(getattr(net, name))
        self.middle = (net,)

    def forward(self, x):
        (net,) = self.middle
        h = self.lora_down(x)
        for k, cosine in enumerate(net.cosines):
            h = net.products[k - 1](h) if k else h
            h = torch.cos(cosine.freq_scale * h + cosine.freq_bias)
        return self.linear(x) + self.lora_up(h)


def released(plain, kind="cos_net", middle="lora_middle_nonlinearity", rank=5):
    """A plain model with the release's layers in its attention and MLP."""
    for module in list(plain.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name.endswith("_proj"):
                setattr(module, name, Released(child, rank, kind, middle))
    return plain.double()


@pytest.mark.parametrize("middle", ["lora_middle_nonlinearity", "cos_net"])
@pytest.mark.parametrize("kind", PARTS)
def test_a_released_state_gives_the_authors_logits(kind, middle, tmp_path):
    theirs = released(model_helpers.llama(), kind, middle).eval()
    ours = model_helpers.llama().double().eval()
    ids = model_helpers.batch(ours)["input_ids"]
    report = load_released(ours, {f"_orig_mod.{name}": value for name, value in theirs.state_dict().items()})
    assert len(report.swapped) == 14
    assert report.config == nlr.NobleConfig.official(
        rank=5, depth=len(PARTS[kind]), init="pretrained", own_init=report.config.own_init
    )
    with torch.no_grad():
        expected = theirs(ids).logits
        assert (ours(ids).logits - expected).abs().max() <= 1e-13 * expected.abs().max()
    ours.save_pretrained(tmp_path)
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert (loaded(ids).logits - expected).abs().max() <= 1e-13 * expected.abs().max()
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in ours.state_dict().items())


def test_biases_of_zero_are_the_papers_formula():
    theirs = released(model_helpers.llama()).eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith(("lora_down.bias", "fc.bias")):
            parameter.data.zero_()
    ours = model_helpers.llama().double().eval()
    nlr.augment(ours, nlr.NobleConfig(rank=5, init="pretrained"), verbose=False)
    loaded = model_helpers.llama().double().eval()
    load_released(loaded, theirs.state_dict(), verbose=False)
    state = {name: value for name, value in loaded.state_dict().items() if ".noble_bias" not in name}
    ours.load_state_dict(state)
    ids = model_helpers.batch(ours)["input_ids"]
    with torch.no_grad():
        expected = theirs(ids).logits
        assert (ours(ids).logits - expected).abs().max() <= 1e-13 * expected.abs().max()


def changed(change):
    state = dict(released(model_helpers.llama()).state_dict())
    change(state)
    return state


Q = "model.layers.0.self_attn.q_proj"
REFUSED = {
    "no branch": (lambda state: [state.pop(name) for name in list(state) if "lora_" in name], "no '<linear>.lora_down"),
    "other net": (lambda state: state.update({f"{Q}.lora_middle_nonlinearity.scale": torch.ones(5)}), "nonlinearity"),
    "gelu": (
        lambda state: [state.pop(name) for name in list(state) if "freq_" in name],
        "the branch of model.layers.0.mlp.down_proj has another nonlinearity",
    ),
    "ranks": (lambda state: state.update({f"{Q}.lora_down.weight": torch.ones(4, 48)}), "several ranks"),
    "missing": (lambda state: state.pop(f"{Q}.lora_up.weight"), f"{Q}.noble_up is missing, not"),
    "shape": (lambda state: state.update({"model.norm.weight": torch.ones(3)}), r"model.norm.weight is \(3,\), not"),
    "unknown": (lambda state: state.update({"odd": torch.ones(3)}), r"odd is \(3,\), not unknown"),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_a_state_that_does_not_fit_is_refused_before_anything_changes(change, words):
    model = model_helpers.llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(nlr.UserError, match=words):
        load_released(model, changed(change))
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
