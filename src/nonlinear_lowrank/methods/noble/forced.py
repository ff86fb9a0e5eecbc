"""Taking one of an operator's forms by name, in place of the rule that chooses."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from nonlinear_lowrank.errors import UserError

Form = TypeVar("Form", bound=str)


@contextmanager
def forced(variable: ContextVar[Form | None], form: Form | None, known: tuple[Form, ...], what: str) -> Iterator[None]:
    """Inside it the variable has the form; None leaves the choice to the rule.

    Args:
        variable: that the rule asks first.
        form: one of `known`, or None.
        known: the forms' names.
        what: the forms are of, for the message.

    Raises:
        UserError: there is no such form.
    """
    if form not in (*known, None):
        raise UserError(f"the form of {what} is {' or '.join(known)}, not {form!r}")
    token = variable.set(form)
    try:
        yield
    finally:
        variable.reset(token)
