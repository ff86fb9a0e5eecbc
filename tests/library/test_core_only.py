"""The library without its extras: only torch, transformers, safetensors, wrapt and what these require are there."""

from cli_helpers import python_prints

# Written into the new process before anything else is imported.
CORE_ONLY = '''
import importlib.metadata, re, sys

def closure(names):
    found, todo = set(), list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found:
            continue
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        todo += [re.match(r"[\\w.-]+", each)[0] for each in required if "extra ==" not in each]
    return found

core = closure(["torch", "transformers", "safetensors", "wrapt"])
owners = importlib.metadata.packages_distributions()
normal = {top: {re.sub(r"[-_.]+", "-", each).lower() for each in names} for top, names in owners.items()}
blocked = {top for top, names in normal.items() if not names & (core | {"nonlinear-lowrank"})} | {"nlr_lab"}
assert {"peft", "accelerate", "datasets", "scipy", "psutil"} <= blocked

class Core:
    """A finder that does not see what is blocked."""

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Core, sys.meta_path)
own_versions = importlib.metadata.version

def version(name):
    if re.sub(r"[-_.]+", "-", name).lower() not in core | {"nonlinear-lowrank"}:
        raise importlib.metadata.PackageNotFoundError(name)
    return own_versions(name)

importlib.metadata.version = version
'''

TRAIN = """
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
import nonlinear_lowrank as nlr
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

configs = (nlr.NobleConfig(rank=4), nlr.SineLowRankConfig(rank=4, omega=100), nlr.NonlinearQueryConfig(),
           nlr.QKNormConfig(), nlr.RationalConfig(groups=4))
for method in configs:
    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None, bos_token_id=None))
    nlr.augment(model, method, include=".*mlp.*" if method.method == "sine-lowrank" else None, verbose=False)
    optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=1e-2, verbose=False))
    tokens = torch.randint(0, 40, (4, 12))
    losses = []
    for _ in range(5):
        losses.append(model(tokens, labels=tokens).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0], losses
    model.eval().save_pretrained(sys.argv[1])
    with torch.no_grad():
        expected = model(tokens).logits
        for again in (AutoModelForCausalLM.from_pretrained(sys.argv[1]), nlr.hub.load_model(sys.argv[1])):
            assert type(again) is type(model)
            assert torch.equal(again(tokens).logits, expected)
print(len(configs))
"""


def test_training_saving_and_loading_need_no_extra(tmp_path):
    assert python_prints(CORE_ONLY + TRAIN, tmp_path / "model").split()[-1] == "5"


ADAPTERS = """
import nonlinear_lowrank as nlr
from nonlinear_lowrank.hub.merging import merge_adapter

for use in (*(lambda name=name: getattr(nlr, name) for name in ("SineLoraConfig", "NoraConfig", "NobleAdapterConfig")),
            lambda: merge_adapter(sys.argv[1], "out")):
    try:
        use()
    except nlr.UserError as error:
        assert "pip install '" in str(error) and "[peft]'" in str(error), error
        assert len(str(error).splitlines()) == 1
    else:
        raise AssertionError("no error")
"""


def test_adapters_name_the_extra_that_they_need(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    python_prints(CORE_ONLY + ADAPTERS, tmp_path)
