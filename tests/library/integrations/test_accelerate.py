"""accelerate's float8 of an augmented model, in a loop of the user's own; the rounding is emulated on a CPU."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import nonlinear_lowrank as nlr

pytestmark = pytest.mark.quantized
BACKBONE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
METHODS = {
    "add": nlr.NobleConfig(rank=4),
    "gated": nlr.NobleConfig(rank=4, fusion="gated", up_bias=True),
    "pretrained": nlr.NobleConfig(rank=4, init="pretrained"),
}


@pytest.fixture
def prepared():
    """A function that makes an accelerator with a model and an optimizer; the state of the process is put back."""
    accelerate = pytest.importorskip("accelerate")
    float8 = pytest.importorskip("torchao.float8")

    def prepare(config, seed=0):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**BACKBONE, **HEADS))
        nlr.augment(model, config, verbose=False)
        optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=1e-2, weight_decay=0.01, verbose=False))
        recipe = accelerate.utils.AORecipeKwargs(config=float8.Float8LinearConfig(emulate=True))
        accelerator = accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], cpu=True)
        return accelerator, *accelerator.prepare(model, optimizer)

    yield prepare
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def train(accelerator, model, optimizer, batches):
    losses = []
    for ids in batches:
        with accelerator.autocast():
            loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", METHODS)
def test_dense_parts_become_float8_and_every_branch_tensor_trains_saves_and_resumes(name, prepared, tmp_path):
    from torchao.float8.float8_linear import Float8Linear

    batches = torch.randint(0, 64, (4, 2, 8))
    accelerator, model, optimizer = prepared(METHODS[name])
    kinds = {name: type(each) for name, each in model.named_modules()}
    inner = {name for name in kinds if name.endswith("_proj.dense")}
    left_by_accelerate = {"model.layers.0.self_attn.q_proj.dense", "lm_head"}  # the first linear and the last
    assert len(inner) == 14
    assert {name for name, kind in kinds.items() if kind is Float8Linear} == inner - left_by_accelerate
    held = [each for group in optimizer.param_groups for each in group["params"]]
    assert {id(each) for each in held} == {id(each) for each in model.parameters()}
    assert len({group["lr"] for group in optimizer.param_groups}) > 3

    start = {name: each.detach().clone() for name, each in model.named_parameters()}
    train(accelerator, model, optimizer, batches[:2])
    assert not [name for name, each in model.named_parameters() if torch.equal(each, start[name])]
    accelerator.save_state(tmp_path / "state")
    losses = train(accelerator, model, optimizer, batches[2:])

    other, resumed, again = prepared(METHODS[name], seed=1)
    other.load_state(tmp_path / "state")
    assert train(other, resumed, again, batches[2:]) == losses
    for (name, each), found in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(each, found), name

    other.unwrap_model(resumed).save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not [each for each in loaded.modules() if isinstance(each, Float8Linear)]
    for (name, each), found in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(each, found), name
