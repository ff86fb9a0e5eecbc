"""Bounds of an operator's rounding: about as much as the plain formula, or as the data themselves ask for."""

import torch


def cast(tensors, dtype):
    """Leaves of a type with the same numbers, in the same layout."""
    return [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]


def jittered(tensors):
    """Float64 leaves moved by a unit in float32's last place, up or down by chance."""
    return cast([each.double() * (1 + 2**-23 * torch.randn_like(each).sign()) for each in tensors], torch.float64)


def assert_as_good_as_plain(fast, plain, exact, moved, slack=1e-6):
    """err(fast) <= 2 (err(plain) + err(moved)) + slack, all against float64, relative to the largest entry.

    `moved` is the exact answer for numbers that float32 hardly tells from the given ones. Where the terms of a sum
    cancel, the plain formula's rounding may come out near zero by luck; that the data ask for more shows there.
    """
    for index, (ours, reference, truth, near) in enumerate(zip(fast, plain, exact, moved, strict=True)):
        scale = truth.abs().max().clamp(min=1e-30)
        error, rounding, condition = ((each.double() - truth).norm() / scale for each in (ours, reference, near))
        assert error <= 2 * (rounding + condition) + slack, (
            f"number {index}: {error:.2e}, the plain formula {rounding:.2e}, the data's own {condition:.2e}"
        )


def assert_close_by_norm(found, expected, bound=1e-9):
    """|found - expected| <= bound |expected| in Frobenius norms; the default is for another order of float64's sums.

    By the norm, as of a model's float32 outputs single entries may be far off: where a residual stream nearly cancels,
    the norm after it enlarges the rounding of that one position a hundred times.
    """
    error, norm = (found - expected).norm(), expected.norm()
    assert error <= bound * norm, f"differs by {error:.1e}, and the norm is {norm:.1e}"
