"""Saved models in a process without this package: the file that `trust_remote_code=True` runs."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import nonlinear_lowrank as nlr
from cli_helpers import HIDE_THE_PACKAGE, python_prints
from family_checks import realigned
from model_helpers import FAMILIES
from nonlinear_lowrank import hub
from nonlinear_lowrank.hub.modeling_file import MODELING_FILE
from tokenizer_helpers import word_tokenizer
from travel_helpers import CASES, MODELS, prepared

WITHOUT_US = f"""
import json
import os
from pathlib import Path
{HIDE_THE_PACKAGE}
root = Path(sys.argv[1])
os.environ["HF_MODULES_CACHE"] = str(root / "modules")
import torch
import transformers
from transformers import AutoConfig, AutoModel
torch.set_num_threads(1)
torch.manual_seed(0)
"""

LOAD = """
for place in sorted((root / "models").iterdir()):
    auto = getattr(transformers, (place / "auto.txt").read_text())
    trusting = {"trust_remote_code": True}
    model, info = auto.from_pretrained(place, output_loading_info=True, **trusting)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), (place.name, info)
    assert not model.training
    inputs, expected = torch.load(place / "outputs.pt")
    with torch.no_grad():
        logits = model(**inputs).logits
        assert (logits - expected).abs().max() <= 1e-6 * expected.abs().max().clamp_min(1), (
            place.name, (logits - expected).abs().max())
    model.save_pretrained(root / "again" / place.name)
    config = AutoConfig.from_pretrained(place, **trusting)
    drawn = auto.from_config(config, **trusting)
    names = dict(model.named_parameters())
    assert names.keys() == dict(drawn.named_parameters()).keys()
    for name, tensor in drawn.named_parameters():
        assert tensor.isfinite().all(), (place.name, name)
        width = json.loads((place / "widths.txt").read_text()).get(name, 0.0)
        assert not width or 0.6 < tensor.std() / width < 1.6, (place.name, name)
    AutoModel.from_pretrained(place, **trusting)
    drawn(**inputs).logits.square().sum().backward()
    own = {name: each.grad for name, each in drawn.named_parameters() if each.grad is not None}
    assert own and all(each.isfinite().all() for each in own.values()), place.name
    print(place.name)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of all cases, loaded and saved once more by a process without this package; the models by case."""
    root, found = tmp_path_factory.mktemp("saved"), {}
    for row, name in CASES:
        folder = root / "models" / f"{row}+{name}"
        model, inputs, logits = prepared(row, name)
        model.save_pretrained(folder)
        torch.save((inputs, logits), folder / "outputs.pt")
        drawn = MODELS[name][1].from_config(AutoConfig.from_pretrained(folder)).named_parameters()
        widths = {own.replace(".dense.", "."): each.std().item() for own, each in drawn if each.numel() >= 64}
        (folder / "widths.txt").write_text(json.dumps(widths))
        (folder / "auto.txt").write_text(MODELS[name][1].__name__)
        found[row, name] = model
    assert python_prints(WITHOUT_US + LOAD, root).split() == sorted(f"{row}+{name}" for row, name in CASES)
    return root, found


@pytest.mark.parametrize(("row", "name"), CASES)
def test_models_saved_without_the_package_load_into_it(saved, row, name):
    root, found = saved
    first, again = (root / place / f"{row}+{name}" for place in ("models", "again"))
    written, rewritten = (load_file(folder / "model.safetensors") for folder in (first, again))
    assert written.keys() == rewritten.keys()
    assert all(torch.equal(tensor, rewritten[key]) for key, tensor in written.items())
    configs = [json.loads((folder / "config.json").read_text()) for folder in (first, again)]
    for part in (part for config in configs for part in config.values() if isinstance(part, dict)):
        part.pop("dtype", None)  # transformers writes the model's into parts of a config when it loads
    assert configs[0] == configs[1]
    assert (first / MODELING_FILE).read_bytes() == (again / MODELING_FILE).read_bytes()
    loaded = realigned(hub.load_model(again))
    assert type(loaded) is type(found[row, name])
    inputs, expected = torch.load(first / "outputs.pt")
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, expected)


def test_files_hold_the_methods_of_the_model_alone(saved):
    root, _ = saved
    texts = {row: (root / "models" / f"{row}+llama" / MODELING_FILE).read_text() for row in ("noble", "sine", "query")}
    marks = {"noble": "NobleBranch", "sine": "SineLowRankLinear", "query": "NonlinearQuery("}
    for row, text in texts.items():
        assert [mark for mark, own in marks.items() if own in text] == [row]
        assert "NobleExperts" not in text
        assert "SplitLinear" not in text
        assert "import nonlinear_lowrank`" in text  # in its first lines
        assert "type: ignore" not in text
    assert "arXiv:2603.06492" in texts["noble"]


def test_files_read_as_our_own_code(saved):
    files = sorted(map(str, saved[0].glob(f"models/*/{MODELING_FILE}")))
    for command in (["check", "--select", "E,F,I,W"], ["format", "--check"]):
        subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", "pyproject.toml", *files],
            check=True,
            capture_output=True,
        )


HEADS = """
from transformers import AutoModelForSequenceClassification, AutoTokenizer
folder = root / "models" / "noble+llama"
trusting = {"trust_remote_code": True}
classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, **trusting)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, **trusting)
assert classifier.score.weight.shape == (3, 32)
tokens = torch.load(folder / "outputs.pt")[0]["input_ids"]
with torch.no_grad():
    assert torch.equal(classifier.model(tokens)[0], model.model(tokens)[0])
assert type(classifier.model) is type(AutoModel.from_pretrained(folder, **trusting))
tokenizer = AutoTokenizer.from_pretrained(folder, **trusting)
assert tokenizer("one")["input_ids"] == [2]
print(model.generate(tokens[:1], max_new_tokens=5, do_sample=False).tolist()[0])
sine = root / "models" / "sine+llama"
half = transformers.AutoModelForCausalLM.from_pretrained(sine, dtype=torch.bfloat16, **trusting)
kinds = {name.rpartition(".")[2]: each.dtype for name, each in half.named_parameters()}
assert kinds["sine_up"] == torch.float32 and kinds["weight"] == torch.bfloat16, kinds
assert half.half().model.layers[0].mlp.up_proj.sine_up.dtype == torch.float32
half(tokens)
"""


def test_heads_tokenizers_generation_and_types_without_the_package(saved):
    root, found = saved
    folder, model = root / "models" / "noble+llama", found["noble", "llama"]
    word_tokenizer(["<unk>", "two", "one"], unk_token="<unk>").save_pretrained(folder)
    tokens = torch.load(folder / "outputs.pt")[0]["input_ids"][:1]
    expected = model.generate(tokens, max_new_tokens=5, do_sample=False).tolist()[0]
    assert json.loads(python_prints(WITHOUT_US + HEADS, root)) == expected


REFUSED = """
for name, words in (("noble+llama", "trust_remote_code=True"), ("none", "nonlinear_lowrank_llama")):
    try:
        AutoConfig.from_pretrained(root / "models" / name, trust_remote_code=False)
    except ValueError as error:
        assert words in str(error), error
    else:
        raise SystemExit(name)
try:
    transformers.AutoModelForCausalLM.from_pretrained(
        root / "models" / "noble+llama", trust_remote_code=True,
        quantization_config=transformers.QuantoConfig(weights="int8"))
except ValueError as error:
    assert "pip install nonlinear-lowrank" in str(error), error
else:
    raise SystemExit("quantized")
"""


def test_without_trust_or_without_the_file_loading_fails(saved, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "noble+llama").symlink_to(saved[0] / "models" / "noble+llama")
    model = FAMILIES["llama"]()
    nlr.augment(model, nlr.NobleConfig(rank=3), verbose=False)
    model.save_pretrained(tmp_path / "models" / "none")
    assert (tmp_path / "models" / "none" / MODELING_FILE).is_file()
    model.config.modeling_file = False
    folder = tmp_path / "models" / "none"
    (folder / MODELING_FILE).unlink()
    model.save_pretrained(folder)
    assert not (folder / MODELING_FILE).exists()
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    python_prints(WITHOUT_US + REFUSED, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.modeling_file is False  # and so it stays


@pytest.mark.parametrize("trust", [None, True])
def test_with_the_package_its_own_classes_load(saved, trust):
    root, found = saved
    loaded = AutoModelForCausalLM.from_pretrained(root / "models" / "noble+llama", trust_remote_code=trust)
    assert type(loaded) is type(found["noble", "llama"])


def test_backbones_of_our_own_have_no_file(tmp_path):
    model = FAMILIES["image_tokens"]()
    nlr.augment(model, nlr.NobleConfig(rank=3), verbose=False)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / MODELING_FILE).exists()
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
