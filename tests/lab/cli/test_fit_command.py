"""`nlr fit` and `nlr compare` on fields: recipes, options, outputs, wrong inputs."""

import json
from dataclasses import asdict, is_dataclass, replace

import numpy as np
import pytest
from PIL import Image

from cli_helpers import refused, run, succeed
from nlr_lab.fields.fit import Stepper, build
from nlr_lab.fields.problem import FieldArm, FieldMethod
from nlr_lab.recipes import RECIPES, get_recipe

FIELDS = [name for name, entry in RECIPES.items() if entry.command == "fit"]
DEMOS = [name for name in FIELDS if name.endswith("-demo")]
ARMS = ("low-rank:rank=1,init=kaiming_zero", "sine:rank=1,init=kaiming_zero,omega=40")
SHORT = ("--steps", "6", "--points", "50", "--crop", "24", "--size", "0", "--width", "16", "--device", "cpu")


@pytest.mark.parametrize("name", FIELDS)
def test_recipe_of_a_field_is_whole(name):
    recipe = get_recipe(name)
    assert is_dataclass(recipe.problem)
    json.dumps(asdict(recipe.problem))
    assert str(FieldMethod.parse(recipe.method)) == recipe.method
    arms = [FieldArm.parse(text) for text in recipe.arms]
    assert len({arm.name for arm in arms}) == len(arms) > 1
    assert {arm.method.kind for arm in arms} == {"dense", "low-rank", "sine"}
    sizes = {kind: sorted(arm.method.rank for arm in arms if arm.method.kind == kind) for kind in ("low-rank", "sine")}
    assert sizes["low-rank"] == sizes["sine"]
    assert len(sizes["sine"]) >= 3  # of which a curve can be made


@pytest.mark.parametrize("name", DEMOS)
def test_builds_every_arm_of_a_demo(name):
    recipe = get_recipe(name)
    problem = recipe.problem.prepare()
    for text in recipe.arms:
        build(problem, FieldArm.parse(text).method, seed=0)


def test_fit_leaves_pictures_scores_and_a_field(capsys, tmp_path):
    out = tmp_path / "run"
    command = ("fit", "image-demo", *SHORT, "--arm", "sine:rank=1,omega=40", "--out", out)
    text = succeed(capsys, *command)
    result = json.loads((out / "result.json").read_text())
    assert f"psnr {result['metrics']['psnr']:.4g}" in text
    assert f"{result['parameters']:,} parameters, sine:rank=1,omega=40" in text
    with Image.open(out / "pictures" / "fitted.png") as opened:
        assert opened.size == (24, 24)
    settings = json.loads((out / "fit.json").read_text())["settings"]
    assert settings["problem"]["field"]["width"] == 16
    assert settings["method"]["omega"] == 40
    assert succeed(capsys, *command, "--resume") == text
    assert "its scores are in result.json" in refused(capsys, "evaluate", out)


def test_comparison_prints_its_table_and_fits_again_what_is_damaged(capsys, tmp_path):
    out = tmp_path / "out"
    command = ("compare", "image-demo", *SHORT, "--arms", *ARMS, "--seeds", "2", "--timing-rounds", "0", "--out", out)
    code, text, err = run(capsys, *command)
    assert code == 0, err
    assert "sine-k1-w40-kaiming_zero" in text
    assert "n = 2" in text
    assert len([line for line in err.splitlines() if "seed" in line]) == 4
    assert (out / "strip.png").is_file()
    scores = [arm["score"] for arm in json.loads((out / "results.json").read_text())["arms"]]
    weights = sorted(out.glob("runs/**/model.safetensors"))
    results = sorted(out.glob("runs/**/result.json"))
    for damage in (
        lambda: weights[0].write_bytes(weights[0].read_bytes()[:500]),
        lambda: [file.unlink() for file in weights[:2]],
        lambda: results[0].write_text("{}"),
        lambda: results[1].write_text('{"score": "psnr", "metrics": {}, "curve": [], "seconds": 1.0}'),
    ):
        damage()
        code, _, err = run(capsys, *command, "--resume")
        assert (code, err.count(" of 2") in (1, 2)) == (0, True), err  # the damaged ones alone
        assert [arm["score"] for arm in json.loads((out / "results.json").read_text())["arms"]] == scores
    assert run(capsys, *command, "--resume") == (0, text, "")


def test_comparison_resumes_with_data_that_were_moved(capsys, tmp_path, monkeypatch):
    pixels = np.random.default_rng(1).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    take = Stepper.take

    def stops(self, step):
        if step == 4:
            raise KeyboardInterrupt
        return take(self, step)

    options = ("--arms", *ARMS, "--tune-lr", "--seeds", "1", "--timing-rounds", "0", "--save-every", "2")
    reference = ("--reference", "sine-k1-w40-kaiming_zero")
    command = ("compare", "image-demo", *SHORT, *options, *reference, "--out", tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr(Stepper, "take", stops)
        assert run(capsys, *command, "--source", tmp_path / "photo.png")[0] == 130
    assert list((tmp_path / "out").glob("**/step-000004"))
    (tmp_path / "photo.png").rename(tmp_path / "moved.png")
    succeed(capsys, *command, "--source", tmp_path / "moved.png", "--resume")
    assert json.loads((tmp_path / "out" / "results.json").read_text())["reference"] == reference[1]


def test_reads_a_whole_photograph_as_it_is(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    problem = replace(get_recipe("image").problem, source=str(tmp_path / "x.png")).prepare()
    assert np.array_equal(problem.picture(None), pixels)
