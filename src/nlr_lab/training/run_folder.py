"""The folder of one training run: may it be written to, what is in it, and its files."""

from pathlib import Path
from typing import Any

from nlr_lab.runtime.environment import determinism, provenance, versions
from nlr_lab.runtime.settings import flatten
from nlr_lab.runtime.storage import (
    FolderLock,
    clear_folder,
    disk_errors,
    holds_former,
    read_json,
    remove_temporaries,
    write_json,
)
from nlr_lab.tasks.task import data_record
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.card import write_card
from nonlinear_lowrank.hub.storage import staged_folder

from .checkpoints import CheckpointedTrainer
from .recipe import Recipe
from .result import TrainResult
from .run_card import origin_of
from .weights import is_adapted

RECIPE, DATA, RESULT, MODEL = "recipe.json", "data.json", "result.json", "model"
# RECIPE goes last: while it is there, the folder can still be resumed or overwritten.
_OURS = (RESULT, MODEL, "checkpoints", "tensorboard", DATA, RECIPE)
_BASE = "base"  # in the model's folder, of an adapter whose base is a model of ours

# Fields that a resumed run may have otherwise: they change no number, only by rounding, or those of comparisons.
_FREE = {
    *("name", "description", "arm.name", "train.save_every", "train.keep_checkpoints", "train.log_every"),
    *("train.tracker", "train.threads", "train.gradient_accumulation", "train.eval_batch_size"),
    *("train.dataloader_workers", "task.text.cache_dir", "task.tokens.cache_dir", "arm.grid"),
    *("arms", "seeds", "tune_lr"),
}


class RunFolder:
    """One run's folder.

    Args:
        path: new, empty, or an earlier run's.
        recipe: what is to be run in it.
    """

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.path, self.recipe = path, recipe
        self.checkpoints = path / "checkpoints"
        self._lock: FolderLock | None = None

    def check(self, *, resume: bool, overwrite: bool) -> str | None:
        """Raise UserError for a folder that is not empty, not ours, or of another recipe; change nothing.

        Returns:
            The contents of result.json when a finished run is resumed, else None.
        """
        if not holds_former(self.path, RECIPE, "training run of ours", resume=resume, overwrite=overwrite):
            return None
        former = Recipe.from_dict(read_json(self.path / RECIPE, recipe=dict)["recipe"])
        before, now = flatten(former.to_dict()), flatten(self.recipe.to_dict())
        for name in sorted((before.keys() | now.keys()) - _FREE):
            if before.get(name) != now.get(name):
                raise UserError(
                    f"{name} was {before.get(name)!r} when the run in {self.path} started and is {now.get(name)!r} "
                    "now; resume with the former value, use another folder, or --overwrite"
                )
        result = self.path / RESULT
        return result.read_text(encoding="utf-8") if result.is_file() else None

    def check_fingerprint(self, fingerprint: str, *, resume: bool) -> None:
        """Raise UserError where a run would be resumed with other data than it began with."""
        about = self.path / RECIPE
        if resume and about.is_file() and read_json(about, recipe=dict).get("fingerprint") != fingerprint:
            raise UserError(
                f"the text is no longer the one that the run in {self.path} was started on; "
                "bring the former one back, or use another folder"
            )

    def open(self, fingerprint: str, *, overwrite: bool) -> None:
        """Make the folder this run's.

        Raises:
            UserError: it cannot be written, or another process trains in it.
        """
        with disk_errors(f"to {self.path}", "choose another folder"):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.path)
            if overwrite:
                clear_folder(self.path, *_OURS)
            remove_temporaries(self.path)
            if not (self.path / RECIPE).is_file():
                about = {"recipe": self.recipe.to_dict(), "fingerprint": fingerprint}
                made = {**provenance(self.recipe.train.threads), "deterministic": determinism()}
                write_json(self.path / RECIPE, {**about, **made})
            if not (self.path / DATA).is_file():
                write_json(self.path / DATA, data_record(self.recipe.task, fingerprint))

    def close(self) -> None:
        """Let other processes in."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def tensorboard(self, callback: Any, checkpoint: Path | None) -> Any:
        """Return Trainer's TensorBoard callback; a resumed run's curves go on where its checkpoint is."""
        from torch.utils.tensorboard import SummaryWriter

        purge = None if checkpoint is None else int(checkpoint.name.removeprefix("step-")) + 1
        return callback(SummaryWriter(str(self.path / "tensorboard"), purge_step=purge))

    def name_base(self, model: Any) -> None:
        """Name a base that is written into this run's folder by that folder, where its adapter then finds it."""
        if hasattr(model, "write_base"):
            model.name_or_path = str((self.path / MODEL / _BASE).resolve())

    def export(self, trainer: CheckpointedTrainer, tokenizer: Any, result: TrainResult) -> None:
        """Write the final model, its tokenizer and its card. All processes call it."""
        if not trainer.is_world_process_zero():
            trainer.export(self.path)
            return
        step = trainer.state.global_step
        with (
            disk_errors(f"the model to {self.path / MODEL}"),
            staged_folder(self.path / MODEL, {"step": step}) as folder,
        ):
            trainer.export(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
            base: Any = model.get_base_model() if is_adapted(model) else None
            if hasattr(base, "write_base"):
                base.write_base(folder / _BASE)
            data = read_json(self.path / DATA, sources=dict, fingerprint=str)
            write_card(folder, origin_of(self.recipe, result, data))

    def write_result(self, result: dict[str, Any]) -> None:
        """Write the last file of a run."""
        with disk_errors(str(self.path / RESULT)):
            write_json(self.path / RESULT, {**result, "versions": versions()})
