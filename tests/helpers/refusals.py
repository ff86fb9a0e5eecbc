"""Assertion that bad input gets a one-line error, and files that the disk refuses."""

import os
from pathlib import Path

import pytest

from nonlinear_lowrank import UserError


def assert_refused(words, call, *arguments, **settings):
    """Assert that a call raises a UserError of one line in which the regular expression `words` is found."""
    with pytest.raises(UserError, match=words) as caught:
        call(*arguments, **settings)
    assert "\n" not in str(caught.value)


def refuse_to_open(monkeypatch, code, *files):
    """Have the disk refuse these files, with an error of this number."""
    opened = Path.open

    def refuse(self, *arguments, **options):
        if self in files:
            raise OSError(code, os.strerror(code), str(self))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
