"""Whatever is imported after `nonlinear_lowrank` or before it knows our types, and every public name is there."""

import importlib
import sys

import pytest

import nonlinear_lowrank as nlr
from cli_helpers import python_prints as run
from model_helpers import llama


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = llama()
    nlr.augment(model, nlr.NobleConfig(rank=2), verbose=False)
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder)
    return str(folder)


LOAD = """
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model).__name__, type(AutoConfig.from_pretrained(sys.argv[1])).__name__)
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import nonlinear_lowrank\nfrom transformers import AutoConfig, AutoModelForCausalLM",
        "from transformers import AutoConfig, AutoModelForCausalLM\nimport nonlinear_lowrank",
        "import transformers\nimport nonlinear_lowrank\nfrom transformers import AutoConfig, AutoModelForCausalLM",
        "import nonlinear_lowrank.errors\nfrom transformers import AutoModelForCausalLM, AutoConfig",
    ],
    ids=["before", "after", "between", "a part of it"],
)
def test_auto_classes_know_our_types_whatever_came_first(saved, imports):
    words = run(f"import sys\n{imports}\n{LOAD}", saved).split()
    assert words == ["NonlinearLowrankLlamaForCausalLM", "NonlinearLowrankLlamaConfig"]


LATER = """
import sys
import nonlinear_lowrank
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

class MyConfig(LlamaConfig):
    model_type = "my_llama"

class MyModel(LlamaForCausalLM):
    config_class = MyConfig

AutoConfig.register("my_llama", MyConfig)
AutoModelForCausalLM.register(MyConfig, MyModel)
if sys.argv[2] == "save":
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = MyModel(MyConfig(**sizes, eos_token_id=None, bos_token_id=None))
    from nonlinear_lowrank.surgery.augment import augment  # nothing but the file of the function is named
    augment(model, nonlinear_lowrank.NobleConfig(rank=2), verbose=False)
    model.save_pretrained(sys.argv[1])
else:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    print(type(model).__name__, type(AutoConfig.from_pretrained(sys.argv[1])).__name__)
"""


def test_auto_classes_load_backbones_that_a_user_registers_later(tmp_path):
    run(LATER, str(tmp_path), "save")
    assert run(LATER, str(tmp_path), "load").split() == ["NonlinearLowrankMyModel", "NonlinearLowrankMyConfig"]


@pytest.mark.parametrize(
    "imports",
    [
        "import peft\nimport nonlinear_lowrank as nlr\nconfig = nlr.NoraConfig()",
        "import nonlinear_lowrank as nlr\nconfig = nlr.NoraConfig()\nimport peft",
        "from nonlinear_lowrank.methods.rational.adapter import NoraConfig\nconfig = NoraConfig()\nimport peft",
        "import nonlinear_lowrank.adapters\nimport peft\nconfig = nonlinear_lowrank.NoraConfig()",
    ],
    ids=["before", "after", "by its file", "without it"],
)
def test_peft_knows_our_methods_whatever_came_first(imports):
    code = f"{imports}\nprint(config.peft_type.value, *[each.value for each in peft.PeftType if 'NLR' in each.value])"
    first, *known = run(code).split()
    assert (first, sorted(known)) == ("NLR_NORA", ["NLR_NOBLE", "NLR_NORA", "NLR_SINE_LORA"])


def test_torchtitan_is_an_extra_which_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.setitem(sys.modules, "spmd_types", None)
    monkeypatch.delitem(sys.modules, "nonlinear_lowrank.integrations.torchtitan", raising=False)
    with pytest.raises(nlr.UserError, match=r"pip install '.*\[torchtitan\]'"):
        importlib.import_module("nonlinear_lowrank.integrations.torchtitan")


def test_every_public_name_is_there():
    for name in nlr.__all__:
        value = getattr(nlr, name)
        assert getattr(value, "__name__", "").rpartition(".")[2] == name
        assert name in dir(nlr)
    for module in (nlr.analysis, nlr.hub):
        assert {*module.__all__} <= {*dir(module)}
        for name in module.__all__:
            assert getattr(module, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'layer_imporance'"):
        _ = nlr.analysis.layer_imporance
    with pytest.raises(AttributeError, match="no attribute 'agument'"):
        _ = nlr.agument
