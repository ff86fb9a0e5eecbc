"""The folder of one training run: may it be written to, what is in it, and its files."""

from pathlib import Path
from typing import Any

from nlr_lab.runtime.environment import determinism, provenance, versions
from nlr_lab.runtime.settings import flatten
from nlr_lab.runtime.storage import FolderLock, clear_folder, is_free, read_json, remove_temporaries, write_json
from nlr_lab.tasks.data_record import data_record
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.card import write_card
from nonlinear_lowrank.hub.storage import describe_disk_error, is_disk_error, staged_folder

from .checkpoints import CheckpointedTrainer
from .recipe import Recipe
from .result import TrainResult
from .run_card import origin_of
from .weights import is_adapted

RECIPE, DATA, RESULT, MODEL = "recipe.json", "data.json", "result.json", "model"
# RECIPE goes last: while it is there, the folder can still be resumed or overwritten.
_OURS = (RESULT, MODEL, "checkpoints", "tensorboard", DATA, RECIPE)
BASE = "base"  # in the model's folder, of an adapter whose base is a model of ours

# Fields that a resumed run may have otherwise: they change no number, or only by rounding.
_FREE = {
    *("name", "description", "arm.name", "train.save_every", "train.keep_checkpoints", "train.log_every"),
    *("train.tracker", "train.threads", "train.gradient_accumulation", "train.eval_batch_size"),
    *("train.dataloader_workers", "task.text.cache_dir", "task.tokens.cache_dir", "arm.grid"),
}
_FREE_OF_COMPARISONS = {"arms", "seeds", "tune_lr"}


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
        """Refuses a folder that may not be used, changing nothing.

        Returns:
            The contents of result.json when a finished run is resumed, else None.

        Raises:
            UserError: the folder is not empty, not ours, or of another recipe.
        """
        if is_free(self.path, resume=resume, overwrite=overwrite):
            return None
        ours = (self.path / RECIPE).is_file()
        if not resume and not overwrite:
            raise UserError(
                f"{self.path} is not empty; choose another folder"
                + (", --resume to go on or --overwrite to start anew" if ours else "")
            )
        if not ours:
            raise UserError(f"{self.path} holds no training run of ours (it has no {RECIPE}); choose another folder")
        if overwrite:
            return None
        former = self._former()
        _check_same(self.path, Recipe.from_dict(former["recipe"]), self.recipe)
        result = self.path / RESULT
        return result.read_text(encoding="utf-8") if result.is_file() else None

    def check_fingerprint(self, fingerprint: str, *, resume: bool) -> None:
        """Refuses to go on with another text than the run began with."""
        if (self.path / RECIPE).is_file() and resume and self._former().get("fingerprint") != fingerprint:
            raise UserError(
                f"the text is no longer the one that the run in {self.path} was started on; "
                "bring the former one back, or use another folder"
            )

    def open(self, fingerprint: str, *, overwrite: bool) -> None:
        """Makes the folder this run's.

        Raises:
            UserError: it cannot be written, or another process trains in it.
        """
        try:
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
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {describe_disk_error(error)}") from error

    def close(self) -> None:
        """Lets other processes in."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def tensorboard(self, callback: Any, checkpoint: Path | None) -> Any:
        """Trainer's TensorBoard callback; a resumed run's curves go on where its checkpoint is."""
        from torch.utils.tensorboard import SummaryWriter

        purge = None if checkpoint is None else int(checkpoint.name.removeprefix("step-")) + 1
        return callback(SummaryWriter(str(self.path / "tensorboard"), purge_step=purge))

    def name_base(self, model: Any) -> None:
        """A base that is found again by a folder of this run, which its adapter then names."""
        if hasattr(model, "write_base"):
            model.name_or_path = str((self.path / MODEL / BASE).resolve())

    def export(self, trainer: CheckpointedTrainer, tokenizer: Any, result: TrainResult) -> None:
        """The final model, its tokenizer and its card. All processes call it."""
        if not trainer.is_world_process_zero():
            trainer.export(self.path)
            return
        try:
            with staged_folder(self.path / MODEL, {"step": trainer.state.global_step}) as folder:
                trainer.export(folder)
                if tokenizer is not None:
                    tokenizer.save_pretrained(folder)
                model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
                base: Any = model.get_base_model() if is_adapted(model) else None
                if hasattr(base, "write_base"):
                    base.write_base(folder / BASE)
                data = read_json(self.path / DATA, sources=dict, fingerprint=str)
                write_card(folder, origin_of(self.recipe, result, data))
        except Exception as error:
            if not is_disk_error(error):
                raise
            raise UserError(
                f"cannot write the model to {self.path / MODEL}: {describe_disk_error(error)}; "
                "make room and go on with --resume"
            ) from error

    def write_result(self, result: dict[str, Any]) -> None:
        """The last file of a run."""
        try:
            write_json(self.path / RESULT, {**result, "versions": versions()})
        except OSError as error:
            raise UserError(
                f"cannot write {self.path / RESULT}: {describe_disk_error(error)}; make room and go on with --resume"
            ) from error

    def _former(self) -> dict[str, Any]:
        return read_json(self.path / RECIPE, recipe=dict)


def _check_same(path: Path, former: Recipe, recipe: Recipe) -> None:
    """Raises UserError naming the first field that would change the result."""
    before, now = flatten(former.to_dict()), flatten(recipe.to_dict())
    for name in sorted(before.keys() | now.keys()):
        if name in _FREE or name in _FREE_OF_COMPARISONS or before.get(name) == now.get(name):
            continue
        raise UserError(
            f"{name} was {before.get(name)!r} when the run in {path} started and is {now.get(name)!r} now; "
            "resume with the former value, use another folder, or --overwrite"
        )
