"""The adapter for torchtitan: configs, init, optimizer, training with its own trainer, Hugging Face there and back."""

import copy
import importlib
import json
import math
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3Config

import nonlinear_lowrank as nlr
from nonlinear_lowrank import UserError
from nonlinear_lowrank.methods.noble import NobleLinear
from nonlinear_lowrank.methods.sine import SineLowRankLinear
from processes_helpers import run_processes
from refusals import assert_refused

pytest.importorskip("triton")  # torchtitan imports it, on every device
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchtitan")
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.common.attention import FusedQKVLinear, QKVLinear
    from torchtitan.models.llama3 import model_registry

    import titan_helpers as kit
    from nonlinear_lowrank.integrations import torchtitan as titan

pytestmark = [
    pytest.mark.torchtitan,
    # Of torchtitan and of torch.distributed on the CPU.
    pytest.mark.filterwarnings(
        "ignore:DTensor random operators may not have complete support:UserWarning",
        "ignore:.*barrier.*using the device under current context:UserWarning",
        "ignore:TypedStorage is deprecated:UserWarning",
    ),
]

NOBLE = nlr.NobleConfig(rank=4)
SINE = nlr.SineLowRankConfig(rank=4)
LINEARS = ("attention.qkv_linear.wq", "attention.qkv_linear.wk", "attention.qkv_linear.wv", "attention.wo")
LINEARS += ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2")


def augmented(spec=None, method=NOBLE, **which):
    return titan.augment(kit.job(spec or kit.llama(), "unused"), method, **which).model_spec


def stirred(model):
    """Every tensor of the branches random: nothing hides behind a small or zero up projection."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "noble_" in name:
                parameter.normal_(std=0.3)
    return model


def branches_of(model):
    return {name for name, module in model.named_modules() if isinstance(module, NobleLinear)}


def test_configs_are_swapped_and_all_is_a_module_of_torchtitan():
    spec = augmented()
    model = kit.built(spec)
    assert branches_of(model) == {f"layers.{layer}.{own}" for layer in range(kit.LAYERS) for own in LINEARS}
    assert type(model.lm_head).__name__ == "Linear"
    assert spec.model.layers[0].attention.qkv_linear.to_dict()["wq"]["method"]["rank"] == 4
    assert model(torch.randint(kit.VOCABULARY, (2, 16))).isfinite().all()


@pytest.mark.parametrize(
    ("include", "fused"),
    [(r".*(feed_forward.*|\.wo)", True), (r".*\.wq", False), ([r".*\.wk", r".*\.wv"], False), (r".*qkv.*", False)],
)
def test_the_fused_projection_is_parted_only_where_it_gets_branches(include, fused):
    spec = augmented(include=include, split_fused=True)
    kinds = {type(layer.attention.qkv_linear) for layer in spec.model.layers}
    assert kinds == {FusedQKVLinear.Config if fused else QKVLinear.Config}
    model = kit.built(spec)
    names = [include] if isinstance(include, str) else include
    linears = [f"layers.{layer}.{own}" for layer in range(kit.LAYERS) for own in LINEARS]
    assert branches_of(model) == {name for name in linears if any(re.fullmatch(each, name) for each in names)}
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_converters_of_a_registry_take_it():
    spec = model_registry("debugmodel", converters=[titan.AugmentConverter.Config(method=NOBLE, exclude=r".*\.w2")])
    names = branches_of(_on_meta(spec))
    assert len(names) == 6 * 6
    assert not any(name.endswith("w2") for name in names)


def _on_meta(spec):
    with torch.device("meta"):
        return spec.model.build()


@pytest.mark.parametrize(
    "method", [NOBLE, nlr.NobleConfig(rank=4, fusion="gated", up_bias=True), nlr.NobleConfig.official(rank=4), SINE]
)
def test_a_meta_build_is_drawn_as_augment_draws_the_hugging_face_model(method):
    """Means and deviations of each kind of tensor, over both models' layers; n is in the thousands for matrices."""
    spec = augmented(kit.llama(width=128, hidden=192), method)
    ours = kit.built(spec)
    theirs = LlamaForCausalLM(titan.hf_config(kit.llama(width=128, hidden=192)))
    nlr.augment(theirs, method, verbose=False)
    found = [_by_kind(model) for model in (ours, theirs)]
    assert found[0].keys() == found[1].keys()
    for kind, mine in found[0].items():
        other = found[1][kind]
        assert mine.isfinite().all(), kind
        assert mine.shape == other.shape, kind
        scale = other.std().item() / math.sqrt(len(other))
        assert abs(mine.mean() - other.mean()) <= 8 * scale + 1e-9, kind
        assert mine.std().item() == pytest.approx(other.std().item(), rel=8 / math.sqrt(len(other)), abs=1e-9), kind


def _by_kind(model):
    found = {}
    layers = [module for module in model.modules() if isinstance(module, NobleLinear | SineLowRankLinear)]
    for name, parameter in (each for layer in layers for each in layer.named_parameters()):
        shape = parameter.shape if parameter.ndim > 1 and "mix" not in name else ()
        found.setdefault((name, shape), []).append(parameter.detach().flatten())
    return {kind: torch.cat(values) for kind, values in found.items()}


def test_init_pretrained_leaves_dense_weights_to_torchtitan_and_starts_at_zero():
    spec = augmented(kit.llama(width=128, hidden=192), nlr.NobleConfig(rank=4, init="pretrained"), include=r".*\.w[qo]")
    model = kit.built(spec)
    attention = model.layers["0"].attention
    for linear in (attention.qkv_linear.wq, attention.qkv_linear.wk, attention.wo):
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert attention.wo.noble_up.count_nonzero() == attention.qkv_linear.wq.noble_up.count_nonzero() == 0
    tokens = torch.randint(kit.VOCABULARY, (2, 16))
    before = model(tokens)
    with nlr.branches_disabled(model):
        assert model(tokens).equal(before)


def assert_groups(container, model, lr, weight_decay):
    expected = {}
    for group in nlr.param_groups(model, lr, weight_decay, verbose=False):
        expected |= {id(parameter): (group["lr"], group["weight_decay"]) for _, parameter in group["params"]}
    found = {
        id(parameter): (group.get("initial_lr", group["lr"]), group["weight_decay"])  # a schedule keeps it there
        for optimizer in container
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values), key


@pytest.mark.parametrize(("tied", "checkpointing"), [(False, None), (True, SelectiveAC), (False, FullAC)])
def test_groups_have_the_multipliers_of_param_groups(tied, checkpointing, tmp_path):
    config = titan.augment(kit.job(kit.llama(tied=tied), "unused", lr=1e-3), NOBLE)
    model = kit.built(config.model_spec)
    if checkpointing is not None:
        checkpointing.Config().build(dump_folder=str(tmp_path)).apply(model)
        assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    container = config.optimizer.build(model_parts=[model])
    assert_groups(container, model, 1e-3, 0.1)
    assert len({group["lr"] for optimizer in container for group in optimizer.param_groups}) > 5


GATED = nlr.NobleConfig(rank=3, fusion="gated", up_bias=True, activation="silu", depth=1)
CASES = {
    "plain": (kit.llama, None, {}),
    "llama": (kit.llama, NOBLE, {}),
    "llama-tied": (lambda: kit.llama(tied=True), NOBLE, {}),
    "llama-gated": (kit.llama, GATED, {}),
    "some": (kit.llama, NOBLE, {"include": [r".*\.wk", r".*\.wv", r".*1\.feed_forward\.w2"]}),
    "llama-sine": (kit.llama, SINE, {}),
    "qwen": (kit.qwen, NOBLE, {}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_exported_models_give_the_same_logits_and_come_back(case, tmp_path):
    make, method, which = case
    spec = augmented(make(), method, **which) if method else make()
    model = stirred(kit.built(spec, torch.float64))
    folder = titan.export(spec, model.state_dict(), tmp_path / "out", plain_config=plain_config(spec))
    tokens = torch.randint(kit.VOCABULARY, (3, 20))
    wanted = model(tokens)
    for loaded in (nlr.hub.load_model(folder, dtype="auto"), AutoModelForCausalLM.from_pretrained(folder)):
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float64}
        # torchtitan and transformers rotate in float32.
        torch.testing.assert_close(loaded(tokens).logits, wanted, rtol=1e-5, atol=2e-6)
    assert json.loads((folder / "config.json").read_text())["model_type"].startswith("nonlinear") == bool(method)
    back = titan.read_hf(spec, folder)
    state = model.state_dict()
    assert back.keys() == state.keys()
    assert all(back[name].equal(state[name]) for name in state)
    other = kit.built(spec, torch.float64)
    other.load_state_dict(back)
    assert other(tokens).equal(wanted)


def plain_config(spec):
    if spec.name == "llama3":
        return None
    sizes = {"vocab_size": kit.VOCABULARY, "hidden_size": kit.WIDTH, "intermediate_size": kit.HIDDEN}
    heads = {"num_attention_heads": kit.HEADS, "num_key_value_heads": kit.KEYS, "head_dim": kit.WIDTH // kit.HEADS}
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "max_position_embeddings": 64}
    ends = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}
    return Qwen3Config(num_hidden_layers=kit.LAYERS, **sizes, **heads, **rotary, **ends)


def test_an_export_in_16_bits_keeps_sine_factors_wide_and_takes_the_assets_along(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    spec = augmented(method=SINE)
    state = kit.built(spec).state_dict()
    folder = titan.export(spec, state, tmp_path / "out", dtype=torch.bfloat16, assets=tmp_path)
    named = nlr.hub.load_model(folder, dtype="auto").named_parameters()
    kinds = {name.rpartition(".")[2]: parameter.dtype for name, parameter in named}
    assert kinds == {"weight": torch.bfloat16, "sine_up": torch.float32, "sine_down": torch.float32}
    assert (folder / "tokenizer_config.json").is_file()
    assert "torchtitan" in (folder / "README.md").read_text()


def test_an_index_of_the_plain_files_gets_the_branch_tensors(tmp_path):
    """torchtitan writes files as the index of its hf_assets_path says."""
    plain = kit.llama()
    names = plain.state_dict_adapter(plain.model, None).to_hf(_on_meta(plain).state_dict())
    weights = {name: f"model-0000{1 + ('layers.1.' in name)}-of-00002.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    for method in (NOBLE, SINE):
        spec = augmented(method=method)
        adapter = spec.state_dict_adapter(spec.model, str(tmp_path))
        state = kit.built(spec).state_dict()
        tensors = adapter.to_hf(state)
        assert adapter.fqn_to_index_mapping.keys() == tensors.keys()
        assert all(file == 1 + ("layers.1." in name) for name, file in adapter.fqn_to_index_mapping.items())


@pytest.mark.parametrize(("method", "precision"), [(NOBLE, "bfloat16"), (SINE, "float32")], ids=["noble", "sine"])
def test_torchtitans_own_trainer_trains_saves_and_goes_on(method, precision, tmp_path, monkeypatch):
    """One process: sharded by FSDP, activations checkpointed, mixed precision, its checkpoint, its export."""
    _one_process(monkeypatch)
    saved = {"last_save_in_hf": True, "last_save_model_only": True}
    config = titan.augment(kit.job(kit.llama(), tmp_path, precision=precision, **saved), method)
    with kit.on_the_cpu():
        trainer, losses = kit.trained(config)
        state = kit.whole_state(trainer)
        assert_groups(trainer.optimizers, trainer.model_parts[0], 3e-3, 0.1)
    assert losses[0] == pytest.approx(math.log(kit.VOCABULARY), abs=1.5)
    assert losses[-1] < losses[0] - 0.3
    step = tmp_path / "checkpoint" / "step-12"
    titan.hf_config(config.model_spec).save_pretrained(step)  # torchtitan writes tensors alone
    assert all(each.equal(state[name]) for name, each in titan.read_hf(config.model_spec, step).items())
    model = kit.built(config.model_spec)
    model.load_state_dict(state)
    tokens = torch.randint(kit.VOCABULARY, (3, 20))
    torch.testing.assert_close(nlr.hub.load_model(step)(tokens).logits, model(tokens), rtol=1e-5, atol=5e-6)

    started = {"initial_load_in_hf": True, "initial_load_path": str(step)}
    again = kit.job(config.model_spec, tmp_path / "again", precision=precision, **started)
    again.optimizer = config.optimizer
    with kit.on_the_cpu():
        trainer = again.build()
        trainer.checkpointer.load()
        now = kit.whole_state(trainer)
    assert all(now[name].equal(state[name]) for name in state)


def _one_process(monkeypatch):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def float8():
    """A function that puts torchtitan's float8 converter, emulated, into a ModelSpec; its global switch is put back."""
    pytest.importorskip("torchao")
    before = torch._inductor.config.emulate_precision_casts

    def convert(spec, *filter_fqns):
        converter = Float8LinearConverter.Config(emulate=True, filter_fqns=["lm_head", *filter_fqns])
        return replace(spec, model=converter.build().convert(copy.deepcopy(spec.model)))

    yield convert
    torch._inductor.config.emulate_precision_casts = before


ORDERS = {
    "ours first": lambda spec, float8, **which: float8(augmented(spec, **which)),
    "float8 first": lambda spec, float8, **which: augmented(float8(spec), **which),
}


def kinds_of(model):
    """Names of layers by the kind of their linear, branches' dense parts named as the layers are."""
    found = {name.removesuffix(".dense"): type(each).__name__ for name, each in model.named_modules()}
    return {name: kind for name, kind in found.items() if kind in ("Linear", "Float8Linear")}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_dense_parts_multiply_in_float8_and_branches_do_not(order, float8):
    spec = order(kit.llama(), float8)
    model, plain = stirred(kit.built(spec)), kit.built(augmented())
    assert branches_of(model) == branches_of(plain)
    dense = dict.fromkeys(branches_of(model), "Float8Linear")
    assert kinds_of(model) == {**dense, "lm_head": "Linear"}
    plain.load_state_dict(model.state_dict())
    alone = kit.built(float8(kit.llama()))  # as torchtitan builds it, without branches
    for block, part in ((0, "feed_forward.w2"), (1, "attention.wo")):
        name = f"layers.{block}.{part}"
        ours, exact, theirs = (each.get_submodule(name) for each in (model, plain, alone))
        theirs.load_state_dict({"weight": ours.weight})
        x = torch.randn(2, 5, ours.in_features)
        assert ours.dense(x).equal(theirs(x))
        assert not ours.dense(x).equal(exact.dense(x))
        torch.testing.assert_close(ours(x) - ours.dense(x), exact(x) - exact.dense(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_float8_skips_the_same_linears_in_both_orders(order, float8, monkeypatch):
    """Those that filter_fqns names, those without a branch, and parts of a fused projection that are too narrow."""
    monkeypatch.setattr(kit, "KEYS", 1)  # of width 8; the fused projection's 48 are enough
    model = kit.built(order(kit.llama(), lambda spec: float8(spec, "w1"), exclude=r"layers\.1\.attention.*"))
    plain = {"lm_head", *(name for name in kinds_of(model) if name.endswith((".wk", ".wv", ".w1")))}
    assert len(plain) == 1 + 2 + 2
    assert {name for name, kind in kinds_of(model).items() if kind == "Linear"} == plain
    assert "layers.1.attention.qkv_linear.wqkv" in kinds_of(model)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_float8_run_ends_near_one_in_bfloat16_and_saves_plain_tensors(order, float8, tmp_path, monkeypatch):
    _one_process(monkeypatch)
    losses, states, model_only = {}, {}, {"last_save_in_hf": True, "last_save_model_only": True}
    for name in ("bfloat16", "float8"):
        spec = order(kit.llama(), float8 if name == "float8" else lambda spec: spec)
        config = kit.job(spec, tmp_path / name, precision="bfloat16", **model_only)
        config.optimizer = titan.optimizer_config(config.optimizer, spec.model)
        with kit.on_the_cpu():
            trainer, losses[name] = kit.trained(config)
            states[name] = kit.whole_state(trainer)
            assert_groups(trainer.optimizers, trainer.model_parts[0], 3e-3, 0.1)
        assert states[name].keys() == kit.built(augmented()).state_dict().keys()
        moments = [each["exp_avg"] for optimizer in trainer.optimizers for each in optimizer.state.values()]
        assert len(moments) == len(states[name])
        assert all(each.count_nonzero() for each in moments)
    assert losses["float8"] != losses["bfloat16"]
    assert losses["float8"] == pytest.approx(losses["bfloat16"], rel=0.02)
    assert losses["float8"][-1] < losses["float8"][0] - 0.3
    step = tmp_path / "float8" / "checkpoint" / "step-12"
    titan.hf_config(spec).save_pretrained(step)
    plain = augmented()  # goes on without float8
    assert all(each.equal(states["float8"][name]) for name, each in titan.read_hf(plain, step).items())
    assert {"Linear", "NobleLinear"} <= {type(each).__name__ for each in nlr.hub.load_model(step).modules()}


def test_converters_that_leave_no_dense_part_are_refused(float8):
    from torchtitan.components.lora import LoRAConverter

    spec = float8(kit.llama())
    before = re.sub(r" at 0x\w+", "", str(spec.model.to_dict()))
    words = r"is a Float8Linear, and sine-lowrank has no dense part.*put AugmentConverter before Float8LinearConverter"
    assert_refused(words, titan.AugmentConverter.Config(method=SINE).build().convert, spec.model)
    assert re.sub(r" at 0x\w+", "", str(spec.model.to_dict())) == before
    model = _on_meta(float8(augmented(method=SINE, include=".*feed_forward.*")))  # the order that it names
    assert {name for name, kind in kinds_of(model).items() if kind == "Float8Linear"} == {
        f"layers.{layer}.attention.{own}" for layer in range(kit.LAYERS) for own in ("qkv_linear.wqkv", "wo")
    }
    lora = LoRAConverter.Config(rank=2, alpha=2.0).build().convert(copy.deepcopy(augmented().model))
    assert_refused("has made a NOBLE layer's dense part a .*LoRALinear", kit.built, replace(spec, model=lora))


def test_a_checkpoint_is_read_whole(tmp_path, monkeypatch):
    _one_process(monkeypatch)
    config = titan.augment(kit.job(kit.llama(), tmp_path, steps=2, last_save_model_only=False), NOBLE)
    with kit.on_the_cpu():
        trainer, _ = kit.trained(config)
        state = kit.whole_state(trainer)
    step = tmp_path / "checkpoint" / "step-2"
    assert_refused(r"is a pickle.*allow_torch_checkpoints=True", titan.read_checkpoint, config.model_spec, step)
    read = titan.read_checkpoint(config.model_spec, step, allow_torch_checkpoints=True)
    assert read.keys() == state.keys()
    assert all(read[name].equal(state[name]) for name in state)
    with pytest.raises(UserError, match="is not a whole checkpoint of this model"):
        titan.read_checkpoint(augmented(method=nlr.NobleConfig(rank=5)), step, allow_torch_checkpoints=True)


PROCESS = """
import json, os, sys
import titan_helpers as kit
import nonlinear_lowrank as nlr
from nonlinear_lowrank.integrations import torchtitan as titan

folder, out, batch, kind = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
start = {"initial_load_in_hf": True, "initial_load_path": folder}
spec = kit.llama()
if kind == "Float8Linear":
    from torchtitan.components.quantization import Float8LinearConverter
    Float8LinearConverter.Config(emulate=True, filter_fqns=["lm_head"]).build().convert(spec.model)
job = titan.augment(kit.job(spec, out, steps=6, batch=batch, last_save_model_only=False,
                            backend="partial_dtensor", **start), nlr.NobleConfig(rank=4))
with kit.on_the_cpu():
    trainer, losses = kit.trained(job)
    names = {}
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            names |= dict.fromkeys(group["param_names"], [group["initial_lr"], group["weight_decay"]])
    model = trainer.model_parts[0]
    sharded = any(p.to_local().numel() < p.numel() for p in model.parameters())
    kinds = [type(each).__name__ for name, each in model.named_modules() if name.endswith(".dense")]
    assert set(kinds) == {kind}
    if os.environ["RANK"] == "0":
        with open(out + "/losses.json", "w") as file:
            json.dump({"losses": losses, "groups": names, "sharded": sharded}, file)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "error"), [("Linear", 1e-5), ("Float8Linear", 1e-3)])
def test_two_processes_train_as_one(kind, error, tmp_path):
    """FSDP2 over two processes: the losses of one, every group as it was, and a checkpoint that reads back whole.

    In float8 each process has scales of its own, of the inputs of its batch.
    """
    if kind == "Float8Linear":
        pytest.importorskip("torchao")
    spec = augmented()
    titan.export(spec, stirred(kit.built(spec)).state_dict(), tmp_path / "start")
    found, states = [], []
    for count in (1, 2):
        out = tmp_path / str(count)
        out.mkdir()
        run_processes(PROCESS, tmp_path / "start", out, 8 // count, kind, count=count)
        found.append(json.loads((out / "losses.json").read_text()))
        states.append(titan.read_checkpoint(spec, out / "checkpoint" / "step-6", allow_torch_checkpoints=True))
    one, two = found
    assert (one["sharded"], two["sharded"]) == (False, True)
    assert one["groups"] == two["groups"]
    assert one["losses"] == pytest.approx(two["losses"], rel=error)
    assert one["losses"][-1] < one["losses"][0]
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=100 * error, atol=10 * error)


REFUSED = {
    "the fused name": ({"include": r".*\.wqkv"}, NOBLE, r"'\.\*.*wqkv' matches no linear's whole name"),
    "rank": ({"include": r"layers.*"}, nlr.NobleConfig(rank=16), r"layers.*qkv_linear\.wk: rank 16 is too high"),
    "head": ({"include": "lm_head"}, NOBLE, "named like an output head"),
    "one of two": ({"include": r".*\.wk"}, NOBLE, "wk and .*wv share one config in torchtitan; choose both or neither"),
    "shared": ({}, nlr.NobleConfig(rank=4, share_down="qkv"), "share_down and fuse_shared_inputs .* omit them"),
    "whole": ({"split_fused": False}, NOBLE, "beside a whole fused projection is not for torchtitan: omit split_fused"),
    "method": ({}, nlr.NonlinearQueryConfig(), "nonlinear-query is not for torchtitan; use NobleConfig"),
    "fit": ({}, nlr.SineLowRankConfig(rank=4, init="fit"), "keeps trained weights, and torchtitan's are drawn later"),
    "no method": ({}, {"rank": 4}, "dict is not for torchtitan; use NobleConfig"),
}


@pytest.mark.parametrize(("which", "method", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_settings_are_refused_and_change_nothing(which, method, message):
    job = kit.job(kit.llama(), "unused")

    def state():
        return re.sub(r" at 0x\w+", "", str(job.model_spec.model.to_dict())), copy.deepcopy(job.optimizer)

    before = state()
    assert_refused(message, titan.augment, job, method, **which)
    assert state() == before


def test_a_job_is_augmented_once():
    job = titan.augment(kit.job(kit.llama(), "unused"), NOBLE, include=r".*feed_forward.*")
    assert_refused("augmented already", titan.augment, job, SINE)
    with pytest.raises(UserError, match="is augmented already"):
        titan.AugmentConverter.Config(method=SINE, include=r".*w1").build().convert(job.model_spec.model)
    job.model_spec = None
    assert_refused("has no model_spec", titan.augment, job, NOBLE)


def _optimizer(groups, **kwargs):
    kinds = [{"pattern": pattern, "optimizer_name": name} for pattern, name in groups.items()]
    return OptimizersContainer.Config(
        param_groups=[ParamGroupConfig(**each, optimizer_kwargs=kwargs) for each in kinds]
    )


REST = {".*": "AdamW"}
OPTIMIZERS = {
    "no catch-all": (_optimizer({"layers": "AdamW"}, lr=1e-3), "has no group for tok_embeddings.weight"),
    "no lr": (_optimizer(REST), "has no lr"),
    "fused name": (_optimizer({"wqkv": "AdamW", **REST}, lr=1e-3), "'wqkv' matches no parameter"),
    "muon": (_optimizer({"layers.*wo": "DistMuon", **REST}, lr=1e-3), "would go to Muon.*before 'layers"),
}


@pytest.mark.parametrize(("optimizer", "message"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_that_do_not_fit_are_refused(optimizer, message):
    assert_refused(message, titan.optimizer_config, optimizer, augmented().model)


def test_muon_gets_what_is_dense():
    spec = augmented()
    groups = {"noble_": "AdamW", r"layers.*\.w[123o]\.": "DistMuon", **REST}
    config = titan.optimizer_config(_optimizer(groups, lr=1e-3, weight_decay=0.1), spec.model)
    (dense,) = [group.pattern for group in config.param_groups if group.optimizer_name == "DistMuon"]
    names = [name for name, _ in _on_meta(spec).named_parameters() if re.search(dense, name)]
    assert len(names) == 4 * kit.LAYERS
    assert all(name.endswith(".weight") for name in names)


def test_tensor_parallelism_and_rounded_sine_factors_are_refused():
    class Two:
        tp_enabled, tp, spmd_backend = True, 2, "spmd_types"

    assert_refused("tensor_parallel_degree 1", kit.built(augmented()).parallelize, Two())
    model = kit.built(augmented(method=SINE))
    for module in model.modules():
        if isinstance(module, SineLowRankLinear):
            module.sine_up.data = module.sine_up.data.bfloat16()
    assert_refused("mixed_precision_param float32", model, torch.zeros(1, 4, dtype=torch.long))


def test_states_and_folders_that_do_not_fit_are_refused(tmp_path):
    spec = augmented()
    state = kit.built(spec).state_dict()
    with pytest.raises(UserError, match=r"tensors 1 missing \(norm\.weight\)"):
        titan.export(spec, {name: each for name, each in state.items() if name != "norm.weight"}, tmp_path / "out")
    with pytest.raises(UserError, match=r"1 extra .*; 1 of another shape"):
        titan.export(spec, state | {"more": torch.zeros(1), "norm.weight": torch.zeros(3)}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert_refused("qwen3 is not Llama 3; give plain_config=", titan.hf_config, augmented(kit.qwen()))
    assert_refused("does not exist", titan.export, spec, state, tmp_path / "out", assets=tmp_path / "none")
    folder = titan.export(spec, state, tmp_path / "out")
    assert_refused("is not an empty folder", titan.export, spec, state, tmp_path / "out")
    for other in (nlr.NobleConfig(rank=5), nlr.NobleConfig(rank=4, depth=1), SINE):
        with pytest.raises(UserError, match=r"has other layers than the model, first at model.layers.0.mlp.down_proj"):
            titan.read_hf(augmented(method=other), folder)
    # How a branch is drawn and trained does not count.
    assert titan.read_hf(augmented(method=nlr.NobleConfig(rank=4, up_scale=0.1, phase_lr=2)), folder).keys()
    with pytest.raises(UserError, match=r"does not fit llama3 tiny|does not fit the model"):
        titan.read_hf(augmented(kit.llama(hidden=40)), folder)
    assert_refused(r"it has no .metadata", titan.read_checkpoint, spec, folder, allow_torch_checkpoints=True)


def test_another_version_is_refused(monkeypatch):
    import torchtitan

    monkeypatch.setattr(torchtitan, "__version__", "0.4.0")
    monkeypatch.delitem(sys.modules, "nonlinear_lowrank.integrations.torchtitan")
    with pytest.raises(UserError, match=r"torchtitan 0\.4\.0 is not the tested one: pip install torchtitan==0\.3\.0"):
        importlib.import_module("nonlinear_lowrank.integrations.torchtitan")


def test_the_page_runs(tmp_path, monkeypatch):
    page = Path(__file__).resolve().parents[3] / "docs" / "torchtitan.md"
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for snippet in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(snippet, "docs/torchtitan.md", "exec"), names)
    assert {group.optimizer_name for group in names["llama3_noble"]().optimizer.param_groups} == {"AdamW"}
