"""TrainerMixin and LearningRateCallback: the table's rates and decay under Trainer and SFTTrainer, resuming too."""

import copy
import os
import warnings

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

import nonlinear_lowrank as nlr
from model_helpers import FAMILIES, SIZES, TOKENS, batch, build, vit
from processes_helpers import fsdp_environment, run_processes, shard_on_cpus
from refusals import assert_refused
from tokenizer_helpers import word_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


class MixedTrainer(nlr.TrainerMixin, Trainer):
    pass


def augmented(family="llama"):
    model = FAMILIES[family]()
    nlr.augment(model, nlr.NobleConfig(rank=4), verbose=False)
    return model


def mixtral():
    sizes = SIZES | TOKENS
    return build("mixtral", **sizes, intermediate_size=48, num_key_value_heads=2, num_local_experts=4)


def rows_for(model):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inputs = batch(model, size=16)
    inputs["labels"] = inputs["input_ids"].clone() if "input_ids" in inputs else torch.arange(16) % 5
    return [{name: value[place] for name, value in inputs.items()} for place in range(16)]


def arguments(folder, kind=TrainingArguments, **settings):
    usual = {"max_steps": 4, "learning_rate": 1e-2, "weight_decay": 0.1, "per_device_train_batch_size": 4, "seed": 1}
    usual |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    return kind(output_dir=str(folder), **{**usual, "save_strategy": "no", **settings})


def trained(folder, model=None, kind=MixedTrainer, settings=None, **options):
    model = augmented() if model is None else model
    trainer = kind(model, arguments(folder, **(settings or {})), train_dataset=rows_for(model), **options)
    trainer.train()
    return trainer


def settings_of(model, groups, lr="lr"):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for group in groups:
        for each in group["params"]:
            tensor = each[1] if isinstance(each, tuple) else each
            found[names[id(tensor)]] = (group[lr], group["weight_decay"])
    return found


class Seen(torch.optim.AdamW):
    """AdamW that notes the groups it steps with."""

    def step(self, closure=None):
        self.seen = [dict(group) for group in self.param_groups]
        return super().step(closure)


def expected_settings(model, lr=1e-2, weight_decay=0.1):
    return settings_of(model, nlr.param_groups(model, lr, weight_decay, verbose=False))


def assert_settings(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-12), name


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])
def test_every_tensor_gets_the_tables_rate_and_decay(optim, tmp_path):
    trainer = trained(tmp_path, settings={"optim": optim, "warmup_steps": 2, "adam_beta2": 0.98})
    model, groups = trainer.model, trainer.optimizer.param_groups
    kind, _ = Trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
    assert type(trainer.optimizer.optimizer) is kind
    assert_settings(settings_of(model, groups, "initial_lr"), expected_settings(model))
    if optim == "adamw_torch":
        assert {group["betas"] for group in groups} == {(0.9, 0.98)}
    # The schedule scales them all: at the end of its line each is 0, and was its multiple of the base in between.
    assert trainer.lr_scheduler.base_lrs == [group["initial_lr"] for group in groups]


def test_sft_trainer_with_an_adapter(tmp_path):
    class MixedSFTTrainer(nlr.TrainerMixin, SFTTrainer):
        pass

    model = FAMILIES["llama"]()
    words = [f"w{number}" for number in range(64)]
    trainer = MixedSFTTrainer(
        model,
        arguments(tmp_path, SFTConfig, max_steps=1, bf16=False, max_length=9),
        train_dataset=Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows_for(model)]),
        processing_class=word_tokenizer(words, eos_token="w1", pad_token="w2", unk_token="w0"),
        peft_config=nlr.NobleAdapterConfig(r=4, target_modules="all-linear"),
    )
    trainer.train()
    found = settings_of(trainer.model, trainer.optimizer.param_groups, "initial_lr")
    assert_settings(found, expected_settings(trainer.model))
    assert len({lr for lr, _ in found.values()}) > 3


def test_an_optimizer_of_the_users_is_used_as_it_is_and_warned_of(tmp_path):
    model = augmented()
    own = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.warns(nlr.LearningRateWarning, match="SGD trains 84 tensors"):
        trainer = trained(tmp_path, model, optimizers=(own, None))
    assert trainer.optimizer.optimizer is own
    assert len(own.param_groups) == 1


def test_an_optimizer_that_takes_no_groups_is_warned_of(tmp_path, monkeypatch):
    """An optimizer with groups of its own, like GaLore."""
    model = augmented()
    own = {"lr": 1e-3, "params": [{"params": list(model.parameters())}]}
    monkeypatch.setattr(MixedTrainer, "get_optimizer_cls_and_kwargs", lambda *args: (torch.optim.SGD, own))
    with pytest.warns(nlr.LearningRateWarning, match="makes parameter groups of its own") as caught:
        trainer = trained(tmp_path, model)
    assert len([each for each in caught if each.category is nlr.LearningRateWarning]) == 1
    assert len(trainer.optimizer.param_groups) == 1


def test_the_callback_steps_with_the_tables_rates(tmp_path):
    own = {"callbacks": [nlr.LearningRateCallback()], "optimizer_cls_and_kwargs": (Seen, {"lr": 1e-2})}
    trainer = trained(tmp_path, kind=Trainer, settings={"warmup_steps": 2, "max_steps": 2}, **own)
    optimizer, expected = trainer.optimizer.optimizer, expected_settings(trainer.model)
    assert_settings(settings_of(trainer.model, optimizer.seen, "initial_lr"), expected)
    half = {name: (lr / 2, decay) for name, (lr, decay) in expected.items()}  # the second step of two of warm-up
    assert_settings(settings_of(trainer.model, optimizer.seen), half)
    assert len(optimizer.param_groups) == 2, "Trainer's own, between the steps"
    assert trainer.lr_scheduler.base_lrs == [1e-2, 1e-2]


@pytest.mark.parametrize("make", [augmented, FAMILIES["llama"]], ids=["noble", "plain"])
def test_the_callback_trains_as_the_mixin_does_and_a_plain_model_as_trainer(make, tmp_path):
    model = make()

    def state(kind, **options):
        settings = {"lr_scheduler_type": "cosine"}
        return trained(tmp_path, copy.deepcopy(model), kind, settings, **options).model.state_dict()

    mixed, called = state(MixedTrainer), state(Trainer, callbacks=[nlr.LearningRateCallback()])
    for name, value in mixed.items():
        torch.testing.assert_close(called[name], value, rtol=1e-5, atol=1e-5)
    if make is not augmented:
        plain = state(Trainer)
        assert all(torch.allclose(plain[name], value) for name, value in mixed.items())
        return
    with pytest.warns(nlr.LearningRateWarning, match="AdamW trains 84 tensors.*decays 56 tensors") as caught:
        plain = state(Trainer)
    assert len([each for each in caught if each.category is nlr.LearningRateWarning]) == 1
    assert any((plain[name] - value).abs().max() > 1e-3 for name, value in mixed.items())


def test_the_callback_serves_tensors_that_are_trained_alone(tmp_path):
    model = augmented()
    for name, each in model.named_parameters():
        each.requires_grad_(name.endswith("noble_up"))
    mixed = trained(tmp_path, copy.deepcopy(model), MixedTrainer).model.state_dict()
    called = trained(tmp_path, copy.deepcopy(model), Trainer, callbacks=[nlr.LearningRateCallback()]).model.state_dict()
    for name, value in mixed.items():
        torch.testing.assert_close(called[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("way", "schedule"), [("mixin", "reduce_lr_on_plateau"), ("callback", "linear")])
def test_a_resumed_run_ends_with_the_same_bits(way, schedule, tmp_path):
    kind, callbacks = (MixedTrainer, []) if way == "mixin" else (Trainer, [nlr.LearningRateCallback])
    model = augmented()
    rows = rows_for(model)
    settings = {"lr_scheduler_type": schedule, "save_strategy": "steps", "save_steps": 2}
    if schedule == "reduce_lr_on_plateau":
        always = {"patience": 0, "threshold": 9.0}
        settings |= {"eval_strategy": "steps", "eval_steps": 1, "lr_scheduler_kwargs": always}

    def run(resume=None):
        given = {"train_dataset": rows, "eval_dataset": rows, "callbacks": [each() for each in callbacks]}
        trainer = kind(copy.deepcopy(model), arguments(tmp_path, **settings), **given)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole, resumed = run(), run(str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    rates = [[group["lr"] for group in each.optimizer.param_groups] for each in (whole, resumed)]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("make", [vit, mixtral], ids=["vit", "mixtral"])  # whose files have other names
def test_the_best_model_is_restored_whole(make, tmp_path):
    class Falling(MixedTrainer):
        def evaluate(self, *args, **kwargs):
            if not hasattr(self, "best"):
                self.best = copy.deepcopy(self.model.state_dict())
            self.log(metrics := {"eval_loss": float(self.state.global_step)})
            return metrics

    settings = dict.fromkeys(("save_steps", "eval_steps"), 1) | dict.fromkeys(
        ("save_strategy", "eval_strategy"), "steps"
    )
    nlr.augment(model := make(), nlr.NobleConfig(rank=4), verbose=False)
    rows = rows_for(model)
    trainer = Falling(
        model, arguments(tmp_path, **settings, load_best_model_at_end=True), train_dataset=rows, eval_dataset=rows
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, trainer.best[name], rtol=0, atol=0, msg=name)


class Elsewhere(torch.optim.SGD):
    """Steps on flattened copies, as DeepSpeed does."""

    def __init__(self, params, **settings):
        flat = [each.detach().flatten() for group in params for each in group["params"]]
        super().__init__(flat, **settings)


class Keeping(torch.optim.SGD):
    """Keeps its count in the groups, as schedule-free optimizers do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


class Stepping(torch.optim.Optimizer):
    def __init__(self, params, **settings):
        super().__init__(params, settings)
        self.inner = torch.optim.SGD(self.param_groups, **settings)

    def step(self, closure=None):
        self.inner.step(closure)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Elsewhere, "finds no branch tensor in Elsewhere; use nlr.TrainerMixin"),
        (Keeping, "cannot serve Keeping, which keeps values in its groups"),
        (Stepping, "cannot change the groups of Stepping, which steps by others"),
    ],
)
def test_the_callback_refuses_what_it_cannot_serve(kind, message, tmp_path):
    own = {"callbacks": [nlr.LearningRateCallback()], "optimizer_cls_and_kwargs": (kind, {"lr": 0.1})}
    assert_refused(message, trained, tmp_path, kind=Trainer, **own)


def test_fsdp1_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("nonlinear_lowrank.integrations.trainer.FullyShardedDataParallel", nn.Identity)
    trainer = MixedTrainer(augmented(), arguments(tmp_path))
    assert_refused("use FSDP2", trainer.create_optimizer, nn.Identity())


PROCESS = """
import sys
import test_trainer
test_trainer.train_in_a_group(sys.argv[1])
"""


class Watching(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.seen = settings_of(model, optimizer.param_groups)


def train_in_a_group(folder):
    """In each process: the rates that both ways step with, and the warning without them, where tensors are wrapped."""
    torch.set_num_threads(1)
    if os.environ.get("ACCELERATE_USE_FSDP"):
        shard_on_cpus()
    torch.manual_seed(0)
    base = augmented()
    settings = {"max_steps": 1, "lr_scheduler_type": "constant", "ddp_backend": "gloo"}
    for kind, callbacks in ((MixedTrainer, []), (Trainer, [nlr.LearningRateCallback()]), (Trainer, [])):
        watching = Watching()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = trained(folder, copy.deepcopy(base), kind, settings, callbacks=[*callbacks, watching])
        warned = [each for each in caught if each.category is nlr.LearningRateWarning]
        wrong = kind is Trainer and not callbacks
        assert len(warned) == (wrong and trainer.args.process_index == 0), (kind, callbacks, warned)
        if not wrong:
            found = {name.removeprefix("module."): value for name, value in watching.seen.items()}
            assert_settings(found, expected_settings(base))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_in_two_processes(engine, tmp_path, monkeypatch):
    for name, value in (fsdp_environment("LlamaDecoderLayer") if engine == "fsdp2" else {}).items():
        monkeypatch.setenv(name, value)
    run_processes(PROCESS, tmp_path)
