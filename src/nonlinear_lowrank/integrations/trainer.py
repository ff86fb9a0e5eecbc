"""The learning-rate table under transformers' Trainer: a mixin for its class, a callback where that cannot be changed.

Trainer's own groups have one learning rate, and it chooses what to decay by names, frequencies and phases included.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, TrainerCallback
from transformers.training_args import OptimizerNames

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.hub.classes import in_files
from nonlinear_lowrank.optim import Mismatch, mismatches, multiplier_roles, param_groups, warn_once
from nonlinear_lowrank.validation import one_line

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class TrainerMixin(_Trainer):
    """Give a Trainer's optimizer the groups of `param_groups`, with args.learning_rate and args.weight_decay.

        class MyTrainer(nlr.TrainerMixin, Trainer): ...      # or trl's SFTTrainer, or any other subclass

    The optimizer is the one that the TrainingArguments name; schedules, resuming and DDP, FSDP2 and DeepSpeed are
    Trainer's. An optimizer that the user hands over (`optimizers=`, `optimizer_cls_and_kwargs=`) is used as it is.
    One that makes groups of its own (GaLore, Apollo, LOMO) keeps them, which is warned of.

    Trainer resumes, and reads the best model, by the names of the tensors in memory, and leaves as they are those with
    others in files (of a plain ViT or Mixtral, too); here they are read as well.
    """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, *_if_given(model))
        self._read_renamed(self.model if model is None else model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._read_renamed(self.model, self.state.best_model_checkpoint)

    def _read_renamed(self, model: Any, folder: Any) -> None:
        """Fill a model from a checkpoint in which transformers has other names for tensors than in memory."""
        saved: set[str] = set()
        for file in Path(folder).glob("model*.safetensors"):
            with safe_open(file, "pt") as tensors:
                saved |= set(tensors.keys())
        own = model.state_dict()
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled  # they have files of their own
        if sharded or not isinstance(model, PreTrainedModel) or saved <= own.keys() | in_files(model, own).keys():
            return
        widest = max((each.dtype for each in model.parameters()), key=lambda dtype: dtype.itemsize)
        try:
            named = type(model).from_pretrained(folder, dtype=widest).state_dict()
        except Exception as error:  # a class whose constructor took more than the config
            warnings.warn(f"the weights in {folder} were not restored ({one_line(error, 200)})", stacklevel=2)
        else:
            model.load_state_dict(named, strict=False)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimizer for the Trainer's model, or one that was wrapped first, unless the user gave one.

        Raises:
            UserError: FSDP1, which flattens tensors.
        """
        if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            return super().create_optimizer(*_if_given(model))
        trained: Any = self.model if model is None else model
        if isinstance(trained, FullyShardedDataParallel):
            raise UserError("FSDP1 flattens matrices and loses their roles; use FSDP2 (fsdp_config={'version': 2})")
        kind, settings = self.get_optimizer_cls_and_kwargs(self.args, trained)
        plain = settings.get("optimizer_dict")
        if isinstance(plain, list) and not any("lr" in group for group in plain):
            # sentence-transformers' groups, by decay alone: of the tensors of its losses, the model's among them.
            losses = self.loss  # type: ignore[attr-defined]
            trained = torch.nn.ModuleList(losses.values() if isinstance(losses, dict) else [losses])
            del settings["optimizer_dict"]
        brings = {"params", "model", "optimizer_dict"} & settings.keys()  # groups of its own
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and not brings:
            groups = param_groups(trained, self.args.learning_rate, self.args.weight_decay, verbose=False)
            settings = {**settings, "params": groups}
        else:
            warn_once(
                [each for each in trained.modules() if multiplier_roles(each)],
                f"optim={OptimizerNames(self.args.optim).value!r} makes parameter groups of its own: branches train "
                "without their learning-rate multipliers; choose another, such as optim='adamw_torch', or add "
                "nlr.LearningRateCallback() to the callbacks",
            )
        self.optimizer_cls_and_kwargs = (kind, settings)
        try:
            return super().create_optimizer(*_if_given(model))
        finally:
            self.optimizer_cls_and_kwargs = None  # Trainer has emptied it


class LearningRateCallback(TrainerCallback):
    """Give branch tensors their multipliers in any Trainer, whose class need not be changed.

        Trainer(..., callbacks=[nlr.LearningRateCallback()])

    Tensors that the optimizer would train at the plain learning rate, or decay against their role, are in groups of
    their own during each step. Between steps the optimizer has Trainer's groups, so that schedules, checkpoints and
    logs are as without it. A tensor whose learning rate differs already is unchanged.

    Raises:
        UserError: when training begins, the optimizer does not hold the model's tensors (DeepSpeed, FSDP1, layer-wise
            optimizers) or steps by other optimizers; after the first step, it keeps values in its groups
            (schedule-free ones).
    """

    def __init__(self) -> None:
        self._found: dict[int, Mismatch] = {}
        self._between: list[dict[str, Any]] = []
        self._set: list[dict[str, Any]] = []

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        optimizer = _unwrapped(optimizer)
        name = type(optimizer).__name__
        branch = set()
        for layer in model.modules():
            own = dict(layer.named_parameters())
            branch |= {id(own[local]) for local in multiplier_roles(layer) if local in own and own[local].requires_grad}
        if branch and branch.isdisjoint(id(each) for group in optimizer.param_groups for each in group["params"]):
            raise UserError(f"LearningRateCallback finds no branch tensor in {name}; use nlr.TrainerMixin")
        self._found = {id(each.tensor): each for each in mismatches(optimizer.param_groups, args.learning_rate)}
        inside = tree_leaves(list(vars(optimizer).values()))
        if self._found and any(isinstance(each, torch.optim.Optimizer) for each in inside):
            raise UserError(f"LearningRateCallback cannot change the groups of {name}, which steps by others")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not self._found:
            return
        optimizer = _unwrapped(optimizer)
        self._between = optimizer.param_groups
        optimizer.param_groups = [part for group in self._between for part in self._parts(group)]
        self._set = [dict(group) for group in optimizer.param_groups]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not self._found:
            return
        optimizer = _unwrapped(optimizer)
        parts, optimizer.param_groups = optimizer.param_groups, self._between
        for part, before in zip(parts, self._set, strict=True):
            if part.keys() != before.keys() or any(part[key] is not before[key] for key in part):
                raise UserError(
                    f"LearningRateCallback cannot serve {type(optimizer).__name__}, which keeps values in its groups; "
                    "use nlr.TrainerMixin"
                )

    def _parts(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """Split the group by the changes that its tensors need; unchanged tensors come first."""
        tensors: dict[tuple[float, bool], list[torch.Tensor]] = {(1.0, False): []}
        for each in group["params"]:
            found = self._found.get(id(each))
            key = (found.role.lr if found.lost else 1.0, found.decayed) if found else (1.0, False)
            tensors.setdefault(key, []).append(each)
        parts = []
        for (multiplier, decayed), params in tensors.items():
            part = {key: value for key, value in group.items() if key != "param_names"} | {"params": params}
            part |= {key: group[key] * multiplier for key in ("lr", "initial_lr") if key in group}
            if decayed:
                part["weight_decay"] = 0.0
            parts.append(part)
        return [part for part in parts if part["params"]]


def _if_given(model: Any) -> tuple[Any, ...]:
    """Return the argument that some of Trainer's methods have only in newer versions or in some subclasses."""
    return () if model is None else (model,)


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside of accelerate's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
