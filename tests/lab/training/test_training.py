"""run_training from end to end: what is written, what is refused, what is the same in all arms."""

import functools
import itertools
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import training_helpers
from nlr_lab.training import Arm, Recipe, TrainResult, run, run_training, trainer
from nlr_lab.training.trainer import EndlessShuffle
from nlr_lab.watch.runs import Watched
from nonlinear_lowrank.hub import load_model, load_tokenizer
from nonlinear_lowrank.optim import param_groups
from refusals import assert_refused
from training_helpers import SEEN, FakeText, cut_back, make_recipe

TEXT = FakeText()


def train(out: Path, arm="noble:rank=4", prepared=TEXT, resume=False, overwrite=False, **settings) -> TrainResult:
    recipe = arm if isinstance(arm, Recipe) else make_recipe(arm, **settings)
    return run_training(recipe, out, prepared=prepared, resume=resume, overwrite=overwrite, quiet=True)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_run_leaves_its_files_and_numbers(tmp_path):
    recipe = make_recipe(tracker="tensorboard")
    result = train(tmp_path / "out", recipe)
    names = {"recipe.json", "data.json", "result.json", "log.jsonl", "model", "checkpoints", "tensorboard", ".lock"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert TrainResult.from_json((tmp_path / "out" / "result.json").read_text()) == result
    kept = json.loads((tmp_path / "out" / "recipe.json").read_text())
    assert Recipe.from_dict(kept["recipe"]) == recipe
    versions = kept["versions"]
    assert versions["torch"] == torch.__version__.split("+")[0] or versions["torch"] == torch.__version__
    assert (result.status, result.steps, result.arm, result.lr) == ("done", 12, "noble-r4", 1e-2)
    assert [step for step, _ in result.curve] == [5, 10, 12]
    assert [step for step, _ in result.train_curve] == [2, 3, 4, 5, 6, 8, 9, 10, 12]
    (view,) = Watched(tmp_path / "out").look().runs
    assert (view.state, view.steps) == ("done", 12)
    assert view.curves["evaluation loss"] == [*result.curve]
    assert view.curves["training loss"] == [*result.train_curve]
    assert result.final_loss == result.curve[-1][1] < result.curve[0][1] < 4.5
    assert result.bits_per_byte == pytest.approx(result.final_loss / math.log(2) / 2.5)
    assert result.tokens_per_step == 4 * training_helpers.LENGTH
    assert list((tmp_path / "out" / "tensorboard").glob("events*"))
    model = load_model(tmp_path / "out" / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) == result.parameters
    # q, k, v, o 32 -> 32; gate-up 32 -> 96; down 48 -> 32; CosNet: r (d_in + d_out) + r r + 4 r
    assert result.parameters_added == 2 * sum(4 * (a + b) + 32 for a, b in [(32, 32)] * 4 + [(32, 96), (48, 32)])
    assert load_tokenizer(tmp_path / "out" / "model").vocab_size == training_helpers.VOCABULARY


def test_last_step_is_evaluated_and_saved_once(tmp_path):
    result = train(tmp_path / "out", steps=10, eval_every=5, save_every=5)
    assert [step for step, _ in result.curve] == [5, 10]
    assert len({step for step, _ in result.train_curve}) == len(result.train_curve)
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir()) == ["step-000005", "step-000010"]


@pytest.mark.parametrize("arm", ["noble:rank=4", "training_helpers:plain_module"])
def test_evaluation_is_the_mean_over_every_token(tmp_path, arm):
    """Also where the batches do not divide the sequences and some labels are masked."""
    text, masks = FakeText(valid=11), not arm.endswith("plain_module")  # whose loss is only the mean of the means
    text.valid.labels = text.valid.tokens.clone()
    text.valid.labels[3, 5 if masks else 16 :] = -100
    losses = [train(tmp_path / str(size), arm, text, steps=3, eval_batch_size=size).final_loss for size in (4, 11, 1)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    if masks:
        model = load_model(tmp_path / "4" / "model").double().eval()
        with torch.no_grad():
            logits = model(input_ids=text.valid.tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text.valid.labels[:, 1:].flatten())
        assert losses[0] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        ({"min_lr_share": 0.1}, {1: 0.5, 2: 1.0, 7: 0.55, 12: 0.1}),
        ({"schedule": "cosine"}, {1: 0.5, 2: 1.0, 7: 0.5, 12: 0.0}),
        ({"schedule": "wsd", "decay_share": 0.33, "min_lr_share": 0.2}, {1: 0.6, 2: 1.0, 8: 1.0, 10: 0.6, 12: 0.2}),
        (
            {"schedule": "wsd", "decay_share": 0.33, "steps": 0, "epochs": 1, "warmup_steps": 0, "warmup_share": 0.2},
            {1: 0.5, 2: 1.0, 8: 1.0, 10: 0.5, 12: 0.0},
        ),
        ({"weight_decay": 0.02}, {1: 0.5, 2: 1.0, 7: 0.5, 12: 0.0}),
    ],
)
def test_learning_rates_follow_the_schedule(tmp_path, settings, factors):
    """In every group, whatever its multiplier, and in a resumed run; the checkpoint of step k has step k + 1's rate."""
    recipe = make_recipe("noble:rank=4,lr=3e-3", save_every=1, keep_checkpoints=12, **settings)
    text = FakeText(train=48)
    train(tmp_path / "out", recipe, text)
    train(cut_back(tmp_path / "out", tmp_path / "cut", 7), recipe, text, resume=True)
    model = recipe.arm.apply(recipe.task.build_model(TEXT, seed=0))
    decay = recipe.train.weight_decay
    expected = {group["role"]: group for group in param_groups(model, 3e-3, decay, verbose=False)}
    for step, factor in factors.items():
        for folder in ("out", *["cut"] * (step >= 7)):
            groups = json.loads((tmp_path / f"{folder}/checkpoints/step-{step:06d}/state.json").read_text())["groups"]
            assert {group["role"] for group in groups} == expected.keys()
            for group in groups:
                wanted = expected[group["role"]]
                assert group["lr"] == pytest.approx(wanted["lr"] * factor, abs=1e-12), (folder, step)
                assert (group["weight_decay"], group["betas"]) == (wanted["weight_decay"], [0.9, 0.98])
                assert sorted(group["params"]) == sorted(name for name, _ in wanted["params"])


def test_compiled_run_is_the_same_with_plain_names(tmp_path, monkeypatch):
    plain = train(tmp_path / "plain", dropout=0.0, steps=4)
    # The backend only traces: the plumbing is checked here, not inductor.
    settings = functools.partial(run.TrainingArguments, torch_compile_backend="eager")
    monkeypatch.setattr(run, "TrainingArguments", settings)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = train(tmp_path / "compiled", dropout=0.0, steps=4, compile=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one for training, one for evaluation"
    assert compiled.final_loss == pytest.approx(plain.final_loss, rel=1e-4)
    for path in ("model", "checkpoints/step-000004"):
        names = [set(load_file(tmp_path / run / path / "model.safetensors")) for run in ("plain", "compiled")]
        assert names[0] == names[1]
    cut = cut_back(tmp_path / "compiled", tmp_path / "cut", 2)
    resumed = train(cut, dropout=0.0, steps=4, compile=True, resume=True)
    assert resumed.final_loss == compiled.final_loss


def test_noise_is_on_the_embeddings_of_training_alone(tmp_path):
    # With a learning rate of next to nothing the model is that of the start.
    known = {"lr": 1e-30, "dropout": 0.0, "steps": 2, "eval_every": 1, "log_every": 1}
    alpha, seen = 16.0, {}
    for noise in (0.0, alpha):
        training_helpers.EMBEDDED.clear()
        result = train(tmp_path / str(noise), "training_helpers:watch_embeddings", embedding_noise=noise, **known)
        seen[noise] = (result, training_helpers.EMBEDDED.copy())
    (plain, clean), (noisy, shaken) = seen.values()
    assert noisy.curve == plain.curve
    assert all(one != other for one, other in zip(noisy.train_curve, plain.train_curve, strict=True))
    bound = alpha / math.sqrt(training_helpers.LENGTH * 32)
    for one, other in zip(clean, shaken, strict=True):
        added = (other - one).flatten()
        assert bound * 0.95 < added.abs().max() <= bound * (1 + 1e-4)
        assert abs(added.mean()) < 0.1 * bound


def test_labels_are_not_smoothed_where_a_model_gives_no_logits(tmp_path):
    words = "label_smoothing needs logits, which the model does not return in training; omit it"
    assert_refused(words, train, tmp_path / "out", "training_helpers:plain_module", label_smoothing=0.1)


def test_same_batches_whatever_the_arm_draws(tmp_path):
    def seen(name: str, arm="training_helpers:spy", **settings) -> torch.Tensor:
        SEEN.clear()
        train(tmp_path / name, arm, **{"seed": 3, **settings})
        return torch.cat([batch["input_ids"] for batch in SEEN])

    one = seen("a")
    assert len(one) == 12 * 4
    assert torch.equal(one, seen("b", "training_helpers:spy,draws=17", gradient_accumulation=2, eval_every=1))
    assert torch.equal(one, seen("c", dataloader_workers=1))
    assert not torch.equal(one, seen("d", seed=4))


def test_runs_repeat_and_seeds_differ(tmp_path):
    torch.manual_seed(1)
    one = train(tmp_path / "a", dropout=0.0)
    torch.manual_seed(2)  # the caller's generator is of no account, nor is how often a run is evaluated
    often = train(tmp_path / "b", dropout=0.0, eval_every=1, log_every=1, save_every=1)
    assert often.final_loss == one.final_loss
    files = [(tmp_path / run / "model/model.safetensors").read_bytes() for run in ("a", "b")]
    assert files[0] == files[1]
    assert train(tmp_path / "d", dropout=0.0, seed=1).final_loss != one.final_loss
    parts = train(tmp_path / "e", dropout=0.0, gradient_accumulation=4)
    assert [loss for _, loss in parts.curve] == pytest.approx([loss for _, loss in one.curve], rel=1e-4)


def test_shuffle_covers_the_text_before_it_repeats():
    order = list(EndlessShuffle(10, 34, seed=5))
    assert len(order) == len(EndlessShuffle(10, 34, seed=5)) == 34
    for start in (0, 10, 20):
        assert sorted(order[start : start + 10]) == list(range(10))
    assert order[:10] != order[10:20]
    assert order != list(EndlessShuffle(10, 34, seed=6))
    assert order[:20] == list(EndlessShuffle(10, 20, seed=5)), "the length of the run does not change the order"
    passes = list(EndlessShuffle(10, 34, seed=5, passes=True))
    assert sorted(passes[:20]) == list(range(20))
    assert [index % 10 for index in passes] == order


def test_shuffle_of_very_many_is_bounded_and_covers_them_all(monkeypatch):
    monkeypatch.setattr(trainer, "_SHUFFLED", 64)
    monkeypatch.setattr(trainer, "_RUN", 4)
    order = list(EndlessShuffle(1001, 2002, seed=5))
    for start in (0, 1001):
        assert sorted(order[start : start + 1001]) == list(range(1001))
    assert order[:1001] != order[1001:]
    assert order == list(EndlessShuffle(1001, 2002, seed=5))
    near = [one for one, two in itertools.pairwise(order) if abs(one - two) == 1]
    assert len(near) < 150, "neighbours are apart: 48 would be together by chance"
    assert len({index // 100 for index in order[:64]}) >= 5, "a window is from all over"


def test_batches_of_similar_lengths_hold_every_example_once_a_pass():
    lengths = torch.randint(1, 90, (640,)).tolist()
    order, plain = list(EndlessShuffle(640, 1280, seed=5, lengths=lengths, batch=8)), EndlessShuffle(640, 1280, seed=5)
    for first in range(0, 1280, 400):  # a window is 50 batches
        assert sorted(order[first : first + 400]) == sorted(list(plain)[first : first + 400])
    longest = [max(lengths[index] for index in order[first : first + 8]) for first in range(0, 1280, 8)]
    mixed = [max(lengths[index] for index in list(plain)[first : first + 8]) for first in range(0, 1280, 8)]
    assert sum(longest) * 8 < 1.1 * 2 * sum(lengths) < sum(mixed) * 8
    assert longest != sorted(longest, reverse=True), "the batches themselves are shuffled"
    order = list(EndlessShuffle(800, 800, seed=5, lengths=range(800), batch=8))
    one, two = ([max(order[at : at + 8]) for at in range(first, first + 400, 8)] for first in (0, 400))
    assert np.argsort(one).tolist() != np.argsort(two).tolist(), "each window in an order of its own"


def test_used_folder_is_refused_and_left_alone(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        assert_refused("choose another folder", train, out, **options)
    assert snapshot(out) == {"thesis.txt": b"years of work"}
    (tmp_path / "file").write_text("x")
    for place, options, words in (
        ("file", {}, "is a file"),
        ("file/out", {}, "cannot write to"),
        ("new", {"resume": True, "overwrite": True}, "choose one"),
    ):
        assert_refused(words, train, tmp_path / place, **options)
    assert not (tmp_path / "new").exists()


def test_finished_run_is_kept_by_resume_and_replaced_by_overwrite(tmp_path):
    out = tmp_path / "out"
    first = train(out)
    before = snapshot(out)
    assert_refused("--resume to continue or --overwrite", train, out)
    for change, field in (
        ({"lr": 2e-2}, "train.lr"),
        ({"arm": "noble:rank=5"}, "arm.settings.rank"),
        ({"arm": "baseline"}, "arm.method"),
        ({"dropout": 0.2}, "task.backbone.dropout"),
    ):
        assert_refused(rf"^{field} was ", train, out, resume=True, **change)
    assert train(out, resume=True, log_every=1, keep_checkpoints=1) == first, "these change no number"
    assert snapshot(out) == before, "a finished run is not run again"
    (out / "result.json").write_text("{}")
    assert replace(train(out, resume=True), seconds=0) == replace(first, seconds=0), "from the last checkpoint"
    assert json.loads((out / "result.json").read_text())["curve"] == [list(each) for each in first.curve]
    (out / "result.json").unlink()
    assert_refused("no longer the one", train, out, resume=True, prepared=FakeText(fingerprint="other"))
    (out / "letter.txt").write_text("somebody's")
    assert train(out, overwrite=True, arm="baseline", steps=2).arm == "baseline"
    assert (out / "letter.txt").read_text() == "somebody's"
    assert Recipe.from_dict(json.loads((out / "recipe.json").read_text())["recipe"]).arm == Arm()
    (out / "recipe.json").write_text('{"recipe": {"name"')
    fix = f"recipe.json is damaged, .*; restore it, or delete {out} to retrain"
    assert_refused(fix, train, out, arm="baseline", steps=2, resume=True)
    assert_refused("not the result", TrainResult.from_json, '{"arm": "x"}')


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arm": "noble:rank=32"}, "rank 32 is too high"),
        ({"arm": "training_helpers:no_module"}, "gave back NoneType"),
        ({"tracker": "carrier-pigeon"}, "carrier-pigeon is not supported, only"),
        ({"tracker": "comet_ml"}, "comet_ml is not installed: pip install comet-ml, or --tracker tensorboard"),
        ({"prepared": FakeText(valid=0)}, "too short"),
        ({"group_by_length": True}, "batches of different lengths"),
        ({"arm": "training_helpers:plain_module", "embedding_noise": 5.0}, "embedding_noise is for token embeddings"),
    ],
)
def test_bad_input_writes_nothing(tmp_path, settings, message):
    assert_refused(message, train, tmp_path / "out", **settings)
    assert not list(tmp_path.iterdir())


def test_quiet_is_silent_and_loud_is_one_line_an_evaluation(tmp_path, capfd):
    train(tmp_path / "a")
    assert capfd.readouterr() == ("", "")
    run_training(make_recipe(), tmp_path / "b", prepared=TEXT)
    printed = capfd.readouterr()
    assert printed.out.startswith("noble: 12 linears swapped"), "what the arm changed, and nothing else"
    assert printed.out.count("linears swapped") == 1
    run_training(make_recipe(steps=1, warmup_steps=0), tmp_path / "c", prepared=TEXT, report=False)
    assert capfd.readouterr().out == ""
    lines = printed.err.splitlines()
    assert [line.split()[2] for line in lines] == ["5/12", "10/12", "12/12"]
    assert all("train" in line and "eval" in line and "bits/byte" in line for line in lines)


def test_process_settings_are_put_back(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.get_num_threads(), dict(os.environ)
    train(tmp_path / "a", threads=2, bf16=True, deterministic=True, steps=2)
    assert (torch.get_num_threads(), dict(os.environ)) == before
    assert torch.is_deterministic_algorithms_warn_only_enabled()  # as conftest set it


@pytest.mark.parametrize("norm", [0.01, 0.0])
def test_gradients_are_clipped_to_the_norm(tmp_path, norm):
    train(tmp_path / "out", steps=1, warmup_steps=0, max_grad_norm=norm)
    files = (tmp_path / "out" / "checkpoints" / "step-000001" / "optimizer").glob("*.safetensors")
    state = {name: value for file in files for name, value in load_file(file).items()}
    gradients = torch.cat([value.flatten() for name, value in state.items() if name.startswith("exp_avg/")]) / 0.1
    assert gradients.norm() > 0.02 if norm == 0 else gradients.norm().item() == pytest.approx(norm, rel=1e-3)


def test_evaluation_has_batches_of_its_own_size(tmp_path):
    text, sizes = FakeText(), set()
    collate = text.collate

    def noted(items):
        sizes.add(len(items))
        return collate(items)

    object.__setattr__(text, "collate", noted)
    train(tmp_path / "out", prepared=text, steps=2, eval_batch_size=3)
    assert sizes == {3}
