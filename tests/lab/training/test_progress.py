"""The progress line: steps and tokens per second of training alone, MFU where the peak is known, time left."""

import re
from types import SimpleNamespace

import pytest
import torch

from nlr_lab.plan.presets import HARDWARE, device_rate
from nlr_lab.tasks.text.language_model import GlmBackbone
from nlr_lab.training import progress as lines
from nlr_lab.training import run_training
from nlr_lab.training.arms import apply_arm, build_model
from training_helpers import LENGTH, VOCABULARY, FakeText, make_recipe


def test_lines_have_tokens_per_second_and_no_mfu_on_a_cpu(tmp_path, capsys):
    run_training(make_recipe(eval_every=4), tmp_path / "out", prepared=FakeText(), report=False)
    found = re.findall(r"step (\d+)/12 .* ([\d.]+) steps/s  ([\d,]+) tokens/s(.*)", capsys.readouterr().err)
    assert [int(step) for step, *_ in found] == [4, 8, 12]
    for _, steps, tokens, _ in found:
        assert int(tokens.replace(",", "")) == pytest.approx(float(steps) * 4 * LENGTH, abs=0.005 * 4 * LENGTH + 0.5)
    assert [bool(rest) for *_, rest in found] == [True, True, False], "time left, except the last"
    assert not any("MFU" in rest for *_, rest in found)


def test_speed_is_of_training_and_time_to_go_of_all(monkeypatch, capsys):
    """Ten steps of a second, ten of half of one, each with an evaluation of 20 s and a checkpoint of 10 s."""
    clock = [0.0]
    monkeypatch.setattr(lines.time, "monotonic", lambda: clock[0])
    state, nothing = SimpleNamespace(global_step=0, max_steps=100), SimpleNamespace()
    callback = lines.ProgressLines("arm", tokens=1000, utilization=2e-4)
    callback.on_train_begin(nothing, state, nothing)
    for seconds in (1.0, 0.5):
        for _ in range(10):
            clock[0] += seconds
            state.global_step += 1
            callback.on_step_end(nothing, state, nothing)
        callback.on_log(nothing, state, nothing, logs={"loss": 2.0})
        clock[0] += 20
        callback.on_log(nothing, state, nothing, logs={"eval_loss": 3.0})
        clock[0] += 10
        callback.on_save(nothing, state, nothing)
    one, two = capsys.readouterr().err.splitlines()
    assert one == "arm  step 10/100  train 2.0000  eval 3.0000  1.00 steps/s  1,000 tokens/s  MFU 20.0 %  4 min left"
    assert "step 20/100" in two
    assert "2.00 steps/s  2,000 tokens/s  MFU 40.0 %" in two
    callback.bar.close()


@pytest.mark.parametrize(
    ("name", "settings", "rate"),
    [
        ("NVIDIA A100-SXM4-80GB", {"bf16": True}, 312e12),
        ("NVIDIA A100-SXM4-80GB", {"bf16": False}, 19.5e12),
        ("NVIDIA A100 80GB PCIe", {"bf16": False, "tf32": True}, 156e12),
        ("NVIDIA H100 80GB HBM3", {"bf16": True}, HARDWARE["h100"].bf16),
        ("NVIDIA H100 PCIe", {"bf16": True}, 756e12),
        ("NVIDIA GeForce RTX 4090", {"bf16": False}, 82.6e12),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", {"bf16": True}, None),
        ("NVIDIA A10G", {"bf16": True}, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", {"bf16": True}, None),
        ("", {"bf16": True}, None),
    ],
)
def test_peaks_are_those_of_the_data_sheets_or_unknown(name, settings, rate):
    assert device_rate(name, **settings) == rate


def test_mfu_is_the_training_flops_of_a_token_by_all_peaks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    recipe = make_recipe("baseline", bf16=True)
    model, text = build_model(recipe, FakeText()), FakeText()
    sizes: GlmBackbone = recipe.task.backbone
    d, h = sizes.width, sizes.hidden
    matrices = sizes.layers * (4 * d * d + 3 * d * h) + d * VOCABULARY  # PaLM's count, arXiv:2204.02311, appendix B
    flops = 6 * matrices + 12 * sizes.layers * LENGTH * d
    assert lines.utilization_of(recipe, model, 4) == pytest.approx(flops / (4 * 989e12))
    assert lines.progress_of(recipe, model, text, 4).tokens == 4 * LENGTH
    noble = make_recipe("noble:rank=4", bf16=True)
    assert lines.utilization_of(noble, apply_arm(noble, noble.arm, model), 4) > flops / (4 * 989e12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Unknown")
    assert lines.utilization_of(recipe, model, 4) is None
