"""Properties of every operator (`op_helpers.ROWS`): formula, gradients, saved activations, compile, autocast."""

import pytest
import torch

from nonlinear_lowrank.analysis.saved import saved_bytes
from op_helpers import COMPILED_ROWS, MORE_ROWS, ROWS, assert_all_close, strided
from rounding_helpers import assert_as_good_as_plain, cast, jittered

rows = pytest.mark.parametrize("row", ROWS)
compiled_rows = pytest.mark.parametrize("row", COMPILED_ROWS)
SMALL = {"batch": (3,), "d_in": 5, "d_out": 4, "r": 2}


def tolerance(row):
    return dict.fromkeys(("rtol", "atol"), 1e-10 if row.startswith("noble") else 1e-9)


def cast_by_autocast(row):
    return not row.startswith("rational") and not row.endswith("embedding")


@pytest.mark.parametrize("row", [*ROWS, *MORE_ROWS])
def test_outputs_and_gradients_are_the_formulas(row):
    case = (ROWS | MORE_ROWS)[row]()
    dys = case.dys()
    expected = case.gradients(case.plain, dys)
    assert_all_close(case.gradients(case.fast, dys), expected, **tolerance(row))
    with torch.no_grad():
        for one, other in zip(case.run(case.fast), expected, strict=False):
            torch.testing.assert_close(one, other)


@rows
def test_gradients_are_the_same_where_others_are_not_wanted(row):
    case = ROWS[row]()
    dys, leaves = case.dys(), case.leaves()
    ys = case.run(case.fast)
    whole = torch.autograd.grad(ys, leaves, dys)
    for place in range(len(leaves)):
        for wanted in ([each != place for each in range(len(leaves))], [each == place for each in range(len(leaves))]):
            some = [each.detach().requires_grad_(want) for each, want in zip(leaves, wanted, strict=True)]
            found = case.gradients(case.fast, dys, some)[len(ys) :]
            assert_all_close(found, [each for each, want in zip(whole, wanted, strict=True) if want])


@rows
def test_layouts_of_inputs_and_of_gradients_change_nothing(row):
    case = ROWS[row]()
    dys = case.dys()
    found = case.gradients(case.fast, [strided(dy) for dy in dys], [strided(each) for each in case.leaves()])
    assert_all_close(found, case.gradients(case.plain, dys), **tolerance(row))


@pytest.mark.parametrize("row", [row for row in ROWS if "dora" not in row])  # whose norm is detached
def test_gradients_pass_gradcheck(row):
    sizes = {"batch": (3,), "channels": 4, "groups": 2, "degrees": (3, 2)} if row.startswith("rational") else SMALL
    if "conv2d" in row:
        sizes = SMALL | {"r": 1}
    case = ROWS[row](**sizes)
    assert torch.autograd.gradcheck(lambda *leaves: tuple(case.run(case.fast, list(leaves))), case.leaves())


ROUNDED = [
    (row, dtype)
    for row in ROWS
    if row.endswith("merged") or row.startswith("rational-") or (row.startswith("noble") and row.count("-") == 1)
    for dtype in (torch.float32, torch.bfloat16, *([torch.float16] if row.startswith("rational") else []))
]


@pytest.mark.parametrize(("row", "dtype"), ROUNDED)
def test_error_is_at_most_twice_the_formulas(row, dtype):
    rational = row.startswith("rational")
    sizes = {"channels": 48} if rational else {"d_in": 48, "d_out": 40, "r": 8}
    case = ROWS[row](batch=(64,), dtype=dtype, **sizes)
    leaves, dys = case.leaves(), case.dys()
    found = case.gradients(case.fast, dys)
    assert [each.dtype for each in found] == [dtype, *(each.dtype for each in leaves)]
    exact = case.gradients(case.plain, dys, cast(leaves, torch.float64))
    # Sums of a rational function's coefficients cancel: its bound is what the data ask for as well.
    moved = case.gradients(case.plain, jittered(dys), jittered(leaves)) if rational else exact
    assert_as_good_as_plain(found, case.gradients(case.plain, dys), exact, moved)


@compiled_rows
def test_compiles_fullgraph_with_equal_outputs_and_gradients(row):
    torch.compiler.reset()
    case = ROWS[row](dtype=torch.float32)
    compiled, dys = torch.compile(case.fast, fullgraph=True, backend="aot_eager"), case.dys()
    eager, found = (case.gradients(function, dys) for function in (case.fast, compiled))
    if row.startswith(("noble", "sine", "dora")):  # one op each way
        assert all(torch.equal(one, other) for one, other in zip(found, eager, strict=True))
    else:
        assert_all_close(found, eager, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for one, other in zip(case.run(compiled), eager, strict=False):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("backend", "autocast"),
    [
        (None, False),
        (None, True),
        ("aot_eager", True),
        pytest.param("aot_eager", False, marks=pytest.mark.slow),
        pytest.param("inductor", False, marks=pytest.mark.slow),
        pytest.param("inductor", True, marks=pytest.mark.slow),
    ],
)
@compiled_rows
def test_saves_its_inputs_alone(row, backend, autocast):
    """aot_eager runs the same partitioner as inductor, which decides what is saved."""
    torch.compiler.reset()
    sizes = {"channels": 64} if row.startswith("rational") else {"d_in": 64, "d_out": 48}
    case = ROWS[row](batch=(64,), dtype=torch.float32, **sizes)
    run = torch.compile(case.fast, backend=backend, fullgraph=True) if backend else case.fast

    def function():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return case.run(run)

    parameters = [each for each in case.leaves() if not any(each is given for given in case.inputs)]
    expected = case.saved // (2 if autocast and cast_by_autocast(row) else 1)
    assert expected <= saved_bytes(function, parameters=parameters) <= expected + case.slack
    if backend is None:
        assert saved_bytes(lambda: case.run(case.plain), parameters=parameters) >= case.saved


@rows
def test_autocast_gives_its_type_and_float32_gradients(row):
    case = ROWS[row](dtype=torch.float32, **({} if row.endswith("embedding") else {"batch": (32,)}))
    with torch.autocast("cpu", torch.bfloat16):
        ys = case.run(case.fast)
        sum(y.float().square().mean() for y in ys).backward()  # also backward under autocast
    assert {y.dtype for y in ys} == {torch.bfloat16 if cast_by_autocast(row) else torch.float32}
    for y, expected in zip(ys, case.run(case.plain), strict=True):
        torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.1)
    assert all(each.grad.dtype == torch.float32 and each.grad.isfinite().all() for each in case.leaves())


@pytest.mark.parametrize("row", [row for row in ROWS if not row.endswith(("conv2d", "embedding"))])
def test_empty_batches_give_zeros(row):
    case = ROWS[row](batch=(0, 3))
    assert not any(each.any() for each in case.gradients(case.fast, case.dys()))


@pytest.mark.parametrize("row", [row for row in ROWS if not row.endswith("embedding") and "anchored" not in row])
def test_meta_gives_shapes(row):
    case = ROWS[row]()
    meta = [each.detach().to("meta").requires_grad_() for each in case.leaves()]
    found = case.gradients(case.fast, [dy.to("meta") for dy in case.dys()], meta)
    assert [each.shape for each in found] == [each.shape for each in case.gradients(case.plain, case.dys())]
