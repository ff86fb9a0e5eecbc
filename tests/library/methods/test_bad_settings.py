"""Wrong settings of methods and adapters: one line that names the field, before any work."""

import pytest

from nonlinear_lowrank import (
    NobleConfig,
    NonlinearQueryConfig,
    NoraConfig,
    QKNormConfig,
    RationalConfig,
    SineLoraConfig,
    SineLowRankConfig,
)
from refusals import assert_refused

# config: [(settings, what the error says)]; NoRA checks what the two have in common as RationalConfig does.
WRONG = {
    NobleConfig: [
        ({"rank": 0}, "rank"),
        ({"activation": "sine"}, "activation"),
        ({"activation": "gelu", "depth": 3}, "depth"),
        ({"depth": 0}, "depth"),
        ({"init": "zero"}, "init"),
        ({"frequency_range": (2.0, 1.0)}, "frequency_range"),
        ({"up_scale": float("nan")}, "up_scale"),
        ({"phase_lr": 0.0}, "phase_lr"),
        ({"rank_ratio": 1.0}, "rank_ratio"),
        ({"fusion": "mul"}, "fusion"),
        ({"dropout": 1.0}, "dropout"),
        ({"output_scale": "2"}, "output_scale must be a finite number"),
        ({"dropout": float("nan"), "fuse_shared_inputs": True}, "dropout must be at least 0"),
        ({"up_lr_power": 1e5}, "up_lr_power must be at most 10"),
        ({"mix_lr_power": float("nan")}, "mix_lr_power must be a finite number of at least -10"),
        ({"frequency_range": 1}, "frequency_range must be two"),
        ({"frequency_range": (float("nan"), 1)}, "frequency_range must be two"),
        ({"depth": 2.0}, "depth"),
        ({"up_bias": "no"}, "up_bias must be true or false, got 'no'"),
        ({"fuse_shared_inputs": "off"}, "fuse_shared_inputs must be true or false"),
        ({"share_down": "q"}, "unknown share_down 'q'; choose one of none, qkv"),
        ({"fusion": "gated", "fuse_shared_inputs": True}, "needs fusion='add' and dropout=0"),
    ],
    NonlinearQueryConfig: [
        ({"rank": 0}, "rank"),
        ({"rank": 2.5}, "rank"),
        ({"kind": "cubic"}, "nonlinear, linear, identity"),
        ({"scale": 0.0}, "scale"),
        ({"init_std": float("nan")}, "init_std"),
        ({"kind": "identity", "rank": 4}, "rank=4 does nothing"),
        ({"kind": "identity", "scale": 0.3}, "scale=0.3 does nothing"),
    ],
    QKNormConfig: [({"head_width": 0}, "head_width")],
    RationalConfig: [
        ({"activation": "mish"}, "unknown activation 'mish'; choose one of gelu"),
        ({"form": "eq6"}, "unknown form 'eq6'; choose one of abs_of_sum, sum_of_abs"),
        ({"groups": 0}, "groups must be a positive integer"),
        ({"degrees": (5, 0)}, "degrees must be two integers from 1 to 9"),
        ({"degrees": 5}, "degrees must be two integers"),
        ({"degrees": (5, 12)}, "from 1 to 9"),
        ({"fit_range": 0}, "fit_range must be a number above 0 or"),
        ({"fit_range": (1.0, 3.0)}, "low < 0 < high"),
        ({"fit_range": (-1.0, float("inf"))}, "low < 0 < high"),
        ({"tails": "flat"}, "unknown tails"),
        ({"anchor": "maybe"}, "unknown anchor"),
        ({"channel_dim": 2}, "channel_dim must be -1 or 1"),
        ({"width": 0}, "width must be a positive integer"),
    ],
    NoraConfig: [
        ({"r": 0}, "r must be a positive integer"),
        ({"groups": 2.5}, "groups must be"),
        ({"groups_pattern": {"act": 0}}, r"groups_pattern\['act'\] must be"),
        ({"form": "kat"}, "unknown form"),
        ({"fit_range": -1.0}, "fit_range must be"),
        ({"tuning": "all"}, "unknown tuning 'all'; choose one of low_rank, shared"),
        ({"target_modules": "all-linear"}, "target_modules names activations in NoRA; leave it out"),
        ({"numerator_only": True, "denominator_only": True}, "leave nothing to train together"),
        ({"tuning": "constants", "form": "sum_of_abs"}, "has no b0"),
        ({"tuning": "gelu_init", "anchor": "exact"}, "drop one of them"),
        ({"init_std": 0}, "init_std must be"),
        ({"lora_r": -1}, "lora_r must be"),
        ({"lora_sine": True}, "lora_sine is for NoRA"),
        ({"lora_target_modules": ["q_proj"]}, "lora_target_modules is for NoRA"),
        ({"lora_r": 2, "lora_dropout": 1.0}, "lora_dropout must be"),
        ({"lora_r": 2, "lora_omega": 0}, "lora_omega must be"),
        ({"lora_r": 2, "lora_gain": -1.0}, "lora_gain must be"),
        ({"lora_r": 2, "lora_alpha": float("nan")}, "lora_alpha must be"),
    ],
    SineLoraConfig: [
        ({"r": 0}, "r must be a positive integer, got 0"),
        ({"r": 2.5}, "r must be"),
        ({"omega": 0}, "omega must be a finite number above 0, got 0"),
        ({"omega": float("nan")}, "omega must be"),
        ({"omega": "200"}, "omega must be"),
        ({"gain": 0.0}, "gain must be"),
        ({"lora_alpha": -1.0}, "lora_alpha must be"),
        ({"lora_dropout": 1.0}, "lora_dropout must be"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\] must be"),
        ({"omega_pattern": {"q_proj": -1}}, r"omega_pattern\['q_proj'\] must be"),
    ],
    SineLowRankConfig: [
        ({"rank": 0}, "rank"),
        ({"rank": True}, "rank"),
        ({"omega": 0}, "omega"),
        ({"omega": float("inf")}, "omega"),
        ({"omega": "imagenet"}, "vit-base-imagenet"),
        ({"gain": -1.0}, "gain"),
        ({"activation": "cosine"}, "activation"),
        ({"init": "xavier"}, "kaiming_zero"),
    ],
}


@pytest.mark.parametrize(("make", "settings", "words"), [(make, *case) for make in WRONG for case in WRONG[make]])
def test_wrong_settings_are_one_line(make, settings, words):
    assert_refused(words, make, **settings)
