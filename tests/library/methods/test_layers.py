"""Properties of every layer: changes in place, meta, copies, types, compile, selective activation checkpointing."""

import copy
import functools

import pytest
import torch
from peft import get_peft_model
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.pytorch_utils import Conv1D

import nonlinear_lowrank as nlr
from nonlinear_lowrank.methods.noble import NobleConv1D, NobleLinear
from nonlinear_lowrank.methods.rational import RationalActivation
from nonlinear_lowrank.methods.sine import SineLowRankLinear

WIDTH, TOKENS = 16, 20


class Trio(nn.Module):
    """Query, key and value of one input, each changed before the next one is computed."""

    def __init__(self, **options):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        nlr.augment(self, nlr.NobleConfig(rank=4, **options), verbose=False)

    def forward(self, x, change):
        return torch.cat([change(layer(x), x) for layer in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)


class Single(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, change):
        return change(self.layer(x), x)


def noble(cls=NobleLinear, **options):
    return Single(cls(WIDTH, WIDTH, config=nlr.NobleConfig(rank=4, **options)))


def sine(activation):
    config = nlr.SineLowRankConfig(rank=2, omega=30.0, activation=activation)
    return Single(SineLowRankLinear(WIDTH, WIDTH, config=config))


def activation(**options):
    return Single(RationalActivation(nlr.RationalConfig(activation="gelu", groups=4, **options)))


def adapted(config_class, base, **options):
    """A layer with an adapter that changes its outputs."""
    field = "init_lora_weights" if config_class is nlr.SineLoraConfig else "init_weights"
    config = config_class(**{field: False}, target_modules=["0"], **options)
    return Single(get_peft_model(nn.Sequential(base), config).base_model.model[0])


def nora(**options):
    base = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
    return Single(get_peft_model(base, nlr.NoraConfig(init_weights=False, groups=4, **options)))


def query(queries=WIDTH, **options):
    return Single(nlr.NonlinearQuery(WIDTH, queries, True, config=nlr.NonlinearQueryConfig(**options)))


LAYERS = {
    "noble": noble,
    "noble-output-scale": lambda: noble(output_scale=2.0),
    "noble-tanh-depth-1": lambda: noble(activation="tanh", depth=1),
    "noble-gated": lambda: noble(fusion="gated", up_bias=True),
    "noble-silu-gated": lambda: noble(activation="silu", depth=1, fusion="gated", output_scale=1.5),
    "noble-depth-3-biased": lambda: noble(depth=3, up_bias=True),
    "noble-official": lambda: noble(bottleneck_bias=True, mix_scale=0.5),
    "noble-dropout": lambda: noble(dropout=0.3),
    "noble-conv1d": lambda: noble(NobleConv1D),
    "noble-shared-down": lambda: Trio(share_down="qkv"),
    "noble-fused-inputs": lambda: Trio(fuse_shared_inputs=True),
    "sine": lambda: sine("sine"),
    "sigmoid": lambda: sine("sigmoid"),
    "identity": lambda: sine("identity"),
    "relu": lambda: sine("relu"),
    "query": query,
    "query-full-rank": lambda: query(kind="full_rank"),
    "query-linear-residual": lambda: query(residual="linear"),
    "query-wide": lambda: query(2 * WIDTH + 1, activation="tanh", in_norm="layer", out_norm="rms"),
    "query-narrow": lambda: query(WIDTH - 1, in_norm="none", out_norm="none", activation="silu"),
    "qkv-grouped": lambda: Single(
        nlr.NonlinearQKV(WIDTH, 2 * WIDTH, queries=4, groups=2, config=nlr.NonlinearQueryConfig(activation="gelu_tanh"))
    ),
    **{
        f"qkv-{kind}": lambda kind=kind: Single(
            nlr.NonlinearQKV(WIDTH, 2 * WIDTH, config=nlr.NonlinearQueryConfig(kind=kind))
        )
        for kind in ("nonlinear", "linear", "identity")
    },
    "rational": activation,
    "rational-exact": lambda: activation(anchor="exact", form="sum_of_abs"),
    "rational-behind-batch": lambda: activation(channel_dim=1, tails="rational"),
    "adapter-noble": lambda: adapted(nlr.NobleAdapterConfig, nn.Linear(WIDTH, WIDTH), r=4),
    "adapter-noble-conv1d": lambda: adapted(nlr.NobleAdapterConfig, Conv1D(WIDTH, WIDTH), r=4),
    "adapter-noble-dropout": lambda: adapted(nlr.NobleAdapterConfig, nn.Linear(WIDTH, WIDTH), r=4, dropout=0.3),
    "adapter-sine-lora": lambda: adapted(nlr.SineLoraConfig, nn.Linear(WIDTH, WIDTH), r=2),
    "adapter-sine-dora": lambda: adapted(nlr.SineLoraConfig, nn.Linear(WIDTH, WIDTH), r=2, use_dora=True),
    "adapter-sine-conv1d": lambda: adapted(nlr.SineLoraConfig, Conv1D(WIDTH, WIDTH), r=2),
    "adapter-sine-conv2d": lambda: adapted(nlr.SineLoraConfig, nn.Conv2d(WIDTH, WIDTH, 1), r=2),
    "adapter-sine-embedding": lambda: adapted(nlr.SineLoraConfig, nn.Embedding(TOKENS, WIDTH), r=2),
    "adapter-nora": nora,
    "adapter-nora-exact": lambda: nora(anchor="exact", lora_r=2, lora_target_modules=["0"]),
}


OURS = [name for name in LAYERS if not name.startswith("adapter")]
ours = pytest.mark.parametrize("name", OURS)


def input_of(name, dtype=torch.float64):
    if name == "adapter-sine-embedding":
        return torch.randint(TOKENS, (2, 5))
    spatial = name in ("adapter-sine-conv2d", "rational-behind-batch")
    return torch.randn(2, *((WIDTH, 3, 5) if spatial else (5, WIDTH)), dtype=dtype, requires_grad=True)


def unchanged(y, x):
    return y


def beside(y, x):
    return x if x.shape == y.shape else torch.ones_like(y)


def assigned(y, x):
    y[..., :2] = 0.5
    return y


# name: (in place, out of place)
CHANGES = {
    "mul": (lambda y, x: y.mul_(2), lambda y, x: y * 2),
    "add": (lambda y, x: y.add_(beside(y, x)), lambda y, x: y + beside(y, x)),
    "slice": (assigned, lambda y, x: torch.cat([torch.full_like(y[..., :2], 0.5), y[..., 2:]], dim=-1)),
    # Last: like any activation that keeps its output, it may not be followed by another change.
    "relu": (lambda y, x: nn.ReLU(inplace=True)(y), lambda y, x: y.relu()),
}


def outcome(run, model, x, change):
    """Output and all gradients of a training step; dropout draws the same at every call."""
    torch.manual_seed(0)
    y = run(x, change)
    wanted = [each for each in (x, *model.parameters()) if each.requires_grad]
    return [y, *torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LAYERS)
def test_change_in_place_equals_change_out_of_place(name, change):
    model, x = LAYERS[name]().double().train(), input_of(name)
    in_place, out_of_place = (outcome(model, model, x, each) for each in CHANGES[change])
    torch.testing.assert_close(in_place, out_of_place, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["noble", "noble-fused-inputs", "sine", "rational", "adapter-sine-conv1d"])
def test_compiled_change_in_place_equals_change_out_of_place(name):
    torch.compiler.reset()
    model, x = LAYERS[name]().double().train(), input_of(name)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def every(y, x, place):
        return functools.reduce(lambda y, change: change[place](y, x), CHANGES.values(), y)

    inside = outcome(compiled, model, x, functools.partial(every, place=0))
    after = outcome(lambda x, change: change(compiled(x, unchanged), x), model, x, lambda y, x: y.mul_(2))
    expected = outcome(model, model, x, functools.partial(every, place=1))
    torch.testing.assert_close(inside, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after, outcome(model, model, x, CHANGES["mul"][1]), rtol=1e-12, atol=1e-12)


@ours
def test_input_changed_before_backward_raises(name):
    model = LAYERS[name]().double().train()
    x = input_of(name) * 1
    y = model(x, unchanged)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@ours
def test_compiled_layer_has_equal_outputs_and_gradients(name):
    torch.compiler.reset()
    model, x = LAYERS[name](), input_of(name, torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outcome(compiled, model, x, unchanged), outcome(model, model, x, unchanged))


@ours
def test_layer_on_meta_runs_and_is_drawn_after_to_empty(name):
    x = input_of(name, torch.float32)
    with torch.device("meta"):
        model = LAYERS[name]()
    model.to("meta")
    assert model(x.to("meta"), unchanged).shape == LAYERS[name]()(x, unchanged).shape
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(each.isfinite().all() for each in [*model.parameters(), *model.buffers(), model(x, unchanged)])


@ours
def test_copies_functional_calls_and_loaded_states_give_the_same_output(name):
    model, twin, x = LAYERS[name]().eval(), LAYERS[name]().eval(), input_of(name, torch.float32)
    expected = model(x, unchanged)
    assert torch.equal(copy.deepcopy(model)(x, unchanged), expected)
    assert torch.equal(torch.func.functional_call(twin, dict(model.named_parameters()), (x, unchanged)), expected)
    state = model.state_dict()
    assert torch.equal(torch.func.functional_call(twin, state, (x, unchanged)), expected)
    twin.load_state_dict(state)
    assert torch.equal(twin(x, unchanged), expected)


@ours
def test_bfloat16_and_autocast_stay_close_to_float32(name):
    model, x = LAYERS[name]().eval(), input_of(name, torch.float32)
    expected = model(x, unchanged)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = model(x, unchanged)
    low = copy.deepcopy(model).bfloat16()(x.bfloat16(), unchanged)
    low.sum().backward()
    assert low.dtype == torch.bfloat16
    assert under_autocast.dtype == (torch.float32 if name.startswith("rational") else torch.bfloat16)
    bound = 0.05 if name == "query" else 0.1
    for y in (low, under_autocast):
        torch.testing.assert_close(y.float(), expected, rtol=bound, atol=bound)


KEPT = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default}


def keep_products(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@ours
def test_selective_checkpointing_changes_no_output_and_no_gradient(name):
    """It keeps the outputs of products, and refuses those that a lean forward changes in place afterwards."""
    model, x = LAYERS[name]().double(), input_of(name)
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    checkpointed = functools.partial(checkpoint, model, use_reentrant=False, context_fn=contexts)
    expected = outcome(model, model, x, unchanged)
    torch.testing.assert_close(outcome(checkpointed, model, x, unchanged), expected, rtol=1e-12, atol=1e-12)


@ours
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.*deprecated:DeprecationWarning")
def test_traces_and_saves_as_a_program_without_operators_of_ours(name, tmp_path):
    class Unchanged(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = LAYERS[name]().double().eval()

        def forward(self, x):
            return self.model(x, lambda y, _: y)

    model, x = Unchanged(), input_of(name).detach()
    torch.jit.save(torch.jit.trace(model, x), tmp_path / "program.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "program.pt")(x), model(x))
