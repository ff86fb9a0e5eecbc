"""A Trainer that can be killed at any moment and resumes bit-exactly.

A checkpoint is a folder `step-000100`, complete when it has that name:

    config.json, model.safetensors   as save_pretrained writes them, so that it loads as a model too;
        or adapter_config.json, adapter_model.safetensors    of an adapter, its head with it
        or trainable.safetensors     of a model that is partly frozen: what is trained
    optimizer/*.safetensors          the optimizer's state, a file from each process that has a part of it
    state.json                       parameter groups, schedule and the random states of every process
    trainer_state.json               step and log history, as Trainer has it
    manifest.json                    step, seconds, bytes and sha256 of every file

Nothing is pickled, but for DeepSpeed's own state in the place of weights and optimizer (see `deepspeed`). The folder
must be visible to all processes. With another number of processes a run resumes, but not bit-exactly.
"""

import base64
import json
import random
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.data._utils import signal_handling
from transformers import PreTrainedModel, Trainer, set_seed

from nlr_lab.runtime.processes import gather_objects, on_rank_0
from nlr_lab.runtime.storage import disk_errors, newest_valid, prune, remove_temporaries, step_folders
from nonlinear_lowrank.errors import DivergedError, UserError
from nonlinear_lowrank.hub.classes import in_files
from nonlinear_lowrank.hub.storage import MANIFEST, staged_folder
from nonlinear_lowrank.validation import one_line

from . import deepspeed
from .arms import is_adapted

_FILE = 2 << 30  # bytes of a file of the optimizer's, by all processes


class CheckpointedTrainer(Trainer):
    """Trainer with whole checkpoints, exact resume, and a stop at the first loss that is not finite.

    When to save is `TrainerControl.should_save`'s business, as in Trainer; `save_total_limit` says how many of the
    newest complete checkpoints are kept. The loss is looked at in every step on one CPU process; otherwise, since that
    would stop the GPU each time, at every log and before every checkpoint, which therefore never holds a diverged
    model. The step named is exact all the same.

    Trainer writes into the final folder and pickles, and has no public hook for either: `_save_checkpoint` and the
    three `_load_...` that read its files back are replaced.

    `checkpoints` is the folder for the `step-N` folders; `allow_torch_checkpoints` lets DeepSpeed write and read its
    engine's checkpoints, which are pickled. The other arguments are Trainer's.
    """

    def __init__(self, checkpoints: Path, *args: Any, allow_torch_checkpoints: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled and not allow_torch_checkpoints:
            raise UserError(deepspeed.PICKLED)
        # Trainer's types allow for None and for other kinds, which neither is once training.
        self.model: Any
        self.lr_scheduler: Any
        self.checkpoints = Path(checkpoints)
        self.keep_all = False  # while it is not known yet whether the newest checkpoints are of any use
        self._started = time.monotonic()
        # The first step with a bad loss, or 0; on the device, so that looking after it does not wait.
        self._bad_step = torch.zeros((), dtype=torch.int64, device=self.args.device)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does; `resume_from_checkpoint` is a checkpoint's path or None.

        Raises:
            UserError: a checkpoint that cannot be resumed from, or a process that reads data died.
            DivergedError: the loss, or a weight, is not finite.
        """
        self._started = time.monotonic()
        if resume_from_checkpoint is not None:
            folder, here = Path(resume_from_checkpoint), {"deepspeed": self.is_deepspeed_enabled}
            deepspeed.check_readable(folder, self.checkpoints, processes=self.args.world_size, **here)
            self._started -= _read(folder / MANIFEST)["seconds"]
            resume_from_checkpoint = str(folder)
        # torch's handler of SIGCHLD raises out of whatever goes on when a process that reads data dies: a checkpoint, a
        # message, another exception's handling. Without it torch notices when it waits for the next batch, in 5 s.
        before, signal_handling._SIGCHLD_handler_set = signal_handling._SIGCHLD_handler_set, True
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except (RuntimeError, OSError, EOFError) as error:
            if not _is_dead_reader(error):
                raise
            raise UserError(
                f"a process that reads data died at step {self.state.global_step} ({one_line(error)}); "
                f"{self._last_good()}; if memory ran out lower --train.dataloader-workers, and go on with --resume"
            ) from error
        finally:
            signal_handling._SIGCHLD_handler_set = before

    def newest(self) -> tuple[Path | None, list[str]]:
        """Return the checkpoint to resume from (None: start anew), and a line for each damaged one that is skipped.

        Removes what a killed process left half written. All processes call it and get rank 0's answer.
        """
        on_rank_0(lambda: remove_temporaries(self.checkpoints))
        return on_rank_0(lambda: newest_valid(self.checkpoints))

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before a resume included."""
        return time.monotonic() - self._started

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # Trainer counts all parameters anew in each step, which in small models is a good part of it

    # --- finite losses -------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        bad = ~torch.isfinite(loss) & (self._bad_step == 0)
        self._bad_step = torch.where(bad, self.state.global_step + 1, self._bad_step)
        if loss.device.type == "cpu" and self.args.world_size == 1:
            self.check_finite()
        return loss

    def check_finite(self) -> None:
        """Raise DivergedError, in every process, if the loss of any step so far was not finite anywhere."""
        steps = self.accelerator.gather(self._bad_step.reshape(1))
        if bad := [step for step in steps.tolist() if step]:
            raise self.diverged(min(bad))

    def diverged(self, step: int, why: str = "the loss is no longer a finite number") -> DivergedError:
        """Return the error that says so, with the checkpoint that is left from before."""
        hint = "lower the learning rate or lengthen the warm-up, and start anew"
        return DivergedError(f"{why} at step {step}; {self._last_good(step)}; {hint}", step)

    def _last_good(self, before: float = float("inf")) -> str:
        found = [folder for step, folder in step_folders(self.checkpoints).items() if step < before]
        return f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint before it"

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does; raise DivergedError if a loss since the last entry was not finite."""
        self.check_finite()
        super().log(logs, *args, **kwargs)

    # --- saving --------------------------------------------------------------------------------------------

    def export(self, folder: Path) -> None:
        """Write the model, or the adapter alone, as save_pretrained does. All processes call it; rank 0 writes."""
        weights = self._weights()
        if self.is_world_process_zero():
            write_weights(folder, self.plain_model(), weights, everything=True)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint under a temporary name, and rename it when it is whole. All processes call it."""
        self.check_finite()
        plain, step = self.plain_model(), self.state.global_step
        # This process's part of what is trained: a loss can be finite, and its gradient not.
        parts = [_own_part(each).detach() for each in plain.parameters() if each.requires_grad]
        if not all(gather_objects(all(bool(torch.isfinite(part).all()) for part in parts))):
            raise self.diverged(step)
        weights = {} if self.is_deepspeed_enabled else _without_frozen(plain, self._weights())
        states = gather_objects(_random_state(self.args.device))
        hint = f"{self._last_good()}; make room and go on with --resume"
        with disk_errors(f"the checkpoint of step {step} to {self.checkpoints}", hint), ExitStack() as stack:
            # Rank 0 has the folder in its stack: gone again if anyone fails.
            folder = Path(on_rank_0(lambda: str(stack.enter_context(self._staged()))))
            groups = None
            if self.is_deepspeed_enabled:
                deepspeed.write_engine(self.model_wrapped, folder, adapted=is_adapted(plain))
            else:
                groups = _write_optimizer(folder, self.model, self.optimizer)

            def finish() -> None:
                if weights:
                    write_weights(folder, plain, weights, everything=False)
                about = {"groups": groups, "scheduler": self.lr_scheduler.state_dict(), "random": states}
                (folder / "state.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
                self.state.save_to_json(str(folder / "trainer_state.json"))
                stack.close()

            on_rank_0(finish)

    @contextmanager
    def _staged(self) -> Iterator[Path]:
        """The folder of this step's checkpoint, to be filled; on leaving, older ones go."""
        step = self.state.global_step
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        about = {"step": step, "seconds": self.seconds, "processes": self.args.world_size}
        with staged_folder(self.checkpoints / f"step-{step:06d}", about) as folder:
            yield folder
        if not self.keep_all:
            prune(self.checkpoints, step, self.args.save_total_limit or 1)

    def _weights(self) -> dict[str, Any]:
        """Weights by their names in memory; of a sharded model whole, and on rank 0 alone."""
        if self.is_deepspeed_enabled:
            return deepspeed.gathered_weights(self.plain_model(), keep=self.is_world_process_zero())
        if self.is_fsdp_enabled:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            return dict(get_model_state_dict(self.model, options=options))
        return dict(self.plain_model().state_dict())

    def plain_model(self) -> Any:
        """Return the model without wrappers."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    # --- resuming ------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Read weights, where DeepSpeed's engine does not read its own; all processes call it."""
        target = self.model if model is None else model
        _read_weights(Path(resume_from_checkpoint), self.accelerator.unwrap_model(target, keep_torch_compile=False))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = _read(Path(checkpoint) / "state.json")
        self.lr_scheduler.load_state_dict(state["scheduler"])
        if not self.is_deepspeed_enabled:
            _read_optimizer(Path(checkpoint), self.model, self.optimizer, state["groups"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        states, here = _read(Path(checkpoint) / "state.json")["random"], self.args.process_index
        if len(states) == self.args.world_size:
            _set_random_state(states[here], self.args.device)
            return
        if self.is_world_process_zero():
            print(
                f"the checkpoint was written by {len(states)} processes and there are {self.args.world_size} now: "
                "the run resumes, but not bit-exactly"
            )
        set_seed((self.args.seed + 7919 * self.state.global_step + here) % 2**32)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _is_dead_reader(error: BaseException) -> bool:
    """Return whether torch's DataLoader raised this because a process of its own died; torch has no class for it.

    A reader that dies while it hands a batch over breaks the connection first: then the error is the connection's.
    """
    if isinstance(error, RuntimeError):
        return str(error).startswith(("DataLoader worker", "Pin memory thread exited"))
    frames = [frame.f_code.co_qualname for frame, _ in traceback.walk_tb(error.__traceback__)]
    return "_MultiProcessingDataLoaderIter._try_get_data" in frames


# --- weights: files that load as a model or an adapter, read back in place ------------------------------------


def write_weights(folder: Path, model: Any, weights: dict[str, Any], *, everything: bool) -> None:
    """Write a model's, or an adapter's, files; `weights` are by their names in memory.

    Where not `everything` is written, for a checkpoint, the buffers of an adapted model are too (running means change
    in training), and of a model that is partly frozen only what is trained.
    """
    if is_adapted(model):
        # Whether embeddings were resized peft would ask the hub; ours never are.
        model.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
        if (buffers := _buffers(model, weights)) and not everything:
            save_file({name: value.contiguous() for name, value in buffers.items()}, folder / "buffers.safetensors")
    elif not everything and not all(each.requires_grad for each in model.parameters()):
        trained = {name: value.contiguous() for name, value in in_files(model, weights).items()}
        save_file(trained, folder / "trainable.safetensors")
    elif not isinstance(model, PreTrainedModel):
        kept: dict[tuple[Any, ...], tuple[str, torch.Tensor]] = {}
        for name, value in weights.items():  # tied tensors once
            kept.setdefault((value.data_ptr() or name, value.shape), (name, value.contiguous()))
        save_file(dict(kept.values()), folder / "model.safetensors", metadata={"format": "pt"})
    else:
        # Training has no use for the cache, but who loads the model to generate does.
        config: Any = model.config
        cached, config.use_cache = config.use_cache, True
        try:  # nothing is converted, so that resuming is exact
            model.save_pretrained(folder, state_dict=in_files(model, weights), save_original_format=False)
        finally:
            config.use_cache = cached


def _read_weights(folder: Path, model: Any) -> None:
    """Fill a model, whole or sharded, from a checkpoint; raise UserError where it is of another model."""
    weights = model.state_dict()
    if is_adapted(model):
        from peft import get_peft_model_state_dict

        adapter = get_peft_model_state_dict(model, save_embedding_layers=False, state_dict=dict(weights))
        wanted = {**adapter, **_buffers(model, weights)}
    else:
        wanted = in_files(model, _without_frozen(model, weights))
    saved = tensor_names(folder)
    places = {_own_part(wanted[name]).data_ptr() for name in wanted.keys() & saved}  # a tied tensor is saved once
    missing = [name for name in wanted.keys() - saved if _own_part(wanted[name]).data_ptr() not in places]
    odd = [*(f"missing tensor {name!r}" for name in sorted(missing))]
    odd += [f"unexpected tensor {name!r}" for name in sorted(saved - wanted.keys())]
    try:
        if not odd:
            _read_tensors(folder, {name: tensor for name, tensor in wanted.items() if name in saved})
    except ValueError as error:  # a tensor of another shape
        odd = [one_line(error, 200)]
    if odd:
        hint = "resume with the recipe and version it was written with"
        raise UserError(f"{folder} does not fit the model: {odd[0]}; {hint}")


def _without_frozen(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Weights without the parameters that are not trained; of an adapter all, which peft sorts out itself."""
    parameters = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, each in parameters if not each.requires_grad and not is_adapted(model)}
    return {name: value for name, value in weights.items() if name not in frozen}


def _own_part(tensor: Any) -> torch.Tensor:
    """This process's part of a tensor; ZeRO-3 leaves an empty one in its place."""
    return tensor.to_local() if hasattr(tensor, "to_local") else getattr(tensor, "ds_tensor", tensor)


def _buffers(model: nn.Module, weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in weights.items() if name not in parameters}


# --- the optimizer's tensors, whole or sharded, by torch's distributed checkpoints ----------------------------


def _write_optimizer(folder: Path, model: nn.Module, wrapped: Any) -> Any:
    """Write optimizer/*.safetensors, tensors as "exp_avg/<parameter>", each process its own part; return the groups."""
    state: Any = get_optimizer_state_dict(model, getattr(wrapped, "optimizer", wrapped))
    tensors = {name: tensor.contiguous() for name, tensor in _tensors(state).items()}
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors.values()]
    # torch copies a whole file in memory before it writes it.
    files = {name: 1 + before // _FILE for name, before in zip(tensors, accumulate(sizes, initial=0), strict=False)}
    with _plain_errors():
        writer = HuggingFaceStorageWriter(str(folder / "optimizer"), files, save_distributed=True)
        dcp.save(tensors, storage_writer=writer)
    return state["param_groups"]


def _read_optimizer(folder: Path, model: nn.Module, wrapped: Any, groups: Any) -> None:
    optimizer = getattr(wrapped, "optimizer", wrapped)  # inside accelerate's wrapper
    state: Any = get_optimizer_state_dict(model, optimizer)
    _read_tensors(folder / "optimizer", _tensors(state))
    # JSON has no tuples.
    state["param_groups"] = [{key: tuple(v) if key == "betas" else v for key, v in group.items()} for group in groups]
    set_optimizer_state_dict(model, optimizer, state)


def tensor_names(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder's safetensors files."""
    return set(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)


def _read_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    with _plain_errors():
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{key}/{name}": tensor for name, own in state["state"].items() for key, tensor in own.items()}


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the error of the process that failed, which torch wraps into a BaseException in every process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*in a single process")
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None


# --- random states --------------------------------------------------------------------------------------------


def _random_state(device: torch.device) -> dict[str, Any]:
    """Return the random states of Python, numpy, torch and this process's device, as JSON values."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 # type: ignore[misc]
    states = {"torch": torch.get_rng_state()}
    if device.type not in ("cpu", "meta"):
        states[device.type] = getattr(torch, device.type).get_rng_state(device)
    coded = {name: base64.b64encode(state.cpu().numpy().tobytes()).decode() for name, state in states.items()}
    return {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest], **coded}  # type: ignore[union-attr]


def _set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numbers, *rest = state["numpy"]
    np.random.set_state((kind, np.array(numbers, dtype=np.uint32), *rest))  # noqa: NPY002
    for name in ("torch", device.type):
        if name in state:
            coded = torch.frombuffer(bytearray(base64.b64decode(state[name])), dtype=torch.uint8)
            torch.set_rng_state(coded) if name == "torch" else getattr(torch, name).set_rng_state(coded, device)
