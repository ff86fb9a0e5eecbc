"""Every method of ours in a whole model under torch.compile with changing lengths, and through torch.export."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from nlr_lab.bench.arms import METHODS, ModelBenchConfig, bench_arms, make_model

SMALL = ModelBenchConfig(width=32, layers=1, heads=2, hidden=48, vocab_size=67, ranks=(4,), family="llama")
SHARED = ModelBenchConfig(width=32, layers=1, heads=2, hidden=48, vocab_size=67, ranks=(4,), share_down="qkv")
OURS = [name for name in METHODS if name not in ("lora", "dora", "peanut", "nora++")]  # ++ is NoRA and peft's LoRA
CASES = [*((name, SMALL) for name in OURS), ("noble", SHARED)]
IDS = [*OURS, "noble, shared down"]


def made(name, settings):
    """A model whose adapters, if it has some, change the outputs."""
    arm = bench_arms((name,), (4,))[-1]
    model = make_model(settings, arm, 64)
    with torch.no_grad():
        for each in model.parameters():
            if each.requires_grad and not each.any():
                each.normal_(std=0.02)
    return model


def tokens(*shape):
    return torch.randint(0, 67, shape)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
def test_one_graph_for_all_lengths(name, settings, backend):
    torch.compiler.reset()
    counters.clear()
    model = made(name, settings).train()
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    for length in (9, 13):
        ids = tokens(2, length)
        expected = model(input_ids=ids, labels=ids).loss
        found = compiled(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        found.backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert all(each.grad is not None for each in model.parameters() if each.requires_grad)


class Logits(nn.Module):
    """What is exported: ids to logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize(("name", "settings"), CASES, ids=IDS)
def test_export_with_dynamic_shapes(name, settings, tmp_path):
    torch.compiler.reset()
    model = Logits(made(name, settings).eval())
    sizes = {"ids": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}
    with torch.no_grad():
        program = torch.export.export(model, (tokens(2, 9),), dynamic_shapes=sizes)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for shape in ((2, 9), (3, 13)):
        ids = tokens(*shape)
        torch.testing.assert_close(loaded(ids), model(ids), rtol=1e-4, atol=1e-5)
