"""Exported programs: `torch.export` of every method, whose graphs have torch's own ops alone."""

import pytest
import torch

from travel_helpers import CASES, assert_close, prepared


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return self.model(**inputs).logits


def exported(row, name, **options):
    """The program of a case, an input and the logits for it."""
    model, inputs, expected = prepared(row, name)
    if name != "vit":
        model.config.use_cache = False
    return torch.export.export(Logits(model), (), kwargs=inputs, **options), inputs, expected


# Strict export traces with dynamo, which takes twice as long: there one family a row.
STRICT = [case for place, case in enumerate(CASES) if case[0] not in {row for row, _ in CASES[:place]}]


@pytest.mark.parametrize(("row", "name"), CASES)
def test_programs_are_torchs_and_compute_the_same(row, name):
    check(*exported(row, name))


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # transformers' own
@pytest.mark.parametrize(("row", "name"), [*STRICT, ("noble", "mixtral"), ("sine", "mixtral"), ("rational", "mixtral")])
def test_strict_programs_are_torchs_and_compute_the_same(row, name):
    check(*exported(row, name, strict=True))


def check(program, inputs, expected):
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    called = {str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"}
    assert not [target for target in called if "nonlinear_lowrank" in target or "autograd" in target]
    assert_close(program.module()(**inputs), expected)


def test_programs_take_any_number_of_tokens():
    model, inputs, _ = prepared("several", "llama")
    tokens = torch.export.Dim("tokens", min=2, max=64)
    model.config.use_cache = False
    program = torch.export.export(model, (), kwargs=inputs, dynamic_shapes={"input_ids": {1: tokens}})
    more = torch.cat([inputs["input_ids"]] * 2, dim=1)
    with torch.no_grad():
        assert_close(program.module()(input_ids=more).logits, model(more).logits)
