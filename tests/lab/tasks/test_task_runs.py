"""Whole runs of tasks that train from scratch: the same data in all arms, exact resumption, saved models, commands."""

import json

import numpy as np
import pytest
import torch

import finetune_helpers
import pretraining_helpers as helpers
from cli_helpers import refused, succeed
from nlr_lab.compare import compare
from nlr_lab.tasks.images.examples import Pixels
from nlr_lab.training import Arm, Recipe, run_training
from nlr_lab.training.result import TrainResult
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub import load_model
from training_helpers import SEEN, FakeText, make_recipe, tiny_recipe

KINDS = ("masked", "vit", "convnext")
ARMS = {"masked": "noble:rank=4", "vit": "noble:rank=4", "convnext": helpers.LAST_STAGE}


def make_task(kind, root, **fields):
    if kind == "masked":
        path = root / "corpus.txt"
        path = path if path.exists() else helpers.corpus(root)
        return helpers.masked_task(path, cache_dir=str(root / "cache"), sizes={"dropout": 0.1})
    varied = {"crop": "resized", "flip": True}
    if kind == "vit":
        return helpers.image_task(root, varied, backbone={"dropout": 0.1}, **fields)
    return helpers.image_task(root, varied, convnext={"drop_path": 0.2}, **fields)


@pytest.mark.parametrize("kind", ["masked", "vit"])
def test_arms_see_the_same_data_in_every_micro_batch(tmp_path, kind):
    seen, task = {}, make_task(kind, tmp_path)
    for name, settings in {"a": {}, "b": {"gradient_accumulation": 2}, "seed": {"seed": 1}}.items():
        SEEN.clear()
        arm = f"training_helpers:spy,draws={100 * (name == 'b')}"
        run_training(helpers.recipe(task, arm, **settings), tmp_path / name, quiet=True)
        names = ("labels", "input_ids" if kind == "masked" else "pixel_values")
        seen[name] = {each: torch.cat([batch[each] for batch in SEEN]) for each in names}
    for name, one in seen["a"].items():
        assert torch.equal(one, seen["b"][name])
        assert not torch.equal(one, seen["seed"][name])
    if kind == "vit":
        labels = seen["a"]["labels"]
        assert labels.shape == (24, 3)
        assert ((labels > 0).sum(1) == 2).any(), "labels are mixed"


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("kind", ["next", "masked", "mixed", "classes", "answers"])
def test_smoothed_labels_are_those_of_torch_in_training_alone(tmp_path, kind, micro):
    # With a learning rate of next to nothing the model is that of the start.
    finetune_helpers.encoder(tmp_path / "bert", dropout=0.0)
    task = {
        "next": lambda: make_recipe(dropout=0.0).task,
        "masked": lambda: helpers.masked_task(helpers.corpus(tmp_path), cache_dir=str(tmp_path / "cache")),
        "mixed": lambda: helpers.image_task(tmp_path, {"flip": True}),
        "classes": lambda: finetune_helpers.glue_task(tmp_path),
        "answers": lambda: finetune_helpers.instruction_task(tmp_path),
    }[kind]()
    prepared = FakeText() if kind == "next" else task.prepare(progress=False)
    settings = {"lr": 1e-30, "steps": 2, "log_every": 2, "eval_every": 2, "gradient_accumulation": micro}
    found = {}
    for share in (0.0, 0.2):
        SEEN.clear()
        own = tiny_recipe(task, "training_helpers:spy", label_smoothing=share, **settings)
        found[share] = run_training(own, tmp_path / str(share), prepared=prepared, quiet=True)
    assert found[0.2].curve == found[0.0].curve
    model, smooth = load_model(tmp_path / "0.0" / "model").eval(), []
    for start in range(0, len(SEEN), micro):
        logits, labels = [], []
        for batch in SEEN[start : start + micro]:
            with torch.no_grad():
                found_logits = model(**{name: each for name, each in batch.items() if name != "labels"}).logits
            shift = kind in ("next", "answers")
            logits.append((found_logits[:, :-1] if shift else found_logits).flatten(0, -2))
            labels.append(batch["labels"][:, 1:].flatten() if shift else batch["labels"])
        labels = torch.cat(labels) if kind == "mixed" else torch.cat([each.flatten() for each in labels])
        smooth.append(torch.nn.functional.cross_entropy(torch.cat(logits), labels, label_smoothing=0.2).item())
    assert found[0.2].train_curve[-1][1] == pytest.approx(sum(smooth) / 2, rel=1e-5)
    assert found[0.2].train_curve != found[0.0].train_curve


@pytest.mark.parametrize("kind", KINDS)
def test_run_resumes_exactly_and_its_model_loads_in_a_fresh_process(tmp_path, kind):
    # 60 texts are about 400 sequences: the batches go through them more than once.
    settings = {"batch_size": 80 if kind == "masked" else 12, "steps": 12, "save_every": 6, "eval_every": 6}
    own = helpers.recipe(make_task(kind, tmp_path), ARMS[kind], **settings)
    run_training(own, tmp_path / "whole", quiet=True)
    helpers.assert_resumes_exactly(own, tmp_path / "whole", tmp_path / "cut")
    folder, masked = tmp_path / "whole" / "model", kind == "masked"
    inputs = {"input_ids": torch.randint(5, 200, (2, 16))} if masked else {"pixel_values": torch.randn(2, 1, 8, 8)}
    with torch.no_grad():
        expected = load_model(folder)(**inputs).logits
    auto = "AutoModelForMaskedLM" if masked else "AutoModelForImageClassification"
    name, logits = helpers.logits_in_a_fresh_process(folder, auto, inputs)
    short = {"masked": "EuroBertForMaskedLM", "vit": "ViTForImageClassification"}
    assert name == f"NonlinearLowrank{short.get(kind, 'ConvNextForImageClassification')}"
    assert torch.equal(logits, expected)


def test_masked_evaluation_is_the_mean_over_the_masked_tokens(tmp_path):
    own = helpers.recipe(make_task("masked", tmp_path))
    prepared = own.task.prepare(progress=False)
    assert len(prepared.valid) == 7, "no multiple of the batch"
    result = run_training(own, tmp_path / "run", prepared=prepared, quiet=True)
    assert Recipe.from_dict(json.loads(json.dumps(own.to_dict()))) == own
    assert result.bits_per_byte is None
    assert "valid_bytes_per_token" not in json.loads((tmp_path / "run" / "result.json").read_text())["data"]
    inputs, labels = (torch.stack([prepared.valid[i][name] for i in range(7)]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        logits = load_model(tmp_path / "run" / "model")(input_ids=inputs).logits.double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    assert result.final_loss == pytest.approx(loss, rel=1e-5)


def test_image_run_reports_losses_with_and_without_augmentation(tmp_path):
    own = helpers.image_task(tmp_path, {"randaugment": 0})
    result = run_training(helpers.recipe(own, steps=60, eval_every=20, save_every=60), tmp_path / "run", quiet=True)
    assert TrainResult.from_json((tmp_path / "run" / "result.json").read_text()) == result
    assert [step for step, _ in result.plain_curve] == [20, 40, 60]
    prepared, model = own.prepare(), load_model(tmp_path / "run" / "model")
    assert isinstance(prepared.tokenizer, Pixels)
    inputs = prepared.collate([prepared.plain[index] for index in range(10)])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(inputs["pixel_values"]).logits, inputs["labels"])
    assert result.plain_curve[-1][1] == pytest.approx(loss.item(), rel=1e-4)
    # Blended labels cannot be fitted: their loss stays above that of the same images as they are.
    assert result.train_curve[-1][1] > result.plain_curve[-1][1]
    assert result.metric == "accuracy"
    assert result.score > 0.5


def test_comparison_reports_both_training_losses(tmp_path):
    own = helpers.recipe(helpers.image_task(tmp_path), log_every=1, save_every=6)
    arms = [Arm.parse("baseline"), Arm.parse("noble:rank=4")]
    record = compare(own, tmp_path / "out", arms=arms, seeds=2, timing_rounds=2, quiet=True).results
    report = (tmp_path / "out" / "report.md").read_text()
    assert "## Training loss" in report
    assert "without augmentation" in report
    for arm in record["arms"]:
        runs = sorted((tmp_path / "out" / "runs" / arm["name"]).rglob("result.json"))
        found = [json.loads(path.read_text()) for path in runs]
        for which in ("train", "plain"):
            mean = np.mean([each[f"{which}_curve"][-1][1] for each in found])
            assert arm[f"{which}_loss"] == pytest.approx(mean)
        assert arm["flops_per_token"] > 0
    for which in ("train", "plain"):
        delta = record["arms"][1][f"{which}_delta"]
        one, two = (arm[f"{which}_loss"] for arm in record["arms"])
        assert delta["value"] == pytest.approx(two - one)
        assert delta["n"] == 2
        assert f"| {two:.4f} | {delta['value']:+.4f} [" in report


def test_odd_batches_are_refused_where_pairs_are_mixed(tmp_path):
    with pytest.raises(UserError, match="takes 3 images at once"):
        run_training(helpers.recipe(helpers.image_task(tmp_path), batch_size=3), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    plain = helpers.image_task(tmp_path, {"randaugment": 0, "mixup": 0.0, "cutmix": 0.0})
    run_training(helpers.recipe(plain, batch_size=3, steps=1), tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("name", "score", "key", "said", "options"),
    [
        (
            "mlm-demo",
            "final_loss",
            "loss",
            "nats per masked token",
            "--sequence-length 16 --vocab-size 300 --eval-sequences 5 --batch-size 2 --steps 4 --warmup-steps 1 "
            "--eval-every 2 --save-every 4",
        ),
        ("vit-demo", "score", "accuracy", "accuracy 0.", "--patch 4 --mixup 0 --cutmix 0 --epochs 1 --batch-size 9"),
    ],
)
def test_command_trains_and_evaluate_repeats(tmp_path, capsys, monkeypatch, name, score, key, said, options):
    monkeypatch.setenv("NLR_CACHE", str(tmp_path / "cache"))
    source = helpers.corpus(tmp_path) if name == "mlm-demo" else finetune_helpers.image_file(tmp_path / "images.npz")
    run, sizes = str(tmp_path / "run"), "--layers 1 --width 16 --heads 2 --hidden 16 --tracker none --arm noble:rank=4"
    arguments = ["train", name, "--out", run, *sizes.split(), *options.split(), "--source", str(source)]
    out = succeed(capsys, *arguments)
    assert said in out
    assert "nlr generate" not in out
    printed = succeed(capsys, "evaluate", run, "--out", tmp_path / "score.json")
    assert f"held-out data of {name}: {key}" in printed
    found = json.loads((tmp_path / "score.json").read_text())["held_out"]
    assert found[key] == pytest.approx(json.loads((tmp_path / "run" / "result.json").read_text())[score], rel=1e-5)
    assert f"loss {found['loss']:.4f} " in out, "of the same examples"
    wrong = [*arguments, "--overwrite", "--size", "9"] if key == "accuracy" else ["generate", run, "--prompt", "a"]
    assert ("patches of 4" if key == "accuracy" else "not a causal language model") in refused(capsys, *wrong)
