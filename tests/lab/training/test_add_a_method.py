"""docs/add-a-method.md: its folder, installed as another distribution, works everywhere with no other file touched."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "add-a-method.md"

NLR = """
import contextlib, io

def nlr_says(*arguments):
    from nlr_lab.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main([str(each) for each in arguments]) == 0
    return said.getvalue()
"""

MODEL = """
import torch, transformers
import nonlinear_lowrank as nlr
from transformers import AutoModelForCausalLM, LlamaConfig

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     bos_token_id=None, eos_token_id=None)
model = AutoModelForCausalLM.from_config(config).eval()
tokens = torch.randint(64, (2, 8))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A site folder with the page's package and its entry point."""
    folder = tmp_path_factory.mktemp("site")
    text = PAGE.read_text(encoding="utf-8")
    files = re.findall(r"^`(glu_branch/\w+\.py)`:\n\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (folder / "glu_branch").mkdir()
    for name, code in files:
        (folder / name).write_text(code, encoding="utf-8")
    (entry,) = re.findall(r'^\[project\.entry-points\."([\w.]+)"\]\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    about = folder / "glu_branch-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: glu-branch\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{entry[0]}]\n{entry[1].replace(chr(34), '')}")
    return folder


@pytest.fixture
def run(site, tmp_path):
    """Run a program in a process that has the package; `nlr_says(*arguments)` in it returns what the command prints."""

    def run(program):
        path = os.pathsep.join([str(site), *filter(None, sys.path)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", NLR + program], env=environment, cwd=tmp_path, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]

    return run


def test_augment_groups_compile_save_and_load(run):
    run(f"""{MODEL}
from glu_branch import GluConfig, GluLinear
report = nlr.augment(model, GluConfig(), budget="20%", verbose=False)
assert 0 < report.parameters_added <= 0.2 * report.parameters_before
assert sum(isinstance(module, GluLinear) for module in model.modules()) == len(report.swapped) == 14
optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=1e-2, verbose=False))
rates = {{group["role"]: group["lr"] for group in optimizer.param_groups}}
assert rates["glu.up"] == 2 * rates["glu.gate"] == 2e-2
first = model(tokens, labels=tokens).loss
first.backward()
optimizer.step()
assert model(tokens, labels=tokens).loss < first
with torch.no_grad():
    logits = model(tokens).logits
    with nlr.branches_disabled(model):
        assert not torch.equal(model(tokens).logits, logits)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(tokens).logits, logits, rtol=1e-4, atol=1e-4)
model.save_pretrained("out")
torch.save(logits, "logits.pt")
""")
    run(f"""{MODEL}
same = AutoModelForCausalLM.from_pretrained("out").eval()  # found by the entry point: glu_branch is not imported here
assert torch.equal(same(tokens).logits, torch.load("logits.pt"))
assert same.generate(tokens, max_new_tokens=2).shape == (2, 10)
""")


def test_convert_and_adapter(run):
    run(f"""{MODEL}
import peft
from glu_branch import GluConfig
from glu_branch.adapter import GluAdapterConfig
model.save_pretrained("plain")
assert nlr.hub.convert("plain", "converted", GluConfig(rank=4)).bit_equal
adapted = peft.get_peft_model(model, GluAdapterConfig(r=4, target_modules="all-linear", init_weights=False))
adapted.save_pretrained("adapter")
torch.save(adapted(tokens).logits, "logits.pt")
assert "bit-equal" in nlr_says("convert", "plain", "by-command", "--method", "glu", "--rank", 4)
""")
    run(f"""{MODEL}
import peft
base = AutoModelForCausalLM.from_pretrained("plain")
assert torch.equal(peft.PeftModel.from_pretrained(base, "adapter")(tokens).logits, torch.load("logits.pt"))
""")


def test_arms_inspect_and_bench(run):
    run("""
from pathlib import Path
small = ["--layers", 1, "--width", 16, "--heads", 2]
sizes = [*small, "--hidden", 16, "--sequence-length", 16, "--arms", "baseline", "glu:rank=2"]
settings = ["--steps", 4, "--warmup-steps", 1, "--eval-every", 2, "--batch-size", 2, "--seeds", 1]
nlr_says("compare", "llm-demo", *sizes, *settings, "--out", "compared")
assert "glu-r2" in Path("compared/report.md").read_text()
plain, branched = (nlr_says("inspect", "llm-demo", "--arm", arm, "--json") for arm in ("baseline", "glu:rank=4"))
assert plain != branched != ""
bench = ["--rounds", 1, "--modes", "eager"]
assert "glu r=4" in nlr_says("bench", "step", "--methods", "glu", "--ranks", 4, *small, *bench)
""")
