"""A pytest plugin that runs peft's own tests with an adapter of this library in LoRA's place.

`NLR_PEER` names the adapter. Sine-LoRA and sine-DoRA have LoRA's settings: `peft.LoraConfig` is their config while the
tests are imported, so that every row and branch of the suite takes them for LoRA. The other methods get rows of their
own where the suite has LoRA's. Tests of other methods are not collected.

A test that ends in a `UserError` of this library is a refusal, not a failure: it is reported with its message.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import peft
import pytest
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.noble.adapter import NobleAdapterConfig
from nonlinear_lowrank.methods.rational.adapter import NoraConfig
from nonlinear_lowrank.methods.sine.adapter import SineLoraConfig


@dataclass
class SineDoraConfig(SineLoraConfig):
    """Sine-DoRA where a test gives no use_dora."""

    use_dora: bool = field(default=True, metadata={"is_lora_variant": True})


@dataclass
class NoraPlusPlusConfig(NoraConfig):
    """NoRA++ where a test gives no rank of LoRA."""

    lora_r: int = 4


# As which they are registered and saved.
SineDoraConfig.__name__, NoraPlusPlusConfig.__name__ = "SineLoraConfig", "NoraConfig"

CONFIGS: dict[str, type] = {
    "lora": peft.LoraConfig,
    "sine-lora": SineLoraConfig,
    "sine-dora": SineDoraConfig,
    "noble": NobleAdapterConfig,
    "nora": NoraConfig,
    "nora++": NoraPlusPlusConfig,
}
PEER = os.environ["NLR_PEER"]
CONFIG = CONFIGS[PEER]
LORA = peft.LoraConfig
SHARED = ("task_type", "modules_to_save", "layers_to_transform", "layers_pattern", "exclude_modules", "bias")


def own_settings(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return a method's settings for a row of LoRA's, None where the row is about a setting that LoRA alone has."""
    if any(name not in (*SHARED, "target_modules", "r", "lora_alpha", "lora_dropout") for name in settings):
        return None
    shared = {name: settings[name] for name in SHARED if name in settings}
    if PEER == "noble":
        dropout = {"dropout": settings["lora_dropout"]} if "lora_dropout" in settings else {}
        return shared | dropout | {"target_modules": settings.get("target_modules"), "r": 1}
    # Equal to the base at the start, as the suite asks for; two groups divide all widths that it has.
    own = shared | {"anchor": "exact", "groups": 2}
    if PEER == "nora++" and settings.get("target_modules") is not None:
        own["lora_target_modules"] = settings["target_modules"]
    return own


def pytest_configure(config: pytest.Config) -> None:
    if PEER.startswith("sine"):
        peft.LoraConfig = CONFIG
    PEFT_TYPE_TO_CONFIG_MAPPING[CONFIG().peft_type] = CONFIG


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Change the rows of a module's tests, and what reaches for the hub."""
    if not isinstance(collector, pytest.Module):
        return
    module = collector.obj
    for each in (module, sys.modules.get(f"{module.__package__}.testing_common")):
        if hasattr(each, "hub_online_once"):  # the models are in the cache
            each.hub_online_once = lambda *_: nullcontext()
    if hasattr(module, "set_init_weights_false") and not issubclass(CONFIG, LORA):
        module.set_init_weights_false = lambda config_cls, kwargs: {**kwargs, "init_weights": False}
    for owner in (module, *(each for each in vars(module).values() if isinstance(each, type))):
        for test in vars(owner).values():
            if isinstance(test, FunctionType) and hasattr(test, "pytestmark"):
                test.pytestmark = [with_own_rows(mark) for mark in test.pytestmark]


def with_own_rows(mark: pytest.Mark) -> pytest.Mark:
    """Return a parametrize mark with the method's rows in place of LoRA's."""
    if mark.name != "parametrize" or not any(isinstance(row, tuple) for row in mark.args[1]):
        return mark
    rows = [changed for row in mark.args[1] if (changed := own_row(row)) is not None]
    return pytest.mark.parametrize(mark.args[0], rows, **mark.kwargs).mark


def own_row(row: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return a row with the method in LoRA's place; rows without a config's class stay."""
    classes = [each for each in row if isinstance(each, type) and issubclass(each, peft.PeftConfig)]
    if not classes or PEER == "lora" or PEER.startswith("sine"):
        return row
    if classes != [LORA]:
        return None
    settings = [own_settings(each) if isinstance(each, dict) else each for each in row]
    if None in settings:
        return None
    return tuple(CONFIG if each is LORA else each for each in settings)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests with the adapter's config among their parameters."""
    kept, others = [], []
    for item in items:
        params = getattr(item, "callspec", None)
        values = list(params.params.values()) if params else []
        mine = any(each is CONFIG or type(each) is CONFIG for each in values)
        (kept if mine else others).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=others)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[Any]:
    """Report a refusal as skipped, with its message."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    # A test of peft's own refusal may meet ours, in other words, first.
    refusals = [each for each in (error, error and error.__context__) if is_refusal(each)]
    if report.failed and refusals:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"refused: {refusals[0]}")
    return report


def is_refusal(error: BaseException | None) -> bool:
    """Return whether an error is this library's, or peft's of settings that exclude each other."""
    return isinstance(error, UserError) or "lora_bias=True is not supported for DoRA" in str(error)
