"""Checkpoints that the authors of nonlinear queries released: their computation, written anew, against our model."""

import math

import pytest
import torch
import torch.nn.functional as F

import nonlinear_lowrank as nlr
from nonlinear_lowrank.methods.query.checkpoint import released_model
from refusals import assert_refused

MODES = ("original", "identity", "residual", "residual_gelu")
SIZES = {"block_size": 16, "vocab_size": 67, "n_layer": 2, "num_heads": 4, "n_embd": 32, "head_size": 8}
SETTINGS = SIZES | {"mlp_hidden_size": 48, "tie_weights": True, "dropout": 0.0, "bias": False, "learning_rate": 6e-4}


def settings(mode, **changed):
    scale = 1 / math.sqrt(8) / (1 if mode == "original" else 2)
    return {**SETTINGS, "query_mode": mode, "scale": scale, **changed}


def random_state(mode, *, tied=True, prefix="", dtype=torch.float64):
    """Tensors of a checkpoint, by its names."""
    shapes = {"transformer.wte.weight": (67, 32), "transformer.wpe.weight": (16, 32), "transformer.ln_f.weight": (32,)}
    for block in range(2):
        at = f"transformer.h.{block}."
        shapes |= {f"{at}{name}.weight": (32,) for name in ("ln_1", "ln_2")}
        shapes[f"{at}attn.c_attn.weight"] = (96 if mode in ("original", "residual") else 64, 32)
        shapes |= {f"{at}attn.c_proj.weight": (32, 32), f"{at}mlp.c_fc.weight": (48, 32)}
        shapes[f"{at}mlp.c_proj.weight"] = (32, 48)
        if mode == "residual_gelu":
            shapes |= {f"{at}attn.residual_{end}.weight": (32,) for end in ("rmsnorm_input", "layernorm_output")}
            shapes |= {f"{at}attn.residual_in.weight": (16, 32), f"{at}attn.residual_out.weight": (32, 16)}
    state = {name: torch.randn(shape, dtype=dtype) * (0.3 if len(shape) > 1 else 1) for name, shape in shapes.items()}
    state["lm_head.weight"] = state["transformer.wte.weight"] if tied else torch.randn(67, 32, dtype=dtype)
    return {prefix + name: value for name, value in state.items()}


def released_logits(state, mode, scale, ids):
    """The authors' forward pass: (B, T) -> (B, T, 67)."""
    x = state["transformer.wte.weight"][ids] + state["transformer.wpe.weight"][: ids.shape[1]]

    def normed(x, name):
        return F.layer_norm(x, (32,), state[f"{name}.weight"], None, 1e-5)

    for block in range(2):
        own = {name.split(f"h.{block}.")[-1]: value for name, value in state.items() if f".h.{block}." in name}
        y = normed(x, f"transformer.h.{block}.ln_1")
        parts = (y @ own["attn.c_attn.weight"].T).split(32, dim=-1)
        key, value = parts[-2:]
        if mode == "original":
            query = parts[0]
        elif mode == "identity":
            query = y
        elif mode == "residual":
            query = y + parts[0]
        else:
            h = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * own["attn.residual_rmsnorm_input.weight"]
            h = F.gelu(h @ own["attn.residual_in.weight"].T) @ own["attn.residual_out.weight"].T
            query = y + F.layer_norm(h, (32,), own["attn.residual_layernorm_output.weight"], None, 1e-5)
        query, key, value = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in (query, key, value))
        scores = (query @ key.mT * scale).masked_fill(torch.ones(ids.shape[1], ids.shape[1]).triu(1) > 0, -torch.inf)
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(-2)
        x = x + mixed @ own["attn.c_proj.weight"].T
        y = normed(x, f"transformer.h.{block}.ln_2")
        x = x + F.gelu(y @ own["mlp.c_fc.weight"].T) @ own["mlp.c_proj.weight"].T
    return normed(x, "transformer.ln_f") @ state["lm_head.weight"].T


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_released_checkpoint_gives_the_authors_logits(mode, tied, tmp_path):
    state, given = random_state(mode, tied=tied), settings(mode, tie_weights=tied)
    compiled = {f"_orig_mod.{name}": value for name, value in state.items()}
    torch.save({"model": compiled, "model_args": given}, tmp_path / "ckpt.pt")
    released = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    model = released_model(released["model"], released["model_args"])
    ids = torch.randint(0, 67, (2, 12))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        torch.testing.assert_close(logits, released_logits(state, mode, given["scale"], ids), rtol=1e-9, atol=1e-9)
        model.save_pretrained(tmp_path / "ours")
        assert torch.equal(nlr.hub.load_model(tmp_path / "ours")(input_ids=ids).logits, logits)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bias": True}, "none of the released"),
        ({"query_mode": "cubic"}, "query_mode='cubic' with bias=False is none of the released"),
        ({"mlp_hidden_size": 64}, r"fc1.weight is \(48, 32\), not \(64, 32\)"),
        ({"n_layer": 3}, "layers.2.* is missing, not"),
        ({"n_layer": 1}, "layers.1.* not unknown"),
        ({"query_mode": "residual"}, "q_proj.query_.* not unknown"),
    ],
)
def test_what_is_no_released_checkpoint_is_refused(change, words):
    assert_refused(words, released_model, random_state("residual_gelu"), settings("residual_gelu") | change)


def test_settings_that_are_missing_are_named():
    given = settings("identity")
    del given["n_layer"]
    assert_refused("model_args has no 'n_layer'", released_model, random_state("identity"), given)
