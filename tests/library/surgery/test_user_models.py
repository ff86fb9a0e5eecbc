"""Models that users write: what is swapped acts in training and in evaluation; what is bypassed is skipped by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import ModelOutput

import nonlinear_lowrank as nlr
from family_checks import RANK, enlarge_branches, train_a_step, without_effect

WIDTH = 32


class Model(nn.Module):
    """Two linears, a list of one, and a loss, in front of which a subclass puts its own code."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.more = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x):
        y = self.body(x)
        return ModelOutput(loss=y.square().mean(), y=y)


class InPlace(Model):
    def __init__(self):
        super().__init__()
        self.activation = nn.ReLU(inplace=True)

    def body(self, x):
        y = self.first(x)
        y += x
        z = self.second(self.activation(y)).mul_(0.5)
        z[..., 0] = 0
        return self.more[0](z).tanh_()


class Sequential(Model):
    def __init__(self):
        super().__init__()
        self.more = nn.Sequential(self.first, nn.ReLU6(inplace=True), self.second, nn.Hardtanh(inplace=True))

    def body(self, x):
        return self.more(x)


class InAList(Model):
    def __init__(self):
        super().__init__()
        self.order = [self.first, nn.ReLU(), self.second]

    def body(self, x):
        for each in self.order:
            x = each(x)
        return self.more[0](x)


class Unpacked(Model):
    def body(self, x):
        weight, bias = self.first.weight, self.first.bias
        return self.second(x @ weight.t() + bias) + self.more[0](x)


class Fused(Model):
    def body(self, x):
        weight = torch.cat([self.first.weight, self.second.weight])
        return F.linear(x, weight).sigmoid() * self.more[0](x).repeat(1, 1, 2)


class FusedInEvaluation(Model):
    def body(self, x):
        y = self.first(x) if self.training else F.linear(x, self.first.weight, self.first.bias)
        return self.second(y) + self.more[0](x)


class Handed(Model):
    """Hands its linears to methods, of which one calls them and one takes a tensor (LayoutLMv3's position tables)."""

    def body(self, x):
        places = x.argmax(-1)
        return self.call(self.second, x) + self.look_up(places, self.first) + self.more[0](x)

    def call(self, linear, x):
        return linear(x)

    def look_up(self, places, table):
        return table.weight[:, places].movedim(0, -1)


class Encoder(Model):
    """torch's encoder, whose fused path in evaluation would take the tensors of its linears."""

    activation = staticmethod(F.relu)

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 48, 0.0, self.activation, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def body(self, x):
        return self.more[0](self.second(self.encoder(self.first(x))))


class OwnActivationEncoder(Encoder):
    """With an activation that the fused path does not know."""

    activation = staticmethod(F.silu)


class SwitchedEncoder(Encoder):
    """With the fused path switched off by hand."""

    def __init__(self):
        super().__init__()
        for layer in self.encoder.layers:
            layer.activation_relu_or_gelu = 0


MODELS = {
    InPlace: [],
    Sequential: [],
    InAList: [],
    Unpacked: ["first"],
    Fused: ["first", "second"],
    FusedInEvaluation: ["first"],
    Handed: ["first"],
}
MODELS |= {Encoder: [], OwnActivationEncoder: [], SwitchedEncoder: []}


@pytest.mark.parametrize(("kind", "skipped"), MODELS.items(), ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_every_swapped_linear_of_a_users_model_acts(kind, skipped, training):
    model, inputs = kind(), {"x": torch.randn(2, 5, WIDTH)}
    report = nlr.augment(model, nlr.NobleConfig(rank=RANK), verbose=False)
    assert sorted(report.skipped) == sorted(skipped)
    assert all("without calling it" in why for why in report.skipped.values())
    train_a_step(model, torch.optim.AdamW(nlr.param_groups(model, lr=1e-3, verbose=False)), inputs)
    assert without_effect(enlarge_branches(model.train(training)), inputs) == []
