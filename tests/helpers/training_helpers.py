"""Tiny runs for the training tests, each in a process of its own where it is to be killed."""

import contextlib
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from nlr_lab.runtime.signals import StoppedBySignal
from nlr_lab.tasks.task import Examples, Prepared
from nlr_lab.tasks.text.data import TextData
from nlr_lab.tasks.text.language_model import GlmBackbone, LanguageModelTask
from nlr_lab.training import Arm, Recipe, TrainConfig, run_training
from nonlinear_lowrank.errors import UserError
from tokenizer_helpers import word_tokenizer

VOCABULARY, LENGTH = 48, 16


class Sequences(Examples):
    """Learnable noise: every other token follows from the one before."""

    def __init__(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (number, LENGTH), generator=generator)
        self.tokens[:, 1::2] = (self.tokens[:, ::2] * 5 + 1) % VOCABULARY
        self.labels = self.tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index].clone()}


class FakeText(Prepared):
    """Stands for packed text."""

    def __init__(self, train: int = 50, valid: int = 7, fingerprint: str = "f" * 16) -> None:
        super().__init__(
            train=Sequences(train, 1),
            valid=Sequences(valid, 2),
            tokenizer=word_tokenizer([f"w{index}" for index in range(VOCABULARY)], unk_token="w0", eos_token="w0"),
            fingerprint=fingerprint,
            facts={"tokens": train * LENGTH},
            vocab_size=VOCABULARY,
            valid_bytes_per_token=2.5,
        )


def tiny_recipe(task: Any, arm: str | Arm, **train: Any) -> Recipe:
    settings = {"batch_size": 4, "lr": 1e-2, "tracker": "none", "threads": 1, **train}
    arm = Arm.parse(arm) if isinstance(arm, str) else arm
    return Recipe(name="tiny", task=task, arm=arm, train=TrainConfig(**settings))


def make_recipe(arm: str | Arm = "noble:rank=4", dropout: float = 0.1, **train: Any) -> Recipe:
    """Two layers of width 32, twelve steps of four sequences."""
    backbone = GlmBackbone(layers=2, width=32, heads=2, hidden=48, embedding_std=1.0, dropout=dropout)
    task = LanguageModelTask(text=TextData(sequence_length=LENGTH), backbone=backbone)
    settings = {"steps": 12, "warmup_steps": 2, "eval_every": 5, "save_every": 2, "log_every": 3, **train}
    return tiny_recipe(task, arm, **settings)


def cut_back(done: Path, out: Path, step: int) -> Path:
    """Copy a finished run as a process leaves it that was killed right after the checkpoint of `step`."""
    shutil.copytree(done, out)
    (out / "result.json").unlink()
    shutil.rmtree(out / "model")
    for folder in (out / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    return out


SEEN: list[dict[str, torch.Tensor]] = []


def before_training(model: nn.Module, at: int, act: Callable[[Any], None]) -> nn.Module:
    """Act before the `at`-th training batch (0: before each), with the batch."""
    batches = itertools.count(1)

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training and at in (0, next(batches)):
            act(kwargs)

    model.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def spy(model: nn.Module, draws: int = 0) -> nn.Module:
    """Notes the training batches in SEEN; may draw random numbers, in building and in every step."""

    def note(batch: dict[str, Any]) -> None:
        SEEN.append({name: each.clone() for name, each in batch.items() if torch.is_tensor(each)})
        torch.randn(draws + 1)

    torch.randn(draws + 1)
    return before_training(model, 0, note)


EMBEDDED: list[torch.Tensor] = []


def watch_embeddings(model: nn.Module) -> nn.Module:
    """Notes in EMBEDDED what the first block is given in training."""

    def note(block: nn.Module, args: Any) -> None:
        if block.training:
            EMBEDDED.append(args[0].detach().clone())

    model.model.layers[0].register_forward_pre_hook(note)
    return model


def poison(model: nn.Module, at: int = 1) -> nn.Module:
    """The loss of the `at`-th training batch is not a number; of batch 0, that of every evaluation."""
    batches = itertools.count(1)

    def spoil(module: nn.Module, args: Any, output: Any) -> None:
        if at == (next(batches) if module.training else 0):
            output["loss"] = output["loss"] * float("nan")

    model.register_forward_hook(spoil)
    return model


def poison_gradient(model: nn.Module, at: int = 1) -> nn.Module:
    """The gradient of the `at`-th training batch is not a number while its loss is."""
    batches = itertools.count(1)
    head = model.get_output_embeddings().weight
    head.register_hook(lambda gradient: gradient * float("nan") if next(batches) == at else gradient)
    return model


def die(model: nn.Module, at: int = 1) -> nn.Module:
    """The second process is killed before its `at`-th training batch, unless it was started again."""
    doomed = os.environ.get("NLR_TEST_DIES") and os.environ["RANK"] == "1"
    doomed = doomed and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    return before_training(model, at, lambda _: os.kill(os.getpid(), signal.SIGKILL)) if doomed else model


def signalled(model: nn.Module, at: int = 1, number: int = signal.SIGTERM) -> nn.Module:
    """With NLR_TEST_FAULT this process gets a signal before its `at`-th training batch."""
    sent = os.environ.get("NLR_TEST_FAULT")
    return before_training(model, at, lambda _: os.kill(os.getpid(), number)) if sent else model


def lose_reader(model: nn.Module, at: int = 1) -> nn.Module:
    """With NLR_TEST_FAULT a process that reads data is killed before the `at`-th training batch."""

    def kill(_: Any) -> None:
        readers = [each for each in multiprocessing.active_children() if each.is_alive()]
        os.kill(readers[0].pid, signal.SIGKILL)

    return before_training(model, at, kill) if os.environ.get("NLR_TEST_FAULT") else model


def break_graph(model: nn.Module) -> nn.Module:
    """The model cannot be compiled into one graph with its hook."""
    model.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    return model


def blow_up(model: nn.Module, at: int = 1, times: float = 60.0) -> nn.Module:
    """Before the `at`-th training batch the output head grows: a loss that is high and finite from then on."""
    return before_training(model, at, lambda _: model.get_output_embeddings().weight.data.mul_(times))


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


class TrainingServer:
    """Training in forks of a process that has imported everything; each is a process to kill."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([__name__, "nlr_lab.training.run"])
        path = os.pathsep.join(filter(None, sys.path))
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONPATH=path):
            forkserver.ensure_running()

    def start(self, out: Path, *, limit: int | None = None, fault: bool = False, **settings: Any) -> None:
        """Begin or resume a run. `limit`: bytes a file may have; `fault`: the arm's happens."""
        self.errors, sender = self.context.Pipe(duplex=False)
        self.process = self.context.Process(target=_train, args=(out, sender, limit, fault, settings))
        self.process.start()
        sender.close()

    def wait(self) -> dict[str, Any]:
        """Return the exit status (negative: the signal that ended it) and, of a UserError, the message."""
        self.process.join()
        code = self.process.exitcode
        return {"exit": code, "error": self.errors.recv() if code == 2 else ""}

    def run(self, out: Path, **settings: Any) -> dict[str, Any]:
        self.start(out, **settings)
        return self.wait()

    def kill_when(
        self, condition: Callable[[], bool], delay: float = 0.0, number: signal.Signals = signal.SIGKILL
    ) -> bool:
        """Send the run a signal some seconds after the condition holds; False if it ended before."""
        while not condition():
            if self.process.exitcode is not None:
                return False
            time.sleep(0.0005)
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self.process.pid, number)
        return self.wait()["exit"] in (-number, 128 + number)  # the first: before training began


def _train(out: Path, errors: Any, limit: int | None, fault: bool, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    if fault:
        os.environ["NLR_TEST_FAULT"] = "1"
    text = settings.pop("text", None)
    recipe, prepared = make_recipe(**settings), FakeText() if text is None else None
    try:
        if text is not None:
            recipe = replace(recipe, task=replace(recipe.task, text=text))
        run_training(recipe, out, resume=True, prepared=prepared, quiet=True)
    except StoppedBySignal as error:
        sys.exit(error.exit_code)
    except UserError as error:
        errors.send(str(error))
        sys.exit(2)
