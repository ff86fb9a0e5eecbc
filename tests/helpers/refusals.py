"""Assertion that bad input gets a one-line error."""

import pytest

from nonlinear_lowrank import UserError


def assert_refused(words, call, *arguments, **settings):
    """Assert that a call raises a UserError of one line in which the regular expression `words` is found."""
    with pytest.raises(UserError, match=words) as caught:
        call(*arguments, **settings)
    assert "\n" not in str(caught.value)
