"""NOBLE layers split over two devices by transformers' plan: the numbers of one process, in float64."""

import json
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import nonlinear_lowrank as nlr
from nonlinear_lowrank import UserError
from nonlinear_lowrank.integrations.tensor_parallel import with_branches
from processes_helpers import run_processes

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"vocab_size": 96, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, **HEADS}
CASES = {
    "cosine": (LlamaConfig, {"rank": 4, "up_bias": True, "output_scale": 1.5}),
    "official": (partial(LlamaConfig, attention_bias=True, mlp_bias=True), {"rank": 4, "bottleneck_bias": True}),
    "uneven": (LlamaConfig, {"rank": 5}),
    "deep": (LlamaConfig, {"rank": 4, "depth": 3}),
    "shallow": (LlamaConfig, {"rank": 5, "depth": 1}),
    "gelu": (Qwen2Config, {"rank": 4, "activation": "gelu", "output_scale": 1.5}),  # with biases
    "plain": (LlamaConfig, None),
}

SCRIPT = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import nonlinear_lowrank as nlr
from nonlinear_lowrank.methods.noble import op
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
import test_tensor_parallel as here

root = Path(sys.argv[1])
asked = set()  # kinds of tensors that kernels would read
op.FUSE_DOWN = True  # asks with x, too
op.kernels = lambda method, *tensors: asked.update(type(each).__name__ for each in tensors)
for name in here.CASES:
    model = AutoModelForCausalLM.from_pretrained(
        root / name / "before", dtype=torch.float64, distributed_config=DistributedConfig(tp_size=2)
    )
    if name == "cosine":  # what torch gathers for a layer comes as a tensor to wait for
        layer = model.model.layers[0].self_attn.q_proj
        x = torch.ones(2, 24, dtype=torch.float64)
        sharded = distribute_tensor(x, layer.noble_up.device_mesh, [Shard(0)])
        gathered = sharded.redistribute(placements=[Replicate()], async_op=True)
        assert type(gathered.to_local()) is AsyncCollectiveTensor
        torch.testing.assert_close(layer(gathered), layer(x))
    found = here.train(model)
    shapes = {each: list(p.to_local().shape) for each, p in model.named_parameters() if hasattr(p, "to_local")}
    model.save_pretrained(root / name / "after")
    if torch.distributed.get_rank() == 0:
        found = {"numbers": found, "shapes": shapes, "asked": sorted(asked)}
        (root / name / "found.json").write_text(json.dumps(found))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def build(kind, settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**SIZES)).double()
    if settings is not None:
        nlr.augment(model, nlr.NobleConfig(up_scale=1.0, init="scratch", **settings), verbose=False)
    return model


def train(model):
    """Loss and the gradient's norm of three steps, and of the last logits; the same tokens in every process."""
    tokens = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(nlr.param_groups(model, lr=1e-2, verbose=False), foreach=False)
    model.train()
    numbers = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        gradients = [each.grad for each in model.parameters()]
        whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in gradients]
        squares = [each.square().sum().item() for each in whole]
        numbers += [loss.item(), sum(squares)]
        optimizer.step()
    with torch.no_grad():
        numbers.append(model.eval()(input_ids=tokens).logits.square().sum().item())
        branches = any("noble" in name for name, _ in model.named_parameters())
        with nlr.branches_disabled(model) if branches else nullcontext():
            numbers.append(model(input_ids=tokens).logits.square().sum().item())
    return numbers


def test_the_numbers_of_one_process(tmp_path):
    want = {}
    for name, (kind, settings) in CASES.items():
        model = build(kind, settings)
        model.save_pretrained(tmp_path / name / "before")
        want[name] = train(model), model
    run_processes(SCRIPT, tmp_path)
    for name, (numbers, model) in want.items():
        found = json.loads((tmp_path / name / "found.json").read_text())
        assert found["numbers"] == pytest.approx(numbers, rel=1e-9), name
        after = AutoModelForCausalLM.from_pretrained(tmp_path / name / "after", dtype=torch.float64)
        assert type(after) is type(AutoModelForCausalLM.from_pretrained(tmp_path / name / "before"))
        for own, tensor in model.state_dict().items():
            torch.testing.assert_close(after.state_dict()[own], tensor, rtol=1e-9, atol=1e-12, msg=f"{name} {own}")
    cosine = json.loads((tmp_path / "cosine" / "found.json").read_text())
    assert set(cosine["asked"]) <= {"Tensor", "Parameter"}
    assert "Tensor" in cosine["asked"]
    shapes = cosine["shapes"]
    found = {name: shapes[f"model.layers.0.self_attn.{name}"] for name in SHAPES}
    assert found == SHAPES


SHAPES = {
    "q_proj.dense.weight": [12, 24],
    "q_proj.noble_up": [12, 4],
    "q_proj.noble_down": [4, 24],
    "o_proj.dense.weight": [24, 12],
    "o_proj.noble_down": [4, 12],
    "o_proj.noble_up": [24, 2],
    "o_proj.noble_mix1": [2, 4],
    "o_proj.noble_phase1": [4],
    "o_proj.noble_phase2": [2],
}


@pytest.mark.parametrize(
    ("settings", "style", "devices", "why"),
    [
        ({"rank": 2}, "colwise", 4, "its rank 2 is below the 4 devices; raise the rank"),
        ({"rank": 4, "fusion": "gated"}, "colwise", 2, "work on one device"),
        ({"rank": 4, "share_down": "qkv"}, "colwise", 2, "share_down"),
        ({"rank": 4, "fuse_shared_inputs": True}, "colwise", 2, "fuse_shared_inputs"),
        ({"rank": 4}, "packed_colwise", 2, "'packed_colwise'"),
    ],
)
def test_what_cannot_be_split_is_named(settings, style, devices, why):
    model = build(LlamaConfig, settings)
    with pytest.raises(UserError, match=f"q_proj cannot be split by tensor parallelism: .*{why}"):
        with_branches(model, {"model.layers.0.self_attn.q_proj": style}, devices)
