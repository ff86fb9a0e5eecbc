"""Derivatives beyond a plain backward: of gradients, forward-mode, and torch.func, of operators and of whole models."""

from functools import partial

import pytest
import torch
from peft import get_peft_model
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import nonlinear_lowrank as nlr
from adapter_helpers import ROWS as ADAPTERS
from model_helpers import gpt2, opt, randomised
from op_helpers import COMPILED_ROWS, ROWS, assert_all_close

rows = pytest.mark.parametrize("row", ROWS)
CLOSE = {"rtol": 1e-8, "atol": 1e-8}


def random_like(tensors):
    return [torch.randn_like(each) for each in tensors]


def detached(tensors):
    return tuple(each.detach() for each in tensors)


@rows
def test_gradients_of_gradients_are_the_formulas(row):
    case = ROWS[row]()
    leaves, dys = case.leaves(), [dy.requires_grad_() for dy in case.dys()]
    weights = random_like(leaves)

    def second(function):
        first = torch.autograd.grad(case.run(function), leaves, dys, create_graph=True)
        total = sum((one * weight).sum() for one, weight in zip(first, weights, strict=True))
        return [*first, *torch.autograd.grad(total, [*leaves, *dys], materialize_grads=True)]

    assert_all_close(second(case.fast), second(case.plain), **CLOSE)


@rows
@pytest.mark.parametrize("wanted", ["first", "others"])
def test_gradients_of_gradients_are_the_same_where_others_are_not_wanted(row, wanted):
    case = ROWS[row]()
    leaves = case.leaves()
    leaves = [each.detach().requires_grad_((place == 0) == (wanted == "first")) for place, each in enumerate(leaves)]
    dys = [dy.requires_grad_() for dy in case.dys()]

    def norm(function, leaves):
        own = [each for each in leaves if each.requires_grad]
        found = torch.autograd.grad(case.run(function, leaves), own, dys, create_graph=True)
        total = sum(each.square().sum() for each in found)
        return torch.autograd.grad(total, [*own, *dys], materialize_grads=True)

    assert_all_close(norm(case.fast, leaves), norm(case.plain, leaves), **CLOSE)


@rows
@pytest.mark.parametrize("enabled", [True, False], ids=["grad", "no-grad"])
def test_tangents_are_the_formulas(row, enabled):
    case = ROWS[row]()
    primals = detached(case.leaves())
    tangents = tuple(random_like(primals))

    def dual(function):
        with forward_ad.dual_level():
            inputs = [forward_ad.make_dual(*each) for each in zip(primals, tangents, strict=True)]
            return [forward_ad.unpack_dual(y).tangent for y in case.run(function, inputs)]

    with torch.set_grad_enabled(enabled):
        expected = dual(case.plain)
        assert_all_close(dual(case.fast), expected, **CLOSE)
        found = jvp(lambda *leaves: tuple(case.run(case.fast, list(leaves))), primals, tangents)[1]
        assert_all_close(found, expected, **CLOSE)


@rows
@pytest.mark.parametrize("enabled", [True, False], ids=["grad", "no-grad"])
def test_batches_of_arguments_are_the_formulas(row, enabled):
    case = ROWS[row]()
    leaves = case.leaves()
    several = [torch.stack([each.detach(), *(each + each.new_empty(each.shape).normal_() for _ in range(2))]).detach()
               for each in leaves]  # fmt: skip
    with torch.set_grad_enabled(enabled):
        for places in (range(len(leaves)), range(1), range(1, len(leaves))):
            dims = tuple(0 if place in places else None for place in range(len(leaves)))
            given = tuple(
                many if dim == 0 else one.detach() for one, many, dim in zip(leaves, several, dims, strict=True)
            )
            found = vmap(lambda *some: tuple(case.run(case.fast, list(some))), in_dims=dims)(*given)
            for at in range(3):
                one = [each if dim is None else each[at] for each, dim in zip(given, dims, strict=True)]
                assert_all_close([y[at] for y in found], case.run(case.plain, one), **CLOSE)


@rows
def test_batches_of_gradients_are_the_formulas(row):
    case = ROWS[row]()
    leaves, dys = case.leaves(), [torch.stack([dy, 2 * dy, dy.cos()]) for dy in case.dys()]
    ys = case.run(case.fast)
    found = torch.autograd.grad(ys, leaves, dys, is_grads_batched=True, retain_graph=True)
    pull = vjp(lambda *some: tuple(case.run(case.fast, list(some))), *detached(leaves))[1]
    transformed = vmap(pull)(tuple(dys))
    for at in range(3):
        expected = case.gradients(case.plain, [dy[at] for dy in dys])[len(ys) :]
        assert_all_close([each[at] for each in found], expected, **CLOSE)
        assert_all_close([each[at] for each in transformed], expected, **CLOSE)


@pytest.mark.parametrize("row", COMPILED_ROWS)
def test_transforms_compile_fullgraph(row):
    torch.compiler.reset()
    case = ROWS[row]()
    leaves, dys = detached(case.leaves()), case.dys()

    def loss(*leaves):
        return sum((y * dy).sum() for y, dy in zip(case.run(case.fast, list(leaves)), dys, strict=True))

    transform = grad(loss, argnums=tuple(range(len(leaves))))
    compiled = torch.compile(lambda *leaves: transform(*leaves), fullgraph=True, backend="aot_eager")
    assert_all_close(compiled(*leaves), transform(*leaves), **CLOSE)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.endswith("embedding")])
def test_autocast_gives_its_type_under_transforms(row):
    case = ROWS[row](batch=(32,), dtype=torch.float32)
    primals = detached(case.leaves())
    with torch.autocast("cpu", torch.bfloat16):
        ys, pull = vjp(lambda *leaves: tuple(case.run(case.fast, list(leaves))), *primals)
        expected = case.run(case.fast)
        found = pull(tuple(torch.ones_like(y) for y in ys))
    assert [y.dtype for y in ys] == [y.dtype for y in expected]
    for y, other in zip(ys, expected, strict=True):
        torch.testing.assert_close(y, other, rtol=0.05, atol=0.1)
    assert all(each.dtype == torch.float32 and each.isfinite().all() for each in found)


NOBLE, SINE = partial(nlr.NobleConfig, rank=4), nlr.SineLowRankConfig(rank=2, omega=30)
OPT = partial(opt, activation_function="gelu")  # relu has no derivative at 0, where differences would see it
METHODS = {
    "noble": (OPT, NOBLE()),
    "noble-shared": (OPT, NOBLE(share_down="qkv")),
    "noble-grouped": (OPT, NOBLE(fuse_shared_inputs=True)),
    "noble-gated": (OPT, NOBLE(fusion="gated")),
    "noble-conv1d": (gpt2, NOBLE()),
    "sine": (OPT, SINE),
    "sine-conv1d": (gpt2, SINE),
    "query": (OPT, nlr.NonlinearQueryConfig()),
    "query-linear-residual": (OPT, nlr.NonlinearQueryConfig(residual="linear", out_norm="none", activation="silu")),
    "qk-norm": (OPT, nlr.QKNormConfig()),
    "rational": (gpt2, nlr.RationalConfig(groups=4)),
}
ADAPTED = {row.name: row for row in ADAPTERS if row.family == "gpt2"}
models = pytest.mark.parametrize("name", [*METHODS, *ADAPTED])


class Model:
    """A small model in float64 as a function of what it trains."""

    def __init__(self, name):
        if name in METHODS:
            family, config = METHODS[name]
            self.module = family()
            nlr.augment(self.module, config, verbose=False)
            randomised(self.module, 0.05)
        else:
            self.module = get_peft_model(ADAPTED[name].base(), ADAPTED[name].config())
        self.module.double().eval()
        self.trained = {key: each for key, each in self.module.named_parameters() if each.requires_grad}
        self.values = {key: each.detach() for key, each in self.trained.items()}
        self.ids = torch.randint(2, 67, (3, 5))

    def logits(self, values, ids):
        inputs = {"input_ids": ids[None], "use_cache": False}
        with sdpa_kernel(SDPBackend.MATH):  # torch's fused attentions have no second derivatives
            return functional_call(self.module, values, kwargs=inputs).logits[0]

    def loss(self, values, ids):
        return self.logits(values, ids).square().mean()

    def gradients(self, ids, values=None, **options):
        values = self.trained if values is None else values
        found = torch.autograd.grad(self.loss(values, ids), list(values.values()), materialize_grads=True, **options)
        return dict(zip(values, found, strict=True))

    def direction(self):
        return {key: torch.randn_like(each) for key, each in self.values.items()}


def inner(one, other):
    return sum((one[key] * other[key]).sum() for key in one)


@models
def test_gradients_of_each_sample_are_those_of_a_loop(name):
    model = Model(name)
    found = vmap(grad(model.loss), in_dims=(None, 0))(model.values, model.ids)
    for at, ids in enumerate(model.ids):
        for key, expected in model.gradients(ids).items():
            torch.testing.assert_close(found[key][at], expected, **CLOSE)


@models
def test_outputs_of_each_sample_are_those_of_the_batch(name):
    model = Model(name)
    with torch.no_grad():
        found = vmap(model.logits, in_dims=(None, 0))(model.values, model.ids)
        torch.testing.assert_close(found, model.module(model.ids, use_cache=False).logits, **CLOSE)


@models
def test_outputs_of_an_ensemble_are_those_of_its_members(name):
    model, ids = Model(name), torch.randint(2, 67, (5,))
    several = [{key: each + 0.01 * torch.randn_like(each) for key, each in model.values.items()} for _ in range(3)]
    with torch.no_grad():
        model.module(ids[None])  # what a layer holds of its own values must not be taken for others
        expected = [model.logits(each, ids) for each in several]
        stacked = {key: torch.stack([each[key] for each in several]) for key in model.values}
        found = vmap(model.logits, in_dims=(0, None))(stacked, ids)
        tangent = jvp(lambda values: model.logits(values, ids), (model.values,), (several[0],))[1]
    torch.testing.assert_close(found, torch.stack(expected), **CLOSE)
    torch.testing.assert_close(
        tangent, jvp(lambda values: model.logits(values, ids), (model.values,), (several[0],))[1]
    )


@models
def test_tangents_of_the_loss_are_along_the_gradient(name):
    model, ids = Model(name), torch.randint(2, 67, (5,))
    direction = model.direction()
    found = jvp(lambda values: model.loss(values, ids), (model.values,), (direction,))[1]
    torch.testing.assert_close(found, inner(model.gradients(ids), direction), **CLOSE)


@models
def test_hessian_vector_products_agree(name):
    model, ids = Model(name), torch.randint(2, 67, (5,))
    direction = model.direction()
    first = model.gradients(ids, create_graph=True)
    found = torch.autograd.grad(inner(first, direction), list(model.trained.values()), materialize_grads=True)
    found = dict(zip(first, found, strict=True))
    forward_over_reverse = jvp(grad(lambda values: model.loss(values, ids)), (model.values,), (direction,))[1]
    assert_all_close(list(forward_over_reverse.values()), list(found.values()), **CLOSE)
    if "dora" in name:  # whose norm is a constant: its gradients are no function's
        return
    step = 1e-7
    ahead, behind = (
        model.gradients(
            ids, {key: (each + sign * step * direction[key]).requires_grad_() for key, each in model.values.items()}
        )
        for sign in (1, -1)
    )
    scale = max(each.abs().max() for each in found.values())
    for key, each in found.items():
        torch.testing.assert_close(each, (ahead[key] - behind[key]) / (2 * step), rtol=1e-5, atol=float(1e-6 * scale))


@models
def test_hessians_are_the_second_derivatives(name):
    model, ids = Model(name), torch.randint(2, 67, (5,))
    key = min(
        (key for key in model.trained if key.rpartition(".")[2] != "bias"), key=lambda key: model.trained[key].numel()
    )
    others = {other: each for other, each in model.values.items() if other != key}
    found = hessian(lambda value: model.loss({**others, key: value}, ids))(model.values[key])
    first = model.gradients(ids, create_graph=True)[key]
    expected = [torch.autograd.grad(each, model.trained[key], retain_graph=True)[0] for each in first.flatten()]
    torch.testing.assert_close(found.reshape(len(expected), -1), torch.stack(expected).flatten(1), **CLOSE)
