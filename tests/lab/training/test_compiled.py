"""Models under torch.compile: every method of ours with changing lengths and through torch.export; and nine and more
models of one class, or batches of as many lengths, of which none falls back to uncompiled code.

The backend only traces: what is looked at is which models are compiled, not what Inductor makes of them.
"""

import os
import random

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import finetune_helpers
from compare_helpers import field_recipe, tiny_recipe
from nlr_lab.bench.arms import METHODS, ModelBenchConfig, bench_arms, make_model
from nlr_lab.bench.decode import DecodeBenchConfig, bench_decode
from nlr_lab.bench.training import TrainBenchConfig, bench_step
from nlr_lab.compare import compare
from nlr_lab.training import Arm, run_training
from nonlinear_lowrank.errors import UserError
from training_helpers import FakeText, make_recipe

SMALL = ModelBenchConfig(width=32, layers=1, heads=2, hidden=48, vocab_size=67, ranks=(4,), family="llama")
SHARED = ModelBenchConfig(width=32, layers=1, heads=2, hidden=48, vocab_size=67, ranks=(4,), share_down="qkv")
OURS = [
    name for name in METHODS if name not in ("lora", "dora", "peanut", "oft", "nora++")
]  # ++ is NoRA and peft's LoRA
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


RANKS = tuple(range(1, 10))
MODEL = {"width": 32, "layers": 1, "heads": 2, "hidden": 48, "vocab_size": 67, "ranks": RANKS}
MODEL |= {"modes": ("compiled",), "rounds": 1, "warmup": 1, "clock": "wall"}


@pytest.fixture
def compiled(monkeypatch):
    """A function that gives the numbers of frames met and frames compiled since it was called last."""
    real = torch.compile

    def traced(model=None, **options):
        kept = {name: value for name, value in options.items() if name in ("dynamic", "fullgraph")}
        return real(model, backend="eager", **kept)

    def counted():
        found = counters["frames"]["total"], counters["frames"]["ok"]
        counters.clear()
        return found

    monkeypatch.setattr(torch, "compile", traced)
    torch._dynamo.reset()
    counters.clear()
    yield counted
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["steps", "tokens"])
def test_every_arm_is_benchmarked_compiled(compiled, what):
    if what == "steps":
        bench_step(TrainBenchConfig(sequence_length=8, batch_size=2, **MODEL))
    else:
        bench_decode(DecodeBenchConfig(context=4, batch_sizes=(1,), **MODEL))
    met, ok = compiled()
    assert met == ok >= len(RANKS) + 1  # and the baseline


def test_comparison_of_fields_is_compiled(compiled, tmp_path):
    arms = tuple(f"sine:rank={rank}" for rank in RANKS)
    recipe = field_recipe(tmp_path, arms=arms, seeds=1, width=32, steps=1, compile=True)
    compare(recipe, tmp_path / "out", quiet=True, timing_rounds=1, command="compare")
    met, ok = compiled()
    assert met == ok == len(RANKS), "of equal forms the timing's are the fits'"


def test_comparison_of_trained_models_is_compiled(compiled, tmp_path):
    recipe = tiny_recipe(tmp_path, steps=1, batch_size=2, compile=True)
    arms = (Arm(), *(Arm(method="noble", name=f"r{rank}", settings={"rank": rank}) for rank in range(1, 5)))
    compare(recipe, tmp_path / "out", arms=arms, seeds=1, tune_lr=(), timing_rounds=0, quiet=True)
    met, ok = compiled()
    assert met == ok >= 2 * len(arms)  # for training and for evaluation


@pytest.mark.parametrize("arm", ["noble:rank=4", "sine-lowrank:rank=4", "rational:groups=4", "nonlinear-query"])
def test_a_run_compiles_to_one_graph_in_the_mode_asked_for(compiled, monkeypatch, tmp_path, arm):
    asked, compile_it = [], torch.compile

    def noted(model, **options):
        asked.append((options["mode"], options["fullgraph"]))
        return compile_it(model, **options)

    monkeypatch.setattr(torch, "compile", noted)
    settings = {"compile": True, "compile_mode": "reduce-overhead", "compile_fullgraph": True, "bf16": True}
    run_training(
        make_recipe(arm, steps=1, warmup_steps=0, **settings), tmp_path / "out", prepared=FakeText(), quiet=True
    )
    assert set(asked) == {("reduce-overhead", True)}
    assert "ACCELERATE_DYNAMO_USE_FULLGRAPH" not in os.environ


def test_a_broken_graph_ends_the_run_only_where_one_graph_is_asked_for(compiled, tmp_path):
    arm = "training_helpers:break_graph"
    settings = {"steps": 1, "warmup_steps": 0, "compile": True}
    with pytest.raises(UserError, match=r"not compile to one graph: .*graph_break.*omit --train\.compile-fullgraph"):
        run_training(
            make_recipe(arm, compile_fullgraph=True, **settings), tmp_path / "one", prepared=FakeText(), quiet=True
        )
    run_training(make_recipe(arm, **settings), tmp_path / "broken", prepared=FakeText(), quiet=True)


def test_one_form_for_batches_of_all_lengths(compiled, tmp_path, monkeypatch):
    words = finetune_helpers.WORDS
    drawn = lambda *_: " ".join(random.choices(words, k=random.randint(1, 25)))  # noqa: E731
    monkeypatch.setattr(finetune_helpers, "sentence", drawn)
    task = finetune_helpers.glue_task(tmp_path)
    assert len(set(task.prepare(progress=False).train.lengths)) > 8, "more than torch keeps forms"
    run_training(finetune_helpers.recipe(task, steps=20, batch_size=2, compile=True), tmp_path / "out", quiet=True)
    met, ok = compiled()
    assert met == ok <= 3, "for training and for evaluation, the last batch of which may be of one example"
