"""Errors that a user is meant to read."""

from typing import Any


class UserError(ValueError):
    """Bad input from the user: one line that says what is wrong and how to fix it.

    The command line prints it without a traceback and exits with code 2.
    """


class LearningRateWarning(UserWarning):
    """An optimizer trains branch tensors without their method's learning-rate multipliers, or decays some.

    Given once, at the first step; `warnings.simplefilter("ignore", nlr.LearningRateWarning)` silences it.
    """


BUILD_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    OSError,
    AttributeError,
    ArithmeticError,
    AssertionError,
)
"""Exceptions of transformers and peft where no model can be built from a config."""


class DivergedError(UserError):
    """The loss or the weights are no longer finite, or the loss spiked and did not recover."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step
        """The first step whose loss was not finite, or spiked."""

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.step)  # to travel between processes
