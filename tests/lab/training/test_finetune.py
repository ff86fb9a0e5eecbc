"""Fine-tuning from end to end: arms, what is trained and saved, resume, loading, comparing."""

import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import finetune_helpers as helpers
import nonlinear_lowrank as nlr
from cli_helpers import python_prints
from nlr_lab.compare import compare
from nlr_lab.evaluation.losses import open_saved, score_held_out
from nlr_lab.tasks.finetune.pretrained import Pretrained
from nlr_lab.tasks.task import AdapterSetup, Measure
from nlr_lab.training import Arm, Recipe, TrainConfig, TrainResult, run_training
from nlr_lab.training.arms import ARM_METHODS, apply_arm, build_model, optimizer_groups
from nlr_lab.training.result import judged
from nonlinear_lowrank.analysis.cost import count_parameters
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.card import loading_code
from refusals import assert_refused
from training_helpers import cut_back


def adapted(recipe: Recipe, prepared=None):
    prepared = recipe.task.prepare(progress=False) if prepared is None else prepared
    return apply_arm(recipe, recipe.arm, build_model(recipe, prepared))


def train(recipe: Recipe, out: Path, **options) -> TrainResult:
    return run_training(recipe, out, quiet=True, **options)


def test_controls_are_what_is_none_of_our_methods():
    controls = {name for name, method in ARM_METHODS.items() if method.control}
    tuned = {"full", "head", "lora", "dora", "peanut", "oft"}
    built = {
        "moe",
        "cola",
        "sltrain",
        "low-rank",
        "sigmoid-low-rank",
        "relu-low-rank",
        "identity-query",
        "residual-linear-query",
        "residual-query",
    }
    assert controls == {"baseline", "wide-mlp", "qk-norm"} | tuned | built


# Per arm: parameters beside the head's 34 (2 x 16 weights and 2 biases), on query and value of two layers.
COUNTS = {
    "head": 0,
    "lora:r=2": 2 * 2 * 2 * (16 + 16),
    "dora:r=2": 2 * 2 * (2 * 32 + 16),
    "peanut:r=2": 2 * 2 * 2 * (16 + 16),
    "oft:oft_block_size=4": 2 * 2 * (16 // 4) * 6,  # a block's rotation has 4 * 3 / 2
    "sine-lora:r=2,omega=100": 2 * 2 * 2 * (16 + 16),
    "sine-dora:r=2,omega=100": 2 * 2 * (2 * 32 + 16),
    "noble-adapter:r=2": 2 * 2 * (2 * 32 + 2 * 2 + 4 * 2),
}


@pytest.mark.parametrize("arm", COUNTS)
def test_arm_trains_its_adapter_and_the_head(root, arm):
    recipe = helpers.recipe(helpers.glue_task(root), arm)
    meta = apply_arm(recipe, recipe.arm, recipe.task.build_on_meta())
    for model in (adapted(recipe), meta):  # known before anything is loaded
        assert count_parameters(model, trainable=True) == COUNTS[arm] + 34


@pytest.mark.parametrize("arm", ["lora:r=2", "nora:tuning=shared,r=3,groups=2"])
def test_arm_trains_whole_modules_and_biases_beside_the_adapter(root, arm):
    recipe = helpers.recipe(helpers.glue_task(root), f"{arm},modules_to_save=LayerNorm,bias=all")
    trained = {name for name, value in adapted(recipe).named_parameters() if value.requires_grad}
    assert any("classifier" in name for name in trained)
    assert any("LayerNorm" in name for name in trained)
    assert any(name.endswith("query.base_layer.bias" if "lora:" in arm else "query.bias") for name in trained)


@pytest.mark.parametrize("names", ["LayerNrm", "Layer.*"])
def test_modules_that_are_not_there_are_refused(root, names):
    recipe = helpers.recipe(helpers.glue_task(root), f"lora:r=2,modules_to_save={names}")
    assert_refused(rf"no module {names[:5]}", adapted, recipe)


def test_full_trains_everything_and_starts_alike(root):
    recipe = helpers.recipe(helpers.glue_task(root), "full")
    full, lora = adapted(recipe), adapted(replace(recipe, arm=Arm.parse("lora:r=2")))
    assert all(each.requires_grad for each in full.parameters())
    with torch.no_grad():
        one, two = (model.eval()(input_ids=torch.tensor([[2, 5, 6, 3]])).logits for model in (full, lora))
    assert torch.equal(one, two), "the same new head, and an adapter that begins at zero"


def test_full_with_include_trains_what_it_names_and_the_head(root):
    recipe = helpers.recipe(helpers.glue_task(root), r"full:include=.*layer\.1\..*bias")
    trained = {name for name, each in adapted(recipe).named_parameters() if each.requires_grad}
    head = {name for name in trained if name.startswith("classifier.")}
    assert head == {"classifier.weight", "classifier.bias"}
    assert len(trained - head) == 8, "six linears and two norms"
    assert all(".layer.1." in name and name.endswith("bias") for name in trained - head)


def test_arms_that_do_not_fit(root):
    task, language = helpers.glue_task(root), helpers.instruction_task(root)
    setup = task.adapter_setup(task.build_on_meta())
    for arm, model, known, words in (
        ("lora:r=2,target_modules=nosuch", task, setup, "lora does not fit.*nosuch; the linears of this model end in"),
        ("lora:r=2", task, None, "trains one from scratch"),
        ("head", language, AdapterSetup(), "head trains a new head, and this model has none"),
        ("peanut:act_fn=nothing", task, setup, "peanut"),
        ("lora:r=2,head_lr=0.1", language, AdapterSetup(), "has no new head, whose learning rate is head_lr; omit it"),
        ("noble:rank=2,head_lr=0.1", task, None, "has no new head"),
        ("full:include=.*nosuch", task, setup, "matches no parameter's whole name; one is .*weight"),
    ):
        with pytest.raises(UserError, match=words):
            Arm.parse(arm).apply(model.build_on_meta(), known)
    assert_refused("init= is for", task.build_model, None, "noble")


def test_losses_that_cannot_be_smoothed_and_inputs_without_embeddings_are_refused(root, tmp_path):
    for task, settings, words in (
        (helpers.glue_task(root, "stsb"), {"label_smoothing": 0.1}, "for a cross-entropy, and this task is a regress"),
        (helpers.image_task(root), {"embedding_noise": 5.0}, "for token embeddings, and the model has none; omit it"),
    ):
        assert_refused(words, train, helpers.recipe(task, **settings), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_decoders_classify_by_the_last_token_that_is_not_padding(root, tmp_path):
    config = Path(helpers.language_model(tmp_path)) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": 5}))  # not the tokenizer's
    task = replace(helpers.glue_task(root), model=Pretrained(checkpoint=str(tmp_path), targets=("q_proj",)))
    prepared = task.prepare(progress=False)
    model = task.build_model(prepared, seed=0).eval()
    cut = [
        {name: value[: 2 + index] for name, value in prepared.train[index].items() if value.ndim} for index in range(4)
    ]
    rows = [{**prepared.train[index], **each} for index, each in enumerate(cut)]
    alone = torch.cat([model(**prepared.collate([row])).logits for row in rows])
    torch.testing.assert_close(model(**prepared.collate(rows)).logits, alone)


def test_lora_plus_groups_are_those_of_peft(root):
    from peft.optimizers import create_loraplus_optimizer

    recipe = helpers.recipe(helpers.glue_task(root), "dora:r=2,plus=16", weight_decay=0.0)
    model = adapted(recipe)
    theirs = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=16)
    expected = {id(each): group["lr"] for group in theirs.param_groups for each in group["params"]}
    groups = optimizer_groups(model, recipe, recipe.arm, 1e-2)
    ours = {id(each): group["lr"] for group in groups for _, each in group["params"]}
    assert ours == pytest.approx(expected)
    assert set(ours.values()) == {1e-2, 16 * 1e-2}

    groups = optimizer_groups(model, recipe, replace(recipe.arm, head_lr=(0.5,)), 1e-2)
    assert {group["lr"] for group in groups for name, _ in group["params"] if "classifier." in name} == {0.5}


def test_lora_plus_trains_factors_of_embeddings_alike(root):
    recipe = helpers.recipe(helpers.glue_task(root), "lora:r=2,plus=16,target_modules=.*word_embeddings")
    groups = optimizer_groups(adapted(recipe), recipe, recipe.arm, 1e-2)
    ours = {name: group["lr"] for group in groups for name, _ in group["params"] if "lora_embedding" in name}
    assert len(ours) == 2
    assert set(ours.values()) == {1e-2}


@pytest.mark.parametrize(
    "arm", ["full", "head", "lora:r=2", "lora:r=2,head_lr=0.5", "sine-lora:r=2,omega=50,plus=4", "nora:r=1,groups=4"]
)
def test_head_has_a_learning_rate_of_its_own(root, arm):
    recipe = helpers.recipe(helpers.glue_task(root), arm, head_lr=0.25 if "head_lr" in arm else 0.5)
    model = adapted(recipe)
    groups = optimizer_groups(model, recipe, recipe.arm, 0.01)
    rates = [(name, each, group["lr"]) for group in groups for name, each in group["params"]]
    head, rest = ([lr for name, _, lr in rates if ("classifier." in name) == wanted] for wanted in (True, False))
    # The rate of what the arm trains is the arm's.
    assert (min(head), min(rest, default=None)) == ((0.01, None) if arm == "head" else (0.5, 0.01))
    trained = [id(each) for each in model.parameters() if each.requires_grad]
    assert sorted(id(each) for _, each, _ in rates) == sorted(trained)


def test_epochs_become_steps():
    config = TrainConfig(epochs=3, batch_size=8, lr=1e-3, eval_every=0, save_every=0, warmup_share=0.1)
    exact = config.resolved(100)
    assert (exact.steps, exact.eval_every, exact.save_every, exact.warmup_steps) == (39, 13, 13, 4)
    assert (exact.epochs, exact.warmup_share) == (None, 0.0)
    assert replace(config, steps=7).resolved(100).steps == 7, "steps win"
    assert replace(config, epochs=0.5).resolved(16).steps == 1
    assert config.length == "3 epochs"


def test_last_and_best_are_read_from_the_log():
    rows = ((1, 1.0, 0.5, 1.0, 0.4), (2, 0.9, 0.8, 1.1, 0.3), (3, 0.8, 0.7, 1.2, 0.6))
    names = ("step", "eval_loss", "eval_f1", "test_loss", "test_f1")
    log = [*(dict(zip(names, row, strict=True)) for row in rows), {"step": 2, "loss": 3.0}]
    found = judged(log, Measure(name="f1", higher_is_better=True), apart=True)
    best = {"score": 0.6, "selection": 0.7, "best_step": 2, "best_score": 0.3}  # chosen by the held-out, scored apart
    assert found == found | best | {"scores": {"loss": 1.2, "f1": 0.6}, "metric_curve": ((1, 0.5), (2, 0.8), (3, 0.7))}
    alone = judged(log, Measure(), apart=False)
    assert alone == alone | {"score": 0.8, "best_step": 3, "metric": "loss"}


def test_scores_of_a_run_are_those_of_its_model(root, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    task = helpers.glue_task(root, "stsb", scored="test")
    recipe = helpers.recipe(task, "lora:r=2", eval_batch_size=7)
    result = train(recipe, tmp_path / "out")
    base = AutoModelForSequenceClassification.from_pretrained(root / "bert", num_labels=1)
    model = PeftModel.from_pretrained(base, tmp_path / "out" / "model").eval()
    prepared = task.prepare()
    for examples, found in ((prepared.test, result.scores), (prepared.valid, {"pearson": result.selection})):
        items = [{name: value[None] for name, value in examples[index].items()} for index in range(len(examples))]
        labels = [item.pop("labels").item() for item in items]
        with torch.no_grad():
            pair = torch.tensor([[model(**item).logits.item() for item in items], labels], dtype=torch.float64)
        assert found["pearson"] == pytest.approx(torch.corrcoef(pair)[0, 1].item(), rel=1e-4, abs=1e-5)
        if "loss" in found:
            assert found["loss"] == pytest.approx(((pair[0] - pair[1]) ** 2).mean().item(), rel=1e-4)
    assert (result.metric, result.higher_is_better) == ("pearson", True)
    assert [step for step, _ in result.metric_curve] == [5, 10, 12]
    assert TrainResult.from_json((tmp_path / "out" / "result.json").read_text()) == result


def test_answer_loss_is_the_mean_over_answers(root, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    task = helpers.instruction_task(root)
    result = train(helpers.recipe(task, "lora:r=2", eval_batch_size=4), tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(root / "llama")
    model = PeftModel.from_pretrained(base, tmp_path / "out" / "model").eval()
    prepared = task.prepare(progress=False)
    assert result.score == result.final_loss == pytest.approx(helpers.answer_loss(model, prepared.valid), rel=1e-4)
    assert result.bits_per_byte is None


def test_padding_and_accumulation_change_only_rounding(root, tmp_path):
    settings = {"steps": 4, "lr": 1e-3}
    helpers.encoder(tmp_path / "still", dropout=0.0)
    task = helpers.glue_task(root)
    task = replace(task, model=replace(task.model, checkpoint=str(tmp_path / "still")))
    one = train(helpers.recipe(task, **settings), tmp_path / "a")
    padded = replace(task, glue=replace(task.glue, pad="max_length"))
    parts = helpers.recipe(task, gradient_accumulation=2, **settings)
    for name, other in {"b": parts, "c": helpers.recipe(padded, **settings)}.items():
        other = train(other, tmp_path / name)
        assert other.final_loss == pytest.approx(one.final_loss, rel=1e-4)
        assert other.train_curve[-1][1] == pytest.approx(one.train_curve[-1][1], rel=1e-3)


RESUMED = ["lora:r=2", "head", "full", "full:include=.*bias", "dora:r=2,plus=4", "sine-lora:r=2,omega=100"]
RESUMED += ["noble-adapter:r=2"]


@pytest.mark.parametrize("arm", RESUMED)
def test_checkpoint_has_what_is_trained_alone_and_resumes_to_the_same_bits(root, tmp_path, arm):
    recipe = helpers.recipe(helpers.glue_task(root, pooling="mean"), arm, group_by_length=arm == "lora:r=2")
    whole = train(recipe, tmp_path / "whole")
    again = train(recipe, cut_back(tmp_path / "whole", tmp_path / "cut", 8), resume=True)
    assert replace(again, seconds=whole.seconds) == whole
    for path in (tmp_path / "whole" / "model").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "cut" / "model" / path.name).read_bytes()
    saved = {path.name for path in (tmp_path / "whole/checkpoints/step-000012").glob("*.safetensors")}
    files = {"head": "trainable", "full:include=.*bias": "trainable", "full": "model"}
    file = f"{files.get(arm, 'adapter_model')}.safetensors"
    assert saved == {file}
    tensors = load_file(tmp_path / "whole/checkpoints/step-000012" / file)
    assert sum(each.numel() for each in tensors.values()) == whole.trainable


def test_gradient_checkpointing_and_bf16_are_what_they_say(root, tmp_path, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    seen, original = [], LlamaMLP.forward

    def spy(self, *args, **kwargs):
        if self.training:
            seen.append(torch.is_autocast_enabled("cpu"))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LlamaMLP, "forward", spy)
    losses, calls = {}, {}
    for name, settings in {"plain": {}, "again": {"gradient_checkpointing": True}, "bf16": {"bf16": True}}.items():
        seen.clear()
        recipe = helpers.recipe(helpers.instruction_task(root), steps=2, eval_every=2, **settings)
        losses[name], calls[name] = train(recipe, tmp_path / name).final_loss, list(seen)
    assert losses["again"] == pytest.approx(losses["plain"], rel=1e-6)
    assert len(calls["again"]) == 2 * len(calls["plain"])
    assert all(calls["bf16"])


LOADER = """
import json, sys, torch
{code}
model.eval()
batch = json.loads(sys.argv[1])
with torch.no_grad():
    print(json.dumps(model(**{{name: torch.tensor(value) for name, value in batch.items()}}).logits.tolist()))
"""


@pytest.mark.parametrize(
    ("kind", "arm"), [("glue", "lora:r=2"), ("mean", "sine-lora:r=2,omega=100"), ("image", "lora:r=2")]
)
def test_printed_lines_load_the_model_in_a_fresh_process(root, tmp_path, kind, arm):
    from peft import set_peft_model_state_dict
    from transformers import AutoTokenizer

    tasks = {"glue": helpers.glue_task(root, "stsb"), "mean": helpers.glue_task(root, pooling="mean")}
    recipe = helpers.recipe(tasks.get(kind) or helpers.image_task(root), arm, steps=3)
    prepared, folder = recipe.task.prepare(), tmp_path / "out" / "model"
    train(recipe, tmp_path / "out", prepared=prepared)
    batch = prepared.collate([prepared.train[index] for index in range(3)])
    batch.pop("labels")
    model = adapted(recipe, prepared)
    set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))
    _, heading, text = (folder / "README.md").read_text().partition("## Loading")
    assert heading
    assert str(tmp_path) not in text
    with torch.no_grad():
        expected = model.eval()(**batch).logits
    values = json.dumps({name: value.tolist() for name, value in batch.items()})
    code = LOADER.format(code=loading_code(folder, recipe.task.model.where()))
    found = json.loads(python_prints(code, values).splitlines()[-1])
    assert torch.tensor(found).numpy() == pytest.approx(expected.numpy(), abs=1e-6)
    if kind != "image":
        assert AutoTokenizer.from_pretrained(folder).get_vocab() == prepared.tokenizer.get_vocab()


def test_compare_by_a_metric(root, tmp_path):
    recipe = helpers.recipe(helpers.glue_task(root), steps=6, eval_every=3, lr=1e-3)
    texts = ("lora:r=2,grid=0.001/0.003,head_lr=0.01/0.1", "head", "sine-lora:r=2,omega=100,lr=0.001,head_lr=0.02")
    arms = [Arm.parse(text) for text in texts]
    options = {"seeds": 2, "timing_rounds": 3, "max_extensions": 0, "quiet": True}
    comparison = compare(recipe, tmp_path / "out", arms=arms, **options)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["metric"] == {"name": "matthews", "higher_is_better": True, "unit": ""}
    lora, head, sine = results["arms"]
    assert [(each["trainable"], each["control"]) for each in results["arms"]] == [(290, True), (34, True), (290, False)]
    tried = sorted((run["lr"], run["head_lr"]) for run in lora["tuning"])
    assert (tried, head["tuning"], sine["tuning"]) == (list(product((0.001, 0.003), (0.01, 0.1))), [], [])
    best = max(lora["tuning"], key=lambda run: (run["selection"], -run["final_loss"], -run["lr"]))
    assert (lora["lr"], lora["head_lr"]) == (best["lr"], best["head_lr"]), "by the held-out share, higher is better"
    assert (head["head_lr"], sine["head_lr"]) == (None, 0.02)
    for arm in results["arms"]:
        for run in arm["runs"]:
            of_head = "" if arm["head_lr"] is None else f"head-{arm['head_lr']:g}"
            path = tmp_path / "out" / "runs" / arm["name"] / of_head / f"lr-{arm['lr']:.6g}" / f"seed-{run['seed']}"
            result = TrainResult.from_json((path / "result.json").read_text())
            assert all(run[name] == getattr(result, name) for name in ("score", "selection", "best_score"))
        assert arm["score"]["mean"] == pytest.approx(sum(run["score"] for run in arm["runs"]) / 2)
    pair = results["against"]["lora-r2"]["head"]
    deltas = [b["score"] - a["score"] for a, b in zip(lora["runs"], head["runs"], strict=True)]
    assert pair["delta"]["value"] == pytest.approx(sum(deltas) / 2)
    assert (pair["step_speedup"]["value"], head["step_time_ratio"]["n"]) == (None, 3)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| arm | lr | trainable | matthews | best step | delta [95 %] | p | p (Holm) |" in report
    assert "speedup" not in report
    assert f"| lora-r2 | {lora['lr']:g}, head {lora['head_lr']:g} |" in report
    assert all(f"| lora-r2, head {rate} |" in report for rate in (0.01, 0.1)), "a row of the table of tuning"
    assert {"curves.png", "rates.png"} <= {path.name for path in (tmp_path / "out").iterdir()}
    again = compare(recipe, tmp_path / "out", arms=arms, resume=True, **options)
    assert again.results["arms"][0]["runs"] == comparison.results["arms"][0]["runs"]
    # Choices that fell on the scored examples are said to.
    recipe = helpers.recipe(helpers.glue_task(root, held_out=0.0), steps=2, eval_every=2)
    comparison = compare(recipe, tmp_path / "other", arms=arms[1:], seeds=1, timing_rounds=0, quiet=True)
    assert any("chosen on the scored examples" in note for note in comparison.results["notes"])
    report = (tmp_path / "other" / "report.md").read_text()
    assert "## Speed" not in report  # nothing was timed, and no curve says when a loss was reached


@pytest.mark.parametrize("targets", ["", ",target_modules=query/nosuch", ",target_modules=all-linear"])
def test_lora_of_a_model_with_branches_goes_onto_their_dense_parts(root, targets):
    task = helpers.glue_task(root)
    model = task.build_on_meta()
    nlr.augment(model, nlr.NobleConfig(rank=4), include=r".*(query|value)", verbose=False)
    adapted = Arm.parse(f"lora:r=2{targets}").apply(model, task.adapter_setup(model), verbose=False)
    names = {name.partition(".lora_")[0] for name, each in adapted.named_parameters() if ".lora_" in name}
    assert any(name.endswith("query.dense") for name in names)
    assert all(not name.endswith(("query", "value")) for name in names)


@pytest.fixture
def in_4_bits(tmp_path):
    """An image task on a ViT whose linears fill blocks of 64 numbers, in float32 and in 4 bits."""
    folder = helpers.vision_model(tmp_path / "vit", hidden_size=64, intermediate_size=128)
    task = helpers.image_task(tmp_path, source=helpers.image_file(tmp_path / "images.npz"))
    model = replace(task.model, checkpoint=folder)
    return {dtype: replace(task, model=replace(model, dtype=dtype)) for dtype in ("float32", "nf4")}


@pytest.mark.quantized
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torchao.*")
def test_adapter_is_trained_and_scored_beside_weights_in_4_bits(in_4_bits, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    recipe = helpers.recipe(in_4_bits["nf4"], "lora:r=2")
    prepared = recipe.task.prepare(progress=False)
    base, wide = (build_model(replace(recipe, task=task), prepared) for task in reversed(in_4_bits.values()))
    linears = {name: each for name, each in base.named_modules() if isinstance(each, torch.nn.Linear)}
    assert {name for name, each in linears.items() if type(each) is torch.nn.Linear} == {"classifier"}
    assert all(
        each.weight.quant_type == "nf4" for each in linears.values() if isinstance(each, bitsandbytes.nn.Linear4bit)
    )
    assert torch.equal(base.classifier.weight, wide.classifier.weight)
    assert count_parameters(base) == count_parameters(wide)
    batch = prepared.collate([prepared.valid[place] for place in range(len(prepared.valid))])
    with torch.no_grad():
        near, exact = (model(**batch).logits for model in (base, wide))
    assert 0 < (near - exact).norm() < 0.2 * exact.norm()

    result = train(recipe, tmp_path / "run", prepared=prepared)
    plain = adapted(replace(recipe, task=in_4_bits["float32"]), prepared)
    assert (result.parameters, result.trainable) == (count_parameters(plain), count_parameters(plain, trainable=True))
    saved = open_saved(recipe.task, prepared, tmp_path / "run" / "model")
    found = score_held_out(saved, replace(prepared, test=None))
    assert found["loss"] == pytest.approx(result.final_loss, rel=1e-4)
    again = train(recipe, cut_back(tmp_path / "run", tmp_path / "again", 4), prepared=prepared, resume=True)
    assert again.final_loss == result.final_loss
    seldom = replace(recipe, train=replace(recipe.train, eval_every=12))  # some CPUs pack weights in evaluation
    assert train(seldom, tmp_path / "seldom", prepared=prepared).final_loss == result.final_loss
    for arm in ("full", "head"):
        other = replace(recipe, arm=Arm.parse(arm))
        assert_refused("beside weights in 4 bits an adapter alone trains", train, other, tmp_path / arm)


def test_weights_in_4_bits_need_bitsandbytes(in_4_bits, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"bitsandbytes is needed here: pip install .*\[quantized\]"):
        in_4_bits["nf4"].model.load("image", 3, 0)
