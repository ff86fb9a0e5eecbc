"""Loading refuses a broken folder in one line, before it reads what its files claim to hold."""

import json
import struct

import pytest

import nonlinear_lowrank as nlr
from model_helpers import llama
from nonlinear_lowrank import hub
from nonlinear_lowrank.hub.storage import is_inside, tensor_shapes


@pytest.fixture(scope="module")
def model():
    model = llama()
    nlr.augment(model, nlr.NobleConfig(rank=3), verbose=False)
    return model


def edit(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def edit_entry(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    edit(folder, nonlinear_lowrank=[{**config["nonlinear_lowrank"][0], **values}])


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def to_index(folder, weight_map):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


BROKEN = {
    "not there": (lambda folder: [each.unlink() for each in folder.iterdir()] and folder.rmdir(), "does not exist"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "a file": (
        lambda folder: [each.unlink() for each in folder.iterdir()] and (folder.rmdir() or folder.touch()),
        "is not a folder",
    ),
    "binary": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"), "cannot be read as JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[1]"), "not an object"),
    "no config at all": (lambda folder: (folder / "config.json").write_text('{"a": 1}'), "not a model config"),
    "unknown type": (lambda folder: edit(folder, model_type="nonlinear_lowrank_foo"), "does not know model_type"),
    "no methods": (lambda folder: edit(folder, nonlinear_lowrank=None), "no list 'nonlinear_lowrank'"),
    "unknown method": (lambda folder: edit_entry(folder, method="foo"), "unknown method 'foo'"),
    "unknown field": (lambda folder: edit_entry(folder, config={"ranks": 1}), "no field 'ranks'"),
    "no modules": (lambda folder: edit_entry(folder, modules=None), "must list method, config and modules"),
    "no class": (lambda folder: edit(folder, architectures=None), "names no model class"),
    "unknown class": (lambda folder: edit(folder, architectures=["FooModel"]), "no model class 'FooModel'"),
    "other size": (lambda folder: edit(folder, hidden_size=64), "cannot be loaded as"),
    "nonsense size": (lambda folder: edit(folder, hidden_size="big"), "cannot be loaded as"),
    "truncated": (lambda folder: truncate(folder / "model.safetensors"), "not a whole safetensors file"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "pickle only": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "only pickled weights, which are never read",
    ),
    "no shard": (
        lambda folder: to_index(folder, {"a": "model-00001-of-00001.safetensors"}),
        "names the shard 'model-00001-of-00001.safetensors', which is not there",
    ),
    "shard elsewhere": (lambda folder: to_index(folder, {"a": "../a.safetensors"}), "names the shard"),
    "no weight map": (lambda folder: to_index(folder, None), "no weight_map"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_loading_a_broken_folder_gives_one_clear_line(model, tmp_path, kind):
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    spoil, message = BROKEN[kind]
    spoil(folder)
    with pytest.raises(nlr.UserError, match=message) as caught:
        hub.load_model(folder)
    assert "\n" not in str(caught.value)


HEADERS = {
    "claims a terabyte": struct.pack("<Q", 1 << 40) + b"{}" + bytes(8),
    "too short": b"1234",
    "a list": struct.pack("<Q", 3) + b"[1]",
    "beyond the end": struct.pack("<Q", 56) + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}  ',
}


@pytest.mark.parametrize("kind", HEADERS)
def test_tensor_shapes_refuses_a_header_that_does_not_fit_its_file(tmp_path, kind):
    (tmp_path / "a.safetensors").write_bytes(HEADERS[kind])
    with pytest.raises(nlr.UserError, match="is not a whole safetensors file") as caught:
        tensor_shapes(tmp_path / "a.safetensors")
    assert "\n" not in str(caught.value)


def test_is_inside_refuses_names_that_leave_the_folder():
    assert all(map(is_inside, ["a", "a/b.json", "a.b", "..a", "a/...", "0"]))
    outside = ["", "..", "../a", "a/../../b", "/etc/passwd", "\\\\host\\a", "C:\\a", "C:a", "a\0", 3]
    assert not any(map(is_inside, outside))
