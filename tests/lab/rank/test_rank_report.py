"""Ranks of checkpoints: what is read from each kind of file, the suggested omega, the commands, what is refused."""

import copy
import json
import math
import re
from dataclasses import asdict

import matplotlib.image
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

import nonlinear_lowrank as nlr
from cli_helpers import refused, run, succeed
from model_helpers import FAMILIES
from nlr_lab.fields.fit import fit
from nlr_lab.fields.image import ImageSettings
from nlr_lab.fields.problem import FieldMethod
from nlr_lab.fields.settings import FieldConfig, FitConfig
from nlr_lab.rank import measures
from nlr_lab.rank.figures import rank_figures
from nlr_lab.rank.report import format_ranks, rank_report
from nlr_lab.runtime.environment import OutOfTimeError

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def plain_ranks(weight):
    """Stable rank and rank at 0.1, by numpy's own SVD in float64."""
    values = torch.linalg.svdvals(weight.detach().double())
    return float(values.square().sum() / values[0] ** 2), int((values > 0.1 * values[0]).sum())


def by_name(*arguments, **options):
    return {layer.name: layer for layer in rank_report(*arguments, **options).layers}


def test_every_matrix_of_a_plain_model_is_measured(tmp_path):
    model = FAMILIES["llama"]()
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    layers = by_name(tmp_path / "m")
    weights = {name.removesuffix(".weight"): each for name, each in model.state_dict().items() if each.ndim == 2}
    assert layers.keys() == weights.keys()
    for name, weight in weights.items():
        expected, rank = plain_ranks(weight)
        assert layers[name].stable_rank == pytest.approx(expected)
        assert layers[name].ranks["0.1"] == rank
        assert layers[name].shape == tuple(weight.shape)
        assert layers[name].spectrum[0] == (1, 1.0)
        assert layers[name].spectrum[-1][0] == min(weight.shape)
    assert layers["lm_head"].kind == layers["model.embed_tokens"].kind == "table"
    assert layers["lm_head"].omega_guess is None
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=8))
    gpt2.save_pretrained(tmp_path / "gpt2")
    shapes = {name.rpartition("h.0.")[2]: layer.shape for name, layer in by_name(tmp_path / "gpt2").items()}
    assert (shapes["attn.c_attn"], shapes["mlp.c_proj"]) == ((48, 16), (16, 64)), "as they multiply"


@pytest.mark.parametrize(
    ("family", "first"),
    [("gpt_oss", "mlp.experts.gate_up_proj"), ("granitemoe", "block_sparse_moe.input_linear.weight")],
)
def test_each_expert_of_a_stack_is_measured_as_it_multiplies(tmp_path, family, first):
    config = AutoConfig.for_model(family, **SIZES, num_local_experts=3, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    report = rank_report(tmp_path)
    layers = {layer.name: layer for layer in report.layers}
    assert not any(name.endswith("bias") or layer.kind == "kernel" for name, layer in layers.items())
    name = f"model.layers.0.{first}"
    for expert, weight in enumerate(load_file(tmp_path / "model.safetensors")[name]):
        found = layers[f"{name.removesuffix('.weight')}.{expert}"]
        assert (found.kind, found.shape) == ("dense", (2 * 24, 32))
        assert found.stable_rank == pytest.approx(plain_ranks(weight)[0], rel=1e-5)
    folded = f"model.layers.*.{first.removesuffix('.weight')}.*"
    assert folded in format_ranks(report, width=200)


def test_sine_layers_are_measured_as_their_weight(tmp_path):
    """Two settings in one model, whose names on disk are not those in memory."""
    model = ViTForImageClassification(
        ViTConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=8,
                  patch_size=4)
    )  # fmt: skip
    for include, config in (
        (r".*mlp\.fc1", nlr.SineLowRankConfig(rank=3, omega=150)),
        (r".*mlp\.fc2", nlr.SineLowRankConfig(rank=2, activation="identity")),
    ):
        nlr.augment(model, config, include=include, verbose=False)
    model.save_pretrained(tmp_path)
    layers = rank_report(tmp_path).layers
    weights = [each.weight for each in model.modules() if hasattr(each, "sine_config")]
    found = [layer for layer in layers if layer.rank is not None]
    assert sorted((layer.kind, layer.rank, layer.omega) for layer in found) == [
        ("low-rank", 2, 1.0), ("low-rank", 2, 1.0), ("sine", 3, 150.0), ("sine", 3, 150.0),
    ]  # fmt: skip
    measured, expected = sorted(layer.stable_rank for layer in found), sorted(plain_ranks(each)[0] for each in weights)
    assert measured == pytest.approx(expected, rel=1e-4)
    patches = next(layer for layer in layers if layer.name.endswith("projection"))
    assert (patches.kind, patches.shape) == ("kernel", (32, 3 * 4 * 4)), "out x the rest"


@pytest.mark.parametrize("method", ["lora", "rslora", "sine"])
def test_adapters_are_measured_as_their_delta(tmp_path, method):
    options = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    if method == "sine":
        config = nlr.SineLoraConfig(**options, omega=90, omega_pattern={"down_proj": 40.0})
    else:
        config = peft.LoraConfig(**options, use_rslora=method == "rslora", alpha_pattern={"down_proj": 9})
    base = FAMILIES["llama"]()
    before = {name: each.clone() for name, each in base.state_dict().items()}
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path)
    layers = by_name(tmp_path)
    merged = model.merge_and_unload().state_dict()
    changed = {name: merged[name] - each for name, each in before.items() if not merged[name].equal(each)}
    assert {f"{name}.weight" for name in layers} == changed.keys()
    for name, layer in layers.items():
        values = torch.linalg.svdvals(changed[f"{name}.weight"].double())
        assert layer.norm == pytest.approx(float(values[0]), rel=1e-3)
        assert layer.stable_rank == pytest.approx(float(values.square().sum() / values[0] ** 2), rel=1e-3)
        assert layer.rank == 3
        assert layer.omega == ((40 if "down" in name else 90) if method == "sine" else None)


def test_bare_files_need_omega_for_sine_factors(tmp_path, capsys):
    up, down = measures.kaiming_factors((40, 30), 2, torch.Generator().manual_seed(0))
    save_file(
        {"a.sine_up": up, "a.sine_down": down, "b": torch.zeros(4, 4), "c": torch.ones(7)}, tmp_path / "f.safetensors"
    )
    layers = by_name(tmp_path / "f.safetensors", omega=80.0)
    assert layers["a"].stable_rank == pytest.approx(plain_ranks(torch.sin(80 * up @ down))[0], rel=1e-5)
    assert layers["b"].stable_rank == layers["b"].norm == 0, "a delta at its start"
    assert "c" not in layers
    assert "give --omega" in refused(capsys, "inspect", "--spectrum", tmp_path / "f.safetensors")
    assert run(capsys, "inspect", "--spectrum", tmp_path, "--omega", "80")[0] == 0


@pytest.mark.parametrize("activation", ["gaussian", "siren"])
@pytest.mark.parametrize("text", ["low-rank:rank=2", "sine:rank=2,omega=40", "sine:rank=2,gain=3", "dense"])
def test_fields_are_measured_as_their_weights_finished_or_not(tmp_path, capsys, text, activation):
    """In the fit's folder, a checkpoint, by the file; omega is asked where fit.json lacks the problem's settings."""
    field = FieldConfig(in_features=2, out_features=3, width=24, activation=activation)
    settings = ImageSettings(source="china", crop=64, size=8, points=0, field=field)
    problem, method = settings.prepare(), FieldMethod.parse(text)
    config = FitConfig(steps=2, eval_every=2, save_every=1, threads=1, device="cpu")
    options = {"quiet": True, "about": asdict(settings)}
    with pytest.raises(OutOfTimeError):
        fit(problem, method, config, tmp_path / "f", stop=lambda step: True, **options)
    checkpoint = by_name(tmp_path / "f" / "checkpoints" / "step-000001")
    fitted = fit(problem, method, config, tmp_path / "f", resume=True, **options)
    assert run(capsys, "inspect", "--spectrum", tmp_path / "f", "--every-layer")[0] == 0
    layers = by_name(tmp_path / "f" / "model" / "model.safetensors")
    for index, layer in enumerate(fitted.model.hidden):
        found = layers[f"hidden.{index}"]
        assert (found.kind, found.rank) == (text.partition(":")[0], None if text == "dense" else 2)
        assert (found.kind, found.omega) == (checkpoint[found.name].kind, checkpoint[found.name].omega)
        assert found.stable_rank == pytest.approx(plain_ranks(layer.weight)[0], rel=1e-4)
        assert found.norm == pytest.approx(float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2)), rel=1e-4)
    about = json.loads((tmp_path / "f" / "fit.json").read_text())
    del about["settings"]["problem"]["field"]
    (tmp_path / "f" / "fit.json").write_text(json.dumps(about))
    code, _, err = run(capsys, "inspect", "--spectrum", tmp_path / "f")
    assert (code, "give --omega" in err) == ((2, True) if text == "sine:rank=2,gain=3" else (0, False))


@pytest.mark.parametrize("init", ["kaiming_sqrt5", "kaiming_zero"])
@pytest.mark.parametrize(("shape", "rank"), [((160, 96), 3), ((96, 160), 12), ((128, 128), 1)])
def test_draws_at_the_suggested_omega_have_the_stable_rank(shape, rank, init):
    most = measures.random_stable_rank(shape)
    target = float(torch.empty(()).uniform_(0.4, 0.7)) * most if rank > 1 else 4.0
    guess = measures.guess_omega(shape, rank, target, init=init)
    generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
    draws = [measures.kaiming_factors(shape, rank, generator, init=init) for _ in range(5)]
    weights = [torch.sin(guess.omega * up @ down) for up, down in draws]
    ranks = [measures.spectrum(weight).stable_rank for weight in weights]
    assert [measures.stable_rank(weight) for weight in weights] == pytest.approx(ranks, rel=0.03), "quick and slow"
    reached = sum(ranks) / 5
    assert reached == pytest.approx(target, rel=0.25)
    assert not guess.saturated


def test_omega_is_none_or_a_limit_at_the_ends():
    shape = (96, 64)
    assert measures.guess_omega(shape, 8, 1.5).omega is None
    limit = measures.guess_omega(shape, 8, 1e6)
    assert limit.saturated
    assert measures.guess_omega((64, 64), 4, 60.0).saturated, "above all ranks of such a matrix"
    up, down = measures.kaiming_factors(shape, 8, torch.Generator().manual_seed(3))
    assert measures.spectrum(torch.sin(limit.omega * up @ down)).stable_rank > 0.75 * measures.random_stable_rank(shape)
    one = measures.guess_omega((96, 96), 1, 0.94 * measures.random_stable_rank((96, 96)))
    assert one.saturated or one.omega > 100 * limit.omega, "rank one saturates late, if ever"


def test_inspect_rank_prints_a_table_json_and_a_picture(tmp_path, capsys):
    FAMILIES["llama"]().save_pretrained(tmp_path / "m")
    code, out, err = run(capsys, "inspect", "--spectrum", tmp_path / "m", "--picture", tmp_path / "p.png")
    assert (code, err) == (0, "")
    assert "model.layers.*.mlp.gate_proj" in out
    assert matplotlib.image.imread(tmp_path / "p.png").std() > 0.01
    options = ("--tolerances", "0.5", "1e-3", "--for-rank", "4")
    layers = json.loads(succeed(capsys, "inspect", tmp_path / "m", "--spectrum", "--json", *options))["layers"]
    assert len(layers) == 2 * 7 + 2
    for layer in layers:
        assert 0 < layer["ranks"]["0.5"] <= layer["ranks"]["0.001"]
        guess = layer["omega_guess"]
        assert guess["omega"] > 0 if "mlp" in layer["name"] else guess is None or "attn" in layer["name"]
    assert all(layer.omega_guess is None for layer in rank_report(tmp_path / "m", for_rank=30).layers)
    every = run(capsys, "inspect", "--spectrum", tmp_path / "m", "--every-layer", "--include", "layers.1.mlp")[1]
    assert every.count("model.layers.1.mlp") == 3


def test_rank_with_a_number_adds_branches(tmp_path, capsys, monkeypatch):
    FAMILIES["llama"]().save_pretrained(tmp_path / "8")
    monkeypatch.chdir(tmp_path)
    assert json.loads(run(capsys, "inspect", "8", "--rank", "4", "--json")[1])["branch_parameters"] > 0
    assert json.loads(run(capsys, "inspect", "8", "--rank=4", "--json")[1])["branch_parameters"] > 0
    assert "stable rank" in run(capsys, "inspect", "--spectrum", "8")[1]
    assert "MODEL" in run(capsys, "inspect", "--rank", "64")[2]


def test_rank_figures_depend_on_their_seeds(tmp_path, capsys):
    assert "sine, omega=2000" in succeed(capsys, "inspect", "--rank-figures", tmp_path / "f", "--seeds", "1")
    record = json.loads((tmp_path / "f" / "rank-figures.json").read_text())
    draw = measures.kaiming_uniform((128, 128), torch.Generator().manual_seed(0))
    dense = record["figure_2"]["matrices"]["dense"]["stable_rank"]
    assert dense["low"] == dense["high"] == pytest.approx(plain_ranks(draw)[0])
    assert matplotlib.image.imread(tmp_path / "f" / "rank-figures.png").std() > 0.01
    spectra = record["figure_3"]["matrices"]
    assert spectra["U V"]["ranks"]["0.01"]["mean"] == 5
    assert spectra["dense"]["spectrum"][0] == [1, 1.0]
    stable = [spectra[f"sine, omega={omega:g}"]["stable_rank"]["mean"] for omega in (10, 100, 300)]
    assert stable == sorted(stable)
    assert stable[-1] > 10 * spectra["sigmoid, omega=300"]["stable_rank"]["mean"]
    assert "--overwrite" in refused(capsys, "inspect", "--rank-figures", tmp_path / "f")


def test_wrong_inputs_give_one_line(tmp_path, capsys):
    model, empty = tmp_path / "m", tmp_path / "empty"
    FAMILIES["llama"]().save_pretrained(model)
    empty.mkdir()
    save_file({"scale": torch.ones(4), "packed": torch.zeros(4, 4, dtype=torch.uint8)}, tmp_path / "flat.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-5])
    (tmp_path / "weights.bin").write_bytes(b"x")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"].fill_(math.nan)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    for arguments, words in (
        ([tmp_path / "absent"], "no such file or folder"),
        ([empty], "has no weights"),
        ([tmp_path / "flat.safetensors"], "no floating-point tensor of two or more dimensions"),
        ([tmp_path / "cut.safetensors"], "not a whole safetensors file"),
        ([tmp_path / "weights.bin"], "is not a .safetensors file"),
        ([model], "model.layers.1.mlp.up_proj: the matrix has numbers that are not finite"),
        ([model, "--include", "nothing"], "whose name matches 'nothing'"),
        ([model, "--include", "("], "is not a regular expression"),
        ([model, "--tolerances", "0.1", "1e-9"], "a tolerance must be"),
        ([model, "--for-rank", "0"], "must be a positive integer"),
        ([model, "--picture", "spectra.pdf"], "must end in .png, got"),
    ):
        assert words in refused(capsys, "inspect", "--spectrum", *arguments)
    refused(capsys, "inspect", "--rank-figures", tmp_path / "weights.bin")
    refused(capsys, "inspect", "--rank-figures", tmp_path / "x", "--seeds", "0")
    assert not (tmp_path / "x").exists()


def test_layers_alike_are_told_by_their_median(tmp_path):
    ones = {f"h.{index}.w": torch.diag((torch.arange(8) < count).float()) for index, count in enumerate((1, 2, 5))}
    save_file(ones, tmp_path / "w.safetensors")
    report = rank_report(tmp_path / "w.safetensors", for_rank=1)
    assert report.layers[0].omega_guess.target == pytest.approx(2)
    assert re.search(r"h\.\*\.w .* 2\.0 \(1\.0 to 5\.0\) +2 +2 ", format_ranks(report, width=200))


def test_figures_have_the_lowest_and_the_highest_of_the_draws():
    measured = rank_figures(seeds=2)["figure_2"]["matrices"]["dense"]["stable_rank"]
    assert measured["low"] < measured["mean"] < measured["high"]


def test_gains_and_embeddings_of_sine_adapters_are_those_that_are_merged(tmp_path):
    options = {"r": 3, "lora_alpha": 5, "target_modules": ["embed_tokens", "q_proj"], "init_lora_weights": False}
    base = FAMILIES["llama"]()
    for gain in (None, 2.0):
        model = peft.get_peft_model(copy.deepcopy(base), nlr.SineLoraConfig(**options, omega=90, gain=gain))
        model.save_pretrained(tmp_path, save_embedding_layers=False)
        merged = model.merge_and_unload().state_dict()
        layers = by_name(tmp_path)
        assert {name.rpartition(".")[2] for name in layers} == {"embed_tokens", "q_proj"}
        for name, layer in layers.items():
            delta = merged[f"{name}.weight"] - base.state_dict()[f"{name}.weight"]
            assert layer.norm == pytest.approx(float(torch.linalg.matrix_norm(delta, 2)), rel=1e-3)
