"""Tiny runs for the training tests, and a process that forks one run at a time, to be killed.

`python training_helpers.py` is that process: it imports everything once, then reads a JSON object a line,
trains in a fork, and answers {"pid": ...} at the start and {"exit": ..., "error": ...} at the end.
"""

import contextlib
import json
import multiprocessing
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast

from nlr_lab.tasks.task import Examples, Prepared
from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import GlmBackbone, LanguageModelTask
from nlr_lab.training import Arm, Recipe, TrainConfig

VOCABULARY, LENGTH = 48, 16


class Sequences(Examples):
    """Learnable noise: every other token follows from the one before."""

    def __init__(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (number, LENGTH), generator=generator)
        self.tokens[:, 1::2] = (self.tokens[:, ::2] * 5 + 1) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index].clone()}


class FakeText(Prepared):
    """Stands for packed text."""

    def __init__(self, train: int = 50, valid: int = 7, fingerprint: str = "f" * 16) -> None:
        words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
        super().__init__(
            train=Sequences(train, 1),
            valid=Sequences(valid, 2),
            tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0"),
            fingerprint=fingerprint,
            facts={"tokens": train * LENGTH},
            vocab_size=VOCABULARY,
            valid_bytes_per_token=2.5,
        )


def make_recipe(arm: str | Arm = "noble:rank=4", dropout: float = 0.1, **train: Any) -> Recipe:
    """Two layers of width 32, twelve steps of four sequences."""
    settings = {"steps": 12, "batch_size": 4, "lr": 1e-2, "warmup_steps": 2, "eval_every": 5, "save_every": 2}
    settings = {**settings, "log_every": 3, "tracker": "none", "threads": 1, **train}
    backbone = GlmBackbone(layers=2, width=32, heads=2, hidden=48, embedding_std=1.0, dropout=dropout)
    task = LanguageModelTask(text=TextData(sequence_length=LENGTH), backbone=backbone)
    arm = Arm.parse(arm) if isinstance(arm, str) else arm
    return Recipe(name="tiny", task=task, arm=arm, train=TrainConfig(**settings))


def cut_back(done: Path, out: Path, step: int) -> Path:
    """Copy a finished run as a process leaves it that was killed right after the checkpoint of `step`."""
    shutil.copytree(done, out)
    (out / "result.json").unlink()
    shutil.rmtree(out / "model")
    for folder in (out / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    return out


# --- functions for arms --------------------------------------------------------------------------------------

SEEN: list[torch.Tensor] = []


def before_training(model: nn.Module, at: int, act: Callable[[Any], None]) -> nn.Module:
    """Act before the `at`-th training batch (0: before each), with the batch."""
    count = 0

    def count_up(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal count
        count += module.training
        if module.training and at in (0, count):
            act(kwargs)

    model.register_forward_pre_hook(count_up, with_kwargs=True)
    return model


def spy(model: nn.Module, draws: int = 0) -> nn.Module:
    """Notes the training sequences in SEEN; may draw random numbers, in building and in every step."""
    torch.randn(draws + 1)
    return before_training(model, 0, lambda batch: (SEEN.extend(batch["input_ids"].clone()), torch.randn(draws + 1)))


def poison(model: nn.Module, at: int = 1) -> nn.Module:
    """The loss of the `at`-th training batch is not a number."""
    batches = []

    def spoil(module: nn.Module, args: Any, output: Any) -> None:
        if module.training:
            batches.append(None)
            output["loss"] = output["loss"] * float("nan" if len(batches) == at else 1)

    model.register_forward_hook(spoil)
    return model


def poison_gradient(model: nn.Module, at: int = 1) -> nn.Module:
    """The gradient of the `at`-th training batch is not a number while its loss is."""
    batches = []

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        batches.append(None)
        return gradient * float("nan") if len(batches) == at else gradient

    model.get_output_embeddings().weight.register_hook(spoil)
    return model


def die(model: nn.Module, at: int = 1) -> nn.Module:
    """The second process is killed before its `at`-th training batch, unless it was started again."""
    doomed = os.environ.get("NLR_TEST_DIES") and os.environ["RANK"] == "1"
    doomed = doomed and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    return before_training(model, at, lambda _: os.kill(os.getpid(), signal.SIGKILL)) if doomed else model


def lose_reader(model: nn.Module, at: int = 1) -> nn.Module:
    """With NLR_TEST_FAULT a process that reads data is killed before the `at`-th training batch."""

    def kill(_: Any) -> None:
        readers = [each for each in multiprocessing.active_children() if each.is_alive()]
        os.kill(readers[0].pid, signal.SIGKILL)

    return before_training(model, at, kill) if os.environ.get("NLR_TEST_FAULT") else model


def jump_clock(model: nn.Module) -> nn.Module:
    """With NLR_TEST_FAULT the time of day is another in every step: days, hours and minutes on or back."""
    if os.environ.get("NLR_TEST_FAULT"):
        true = time.time
        jumps = Random(0)
        time.time = lambda: true() + jumps.choice((-1, 1)) * jumps.choice((60, 3600, 86400, 400 * 86400))
    return model


def blow_up(model: nn.Module, at: int = 1, times: float = 60.0) -> nn.Module:
    """Before the `at`-th training batch the output head grows: a loss that is high and finite from then on."""
    return before_training(model, at, lambda _: model.get_output_embeddings().weight.data.mul_(times))


def poison_evaluation(model: nn.Module) -> nn.Module:
    """The loss is not a number in evaluation only."""

    def spoil(module: nn.Module, args: Any, output: Any) -> None:
        if not module.training:
            output["loss"] = output["loss"] * float("inf")

    model.register_forward_hook(spoil)
    return model


def no_module(model: nn.Module) -> None:
    """Forgets to return the model."""


def plain_module(model: nn.Module) -> nn.Module:
    """Not a transformers model any more; embedding and head are one tensor."""
    return Wrapped(model)


class Wrapped(nn.Module):
    """Has a loss that knows of no num_items_in_batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        model.lm_head.weight = model.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(input_ids=input_ids, labels=labels).loss}


# --- the forking process -------------------------------------------------------------------------------------


class TrainingServer:
    """Training in forks of a process that has imported everything; each is a process to kill."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )

    def start(self, out: Path, *, limit: int | None = None, fault: bool = False, **settings: Any) -> int:
        """Begin or resume a run; return its process id. `limit`: bytes a file may have; `fault`: the arm's happens."""
        command = {"out": str(out), "limit": limit, "fault": fault, "settings": settings}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()["pid"]

    def wait(self) -> dict[str, Any]:
        """Return the exit status (negative: the signal that ended it) and, of a UserError, the message."""
        return self._answer()

    def run(self, out: Path, **settings: Any) -> dict[str, Any]:
        """Start and wait."""
        self.start(out, **settings)
        return self.wait()

    def kill_when(self, pid: int, condition: Callable[[], bool], delay: float = 0.0) -> bool:
        """Kill the run some seconds after the condition holds; False if it ended before."""
        while not condition():
            if select.select([self.process.stdout], [], [], 0.0005)[0]:  # it has ended
                self.wait()
                return False
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return self.wait()["exit"] == -signal.SIGKILL

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


def _serve() -> None:
    from nlr_lab.training import run_training
    from nonlinear_lowrank.errors import UserError

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what runs print is no answer
    text = FakeText()

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    for line in sys.stdin:
        command = json.loads(line)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                if command["limit"] is not None:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (command["limit"], resource.RLIM_INFINITY))
                if command["fault"]:
                    os.environ["NLR_TEST_FAULT"] = "1"
                recipe = make_recipe(**command["settings"])
                run_training(recipe, Path(command["out"]), resume=True, prepared=text, quiet=True)
                code = 0
            except UserError as error:
                os.write(writer, str(error).encode())
                code = 2
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writer)
        answer(pid=pid)
        status = os.waitpid(pid, 0)[1]
        with os.fdopen(reader) as stream:
            error = stream.read()
        answer(exit=os.waitstatus_to_exitcode(status), error=error)


if __name__ == "__main__":
    _serve()
