"""NoRA's rivals, its figures, and MMLU's score of a tuned model."""

import errno
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import ViTConfig, ViTForImageClassification

from cli_helpers import succeed
from finetune_helpers import SIZES
from nlr_lab.evaluation.harness import score_tasks
from nlr_lab.evaluation.local_tasks import find_local_tasks
from nlr_lab.reproduce import nora, nora_arms
from nlr_lab.reproduce.nora_figures import convergence, grad_cam
from nlr_lab.reproduce.run import _evaluate, run_table, score_model
from nlr_lab.reproduce.table import SCALES, Absent, tables
from nonlinear_lowrank.hub.loading import load_model, load_tokenizer
from nonlinear_lowrank.methods.rational.parametric import ELU, AReLU, PReLU
from refusals import assert_refused, refuse_to_open
from task_helpers import byte_tokenizer, mmlu_rows, tiny_model, write_lines


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = ViTConfig(**SIZES, image_size=8, patch_size=2, num_channels=1, num_labels=3)
    return ViTForImageClassification(config).eval()


@pytest.fixture
def batch():
    return {"pixel_values": torch.randn(4, 1, 8, 8), "labels": torch.tensor([0, 1, 2, 0])}


@pytest.mark.parametrize(
    ("change", "settings", "trained"),
    [
        (nora_arms.prompts, {"count": 5}, 5 * 16),
        (nora_arms.bottlenecks, {"width": 3}, 2 * (16 * 3 + 3 + 3 * 16 + 16)),
        (nora_arms.activations, {"kind": "prelu"}, 2 * 32),
        (nora_arms.activations, {"kind": "arelu"}, 4),
        (nora_arms.activations, {"kind": "elu"}, 2),
    ],
)
def test_rivals_train_what_they_put_in_and_the_head(change, settings, trained, model, batch):
    before = model(batch["pixel_values"]).logits
    changed = change(model, **settings)
    logits = changed(batch["pixel_values"]).logits
    assert torch.equal(before, logits) == (change is nora_arms.bottlenecks)  # which starts as the pretrained model
    logits.sum().backward()
    sizes = {name: each.numel() for name, each in changed.named_parameters() if each.requires_grad}
    head = {"classifier.weight", "classifier.bias"}
    assert sizes.keys() >= head
    assert sum(size for name, size in sizes.items() if name not in head) == trained
    assert all(each.grad is not None for each in changed.parameters() if each.requires_grad)


def test_prompts_are_tokens_behind_the_class_token(model, batch):
    plain = model.vit.embeddings(batch["pixel_values"])
    tokens = nora_arms.prompts(model, 5).vit.embeddings(batch["pixel_values"])
    assert torch.equal(tokens[:, [0, *range(6, 22)]], plain)
    assert torch.equal(tokens[1, 1:6], model.vit.embeddings.prompts)


@pytest.mark.parametrize(
    ("module", "tensors", "expected"),
    [
        (PReLU(3), {"slope": [0.5, 1.0, 2.0]}, [-1.0, 0.0, 3.0]),
        (AReLU(), {"alpha": [0.9], "beta": [0.0]}, [-1.8, 0.0, 4.5]),
        (AReLU(), {"alpha": [-2.0], "beta": [0.0]}, [-0.02, 0.0, 4.5]),
        (ELU(), {"alpha": [1.5]}, [1.5 * math.expm1(-2), 0.0, 3.0]),
    ],
)
def test_learned_activations_are_their_papers(module, tensors, expected):
    module.load_state_dict({name: torch.tensor(values) for name, values in tensors.items()})
    torch.testing.assert_close(module(torch.tensor([-2.0, 0.0, 3.0])), torch.tensor(expected))


def test_unknown_activation_is_refused(model):
    assert_refused("kind", nora_arms.activations, model, "gelu")


def test_grad_cam_is_the_gradient_of_the_labels_logit_by_hand(model, batch):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    x = model.vit.embeddings(batch["pixel_values"])
    x, last = model.vit.layers[0](x), model.vit.layers[1]
    inner = last.layernorm_before(x).detach().requires_grad_()
    x = x + last.attention(inner)[0]
    x = x + last.mlp(last.layernorm_after(x))
    logits = model.classifier(model.vit.layernorm(x)[:, 0])
    (gradient,) = torch.autograd.grad(logits[range(4), batch["labels"]].sum(), inner)
    expected = F.relu(torch.einsum("bpd,bd->bp", inner[:, 1:], gradient[:, 1:].mean(1)))
    found = grad_cam(model, batch)
    assert found.shape == (4, 4, 4)
    assert found.sum() > 0
    torch.testing.assert_close(found.flatten(1), expected.detach())


def test_convergence_is_the_first_epoch_within_a_point_of_the_best():
    curves = [[[10, 0.5], [20, 0.895], [30, 0.9], [40, 0.88]], [[10, 0.3], [20, 0.4], [30, 0.5], [40, 0.6]]]
    arm = {"name": "NoRA", "runs": [{"metric_curve": curve, "steps": 40} for curve in curves]}
    trial = SimpleNamespace(arms={"NoRA": ""}, recipe=SimpleNamespace(train=SimpleNamespace(epochs=8)))
    found = convergence("digits", SimpleNamespace(results={"arms": [arm]}), trial, None)
    cell = found["NoRA"]["epochs, digits"]
    assert (cell["value"], cell["n"]) == ((4 + 8) / 2, 2)


def test_a_tuned_model_is_scored_on_a_folder_of_mmlu(tmp_path):
    torch.manual_seed(0)
    subjects, folder = ["astronomy", "anatomy"], tmp_path / "model"
    tokenizer = byte_tokenizer()
    tiny_model(tokenizer, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, count in (("test", 12), ("dev", 2)):
        write_lines(tmp_path / f"{name}.jsonl", mmlu_rows(subjects, count))
    local = find_local_tasks(["mmlu_local"], tmp_path, shots=2)
    plain = score_tasks(load_model(folder), load_tokenizer(folder), local=local)
    found = score_model(None, folder, ["mmlu_stem", "mmlu_other"], {"mmlu": str(tmp_path)}, 2)
    assert found == {
        "mmlu_stem": 100 * plain["mmlu_local_astronomy"]["acc,none"],
        "mmlu_other": 100 * plain["mmlu_local_anatomy"]["acc,none"],
    }


def test_scores_are_kept_by_where_the_questions_came_from(tmp_path, monkeypatch):
    run = {"seed": 1, "lr": 1e-3, "init": "", "head_lr": 1e-2}
    own = tmp_path / "runs/NoRA/head-0.01/lr-0.001/seed-1"
    own.mkdir(parents=True)
    asked = []

    def score(_task, folder, names, sources, _shots):
        assert folder == own / "model"
        asked.append(sources["mmlu"])
        return dict.fromkeys(names, float(len(asked)))

    monkeypatch.setattr("nlr_lab.reproduce.run.score_model", score)
    trial = SimpleNamespace(tasks={"MMLU": "mmlu"}, recipe=SimpleNamespace(task=None), shots=None)
    arm = SimpleNamespace(own={"name": "NoRA"}, runs=[run])
    found = [_evaluate(trial, tmp_path, arm, {"mmlu": folder})["MMLU"]["value"] for folder in ("a", "b", "a")]
    assert (found, asked) == ([1.0, 2.0, 1.0], ["a", "b"])


@pytest.mark.parametrize("scale", SCALES)
def test_qlora_is_compared_where_bitsandbytes_is(monkeypatch, scale):
    monkeypatch.setattr(nora, "find_spec", lambda name: name)
    parts = {trial.part: trial for trial in [*nora.tuned(scale), *nora.instructions(scale)] if hasattr(trial, "part")}
    types = {part: dict.fromkeys(trial.arms, trial.recipe.task.model.dtype) for part, trial in parts.items()}
    names = ["digits"] if scale == "demo" else ["CIFAR-10", "CIFAR-100"]
    for name in names:
        assert types[name]["LoRA"] == "float32"
        assert types[f"{name}-nf4"] == {"QLoRA": "nf4", "control, NoRA++ in 4 bits": "nf4"}
        assert parts[f"{name}-nf4"].arms["QLoRA"] == parts[name].arms["LoRA"]
        assert parts[f"{name}-nf4"].column == parts[name].column
    if scale != "demo":
        assert set(types["Alpaca-nf4"].values()) == {"nf4"}
        assert [*parts["Alpaca-nf4"].arms.values()] == [*parts["Alpaca"].arms.values()]
    monkeypatch.setattr(nora, "find_spec", lambda name: None)
    *_, absent = nora.tuned(scale)
    assert absent.rows[0] == "QLoRA"
    assert "bitsandbytes: pip install" in absent.why


def test_controls_that_are_absent_are_listed(tmp_path, monkeypatch):
    absent = Absent(rows=("QLoRA", "control"), why="not here")
    table = replace(tables()["nora/table1"], trials=lambda scale: [absent])
    record = run_table(table, "demo", tmp_path)
    cells = {row["row"]: row["ours"]["trained_m"] for row in record["rows"]}
    assert cells["QLoRA"] == cells["control"] == {"why": "not here"}
    refuse_to_open(monkeypatch, errno.ENOSPC, tmp_path / "nora-table1" / "demo" / ".tmp-table.md")
    assert_refused("cannot write the table to .*nora-table1.*: no space left", run_table, table, "demo", tmp_path)


@pytest.mark.slow
def test_figures_show_what_the_table_trained(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("NLR_CACHE", str(tmp_path / "cache"))
    recipe = nora.recipe

    def short(name):
        own = recipe(name)
        task = replace(own.task, images=replace(own.task.images, train_rows=100))
        return replace(own, task=task, train=replace(own.train, epochs=2))

    monkeypatch.setattr(nora, "recipe", short)
    succeed(capsys, "reproduce", "nora/table1", "--out", tmp_path)
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.glob("nora-table1/**/result.json")}
    found = {}
    for number in (4, 5, 6, 7):
        succeed(capsys, "reproduce", f"nora/fig{number}", "--out", tmp_path)
        record = json.loads((tmp_path / f"nora-fig{number}" / "demo" / "table.json").read_text())
        found[number] = {
            row["row"]: cell["value"] for row in record["rows"] for cell in row["ours"].values() if "value" in cell
        }
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("nora-*/**/result.json")} == runs
    assert set(found[4]) == {"full tuning", "LoRA", "DoRA", "NoRA", "NoRA++"}
    assert all(0 < value < 1 for value in found[4].values())
    assert set(found[5].values()) <= {1, 2}
    assert set(found[6]) == {"full tuning", "NoRA"}
    assert set(found[7]) == {"before tuning", "NoRA"}
    assert all(0 < value < 1 for value in found[7].values())
    for name in ("t-sne-digits.png", "grad-cam-digits.png"):
        assert (tmp_path / "nora-table1" / "demo" / name).stat().st_size > 10_000


def test_trained_activations_start_as_published():
    x = torch.tensor([-1.0, 1.0])
    starts = {PReLU: [-0.25, 1.0], AReLU: [-0.9, 1 + torch.tensor(2.0).sigmoid()], ELU: [torch.e**-1 - 1, 1.0]}
    for kind, values in starts.items():
        torch.testing.assert_close(kind()(x), torch.tensor(values))
