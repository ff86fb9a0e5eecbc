"""`nlr bench decode` at toy sizes: what it reports, not how fast this machine is."""

import dataclasses
import json

import pytest
import torch

from nlr_lab.bench.arms import BenchArm, make_model
from nlr_lab.bench.decode import DecodeBenchConfig, bench_decode, make_decoder
from nlr_lab.bench.timing import paired_ratio
from nlr_lab.cli.main import main

TINY = DecodeBenchConfig(
    width=32,
    layers=2,
    heads=2,
    hidden=48,
    vocab_size=67,
    context=9,
    batch_sizes=(1, 3),
    ranks=(4,),
    rounds=3,
    warmup=1,
    clock="wall",  # steps of this size can be shorter than the process clock's tick
)


def test_report_holds_what_was_timed():
    result = bench_decode(TINY)
    arms = ("noble r=4", "noble r=4, optimized")
    assert [(row.panel, row.arm) for row in result.rows] == [
        (f"eager, batch {size}", arm) for size in (1, 3) for arm in arms
    ]
    data = json.loads(result.to_json())
    for row in result.rows:
        times = data["times"][row.panel]
        assert row.step == paired_ratio(times[row.arm], times["baseline"])
        assert row.figures["parameter_ratio"] > 1
        assert str(row.step) in str(result)
    assert "one token after 9" in str(result)


def test_optimized_arms_are_those_that_get_faster():
    result = bench_decode(dataclasses.replace(TINY, methods=("nonlinear-query", "noble"), batch_sizes=(1,)))
    assert [row.arm for row in result.rows] == ["nonlinear-query", "noble r=4", "noble r=4, optimized"]


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # inductor imports torch.jit
@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_step_is_the_next_token_and_leaves_the_cache(mode):
    torch._dynamo.reset()
    model = make_model(TINY, BenchArm(method="noble", rank=4), 16, cache=True).eval()
    step = make_decoder(TINY, mode, model, 3)
    inner = step.__wrapped__
    cells = dict(zip(inner.__code__.co_freevars, [cell.cell_contents for cell in inner.__closure__], strict=True))
    ids = torch.randint(0, 67, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        first = model(input_ids=ids).logits[:, -1:].argmax(-1)
        expected = model(input_ids=torch.cat([ids, first], 1)).logits[:, -1:].argmax(-1)
    assert torch.equal(cells["token"], first)
    for _ in range(3):
        assert torch.equal(step(), expected)
        assert cells["cache"].get_seq_length() == 9


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--batch-sizes", "0"], "batch_sizes"),
        (["--batch-sizes", "2", "2"], "different"),
        (["--context", "0"], "context"),
        (["--ranks", "900"], "rank 900"),
        (["--rounds", "0"], "rounds"),
    ],
)
def test_bad_settings_give_one_line(capsys, options, word):
    assert main(["bench", "decode", *options]) == 2
    err = capsys.readouterr().err
    assert word in err
    assert err.count("\n") == 1


def test_help_lists_what_can_be_measured(capsys):
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert "nlr bench step" in out
    assert "nlr bench decode" in out
