"""`nlr bench` at toy sizes: what they report against counts by hand, not how fast it is."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nlr_lab.bench import result as bench_result
from nlr_lab.bench.arms import METHODS, BenchArm, bench_arms, make_model
from nlr_lab.bench.decode import bench_decode, make_decoder
from nlr_lab.bench.op import bench_op, kat_rational, op_arms
from nlr_lab.bench.result import BenchResult
from nlr_lab.bench.settings import RIVALS, DecodeBenchConfig, OpBenchConfig, TrainBenchConfig
from nlr_lab.bench.timing import paired_ratio
from nlr_lab.bench.training import Stepper, bench_memory, bench_step, launches, peak_bytes
from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.methods.base import all_methods
from nonlinear_lowrank.methods.rational.reference import rational_reference

# steps of this size can be shorter than the process clock's tick
TIMED = {"modes": ("eager",), "warmup": 1, "clock": "wall"}
MODEL = {"width": 32, "heads": 2, "hidden": 48, "vocab_size": 67}
STEP = TrainBenchConfig(**MODEL, **TIMED, layers=1, sequence_length=8, batch_size=2, ranks=(4, 8), rounds=3)
DECODE = DecodeBenchConfig(**MODEL, **TIMED, layers=2, context=9, batch_sizes=(1, 3), ranks=(4,), rounds=3)
OP = OpBenchConfig(**TIMED, width=24, hidden=32, tokens=20, ranks=(4,), rounds=2)
MEMORY = replace(STEP, width=64, layers=2, hidden=96, sequence_length=32, batch_size=4, ranks=(4,))
MEMORY = replace(MEMORY, methods=("noble", "sine-lora", "sine-dora", "dora", "nora"))
NOBLE = BenchArm(method="noble", rank=4)


def test_step_counts_flops_by_hand():
    lines = []
    threads = torch.get_num_threads()
    result = bench_step(replace(STEP, threads=threads + 1), progress=lines.append)
    assert torch.get_num_threads() == threads
    named = [(row.panel, row.arm, row.over) for row in result.rows]
    assert named == [("eager", f"noble r={rank}", "baseline") for rank in (4, 8)]
    data = json.loads(result.to_json())
    for row in result.rows:
        times = data["times"]["eager"]
        assert len(times["baseline"]) == len(times[row.arm]) == 3
        assert row.step == paired_ratio(times[row.arm], times["baseline"])
        assert row.figures["step_over_flops"] == row.step.median / row.figures["flop_ratio"]
        assert row.figures["launches"] > row.figures["launches_of_over"] > 100  # operators, on a CPU
        # r (d_in + d_out) + r^2 multiply-adds a token for each of 6 linears, forward and twice as much backward, where
        # the bottleneck is computed again
        sides = sum(d_in + d_out for d_in, d_out in [(32, 32)] * 4 + [(32, 96), (48, 32)])
        rank = int(row.arm.removeprefix("noble r="))
        branch = 2 * 16 * (3 * rank * sides + 6 * 4 * rank**2)
        assert result.flops[row.arm] - result.flops["baseline"] == branch
        assert row.figures["flop_ratio"] == result.flops[row.arm] / result.flops["baseline"]
        assert f"{row.figures['flop_ratio']:.4f}" in str(result)
    linears = 4 * 32 * 32 + 32 * 96 + 48 * 32 + 67 * 32
    attention = 4 * 8 * 32 * 16  # scores and values, forward; backward forms the scores again
    assert result.flops["baseline"] == 6 * 16 * linears + 3.5 * attention
    assert data["config"]["ranks"] == [4, 8]
    assert data["machine"]["threads"] == threads + 1
    assert data["machine"]["copy_bytes_per_second"] > 1e6
    assert lines


@pytest.mark.parametrize("family", ["glm", "llama"])
def test_every_method_is_over_its_arm(family):
    config = replace(STEP, methods=tuple(METHODS), ranks=(4,), rounds=1, family=family)
    result = bench_step(config)
    rows = {row.arm: row for row in result.rows}
    assert set(rows) == {arm.name for arm in bench_arms(config.methods, config.ranks)} - {"baseline"}
    for row in rows.values():
        assert row.over == ("baseline" if row.arm.split()[0] in (*all_methods(), "lora") else "lora r=4")
    # sine-LoRA has LoRA's factors and forms its weight of them; DoRA and sine-DoRA add one number an output
    trained = {arm: row.figures["trained_ratio"] for arm, row in rows.items()}
    assert trained["sine-lora r=4"] == 1 < rows["sine-lora r=4"].figures["flop_ratio"]
    assert trained["sine-dora r=4"] == trained["dora r=4"] > 1
    assert trained["lora r=4"] < 0.3 < 0.9 < trained["nonlinear-query"] < 1.1
    assert trained["noble-adapter r=4"] > 1
    names = [arm.name for arm in bench_arms(("sine-lora",), (2, 4))]
    assert names == ["lora r=2", "lora r=4", "sine-lora r=2", "sine-lora r=4"]  # alone: without the plain model


@pytest.mark.parametrize("rival", RIVALS)
def test_rivals_compute_what_noble_does_and_save_more(rival):
    arms = {arm.name: arm for arm in bench_arms(("noble", rival), (4,))}
    config = replace(STEP, batch_size=3)
    plain, ours, theirs = (Stepper(config, "eager", arm, lr=1e-2) for arm in arms.values())
    assert list(arms) == ["baseline", "noble r=4", f"{rival} r=4"]
    assert {arm.over for arm in arms.values()} == {None, "baseline"}
    assert ours.trained == theirs.trained > plain.trained
    assert [len(each["params"]) for each in ours.optimizer.param_groups] == [
        len(each["params"]) for each in theirs.optimizer.param_groups
    ]
    losses = [[stepper.step().item() for _ in range(5)] for stepper in (ours, theirs)]
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    saved = [saved_bytes(each.loss, parameters=list(each.model.parameters())) for each in (ours, theirs)]
    assert saved[0] < saved[1]
    config = replace(DECODE, methods=("noble", rival), batch_sizes=(1,))
    assert [row.arm for row in bench_decode(config).rows] == ["noble r=4", f"{rival} r=4", "noble r=4, optimized"]


def test_a_time_is_the_mean_of_calls_in_a_row(monkeypatch):
    called = []
    monkeypatch.setattr("nlr_lab.bench.timing.time.perf_counter", lambda: 0.5 * len(called))
    config = replace(OP, operators=("noble",), calls=4)
    result = BenchResult(config=config, about="")
    result.time("panel", {"arm": lambda: called.append(1)}, lambda line: None, config.calls)
    assert result.times == {"panel": {"arm": [0.5, 0.5]}}
    assert len(called) == 4 * (config.warmup + config.rounds)


def test_arms_differ_by_the_branch_and_learn():
    plain, noble = (Stepper(STEP, "eager", arm, lr=1e-2) for arm in (BenchArm(), NOBLE))
    assert plain.flops() < noble.flops()
    added = [each.numel() for name, each in noble.model.named_parameters() if "noble_" in name]
    assert noble.trained - plain.trained == sum(added)
    config = replace(STEP, methods=("sine-lora",), bf16=True, frozen_dtype="bfloat16")
    adapter = Stepper(config, "eager", BenchArm(method="sine-lora", rank=4), lr=1e-2)
    kinds = {(each.requires_grad, each.dtype) for each in adapter.model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    for stepper, least in ((plain, 0.5), (noble, 0.5), (adapter, 0)):
        before = {name: p.detach().clone() for name, p in stepper.model.named_parameters() if p.requires_grad}
        losses = [stepper.step().item() for _ in range(30)]
        assert losses[-1] < losses[0] - least
        changed = {name: p for name, p in stepper.model.named_parameters() if p.requires_grad}
        assert all(not torch.equal(p, before[name]) for name, p in changed.items())
        assert all(p.grad is None for p in stepper.model.parameters())


def test_steps_take_the_given_batches():
    batches = iter([torch.full((2, 8), token) for token in (3, 5)])
    stepper = Stepper(STEP, "eager", NOBLE, batch=lambda: next(batches))
    assert len({stepper.step().item() for _ in range(2)}) == 2
    with pytest.raises(StopIteration):
        stepper.step()


def test_peak_agrees_with_counts_by_hand():
    x = torch.randn(1 << 16, requires_grad=True)
    assert x.nbytes <= peak_bytes(lambda: x.detach() + 1, "cpu") <= x.nbytes + 1024
    # sin(x) and cos(x) are kept, their product is the third; of the backward pass one at a time on top
    peak = peak_bytes(lambda: (torch.sin(x) * torch.cos(x)).sum().backward(), "cpu")
    assert 3 * x.nbytes <= peak <= 6 * x.nbytes
    assert peak_bytes(lambda: None, "cpu") == 0
    assert launches(lambda: torch.sin(x).neg(), "cpu") == 2
    assert launches(lambda: None, "cpu") == 0


# torch hides it where warnings are no errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_memory_agrees_with_counts_by_hand(mode, tmp_path):
    lines = []
    result = bench_memory(replace(MEMORY, modes=(mode,)), progress=lines.append)
    rows = {row.arm: row.figures for row in result.rows}
    names = ("lora", "noble", "sine-lora", "sine-dora", "dora", "nora")
    assert list(rows) == ["baseline", *(f"{name} r=4" for name in names)]
    # NOBLE keeps h alone: r numbers a token for each of the six linears of a block
    h = 2 * 6 * 4 * 32 * 4 * 4
    extra = rows["noble r=4"]["saved_bytes"] - rows["baseline"]["saved_bytes"]
    assert h <= extra <= 1.05 * h
    whole = [rows[name]["weights_bytes"] + rows[name]["peak_bytes"] for name in ("noble r=4", "baseline")]
    assert rows["noble r=4"]["peak_ratio"] == whole[0] / whole[1]
    assert rows["noble r=4"]["saved_ratio"] == rows["noble r=4"]["saved_bytes"] / rows["baseline"]["saved_bytes"]
    # sine keeps what LoRA keeps, or less; nothing as large as a weight
    for name in ("sine-lora r=4", "sine-dora r=4"):
        assert rows[name]["saved_bytes"] <= 1.01 * rows["lora r=4"]["saved_bytes"]
    assert rows["nora r=4"]["trained"] < rows["lora r=4"]["trained"]
    for row in result.rows:
        over = {"baseline": None, "noble r=4": "baseline", "lora r=4": "baseline"}
        assert row.over == over.get(row.arm, "lora r=4")
        assert row.figures["peak_bytes"] > row.figures["saved_bytes"] * 0.9
        assert row.arm in str(result)
    weights = 4 * rows["baseline"]["trained"]
    assert weights <= rows["baseline"]["weights_bytes"] <= weights + 1024  # buffers
    assert json.loads(result.to_json())["rows"][0]["arm"] == "baseline"
    assert len(lines) == len(rows)
    result.draw(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"


def test_decode_times_also_optimized_arms_that_get_faster():
    result = bench_decode(replace(DECODE, methods=("nonlinear-query", "noble")))
    arms = ("nonlinear-query", "noble r=4", "noble r=4, optimized")
    found = [(row.panel, row.arm) for row in result.rows]
    assert found == [(f"eager, batch {size}", arm) for size in (1, 3) for arm in arms]
    for row in result.rows:
        times = result.times[row.panel]
        assert row.step == paired_ratio(times[row.arm], times["baseline"])
        assert row.figures["parameter_ratio"] > 1
        assert str(row.step) in str(result)


@pytest.mark.parametrize("mode", ["eager", *(pytest.param(m, marks=pytest.mark.slow) for m in ("compiled", "graphs"))])
def test_decoded_step_is_the_next_token_and_leaves_the_cache(mode):
    torch._dynamo.reset()
    model = make_model(DECODE, BenchArm(method="noble", rank=4), 16, cache=True).eval()
    step = make_decoder(DECODE, mode, model, 3)
    ids = torch.randint(0, 67, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        first = model(input_ids=ids).logits[:, -1:].argmax(-1)
        expected = model(input_ids=torch.cat([ids, first], 1)).logits[:, -1:].argmax(-1)
    for _ in range(3):
        assert torch.equal(step(), expected)


def test_op_reports_what_was_timed(tmp_path):
    lines = []
    result = bench_op(OP, progress=lines.append)
    data = json.loads(result.to_json())
    for row in result.rows:
        times = data["times"][row.panel]
        assert row.step == paired_ratio(times[row.arm], times[row.over])
        assert str(row.step) in str(result)
    assert len(result.rows) == 3 + 5 + 4 + 2
    saved = {row.arm: row.figures["saved_bytes"] for row in result.rows}
    over = {row.arm: row.figures["saved_by_over_bytes"] for row in result.rows}
    assert saved["NOBLE r=4"] - over["NOBLE r=4"] == 20 * 4 * 4
    assert saved["sine-LoRA r=4"] == 20 * 24 * 4
    assert saved["rational"] == over["rational"] == 20 * 32 * 4
    assert saved["gated rational"] == 2 * 20 * 32 * 4
    for row in result.rows:
        if row.arm.startswith(("plain", "official", "KAT")):
            assert row.figures["saved_bytes"] > row.figures["saved_by_over_bytes"]
    assert lines
    result.draw(tmp_path / "op.png")
    assert (tmp_path / "op.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("operator", ["noble", "sine", "rational", "gated"])
def test_plain_formula_equals_the_operator(operator):
    arms = {arm.name: arm for arm in op_arms(operator, OP)}
    plain = next(arm for name, arm in arms.items() if name.startswith("plain"))
    ours = {"noble": "NOBLE r=4", "sine": "sine-LoRA r=4", "rational": "rational", "gated": "gated rational"}[operator]
    if operator == "sine":  # its weight is its own: both start at a delta of zero
        x = plain.inputs[0]
        torch.testing.assert_close(plain.function(x), F.linear(x, plain.parameters[0]))
        return
    torch.testing.assert_close(plain.function(*plain.inputs), arms[ours].function(*arms[ours].inputs))


def test_kats_way_is_the_sum_of_abs():
    x = torch.randn(3, 5, 8, dtype=torch.float64).float().requires_grad_()
    a, b = torch.randn(4, 6).requires_grad_(), torch.randn(4, 4).requires_grad_()
    found = kat_rational(x, a, b)
    wanted = rational_reference(x.double(), a.double(), b.double(), "sum_of_abs")
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    dy = torch.randn_like(found)
    gradients = torch.autograd.grad(wanted, (x, a, b), dy.double())
    torch.testing.assert_close(torch.autograd.grad(found, (x, a, b), dy), gradients, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_branches_of_a_base_model_save_three_percent_more():
    base = {"width": 1024, "layers": 12, "heads": 16, "hidden": 2752, "ranks": (64,), "bf16": True}
    config = TrainBenchConfig(**base, sequence_length=64, batch_size=1, modes=("eager",))
    baseline, noble = bench_memory(config, progress=lambda line: None).rows
    assert 1 < noble.figures["saved_bytes"] / baseline.figures["saved_bytes"] <= 1.03


def test_a_copy_reads_and_writes_and_a_product_multiplies_and_adds(monkeypatch):
    monkeypatch.setattr(bench_result, "_seconds", lambda statement, **names: 2.0)
    found = bench_result.describe_machine("cpu")
    assert found["copy_bytes_per_second"] == 2 * (1 << 26) / 2
    assert found["product_flops_per_second"] == 2 * 768**3 / 2
