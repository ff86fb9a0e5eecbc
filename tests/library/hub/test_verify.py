"""nlr verify finds every kind of damage, names it in one line, and leaves the last good checkpoint alone."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nlr_lab.cli import main as cli
from nlr_lab.runtime.storage import read_manifest
from nlr_lab.training import run_training
from nonlinear_lowrank import UserError
from nonlinear_lowrank.hub import load_model
from nonlinear_lowrank.hub.storage import CARD, MANIFEST, hash_file
from nonlinear_lowrank.hub.verify import verify
from training_helpers import FakeText, make_recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("verify") / "run"
    run_training(make_recipe(steps=4, save_every=2), out, prepared=FakeText(), quiet=True)
    return out


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def faults(path: Path) -> str:
    return "\n".join(verify(path).faults)


def test_verify_finds_no_fault_in_a_whole_run(trained, capsys):
    found = verify(trained)
    assert found.faults == []
    files = list(trained.rglob("*.safetensors"))
    assert found.nbytes == sum(file.stat().st_size for file in files)
    assert found.tensors == sum(len(load_file(file)) for file in files)
    assert found.hashed == sum(len(read_manifest(file.parent)["files"]) for file in trained.rglob(MANIFEST)) >= 15
    assert cli.main(["verify", str(trained)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("; whole")
    for part in ("checkpoints/step-000004", "model/model.safetensors", "result.json"):
        assert verify(trained / part).faults == []


def test_verify_finds_any_flipped_bit(run):
    """In any file but the card; in a manifest the fault may name the file that it now describes wrongly."""
    folders = (run / "model", run / "checkpoints")
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file() and file.name != CARD]
    for file in random.sample(files, 6):
        whole = file.read_bytes()
        spoilt = bytearray(whole)
        spoilt[random.randrange(len(spoilt))] ^= 1 << random.randrange(8)
        file.write_bytes(spoilt)
        found = faults(run)
        assert (str(file.parent) in found) if file.name == MANIFEST else (file.name in found), file
        file.write_bytes(whole)
    assert faults(run) == ""


def spoil_with_nan(run: Path) -> None:
    """Numbers alone: the manifest is right about them."""
    path = run / "model" / "model.safetensors"
    tensors = load_file(path)
    spoilt = tensors["model.layers.1.self_attn.q_proj.weight"]
    spoilt[3, :5], spoilt[4, 0] = float("nan"), float("-inf")
    save_file(tensors, path, metadata={"format": "pt"})
    manifest = json.loads((path.parent / MANIFEST).read_text())
    manifest["files"][path.name] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    (path.parent / MANIFEST).write_text(json.dumps(manifest))


def without(name):
    return lambda run: (run / name).unlink()


def write(name, text):
    return lambda run: (run / name).write_text(text)


DAMAGE = {
    "numbers": (spoil_with_nan, r"'model.layers.1.self_attn.q_proj.weight' has 5 NaN and 1 infinite of 1,024 values"),
    "cut": (write("model/model.safetensors", "{}"), "model.safetensors is not a whole safetensors file"),
    "missing": (without("checkpoints/step-000002/state.json"), "state.json is missing"),
    "added": (write("model/more.json", "{}"), r"more.json is not in .*manifest.json"),
    "json": (write("result.json", '{"a": '), "result.json is not JSON"),
    "no manifest": (without(f"checkpoints/step-000002/{MANIFEST}"), "step-000002 has no manifest"),
    "manifest": (write(f"model/{MANIFEST}", "[]"), "manifest.json lists no files"),
    "outside": (
        write(f"model/{MANIFEST}", '{"files": {"../../etc/passwd": {"bytes": 1}}}'),
        r"names '../../etc/passwd', which is outside its folder",
    ),
    "entry": (write(f"model/{MANIFEST}", '{"files": {"config.json": 3}}'), "the size of config.json"),
    "weights": (without("model/model.safetensors"), "config.json and no weights"),
}


@pytest.mark.parametrize(("spoil", "words"), DAMAGE.values(), ids=DAMAGE)
def test_verify_names_the_damage(run, capsys, spoil, words):
    spoil(run)
    assert re.search(words, faults(run)), faults(run)
    assert cli.main(["verify", str(run)]) == 2
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if line.startswith("fault: ") and re.search(words, line)]
    assert err.count("\n") == 1
    assert "not whole" in err


def test_verify_takes_a_config_alone_for_an_adapters_base_only(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    assert "config.json and no weights" in faults(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"a": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    assert faults(tmp_path) == ""


def test_verify_holds_shards_against_their_index(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors", "c": "../two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = faults(tmp_path)
    assert "one.safetensors lacks 1 tensors of its index, such as b" in found
    assert "names the shard '../two.safetensors', which is not there" in found


def test_verify_looks_at_large_and_narrow_tensors_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("nonlinear_lowrank.hub.verify._AT_ONCE", 64)
    values = torch.zeros(37, 5)
    values[36, 4], values[0, 0] = float("nan"), float("inf")
    eighth = torch.ones(3).to(torch.float8_e4m3fn)
    eighth.view(torch.uint8)[1] = 0x7F  # its NaN
    tensors = {"large": values, "float8": eighth, "whole": torch.arange(1000), "scalar": torch.tensor(float("nan"))}
    save_file(tensors, tmp_path / "a.safetensors")
    assert sorted(line.partition("tensor ")[2] for line in verify(tmp_path / "a.safetensors").faults) == [
        "'float8' has 1 NaN of 3 values",
        "'large' has 1 NaN and 1 infinite of 185 values",
        "'scalar' has 1 NaN of 1 values",
    ]


def test_verify_names_pickles_and_never_opens_them(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")
    found = verify(tmp_path)
    assert found.faults == []
    assert ["pytorch_model.bin" in line and "checkpoints reads it" in line for line in found.notes] == [True]


@pytest.mark.parametrize(("make", "words"), [(None, "no such file"), ("", "holds no checkpoint"), ("a.bin", "neither")])
def test_verify_refuses_a_path_with_nothing_to_check(tmp_path, capsys, make, words):
    path = tmp_path / "x"
    if make is not None:
        path.mkdir()
        (path / "a.bin").write_bytes(b"1")
        path /= make
    assert cli.main(["verify", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_load_model_refuses_weights_that_differ_from_the_manifest(run):
    path = run / "model" / "model.safetensors"
    assert load_model(run / "model") is not None
    spoilt = bytearray(path.read_bytes())
    spoilt[-1] ^= 1
    path.write_bytes(spoilt)
    with pytest.raises(UserError, match=r"model.safetensors is damaged.*delete .*manifest.json"):
        load_model(run / "model")
    (run / "model" / MANIFEST).unlink()
    load_model(run / "model")
    (run / "model" / MANIFEST).write_text('{"icons": []}')  # another tool's
    load_model(run / "model")
