"""A Trainer that can be killed at any moment and goes on bit by bit as if it had not been.

A checkpoint is a folder `step-000100`, complete when it has that name:

    config.json, model.safetensors   as save_pretrained writes them, so that it loads as a model too;
        or adapter_config.json, adapter_model.safetensors    of an adapter, its head with it
        or trainable.safetensors     of a model that is partly frozen: what is trained, by its names in memory
    optimizer.safetensors, .json     tensors as "exp_avg/<parameter>", and the groups
    scheduler.json, random.json      the schedule; the random states of every process
    trainer_state.json               step and log history, as Trainer has it
    manifest.json                    step, seconds, bytes and sha256 of every file

Nothing is pickled. Only the first process writes; the folder must be visible to all processes on resume. A model that
is sharded may have, where that is allowed, weights and optimizer as `shards` writes them instead.
With another number of processes a run goes on, but not bit by bit.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel, Trainer
from transformers.utils import logging as transformers_logging

from nlr_lab.runtime.processes import gather_objects, on_first_process
from nlr_lab.runtime.storage import newest_valid, prune, remove_temporaries, step_folders
from nonlinear_lowrank.errors import DivergedError, UserError
from nonlinear_lowrank.hub.names import in_files, in_memory
from nonlinear_lowrank.hub.storage import MANIFEST, describe_disk_error, is_disk_error, staged_folder

from . import shards
from .readers import is_dead_reader, told_where_waited_for
from .state_files import (
    random_state,
    read_optimizer,
    read_plain,
    seed_all,
    set_random_state,
    write_optimizer,
    write_plain,
)

DEEPSPEED_IS_PICKLED = (
    "DeepSpeed's checkpoints are pickled; give --allow-torch-checkpoints (reading a pickle can run code: only for runs "
    "of your own), or use FSDP2 (accelerate launch --use_fsdp --fsdp_version 2)"
)

_TRAINABLE, _BUFFERS = "trainable.safetensors", "buffers.safetensors"


class CheckpointedTrainer(Trainer):
    """Trainer with whole checkpoints, exact resume, and a stop at the first loss that is not finite.

    When to save is `TrainerControl.should_save`'s business, as in Trainer; `save_total_limit` says how many
    of the newest complete checkpoints are kept. The loss is looked at in every step on one CPU process;
    otherwise, since that would stop the GPU each time, at every log and before every checkpoint, which
    therefore never holds a diverged model. The step named is exact all the same.

    Args:
        checkpoints: folder for the `step-N` folders.
        allow_torch_checkpoints: of a sharded model every process writes its own part, pickled (see `shards`).
        *args: Trainer's.
        **kwargs: Trainer's.
    """

    def __init__(self, checkpoints: Path, *args: Any, allow_torch_checkpoints: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.allow_torch_checkpoints = allow_torch_checkpoints
        if self.is_deepspeed_enabled and not allow_torch_checkpoints:
            raise UserError(DEEPSPEED_IS_PICKLED)
        # Trainer's types allow for None and for other kinds, which neither is once training.
        self.model: Any
        self.lr_scheduler: Any
        self.checkpoints = Path(checkpoints)
        self.keep_all = False  # while it is not known yet whether the newest checkpoints are of any use
        self.seconds_before = 0.0
        self._verified: Path | None = None
        self._started = time.monotonic()
        self._flops_per_token: int | None = None
        # The first step with a bad loss, or 0; on the device, so that looking after it does not wait.
        self._bad_step = torch.zeros((), dtype=torch.int64, device=self.args.device)

    # --- the whole run -------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer.train; `resume_from_checkpoint` is a checkpoint's path or None.

        Raises:
            UserError: a checkpoint that may not be read, or a process that reads data died.
            DivergedError: the loss, or a weight, is not finite.
        """
        if resume_from_checkpoint is not None:
            resume_from_checkpoint = str(resume_from_checkpoint)
            shards.check_readable(
                Path(resume_from_checkpoint),
                self.checkpoints,
                deepspeed=self.is_deepspeed_enabled,
                allowed=self.allow_torch_checkpoints,
                processes=self.args.world_size,
                verified=Path(resume_from_checkpoint) == self._verified,
            )
            manifest = read_plain(Path(resume_from_checkpoint) / MANIFEST)
            self.seconds_before = manifest["seconds"]
        self._started = time.monotonic()
        try:
            with told_where_waited_for():
                return super().train(resume_from_checkpoint, *args, **kwargs)
        except (RuntimeError, OSError, EOFError) as error:
            if not is_dead_reader(error):
                raise
            raise UserError(
                f"a process that reads data died at step {self.state.global_step} ({' '.join(str(error).split())}); "
                f"{self._last_good()}; if memory ran out lower --train.dataloader-workers, and go on with --resume"
            ) from error

    def newest(self) -> tuple[Path | None, list[str]]:
        """The checkpoint to resume from (None: start anew), and a line for each damaged one passed over.

        Removes what a killed process left half written. All processes get the first one's answer.
        """

        def look() -> tuple[Path | None, list[str]]:
            remove_temporaries(self.checkpoints)
            return newest_valid(self.checkpoints)

        found = on_first_process(look)
        self._verified = found[0]
        return found

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before a resume included."""
        return self.seconds_before + time.monotonic() - self._started

    # --- finite losses -------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        step = self.state.global_step + 1
        if loss.device.type == "cpu" and self.args.world_size == 1:
            if not torch.isfinite(loss):
                raise self.diverged(step)
        else:
            self._note_bad(loss, step)
        return loss

    def _note_bad(self, loss: torch.Tensor, step: int) -> None:
        bad = ~torch.isfinite(loss) & (self._bad_step == 0)
        self._bad_step = torch.where(bad, step, self._bad_step)

    def check_finite(self) -> None:
        """Raises DivergedError, in every process, if the loss of any step so far was not finite anywhere."""
        first = self._bad_step
        if self.args.world_size > 1:
            steps = self.accelerator.gather(first.reshape(1))
            first = torch.where(steps > 0, steps, torch.iinfo(steps.dtype).max).min()
            first = torch.where(first == torch.iinfo(steps.dtype).max, 0, first)
        step = int(first)
        if step:
            raise self.diverged(step)

    def diverged(self, step: int, why: str = "the loss is no longer a finite number") -> DivergedError:
        """The error that says so, with the checkpoint that is left from before."""
        return DivergedError(
            f"{why} at step {step}; {self._last_good(step)}; lower the learning rate or lengthen the warm-up, and "
            "start anew",
            step,
        )

    def _last_good(self, before: float = float("inf")) -> str:
        found = [folder for step, folder in step_folders(self.checkpoints).items() if step < before]
        return f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint before it"

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log or self.control.should_save:
            self.check_finite()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        # Trainer counts all parameters anew in each step, which in small models is a good part of the step.
        size = next(iter(inputs.values())).numel()
        if self._flops_per_token is None:
            self._flops_per_token = super().floating_point_ops(inputs) // max(1, size)
        return self._flops_per_token * size

    # --- saving --------------------------------------------------------------------------------------------

    def export(self, folder: Path) -> None:
        """Writes the model, or the adapter alone, as save_pretrained does. Call it in all processes.

        `folder` is only used in the first process, which writes alone.
        """
        weights = self._weights(everything=True)
        if self.is_world_process_zero():
            self._write_model(folder, weights, whole=True)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Replaces Trainer's, which writes into the final folder and pickles."""
        self.check_finite()
        self.store_flos()
        if self.writes_shards:
            self._save_shards()
            return
        weights = self._weights()
        optimizer = get_optimizer_state_dict(
            self.model,
            shards.plain_optimizer(self.optimizer),
            options=StateDictOptions(full_state_dict=True, cpu_offload=True),
        )
        states = gather_objects(random_state(self.args.device))

        def write() -> None:
            # A loss can be finite and its gradient not. What is frozen need not be looked at.
            trained = {name for name, each in self._plain().named_parameters() if each.requires_grad}
            seen = [each for name, each in weights.items() if name in trained and each.is_floating_point()]
            if not all(bool(torch.isfinite(each).all()) for each in seen):
                raise self.diverged(self.state.global_step)
            with self._staged(self._about()) as folder:
                self._write_model(folder, weights)
                write_optimizer(folder, optimizer)
                self._write_states(folder, states)

        on_first_process(write)

    @property
    def writes_shards(self) -> bool:
        """Whether each process writes its own part of a checkpoint."""
        return self.allow_torch_checkpoints and (self.is_fsdp_enabled or self.is_deepspeed_enabled)

    @property
    def adapted(self) -> bool:
        """Whether an adapter is trained."""
        return is_adapted(self._plain())

    def _save_shards(self) -> None:
        """All processes write into the folder that the first one opened, and it closes."""
        if not all(gather_objects(shards.trained_is_finite(self._plain()))):
            raise self.diverged(self.state.global_step)
        states = gather_objects(random_state(self.args.device))
        about = self._about()
        with ExitStack() as stack:  # the first process has the folder in it: gone again if anyone fails
            folder = Path(on_first_process(lambda: str(stack.enter_context(self._staged(about)))))
            error = None
            try:
                about["files"] = shards.write_shards(self, folder)
            except Exception as caught:
                error = caught
            # A process that is waiting for a dead one ends by its group's time limit.
            failed = [each for each in gather_objects(None if error is None else str(error)) if each]
            if error is not None:
                raise error
            if failed:
                raise UserError(f"another process could not write its part of the checkpoint: {failed[0]}")

            def finish() -> None:
                self._write_states(folder, states)
                stack.close()

            on_first_process(finish)

    def _about(self) -> dict[str, Any]:
        return {"step": self.state.global_step, "seconds": self.seconds, "processes": self.args.world_size}

    @contextmanager
    def _staged(self, about: dict[str, Any]) -> Iterator[Path]:
        """The folder of this step's checkpoint, to be filled; on leaving, older ones go."""
        step = self.state.global_step
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            with staged_folder(self.checkpoints / f"step-{step:06d}", about) as folder:
                yield folder
            if not self.keep_all:
                prune(self.checkpoints, step, self.args.save_total_limit or 1)
        except Exception as error:
            if not is_disk_error(error):
                raise
            raise UserError(
                f"cannot write the checkpoint of step {step} to {self.checkpoints}: {describe_disk_error(error)}; "
                f"{self._last_good()}; make room and go on with --resume"
            ) from error

    def _write_states(self, folder: Path, random_states: list[dict[str, Any]]) -> None:
        write_plain(folder / "scheduler.json", self.lr_scheduler.state_dict())
        write_plain(folder / "random.json", random_states)
        self.state.save_to_json(str(folder / "trainer_state.json"))

    def _weights(self, everything: bool = False) -> dict[str, Any]:
        """Weights by their names in memory; of a sharded model, only in the first process.

        Those that never change are left out unless `everything` is asked for, or the model is an adapter's,
        which peft sorts out itself.
        """
        model = self._plain()
        if self.is_deepspeed_enabled:
            weights: dict[str, Any] = shards.gathered_weights(model, keep=self.is_world_process_zero())
        elif self.is_fsdp_enabled:
            weights = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        else:
            weights = model.state_dict()
        if everything or is_adapted(model) or not _partly_frozen(model):
            return weights
        frozen = {name for name, each in model.named_parameters(remove_duplicate=False) if not each.requires_grad}
        return {name: value for name, value in weights.items() if name not in frozen}

    def _plain(self) -> Any:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _write_model(self, folder: Path, weights: dict[str, Any], *, whole: bool = False) -> None:
        model = self._plain()
        if is_adapted(model):
            # Whether embeddings were resized peft would ask the hub; ours never are.
            model.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
            buffers = _buffers(model, weights)
            if buffers and not whole:
                save_file(buffers, folder / _BUFFERS)
            return
        if _partly_frozen(model) and not whole:
            trained = {name: value.contiguous() for name, value in in_files(model, weights).items()}
            save_file(trained, folder / _TRAINABLE)
            return
        if not isinstance(model, PreTrainedModel):
            kept: dict[tuple[Any, ...], tuple[str, torch.Tensor]] = {}
            for name, value in weights.items():  # tied tensors once
                kept.setdefault((value.data_ptr() or name, value.shape), (name, value.contiguous()))
            save_file(dict(kept.values()), folder / "model.safetensors", metadata={"format": "pt"})
            return
        # Training has no use for the cache, but who loads the model to generate does.
        cached, model.config.use_cache = model.config.use_cache, True
        try:
            with _no_progress_bars():
                # Nothing is converted, so that resuming is exact.
                model.save_pretrained(
                    folder, state_dict=in_files(model, weights), is_main_process=True, save_original_format=False
                )
        finally:
            model.config.use_cache = cached

    # --- resuming ------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        target = self.model if model is None else model
        plain = self.accelerator.unwrap_model(target, keep_torch_compile=False)
        if (folder / shards.SHARDS).is_dir():
            shards.read_model(self, target, folder)
            return
        if is_adapted(plain):
            self._load_adapter(folder, target, plain)
            return
        read = not self.is_fsdp_enabled or self.is_world_process_zero()
        weights: dict[str, Any] = {}
        frozen = _partly_frozen(plain)
        for file in sorted(folder.glob(_TRAINABLE if frozen else "model*.safetensors")) if read else ():
            weights |= in_memory(plain, load_file(file))
        if self.is_fsdp_enabled:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=not frozen)
            set_model_state_dict(target, weights, options=options)
            return
        found = plain.load_state_dict(weights, strict=False)
        named = dict(plain.named_parameters(remove_duplicate=False)) | dict(plain.named_buffers(remove_duplicate=False))
        loaded = {named[name].data_ptr() for name in weights if name in named}
        missing = [name for name in found.missing_keys if named[name].data_ptr() not in loaded]  # others are tied
        if frozen:
            missing = [name for name in missing if named[name].requires_grad]
        if missing or found.unexpected_keys:
            raise _does_not_fit(folder, missing, found.unexpected_keys)

    def _load_adapter(self, folder: Path, target: Any, plain: Any) -> None:
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        weights = load_file(folder / "adapter_model.safetensors")
        wanted = get_peft_model_state_dict(plain, save_embedding_layers=False)
        missing, unexpected = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
        if missing or unexpected:
            raise _does_not_fit(folder, missing, unexpected)
        if self.is_fsdp_enabled:
            # By the names in memory, which are peft's with the adapter's name put in.
            names = {_in_file(name): name for name in plain.state_dict()}
            named: dict[str, Any] = {names[key]: value for key, value in weights.items()}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
            set_model_state_dict(target, named if self.is_world_process_zero() else {}, options=options)
            return
        set_peft_model_state_dict(plain, weights)
        if (folder / _BUFFERS).is_file():
            buffers = dict(plain.named_buffers())
            with torch.no_grad():
                for name, value in load_file(folder / _BUFFERS).items():
                    buffers[name].copy_(value)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder, optimizer = Path(checkpoint), shards.plain_optimizer(self.optimizer)
        self.lr_scheduler.load_state_dict(read_plain(folder / "scheduler.json"))
        if self.is_deepspeed_enabled:
            return  # its engine has read its own
        if (folder / shards.SHARDS).is_dir():
            shards.read_optimizer_state(self, folder)
            return
        state: dict[str, Any] = {}
        if not self.is_fsdp_enabled or self.is_world_process_zero():
            state = read_optimizer(folder)
        options = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=self.is_fsdp_enabled, strict=self.is_fsdp_enabled
        )
        set_optimizer_state_dict(self.model, optimizer, state, options=options)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        states = read_plain(Path(checkpoint) / "random.json")
        if len(states) != self.args.world_size:
            if self.is_world_process_zero():
                print(
                    f"the checkpoint was written by {len(states)} processes and there are {self.args.world_size} "
                    "now: the run goes on, but not bit by bit"
                )
            seed = self.args.seed + 7919 * self.state.global_step + self.args.process_index
            seed_all(seed)
            return
        set_random_state(states[self.args.process_index], self.args.device)


def is_adapted(model: Any) -> bool:
    """Whether it is a model of peft's; without importing peft, which takes seconds."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _partly_frozen(model: nn.Module) -> bool:
    return not all(each.requires_grad for each in model.parameters())


def _buffers(model: nn.Module, weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the state dict has beside parameters: running means and the like, which a frozen model changes too."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value.contiguous() for name, value in weights.items() if name not in parameters}


def _in_file(name: str) -> str:
    """A parameter's name in memory -> in an adapter's file."""
    return name.replace(".modules_to_save.default.", ".").replace(".default", "")


def _does_not_fit(folder: Path, missing: list[str], unexpected: list[str]) -> UserError:
    odd = (missing or unexpected)[0]
    return UserError(
        f"{folder} does not fit the model: {'missing' if missing else 'unexpected'} tensor {odd!r}; "
        "resume with the recipe and version it was written with"
    )


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
