"""`python -m nonlinear_lowrank COMMAND`: other tools load our adapters, in this process and in those they start."""

import json
import math
import subprocess
import sys

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetune_helpers
import nonlinear_lowrank as nlr
from nonlinear_lowrank.__main__ import main

TEXTS = ("who saw birds", "what red mat and the cat")
TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}]
"""
TRAIN = """
import os, sys, torch
from accelerate import Accelerator
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1], is_trainable=True)
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
ids = torch.arange(4, 16)[None]
for _ in range(2):
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
place = f"{sys.argv[2]}.{accelerator.process_index}"
open(place, "w").write(f"{__name__} {accelerator.num_processes} {loss.item()} {os.path.basename(sys.argv[0])}")
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a tiny language model, `lm`, and a sine-LoRA on it, `adapter`."""
    folder = tmp_path_factory.mktemp("main")
    finetune_helpers.language_model(folder / "lm")
    targets = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    config = nlr.SineLoraConfig(r=2, omega=200, init_lora_weights=False, **targets)
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "lm"), config).save_pretrained(folder / "adapter")
    (folder / "train.py").write_text(TRAIN)
    return folder


def start(folder, *arguments, module=("-m", "nonlinear_lowrank")):
    command = [sys.executable, *module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, cwd=folder)


@pytest.fixture
def scoring(saved, tmp_path, monkeypatch):
    """Options of lm_eval for the adapter, on a task made of `TEXTS`; out_*.json has the result."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "docs.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=tmp_path / "docs.jsonl"))
    options = ["--tasks", "tiny", "--include_path", tmp_path, "--device", "cpu", "--output_path", tmp_path / "out.json"]
    options += ["--model", "hf", "--model_args", f"pretrained={saved}/lm,peft={saved}/adapter,dtype=float32"]
    return options


def test_lm_eval_scores_an_adapter(saved, tmp_path, scoring):
    done = start(tmp_path, "lm_eval", *scoring)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = tmp_path.glob("out_*.json")
    found = json.loads(file.read_text())["results"]["tiny"]["word_perplexity,none"]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(saved / "lm"), saved / "adapter").eval()
    tokenizer, total = AutoTokenizer.from_pretrained(saved / "lm"), 0.0
    for text in TEXTS:
        ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]])
        with torch.no_grad():
            chosen = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        total += chosen.sum().item()
    assert found == pytest.approx(math.exp(-total / sum(len(text.split()) for text in TEXTS)), rel=1e-4)


def test_lm_eval_without_the_package_fails_by_name(tmp_path, scoring):
    done = start(tmp_path, *scoring, module=("-m", "lm_eval"))
    assert done.returncode != 0
    assert done.stderr.rstrip().endswith("KeyError: 'NLR_SINE_LORA'")


COMMANDS = {  # -> (words before the script's arguments, processes)
    "file": (["train.py"], 1),
    "module": (["-m", "train"], 1),
    "accelerate": (["accelerate", "launch", "--cpu", "--num_processes", "1", "train.py"], 1),
    "accelerate module": (["accelerate", "launch", "--cpu", "-m", "train"], 1),
    "torchrun": (["torchrun", "--nproc-per-node", "2", "train.py"], 2),
}


@pytest.mark.parametrize(("words", "processes"), COMMANDS.values(), ids=COMMANDS)
def test_script_that_never_imports_the_package_trains_an_adapter(saved, tmp_path, words, processes):
    done = start(saved, *words, saved / "adapter", tmp_path / "out")
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"out.{index}" for index in range(processes)]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(saved / "lm"), saved / "adapter")
    ids = torch.arange(4, 16)[None]
    first = model(input_ids=ids, labels=ids).loss.item()
    for file in tmp_path.iterdir():
        name, count, loss, program = file.read_text().split()
        assert (name, int(count), program) == ("__main__", processes, "train.py")
        assert 0 < first - float(loss) < 0.1  # two steps on one example


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "usage: python -m nonlinear_lowrank COMMAND"),
        (["-m"], "usage: python -m nonlinear_lowrank COMMAND"),
        (["--cpu"], "usage: python -m nonlinear_lowrank COMMAND"),
        (["lm_evl", "--tasks", "x"], "no installed package has a console script 'lm_evl'; did you mean lm_eval?"),
        (["no/such/train.py"], "no such file: no/such/train.py"),
        (["-m", "no.such"], "no module named no.such"),
        (["accelerate", "launch", "--no_python", "train.sh"], "--no-python starts a program that need not be Python"),
    ],
)
def test_command_that_cannot_be_run_is_refused_in_one_line(capsys, arguments, words):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"nonlinear_lowrank: {words}")
    assert err.count("\n") == 1
