"""Errors that a user is meant to read."""


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
