"""Loading refuses a broken folder in one line, before it reads what its files claim to hold."""

import json
import shutil

import pytest

import nonlinear_lowrank as nlr
from model_helpers import llama
from nonlinear_lowrank import hub
from nonlinear_lowrank.hub.storage import is_inside
from refusals import assert_refused


def edit(**values):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return change


def edit_entry(**values):
    def change(folder):
        (entry,) = json.loads((folder / "config.json").read_text())["nonlinear_lowrank"]
        edit(nonlinear_lowrank=[{**entry, **values}])(folder)

    return change


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def to_index(weight_map):
    def change(folder):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return change


BROKEN = {
    "not there": (shutil.rmtree, "does not exist"),
    "a file": (lambda folder: shutil.rmtree(folder) or folder.touch(), "is not a folder"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "binary": (write("config.json", b"\xff\xfe\x00"), "cannot be read as JSON"),
    "a list": (write("config.json", b"[1]"), "not an object"),
    "no type": (write("config.json", b'{"a": 1}'), "does not know model_type 'None'"),
    "unknown type": (edit(model_type="nonlinear_lowrank_foo"), "does not know model_type"),
    "no methods": (edit(nonlinear_lowrank=None), "no list 'nonlinear_lowrank'"),
    "unknown method": (edit_entry(method="foo"), "unknown method 'foo'"),
    "unknown field": (edit_entry(config={"ranks": 1}), "no field 'ranks'"),
    "no modules": (edit_entry(modules=None), "must list method, config and modules"),
    "no class": (edit(architectures=None), "names no model class"),
    "unknown class": (edit(architectures=["FooModel"]), "no model class 'FooModel'"),
    "other size": (edit(hidden_size=64), "cannot be loaded as"),
    "nonsense size": (edit(hidden_size="big"), "cannot be loaded as"),
    "a billion layers": (edit(num_hidden_layers=10**9), r"describes 1,000,000,000 layers, and the files hold \d+ tens"),
    "a billion tokens": (edit(vocab_size=10**9), "cannot be loaded as"),
    "truncated": (write("model.safetensors", bytes(999)), "not a whole safetensors file"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "pickle only": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "only pickled weights, which are never read",
    ),
    "no shard": (to_index({"a": "model-1.safetensors"}), "names the shard 'model-1.safetensors', which is not there"),
    "shard elsewhere": (to_index({"a": "../a.safetensors"}), "names the shard"),
    "no weight map": (to_index(None), "no weight_map"),
}


@pytest.mark.parametrize(("spoil", "message"), BROKEN.values(), ids=BROKEN)
def test_loading_a_broken_folder_gives_one_clear_line(tmp_path, spoil, message):
    model = llama()
    nlr.augment(model, nlr.NobleConfig(rank=3), verbose=False)
    model.save_pretrained(tmp_path / "model")
    spoil(tmp_path / "model")
    assert_refused(message, hub.load_model, tmp_path / "model")


def test_is_inside_refuses_names_that_leave_the_folder():
    assert all(map(is_inside, ["a", "a/b.json", "a.b", "..a", "a/...", "0"]))
    outside = ["", "..", "../a", "a/../../b", "/etc/passwd", "\\\\host\\a", "C:\\a", "C:a", "a\0", 3]
    assert not any(map(is_inside, outside))
