"""Experts that transformers holds as 3-D parameters: branches, sine low-rank weights and rational activations."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Llama4TextConfig, LongcatFlashConfig, MixtralConfig
from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import nonlinear_lowrank as nlr
from family_checks import enlarge_branches, outputs, realigned, same
from family_helpers import FAMILIES
from nonlinear_lowrank import NobleConfig, UserError
from nonlinear_lowrank.analysis.cost import active_parameters, model_cost
from nonlinear_lowrank.methods.experts import ExpertsLayer
from nonlinear_lowrank.methods.noble.experts import NobleExperts
from nonlinear_lowrank.methods.noble.op import Branch, noble_linear_reference
from nonlinear_lowrank.methods.rational.adapter_layers import NoraActivation
from nonlinear_lowrank.methods.sine.experts import SineExperts
from nonlinear_lowrank.methods.sine.reference import lowrank_linear_reference

EXPERTS, WIDTH, HIDDEN, TOKENS, K = 4, 16, 24, 20, 2
CONFIGS = {
    "cosnet": NobleConfig(rank=4),
    "shared down": NobleConfig(rank=4, expert_down="shared"),
    "depth 3": NobleConfig(rank_ratio=0.25, depth=3, up_bias=True),
    "official": NobleConfig.official(rank=4),
    "gated": NobleConfig(rank=4, activation="silu", depth=1, fusion="gated", up_bias=True, output_scale=1.5),
}
SINE = nlr.SineLowRankConfig(rank=4, omega=30)
OWN = ("llama4_text", "jetmoe", "longcat_flash", "dbrx")  # with classes of their own
CLASSES = ("mixtral", *OWN)
PAIRS = [(kind, config) for kind in CLASSES for config in (*CONFIGS.values(), SINE)]
NAMES = [f"{kind}-{each}" for kind in CLASSES for each in (*CONFIGS, "sine")]
every_class = pytest.mark.parametrize(("kind", "config"), PAIRS, ids=NAMES)
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
LAYOUTS = ("mixtral", "gpt_oss", "nemotron_h")  # gated; transposed, interleaved and with biases; without a gate


def _sizes(**others):
    return MixtralConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=K, **others
    )


def _plain(kind):
    if kind == "llama4_text":
        return Llama4TextExperts(
            Llama4TextConfig(hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=EXPERTS)
        )
    if kind == "jetmoe":
        return JetMoeParallelExperts(EXPERTS, WIDTH, HIDDEN)
    if kind == "longcat_flash":
        sizes = {"expert_ffn_hidden_size": HIDDEN, "n_routed_experts": EXPERTS, "zero_expert_num": 2}
        return LongcatFlashExperts(LongcatFlashConfig(hidden_size=WIDTH, **sizes))
    if kind == "dbrx":
        return DbrxExperts(DbrxFFNConfig(hidden_size=WIDTH, ffn_hidden_size=HIDDEN, moe_num_experts=EXPERTS))
    sizes = _sizes()
    sizes._experts_implementation = "grouped_mm"
    return MixtralExperts(sizes)


def _layer(config, kind="mixtral"):
    plain = _plain(kind).double()
    layer = SineExperts.replacing(plain, config) if config is SINE else NobleExperts.beside(plain, config)
    layer.reset_parameters()
    with torch.no_grad():
        for name, value in layer.named_parameters():
            if name.startswith("noble") and name.endswith(("_up", "bias", "fusion")):
                value.normal_(std=0.5)
    return layer


def _routing(experts=EXPERTS):
    index = torch.stack([torch.randperm(experts)[:K] for _ in range(TOKENS)])
    return index, torch.rand(TOKENS, K, dtype=torch.float64)


def _is(layer, plain):
    return issubclass(getattr(layer, "experts_class", type(layer)), plain)


def _output(layer, x, index, weights):
    """Call the experts as the model around them does."""
    match layer:
        case _ if _is(layer, Llama4TextExperts):
            routed = x.new_zeros(EXPERTS, TOKENS, WIDTH)
            rows = torch.arange(TOKENS)[:, None].expand_as(index)
            return (
                layer(routed.index_put((index, rows), x[:, None] * weights[..., None]).flatten(0, 1))
                .view(EXPERTS, TOKENS, WIDTH)
                .sum(0)
            )
        case _ if _is(layer, JetMoeParallelExperts):
            order = index.flatten().argsort()
            y = layer(x[order // K], index.flatten().bincount(minlength=EXPERTS).tolist())
            return (y[order.argsort()].unflatten(0, (TOKENS, K)) * weights[..., None]).sum(1)
        case _:
            return layer(x, index, weights)


def _weight(layer, end, e):
    """Return the weight (d_out, d_in) of one expert."""
    match layer:
        case Llama4TextExperts():
            return (layer.gate_up_proj if end == "in" else layer.down_proj)[e].T
        case JetMoeParallelExperts():
            return layer.weight[e]
        case DbrxExperts():
            w1, v1, w2 = (each.view(EXPERTS, HIDDEN, WIDTH)[e] for each in (layer.mlp.w1, layer.mlp.v1, layer.mlp.w2))
            return torch.cat([w1, v1]) if end == "in" else w2.T
        case _:
            return (layer.gate_up_proj if end == "in" else layer.down_proj)[e]


def _of_expert(layer, end, e, x):
    """Return one projection of one expert by the plain formula."""
    if isinstance(layer, SineExperts):
        up, down = getattr(layer, f"sine_{end}_up")[e], getattr(layer, f"sine_{end}_down")[e]
        return lowrank_linear_reference(x, up, down, None, "sine", layer.sine_config.omega, down.shape[1] ** 0.5)
    weight = _weight(layer, end, e)
    own = {name.removeprefix(f"noble_{end}_"): value for name, value in layer.named_parameters() if f"_{end}_" in name}
    one = {name: value if name == "down" and value.ndim == 2 else value[e] for name, value in own.items()}
    config, count = layer.noble_config, range(1, layer.noble_config.depth + 1)
    vectors = count if config.activation == "cosine" else ()
    phases = [one[f"phase{k}"] + one[f"frequency{k}"] * one.get(f"bias{k}", 0) for k in vectors]
    branch = Branch(
        one["down"], one["up"], [one[f"mix{k}"] for k in count[:-1]], [one[f"frequency{k}"] for k in vectors],
        phases, config.activation,
    )  # fmt: skip
    added, y = noble_linear_reference(x, None, None, branch), F.linear(x, weight)
    added = added + one["up_bias"] if config.up_bias else added
    if config.fusion == "gated":
        gate = torch.sigmoid(one["fusion"])
        return config.scale * (gate * y + (1 - gate) * added)
    return config.scale * (y + added)


def _mlp(layer, e, x):
    if e >= EXPERTS:
        return x  # LongCat-Flash's identity
    z = _of_expert(layer, "in", e, x)
    if _is(layer, JetMoeParallelExperts):
        return z
    gate, up = z.chunk(2)
    return _of_expert(layer, "out", e, F.silu(gate) * up)


def _reference(layer, x, index, weights):
    """Return the experts' output token by token."""
    rows = []
    for token, experts, shares in zip(x, index.tolist(), weights, strict=True):
        row = 0
        for e, share in zip(experts, shares, strict=True):
            first = _is(layer, Llama4TextExperts)  # weighs what goes in
            row = row + (1 if first else share) * _mlp(layer, e, token * share if first else token)
        rows.append(row)
    return torch.stack(rows)


@every_class
def test_experts_are_the_formula_of_each_expert(kind, config):
    layer, (index, weights) = _layer(config, kind), _routing(EXPERTS + 2 * (kind == "longcat_flash"))
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    found, wanted = _output(layer, x, index, weights), _reference(layer, x, index, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(found)
    gradients = [torch.autograd.grad(each, inputs, dy) for each in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_class
def test_experts_in_low_precision_err_as_the_formula_does(kind, config, dtype):
    layer, (index, weights) = _layer(config, kind), _routing()
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    exact = _reference(layer, x, index, weights)
    low = copy.deepcopy(layer).float().to(dtype)  # of float32, whose sine factors stay
    x, weights = x.to(dtype), weights.to(dtype)
    errors = [
        (each - exact).abs().max() for each in (_output(low, x, index, weights), _reference(low, x, index, weights))
    ]
    assert errors[0] <= 2 * errors[1] + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "include"), [*((name, r".*experts") for name in LAYOUTS), *((name, None) for name in OWN)]
)
def test_branches_that_start_at_zero_leave_a_model_as_it_is(name, include, dtype):
    """To the bit, but for the whole models of three classes of their own, to rounding."""
    model = FAMILIES[name].build().to(dtype)
    inputs = FAMILIES[name].inputs(model)
    before = outputs(model, inputs)
    nlr.augment(model, NobleConfig(rank=4, init="pretrained"), include=include, verbose=False)
    for found, wanted in zip(outputs(model, inputs), before, strict=True):
        assert (found - wanted).norm() <= 4 * torch.finfo(dtype).eps * wanted.norm()
    assert name in ("llama4_text", "longcat_flash", "dbrx") or same(outputs(model, inputs), before)
    enlarge_branches(model)
    assert not same(outputs(model, inputs), before)
    with nlr.branches_disabled(model):
        assert same(outputs(model, inputs), before)


@pytest.mark.parametrize(
    ("kind", "config"), [(each, config) for each in CLASSES for config in (SINE, CONFIGS["cosnet"])]
)
def test_an_expert_without_tokens_gets_no_gradient(kind, config):
    layer, (index, weights) = _layer(config, kind), _routing(EXPERTS - 1)
    _output(layer, torch.randn(TOKENS, WIDTH, dtype=torch.float64), index, weights).square().sum().backward()
    for name, value in layer.named_parameters():
        gradient = value.grad.unflatten(0, (EXPERTS, -1)) if name.startswith("mlp.") else value.grad
        assert not gradient[EXPERTS - 1 :].any(), name
        assert gradient[: EXPERTS - 1].flatten(1).any(1).all(), name


def test_init_and_learning_rates_follow_the_table_of_one_linear():
    sizes = MixtralConfig(hidden_size=128, intermediate_size=256, num_local_experts=3, vocab_size=64,
                          num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4)  # fmt: skip
    model = AutoModelForCausalLM.from_config(sizes)
    nlr.augment(model, NobleConfig(rank=32), verbose=False)
    experts, roles = model.model.layers[0].mlp.experts, {}
    for group in nlr.param_groups(model, lr=1.0, weight_decay=0.1, verbose=False):
        for name, _ in group["params"]:
            roles[name.rpartition(".")[2] if "experts" in name else name] = group["lr"], group["weight_decay"]
    for end, dense, d_in in (("in", "gate_up_proj", 128), ("out", "down_proj", 256)):
        wanted = {"down": d_in**-0.5, "up": 0.01 / 32**0.5, "mix1": 32**-0.5}
        wanted = {f"noble_{end}_{part}": std for part, std in wanted.items()} | {dense: 0.5 / d_in**0.5}
        wanted |= {f"noble_{end}_frequency1": 0.4 / 12**0.5, f"noble_{end}_phase2": 0.1}
        for name, std in wanted.items():
            value = getattr(experts, name)
            assert value.std().item() == pytest.approx(std, rel=6 / (2 * value.numel()) ** 0.5), name
        multipliers = {"down": 1, "up": 4**0.6, "mix1": 4**0.45, "frequency1": 3, "phase2": 5}
        for part, lr in multipliers.items():
            assert roles[f"noble_{end}_{part}"] == (pytest.approx(lr), 0.0 if lr in (3, 5) else 0.1)


@every_config
def test_counts_are_those_of_the_report_and_of_a_budget(config):
    sizes = _sizes(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=64)
    model = AutoModelForCausalLM.from_config(sizes)
    before = sum(p.numel() for p in model.parameters())
    report = nlr.augment(model, config, include=r".*experts", verbose=False)
    assert report.parameters_added == sum(p.numel() for p in model.parameters()) - before
    r = config.rank_of(WIDTH, 2 * HIDDEN)
    products = r * (WIDTH + 2 * HIDDEN + HIDDEN + WIDTH) + 2 * (config.depth - 1) * r * r
    assert report.flops_added == 2 * 2 * K * products
    linears = [row.flops for row in model_cost(model, 1).rows if not row.name.endswith("self_attn")]
    assert sum(linears) == report.flops_before + report.flops_added
    small = AutoModelForCausalLM.from_config(sizes)
    within = nlr.augment(small, config, budget="20%", verbose=False)
    assert 0.1 * before < within.parameters_added <= 0.2 * before


def _active_of(name):
    """Return experts of a token, and (experts held, d_in, d_out) of each linear of a model's experts."""
    mlp = [(4, 32, 96), (4, 48, 32)]
    return {
        "llama4_text": (1, [(2, 32, 96), (2, 48, 32)]),
        "jetmoe": (2, 2 * [*mlp, (4, 32, 16), (4, 16, 32)]),
        "longcat_flash": (4 / 3, [(6, 32, 64), (4, 32, 32)]),  # rows of gate and up for its 2 identities too, of 2 of 6
        "dbrx": (2, 2 * mlp),
    }[name]


@pytest.mark.parametrize("name", OWN)
def test_own_classes_are_counted_by_the_experts_of_a_token(name):
    k, linears = _active_of(name)
    model, config = FAMILIES[name].build(), NobleConfig(rank=4)
    before = sum(p.numel() for p in model.parameters())
    idle = sum(held * d_in * d_out - round(k * d_in * d_out) for held, d_in, d_out in linears)
    assert active_parameters(model) == before - idle
    report = nlr.augment(model, config, include=r".*(experts|put_linear)", verbose=False)
    assert report.reached_parameters == sum(held * d_in * d_out for held, d_in, d_out in linears)
    assert report.parameters_added == sum(p.numel() for p in model.parameters()) - before
    products = sum(4 * (d_in + d_out) + 4 * 4 for _, d_in, d_out in linears)
    assert report.flops_added == round(2 * k * products)
    cost = model_cost(model, 1)
    assert cost.notes == []
    rows = {row.name: row.flops for row in cost.rows}
    plain = round(2 * k * sum(d_in * d_out for _, d_in, d_out in linears))
    assert sum(rows[name] for name in report.swapped) == plain + report.flops_added
    within = nlr.augment(FAMILIES[name].build(), config, budget="20%", verbose=False)
    assert 0.1 * before < within.parameters_added <= 0.2 * before


@pytest.mark.parametrize("name", CLASSES)
def test_mixtures_are_copied_pickled_and_compiled(name):
    model = FAMILIES[name].build()
    nlr.augment(model, NobleConfig(rank=4), verbose=False)
    enlarge_branches(model)
    inputs = FAMILIES[name].inputs(model)
    wanted = outputs(model, inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(outputs(other, inputs), wanted)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outputs(compiled, inputs), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("identities", ["some", "all"])
def test_compiled_identity_experts_and_their_gradients_are_those_of_eager_mode(identities):
    layer, (index, weights) = _layer(CONFIGS["official"], "longcat_flash"), _routing(EXPERTS + 2)
    index = index if identities == "some" else EXPERTS + index % 2
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    compiled, inputs, found = torch.compile(layer, fullgraph=True, backend="aot_eager"), [x, *layer.parameters()], []
    for each in (compiled, layer):
        y = each(x, index, weights)
        gradients = torch.autograd.grad(y.square().sum(), inputs, materialize_grads=True)
        found.append((y, *gradients))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    if identities == "all":
        torch.testing.assert_close(found[0][0], x * weights.sum(1, keepdim=True))
        assert not any(each.any() for each in found[0][2:])


@pytest.mark.parametrize("name", [*LAYOUTS, *OWN])
def test_sine_experts_are_counted_saved_and_formed_for_inference(name, tmp_path):
    family = FAMILIES[name]
    model, config = family.build(), nlr.SineLowRankConfig(rank=2)
    before, flops = sum(p.numel() for p in model.parameters()), sum(row.flops for row in model_cost(model, 1).rows)
    report = nlr.augment(model, config, include=r".*(experts|put_linear)", verbose=False)
    assert report.parameters_added == sum(p.numel() for p in model.parameters()) - before < 0
    assert sum(row.flops for row in model_cost(model, 1).rows) == flops  # of formed weights
    inputs = family.inputs(model)
    expected = outputs(model, inputs)
    model.save_pretrained(tmp_path)
    loaded = family.auto_class.from_pretrained(tmp_path)
    assert same(outputs(loaded, inputs), expected)
    low = family.auto_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kinds = {part: value.dtype for part, value in low.named_parameters() if ".sine_" in part}
    assert set(kinds.values()) == {torch.float32}
    formed = nlr.optimize_for_inference(loaded)
    assert not any(isinstance(each, SineExperts) for each in formed.modules())
    torch.testing.assert_close(outputs(formed, inputs), expected, rtol=1e-4, atol=1e-4)
    low_rank = nlr.augment(family.build(), nlr.SineLowRankConfig(rank=2, activation="identity"), verbose=False)
    assert low_rank.flops_added < 0


@pytest.mark.parametrize("name", ["mixtral", "llama4_text", "longcat_flash", "dbrx"])
@pytest.mark.parametrize("others", [(), ("noble",), ("sine",)], ids=lambda others: "".join(others) or "alone")
@pytest.mark.parametrize("late", [False, True], ids=["first", "last"])
def test_experts_have_rational_activations_of_their_own(name, others, late, tmp_path):
    configs = {"noble": NobleConfig(rank=4), "sine": nlr.SineLowRankConfig(rank=2)}
    steps = [*([configs[each] for each in others]), nlr.RationalConfig(groups=4)]
    model = FAMILIES[name].build()
    for config in steps if late else steps[::-1]:
        nlr.augment(model, config, verbose=False)
    inputs = FAMILIES[name].inputs(model)
    before = outputs(model, inputs)
    of_experts = [each for each in model.modules() if getattr(each, "rational_config", None) and each.num_experts]
    activation = of_experts[-1]
    assert activation.rational_numerator.shape == (2 if name == "llama4_text" else 4, 4, 6)
    model(**inputs).loss.backward()
    rows = []
    activation.register_forward_hook(lambda module, given, _: rows.append((given[0], module.expert_ends)))
    found = model(**inputs).loss
    assert torch.equal(torch.autograd.grad(found, activation.rational_numerator)[0], activation.rational_numerator.grad)
    x, ends = rows[0]
    used = [bool(last > first) for first, last in zip([0, *ends], ends, strict=False)]
    assert activation.rational_numerator.grad.flatten(1).any(1).tolist() == used
    with torch.no_grad():
        activation.rational_numerator[used.index(True)] += 0.1
        activation.expert_ends = ends
        shifted, activation.expert_ends = activation(x), None
    assert not torch.equal(outputs(model, inputs)[0], before[0])
    one = nlr.RationalActivation(nlr.RationalConfig(groups=4, activation="silu"))
    for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        with torch.no_grad():
            one.rational_numerator.copy_(activation.rational_numerator[e])
            one.rational_denominator.copy_(activation.rational_denominator[e])
            assert torch.equal(shifted[start:end], one(x[start:end]))
    model.save_pretrained(tmp_path)
    loaded = FAMILIES[name].auto_class.from_pretrained(tmp_path)
    assert same(outputs(loaded, inputs), outputs(model, inputs))
    with pytest.raises(UserError, match="must be called by the experts that it was put into"):
        activation(x)


@pytest.mark.parametrize("rational", [False, True], ids=["plain base", "rational base"])
@pytest.mark.parametrize(
    ("name", "tuning"),
    [("mixtral", each) for each in ("low_rank", "shared", "zero_init", "rational", "constants")]
    + [(each, "low_rank") for each in ("llama4_text", "longcat_flash", "dbrx")],
)
def test_nora_gives_each_expert_coefficients_of_its_own(name, tuning, rational, tmp_path):
    def as_plain(logits):
        if rational or name == "mixtral":
            return torch.equal(logits, plain)
        return torch.allclose(logits, plain, rtol=1e-5, atol=1e-6)  # those of our products, summed in another order

    model, ids = FAMILIES[name].build(), torch.randint(64, (2, 8))
    if rational:
        nlr.augment(model, nlr.RationalConfig(groups=4), verbose=False)
    plain = model(ids).logits
    config = nlr.NoraConfig(tuning=tuning, anchor="none" if rational else "exact")
    tuned = get_peft_model(model, config)
    assert as_plain(tuned(ids).logits)
    activation = next(each for each in tuned.modules() if isinstance(each, NoraActivation) and each.num_experts)
    side = "lora_numerator_b" if tuning in ("low_rank", "shared") else "lora_numerator"
    own = getattr(activation, side)["default"].weight
    assert len(own) == (2 if name == "llama4_text" else 4) * config.groups
    rows = []
    hook = activation.register_forward_hook(lambda module, given, _: rows.append((given[0], module.expert_ends)))
    tuned(ids)
    hook.remove()
    x, ends = rows[0]
    expert = next(e for e, (first, last) in enumerate(zip([0, *ends], ends, strict=False)) if last > first)
    with torch.no_grad():
        for value in (value for value in tuned.parameters() if value.requires_grad):
            value.normal_(std=0.05) if tuning != "rational" else value.mul_(1.05)
        activation.expert_ends = ends
        before = activation(x)
        own[expert * config.groups : (expert + 1) * config.groups] += 0.1
        changed = (activation(x) != before).any(1)
        activation.expert_ends = None
    assert changed[: ends[expert]].any()
    assert not changed[ends[expert] :].any()
    found = tuned.eval()(ids).logits
    with tuned.disable_adapter():
        assert as_plain(tuned(ids).logits)
    tuned.save_pretrained(tmp_path / "adapter")
    tuned.merge_adapter()
    torch.testing.assert_close(tuned(ids).logits, found, rtol=1e-4, atol=1e-5)
    tuned.unmerge_adapter()
    base = tuned.unload()
    assert torch.equal(base(ids).logits, plain)
    assert any(type(each).__bases__[0] is ExpertsLayer for each in base.modules()) is rational
    merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, found, rtol=1e-4, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(realigned(loaded)(ids).logits, realigned(merged)(ids).logits)


def test_an_augmented_mixture_is_checkpointed():
    sizes = _sizes(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=64)
    model = AutoModelForCausalLM.from_config(sizes)
    nlr.augment(model, NobleConfig(rank=4), verbose=False)
    enlarge_branches(model)
    ids = torch.randint(64, (2, 8))
    model(ids, labels=ids).loss.backward()
    plain = {name: value.grad for name, value in model.named_parameters()}
    model.zero_grad()
    model.activation_checkpointing_enable()
    model.train()(ids, labels=ids).loss.backward()
    for name, value in model.named_parameters():
        assert torch.equal(value.grad, plain[name]), name


class OtherExperts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x):
        return (x @ self.weight).sum(0)


@pytest.mark.parametrize("config", [CONFIGS["cosnet"], SINE])
def test_experts_of_other_classes_are_skipped_and_listed(config):
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), OtherExperts(), torch.nn.Linear(WIDTH, WIDTH))
    weight = model[1].weight
    report = nlr.augment(model, config, include=".*", verbose=False)
    assert report.skipped == {"1": "holds weights as 3-D parameters, which are no linears"}
    assert dict(model[1].named_parameters()) == {"weight": weight}


def test_experts_that_cannot_have_a_branch_are_refused_by_name():
    model = FAMILIES["mixtral"].build()
    model.model.layers[0].mlp.experts.down_proj.requires_grad_(False)
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.experts is frozen; unfreeze it"):
        nlr.augment(model, NobleConfig(rank=4))
    with pytest.raises(UserError, match=r"nothing to swap .*rank 500 is too high for 32 -> 96"):
        nlr.augment(FAMILIES["mixtral"].build(), NobleConfig(rank=500))


def test_branches_of_experts_drop_in_training_alone():
    model = FAMILIES["mixtral"].build()
    nlr.augment(model, NobleConfig(rank=4, dropout=0.5, up_scale=1.0), include=r".*experts", verbose=False)
    tokens = torch.arange(18).reshape(2, 9)
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, model(tokens).logits)
        assert not torch.equal(model.train()(tokens).logits, model(tokens).logits)
