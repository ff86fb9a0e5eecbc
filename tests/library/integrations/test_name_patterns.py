"""Patterns tell classes of names apart, also below wrappers."""

import re

import pytest

from nonlinear_lowrank.integrations.name_patterns import name_patterns

LAYERS = range(12)
OWN = ("wq.weight", "wq.up", "wk.weight", "wk.up", "norm.weight", "frequency1")


def classes_of(names, kind):
    found = {}
    for name in names:
        found.setdefault(kind(name), []).append(name)
    return list(found.values())


NAMES = [f"layers.{layer}.{own}" for layer in LAYERS for own in OWN] + ["norm.weight", "head.weight", "a+b.weight"]
KINDS = {
    "last part": lambda name: name.rpartition(".")[2],
    "last two parts": lambda name: name.split(".")[-2:] == ["wq", "up"],
    "by layer": lambda name: name.startswith(("layers.1.", "layers.11.")),
    "each its own": lambda name: name,
    "outside of layers": lambda name: not name.startswith("layers."),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_pattern_matches_its_class_and_no_other_name(kind):
    classes = classes_of(NAMES, kind)
    patterns = name_patterns(classes)
    assert len(patterns) == len(classes)
    for names, pattern in zip(classes, patterns, strict=True):
        assert [name for name in NAMES if re.search(pattern, name)] == names
        wrapped = [name.replace(".w", "._checkpoint_wrapped_module.w") for name in NAMES]
        assert [NAMES[at] for at, name in enumerate(wrapped) if re.search(pattern, name)] == names


def test_numbers_are_named_only_where_nothing_else_tells_names_apart():
    up, rest = name_patterns(classes_of(NAMES, KINDS["last two parts"]))[::-1]
    assert "11" not in up + rest
    assert len(up) < 60
