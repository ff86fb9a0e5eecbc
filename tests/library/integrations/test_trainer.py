"""TrainerMixin and LearningRateCallback: the table's rates and decay under Trainer and SFTTrainer, resuming too."""

import copy
import os
import warnings

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import nonlinear_lowrank as nlr
from model_helpers import FAMILIES, batch
from processes_helpers import fsdp_environment, run_processes, shard_on_cpus

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


class MixedTrainer(nlr.TrainerMixin, Trainer):
    pass


def augmented(family="llama"):
    model = FAMILIES[family]()
    nlr.augment(model, nlr.NobleConfig(rank=4), verbose=False)
    return model


def rows_for(model):
    inputs = batch(model, size=16)
    inputs["labels"] = inputs["input_ids"].clone()
    return [{name: value[place] for name, value in inputs.items()} for place in range(16)]


def arguments(folder, **settings):
    settings = {
        "max_steps": 4, "learning_rate": 1e-2, "weight_decay": 0.1, "per_device_train_batch_size": 4, **settings,
    }  # fmt: skip
    return TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        save_strategy=settings.pop("save_strategy", "no"), seed=1, **settings,
    )  # fmt: skip


def settings_of(model, groups, lr="lr"):
    """(learning rate, weight decay) by the parameters' names."""
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
    model = augmented()
    settings = arguments(tmp_path, optim=optim, warmup_steps=2, adam_beta2=0.98)
    trainer = MixedTrainer(model, settings, train_dataset=rows_for(model))
    trainer.train()
    kind, _ = Trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
    assert type(trainer.optimizer.optimizer) is kind
    assert_settings(settings_of(model, trainer.optimizer.param_groups, "initial_lr"), expected_settings(model))
    if optim == "adamw_torch":
        assert {group["betas"] for group in trainer.optimizer.param_groups} == {(0.9, 0.98)}
    # The schedule scales them all: at the end of its line each is 0, and was its multiple of the base in between.
    assert trainer.lr_scheduler.base_lrs == [group["initial_lr"] for group in trainer.optimizer.param_groups]


def test_sft_trainer_with_an_adapter(tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    class MixedSFTTrainer(nlr.TrainerMixin, SFTTrainer):
        pass

    model = FAMILIES["llama"]()
    tokens = [{"input_ids": row["input_ids"].tolist()} for row in rows_for(model)]
    config = SFTConfig(
        output_dir=str(tmp_path), max_steps=1, learning_rate=1e-2, weight_decay=0.1, use_cpu=True, report_to=[],
        bf16=False, disable_tqdm=True, dataloader_pin_memory=False, save_strategy="no", max_length=9,
    )  # fmt: skip
    trainer = MixedSFTTrainer(
        model,
        config,
        train_dataset=Dataset.from_list(tokens),
        processing_class=word_tokenizer(),
        peft_config=nlr.NobleAdapterConfig(r=4, target_modules="all-linear"),
    )
    trainer.train()
    found = settings_of(trainer.model, trainer.optimizer.param_groups, "initial_lr")
    assert_settings(found, expected_settings(trainer.model))
    assert len({lr for lr, _ in found.values()}) > 3


def word_tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w2", unk_token="w0")


def test_an_optimizer_of_the_users_is_used_as_it_is_and_warned_of(tmp_path):
    model = augmented()
    own = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = rows_for(model)
    trainer = MixedTrainer(model, arguments(tmp_path), train_dataset=rows, optimizers=(own, None))
    with pytest.warns(nlr.LearningRateWarning, match="SGD trains 84 tensors"):
        trainer.train()
    assert trainer.optimizer.optimizer is own
    assert len(own.param_groups) == 1


def test_an_optimizer_that_takes_no_groups_is_warned_of(tmp_path, monkeypatch):
    """An optimizer with groups of its own, like GaLore."""
    model = augmented()
    trainer = MixedTrainer(model, arguments(tmp_path), train_dataset=rows_for(model))
    own = [{"params": list(model.parameters())}]
    monkeypatch.setattr(
        trainer, "get_optimizer_cls_and_kwargs", lambda *args: (torch.optim.SGD, {"lr": 1e-3, "params": own})
    )
    with pytest.warns(nlr.LearningRateWarning, match="makes parameter groups of its own") as caught:
        trainer.train()
    assert len([each for each in caught if each.category is nlr.LearningRateWarning]) == 1
    assert len(trainer.optimizer.param_groups) == 1


def test_the_callback_steps_with_the_tables_rates(tmp_path):
    model = augmented()
    callback = nlr.LearningRateCallback()
    trainer = Trainer(
        model, arguments(tmp_path, warmup_steps=2, max_steps=2), train_dataset=rows_for(model), callbacks=[callback],
        optimizer_cls_and_kwargs=(Seen, {"lr": 1e-2}),
    )  # fmt: skip
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    expected = expected_settings(model)
    assert_settings(settings_of(model, optimizer.seen, "initial_lr"), expected)
    half = {name: (lr / 2, decay) for name, (lr, decay) in expected.items()}  # the second step of two of warm-up
    assert_settings(settings_of(model, optimizer.seen), half)
    assert len(optimizer.param_groups) == 2, "Trainer's own, between the steps"
    assert trainer.lr_scheduler.base_lrs == [1e-2, 1e-2]


@pytest.mark.parametrize("make", [augmented, FAMILIES["llama"]], ids=["noble", "plain"])
def test_the_callback_trains_as_the_mixin_does_and_a_plain_model_as_trainer(make, tmp_path):
    model = make()
    rows, settings = rows_for(model), arguments(tmp_path, lr_scheduler_type="cosine")

    def trained(kind, **options):
        trainer = kind(copy.deepcopy(model), settings, train_dataset=rows, **options)
        trainer.train()
        return trainer.model.state_dict()

    mixed, called = trained(MixedTrainer), trained(Trainer, callbacks=[nlr.LearningRateCallback()])
    for name, value in mixed.items():
        torch.testing.assert_close(called[name], value, rtol=1e-5, atol=1e-5)
    if make is not augmented:
        plain = trained(Trainer)
        assert all(torch.allclose(plain[name], value) for name, value in mixed.items())
        return
    with pytest.warns(nlr.LearningRateWarning, match="AdamW trains 84 tensors.*decays 56 tensors") as caught:
        plain = trained(Trainer)
    assert len([each for each in caught if each.category is nlr.LearningRateWarning]) == 1
    assert any((plain[name] - value).abs().max() > 1e-3 for name, value in mixed.items())


@pytest.mark.parametrize(("way", "schedule"), [("mixin", "reduce_lr_on_plateau"), ("callback", "linear")])
def test_a_resumed_run_ends_with_the_same_bits(way, schedule, tmp_path):
    kind, callbacks = (MixedTrainer, []) if way == "mixin" else (Trainer, [nlr.LearningRateCallback])
    model = augmented()
    rows = rows_for(model)
    settings = {"lr_scheduler_type": schedule, "save_strategy": "steps", "save_steps": 2}
    if schedule == "reduce_lr_on_plateau":
        always = {"patience": 0, "threshold": 9.0}
        settings |= {"eval_strategy": "steps", "eval_steps": 1, "lr_scheduler_kwargs": always}

    def run(model, resume=None):
        trainer = kind(
            model, arguments(tmp_path, **settings), train_dataset=rows, eval_dataset=rows,
            callbacks=[each() for each in callbacks],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(copy.deepcopy(model))
    resumed = run(copy.deepcopy(model), str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    rates = [[group["lr"] for group in each.optimizer.param_groups] for each in (whole, resumed)]
    assert rates[0] == rates[1]


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
    """Steps by another."""

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
    model = augmented()
    trainer = Trainer(
        model, arguments(tmp_path), train_dataset=rows_for(model), optimizer_cls_and_kwargs=(kind, {"lr": 0.1}),
        callbacks=[nlr.LearningRateCallback()],
    )  # fmt: skip
    with pytest.raises(nlr.UserError, match=message):
        trainer.train()


def test_fsdp1_is_refused(tmp_path, monkeypatch):
    class Flattening(nn.Module):
        pass

    monkeypatch.setattr("nonlinear_lowrank.integrations.trainer.FullyShardedDataParallel", Flattening)
    model = augmented()
    trainer = MixedTrainer(model, arguments(tmp_path), train_dataset=rows_for(model))
    with pytest.raises(nlr.UserError, match="use FSDP2"):
        trainer.create_optimizer(Flattening())


PROCESS = """
import sys
import torch
torch.set_num_threads(1)
import test_trainer as here
here.train_in_a_group(sys.argv[1])
"""


class Watching(TrainerCallback):
    """Notes what each step is made with."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.seen.append(settings_of(model, optimizer.param_groups))


def train_in_a_group(folder):
    """In each process: the rates that both ways step with, and the warning without them, where tensors are wrapped."""
    if os.environ.get("ACCELERATE_USE_FSDP"):
        shard_on_cpus()
    torch.manual_seed(0)
    base = augmented()
    rows = rows_for(base)
    expected = expected_settings(base)
    for kind, callbacks in ((MixedTrainer, []), (Trainer, [nlr.LearningRateCallback()]), (Trainer, [])):
        model = copy.deepcopy(base)
        settings = arguments(folder, max_steps=1, lr_scheduler_type="constant", ddp_backend="gloo")
        watching = Watching()
        trainer = kind(model, settings, train_dataset=rows, callbacks=[*callbacks, watching])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        warned = [each for each in caught if each.category is nlr.LearningRateWarning]
        wrong = kind is Trainer and not callbacks
        assert len(warned) == (wrong and trainer.args.process_index == 0), (kind, callbacks, warned)
        if not wrong:
            (found,) = watching.seen
            assert_settings({name.removeprefix("module."): value for name, value in found.items()}, expected)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_in_two_processes(engine, tmp_path, monkeypatch):
    for name, value in (fsdp_environment("LlamaDecoderLayer") if engine == "fsdp2" else {}).items():
        monkeypatch.setenv(name, value)
    run_processes(PROCESS, tmp_path)
