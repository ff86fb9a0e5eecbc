"""Nine and more models of one class, or batches of as many lengths: none falls back to uncompiled code.

The backend only traces: what is looked at is which models are compiled, not what Inductor makes of them.
"""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch._dynamo.utils import counters

import finetune_helpers
from nlr_lab.bench.decode import DecodeBenchConfig, bench_decode
from nlr_lab.bench.training import TrainBenchConfig, bench_step
from nlr_lab.compare import compare
from nlr_lab.fields.image import ImageSettings
from nlr_lab.fields.model import FieldConfig
from nlr_lab.fields.recipe import FieldRecipe, FitConfig
from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import GlmBackbone, LanguageModelTask
from nlr_lab.training import Arm, run_training
from seeds import rng
from training_helpers import tiny_recipe

RANKS = tuple(range(1, 10))
MODEL = {"width": 32, "layers": 1, "heads": 2, "hidden": 48, "vocab_size": 67, "ranks": RANKS}
MODEL |= {"modes": ("compiled",), "rounds": 1, "warmup": 1, "clock": "wall"}


@pytest.fixture(autouse=True)
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
    Image.fromarray(rng().integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(tmp_path / "photo.png")
    field = FieldConfig(in_features=2, out_features=3, width=32)
    recipe = FieldRecipe(
        name="tiny",
        problem=ImageSettings(source=str(tmp_path / "photo.png"), points=16, field=field),
        method="sine:rank=1,omega=30",
        train=FitConfig(steps=1, save_every=0, threads=1, device="cpu", compile=True),
        arms=tuple(f"sine:rank={rank}" for rank in RANKS),
        seeds=1,
    )
    compare(recipe, tmp_path / "out", quiet=True, timing_rounds=1, command="compare")
    met, ok = compiled()
    assert met == ok == len(RANKS), "of equal forms the timing's are the fits'"


def test_comparison_of_trained_models_is_compiled(compiled, tmp_path):
    words = [random.choice(["the", "cat", "sat", "on", "a", "mat"]) for _ in range(2000)]
    (tmp_path / "text.txt").write_text(" ".join(words), encoding="utf-8")
    text = TextData(source=str(tmp_path / "text.txt"), sequence_length=8, vocab_size=270, cache_dir=str(tmp_path))
    task = LanguageModelTask(text=text, backbone=GlmBackbone(layers=1, width=16, heads=2, hidden=32))
    recipe = tiny_recipe(task, "baseline", steps=1, batch_size=2, compile=True)
    arms = (Arm(), *(Arm(method="noble", name=f"r{rank}", settings={"rank": rank}) for rank in range(1, 5)))
    compare(recipe, tmp_path / "out", arms=arms, seeds=1, tune_lr=(), timing_rounds=0, quiet=True)
    met, ok = compiled()
    assert met == ok >= 2 * len(arms)  # for training and for evaluation


def test_one_form_for_batches_of_all_lengths(compiled, tmp_path, monkeypatch):
    words = finetune_helpers.WORDS
    drawn = lambda *_: " ".join(random.choices(words, k=random.randint(1, 25)))  # noqa: E731
    monkeypatch.setattr(finetune_helpers, "sentence", drawn)
    task = finetune_helpers.glue_task(tmp_path)
    assert len(set(task.prepare(progress=False).train.lengths)) > 8, "more than torch keeps forms"
    run_training(finetune_helpers.recipe(task, steps=20, batch_size=2, compile=True), tmp_path / "out", quiet=True)
    met, ok = compiled()
    assert met == ok <= 3, "for training and for evaluation, the last batch of which may be of one example"
