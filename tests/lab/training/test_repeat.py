"""A run folder says what it was made from, and can be run again to the same bits."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cli_helpers import run
from nlr_lab.cli import main as cli
from nlr_lab.runtime.environment import determinism, deterministic
from nlr_lab.tasks.task import changed_files, data_record
from nlr_lab.training import TrainConfig, run_training
from nlr_lab.training.trainer import Schedule
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.storage import hash_file
from training_helpers import FakeText, make_recipe

TINY = (
    *("--steps", "3", "--batch-size", "2", "--layers", "1", "--width", "16", "--hidden", "24", "--heads", "2"),
    *("--arm", "noble:rank=4", "--vocab-size", "300", "--sequence-length", "16", "--eval-sequences", "2"),
    *("--warmup-steps", "1", "--tracker", "none", "--threads", "1", "--dropout", "0.1"),
)


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_run_folder_says_what_it_was_made_from(tmp_path):
    """Also where an operation without a deterministic kernel ends the run, which is named."""
    recipe = make_recipe("test_repeat:unpools", deterministic=True, steps=2)
    with pytest.raises(UserError, match=r"^max_unpooling2d\S* has no deterministic kernel.*--deterministic"):
        run_training(recipe, tmp_path / "out", prepared=FakeText(), quiet=True)
    assert determinism()["algorithms"] is False
    assert not (tmp_path / "out" / "result.json").exists()
    about = read(tmp_path / "out" / "recipe.json")
    assert about.keys() == {"recipe", "fingerprint", "versions", "machine", "git", "deterministic"}
    assert (about["machine"]["threads"], about["deterministic"]["algorithms"]) == (1, True)
    assert {"torch", "transformers", "peft", "safetensors", "numpy"} <= about["versions"].keys()
    data = read(tmp_path / "out" / "data.json")
    assert data["fingerprint"] == "f" * 16
    assert data["sources"]["text.source"]["bytes"] > 1_000_000  # the library's sources
    assert data["sources"]["text.tokenizer"] == {"name": "bpe"}
    assert str(tmp_path) not in json.dumps([about, data])
    with pytest.raises(RuntimeError, match="something else"), deterministic(True):
        raise RuntimeError("something else")


def test_data_are_recorded_file_by_file(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_text("one")
    (folder / "inner" / "b.txt").write_text("three")
    for unread in (".hidden", "notes.pdf"):
        (folder / unread).write_text("no")
    task = make_recipe().task

    def record(source):
        return data_record(replace(task, text=replace(task.text, source=str(source))), "f")

    before = record(folder)
    entry = before["sources"]["text.source"]
    assert entry["name"] == "corpus"
    assert entry["bytes"] == 8
    assert entry["files"] == {
        "a.txt": {"bytes": 3, "sha256": hash_file(folder / "a.txt")},
        "inner/b.txt": {"bytes": 5, "sha256": hash_file(folder / "inner" / "b.txt")},
    }
    assert changed_files(before, record(folder)) == []
    (folder / "a.txt").write_text("two")
    (folder / "inner" / "b.txt").unlink()
    (folder / "c.txt").write_text("")
    changes = ("a.txt has changed", "c.txt is new", "inner/b.txt is missing")
    assert changed_files(before, record(folder)) == [f"text.source: corpus, {each}" for each in changes]
    assert record(folder / "c.txt")["sources"]["text.source"]["files"].keys() == {"c.txt"}
    assert record("owner/name")["sources"]["text.source"] == {"name": "owner/name", "fingerprint": "f"}


def unpools(model):
    """Runs an operation that has no deterministic kernel."""

    def spoil(module, args, output):
        places = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
        extra = torch.nn.functional.max_unpool2d(torch.zeros(1, 1, 1, 1), places, 2)
        output["loss"] = output["loss"] + extra.sum()

    model.register_forward_hook(spoil)
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("repeat")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NLR_CACHE", str(root / "cache"))
        patched.chdir(root)  # where there is no git, whose state would differ from time to time
        (root / "text").mkdir()
        for number in range(40):
            words = " ".join(f"word{(number * 7 + place) % 23} = {place}" for place in range(60))
            (root / "text" / f"{number:02}.txt").write_text(words)
        command = ["train", "llm-demo", "--source", root / "text", "--out", root / "run", *TINY, "--deterministic"]
        assert cli.main([str(each) for each in command]) == 0
        yield root


def test_repeated_run_has_the_same_bits(trained, tmp_path, capsys):
    code, out, err = run(capsys, "train", "--from", trained / "run", "--out", tmp_path / "again")
    assert code == 0
    assert "warning" not in err
    assert f"the same bits as {trained / 'run'}: every loss and score, every weight" in out
    for name in ("model/model.safetensors", "data.json"):
        assert (tmp_path / "again" / name).read_bytes() == (trained / "run" / name).read_bytes()
    for name in ("recipe.json", "result.json"):
        contents = [read(folder / name) | {"seconds": 0} for folder in (trained / "run", tmp_path / "again")]
        assert contents[0] == contents[1]


def test_a_run_with_changes_is_another_run(trained, tmp_path, capsys):
    command = ["train", "--from", trained / "run", "--seed", "3", "--out", tmp_path / "other"]
    code, out, err = run(capsys, *command)
    assert code == 0, err
    assert "bits of" not in out
    settings = [read(folder / "recipe.json")["recipe"] for folder in (trained / "run", tmp_path / "other")]
    assert settings[1]["train"]["seed"] == 3
    settings[1]["train"]["seed"] = settings[0]["train"]["seed"]
    assert settings[0] == settings[1]


def test_changes_are_named(trained, tmp_path, capsys):
    former = tmp_path / "former"
    shutil.copytree(trained / "run", former)
    about, data, result = (read(former / f"{name}.json") for name in ("recipe", "data", "result"))
    about["versions"]["torch"] = "1.0"
    about["machine"]["processor"] = "another"
    about["git"] = {"commit": "0" * 40, "dirty": True}
    data["sources"]["text.source"]["files"]["07.txt"]["sha256"] = "0" * 64
    result["curve"][-1][1] += 1e-15
    for name, changed in {"recipe": about, "data": data, "result": result}.items():
        (former / f"{name}.json").write_text(json.dumps(changed))
    code, out, err = run(capsys, "train", "--from", former, "--out", tmp_path / "again")
    assert code == 0
    for words in (
        *("torch was 1.0 and is 2", "processor was another and is ", f"commit was {'0' * 40} and is None now"),
        *("the working directory had changes beside its commit 000", "text.source: text, 07.txt has changed"),
    ):
        assert f"warning: {words}" in err
    assert f"not the bits of {former}: curve was " in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("train --from {run} --out {run}", "is the run itself"),
        ("train llm-demo --from {run} --out {new}", "omit llm-demo"),
        ("train --from {run} --out {new} --lrr 1", "unrecognized argument --lrr; did you mean --lr?"),
        ("train --from {new} --out {new} --lr 1", "--config {new}/recipe.json: there is no such file"),
        ("train --from {run}", "--out"),
        ("train --from {run}/model --out {new}", "is not a run folder"),
        ("train --from {run}/nothing --out {new}", "does not exist"),
        ("finetune --from {run} --out {new}", "nlr train --from {run}"),
        ("train --from {code} --out {new}", "calls test_repeat:unpools, code that the folder only names"),
        ("train --from {code} --out {new} --allow-code", "no deterministic kernel"),  # it was called
        ("train --from {damaged} --out {new}", "is damaged"),
        ("train --from {torn} --out {new}", "torn/result.json is not the result of a run: JSONDecodeError"),
        ("train --from {torn} --out {new}", "recipe.json --out {torn} --resume rewrites it"),
    ],
)
def test_refused(trained, tmp_path, capsys, arguments, words):
    about = read(trained / "run" / "recipe.json")
    about["recipe"]["arm"] = {"method": "test_repeat:unpools"}
    for name, text in {"code": json.dumps(about), "damaged": '{"recipe": {"name": "x"'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.json").write_text(text)
    shutil.copytree(trained / "run", tmp_path / "torn")
    (tmp_path / "torn" / "result.json").write_text('{"arm": "noble", "se')
    places = {"run": trained / "run", **{name: tmp_path / name for name in ("new", "code", "damaged", "torn")}}
    code, _, err = run(capsys, *(each.format(**places) for each in arguments.split()))
    assert code == 2
    assert words.format(**places) in err
    assert not (tmp_path / "new" / "result.json").exists()


def test_each_process_draws_dropout_of_its_own():
    drawn = set()
    for place in (0, 1):
        schedule, state = Schedule(TrainConfig(steps=2, batch_size=2, lr=1e-3)), SimpleNamespace(global_step=0)
        schedule.on_train_begin(SimpleNamespace(seed=3, process_index=place), state, None)
        drawn.add(torch.initial_seed())
    assert len(drawn) == 2
