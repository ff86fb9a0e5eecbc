"""Exported programs: `torch.export` of every method, whose graphs have torch's own ops alone, and ONNX of these.

ONNX needs packages that `make test-onnx` installs into a folder of their own.
"""

import warnings

import pytest
import torch

from travel_helpers import CASES, OWN_EXPERTS, assert_close, prepared


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
    if name == "mixtral":
        model.set_experts_implementation("batched_mm")  # of plain experts: the default is an op of transformers
    return torch.export.export(Logits(model), (), kwargs=inputs, **options), inputs, expected


FIRST = [case for place, case in enumerate(CASES) if case[0] not in {row for row, _ in CASES[:place]}]
EXPERTS = [("noble", "mixtral"), ("sine", "mixtral"), ("rational", "mixtral")]
# Quick are one family a row, and all of NOBLE's; of strict export, which traces with dynamo, one row a method.
QUICK = {*FIRST, *EXPERTS, *(case for case in CASES if case[0] == "noble")}
QUICK_STRICT = {("noble", "mixtral"), *(case for case in FIRST if case[0] in ("noble", "sine", "rational", "query"))}


def marked(cases, quick):
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("row", "name"), marked(CASES, QUICK))
def test_programs_are_torchs_and_compute_the_same(row, name):
    check(*exported(row, name))


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # transformers' own
@pytest.mark.parametrize(("row", "name"), marked([*FIRST, *EXPERTS], QUICK_STRICT))
def test_strict_programs_are_torchs_and_compute_the_same(row, name):
    check(*exported(row, name, strict=True))


@pytest.mark.parametrize(("row", "name"), [case for case in CASES if case[1] in ("gpt2", "vit", "mixtral")])
def test_onnx_computes_the_same(row, name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="make test-onnx")
    program, inputs, expected = exported(row, name)
    with warnings.catch_warnings(action="ignore"):  # torch's exporter, onnxscript and onnx about each other
        torch.onnx.export(program, dynamo=True).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    feeds = {each.name: inputs[each.name].numpy() for each in session.get_inputs()}
    assert_close(torch.from_numpy(session.run(None, feeds)[0]), expected)


def check(program, inputs, expected):
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    called = {str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"}
    assert not [each for each in called if each.startswith(("nonlinear_lowrank", "transformers")) or "autograd" in each]
    assert_close(program.module()(**inputs), expected)


OF_EXPERTS = [("noble", name) for name in ("mixtral", *OWN_EXPERTS)] + [("sine", "dbrx"), ("rational", "longcat_flash")]


@pytest.mark.parametrize(("row", "name"), [("several", "llama"), *OF_EXPERTS])
def test_programs_take_any_number_of_tokens(row, name):
    model, inputs, _ = prepared(row, name)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    model.config.use_cache = False
    program = torch.export.export(model, (), kwargs=inputs, dynamic_shapes={"input_ids": {1: tokens}})
    more = torch.cat([inputs["input_ids"]] * 2, dim=1)
    with torch.no_grad():
        assert_close(program.module()(input_ids=more).logits, model(more).logits)
