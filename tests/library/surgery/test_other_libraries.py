"""Conventions of timm, diffusers and sentence-transformers that transformers' models do not have."""

import peft
import pytest
import torch
from diffusers import UNet2DConditionModel
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
from torch import nn
from transformers import AutoTokenizer, BertConfig, BertModel

import finetune_helpers
import nonlinear_lowrank as nlr
from family_checks import RANK
from refusals import assert_refused

WIDTH, HEADS = 16, 4


class RmsNorm(nn.RMSNorm):
    """timm's spelling."""


class Affine(nn.Module):
    """ResMLP's norm."""

    def __init__(self, width):
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.ones(1, 1, width)), nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, x):
        return self.beta + self.alpha * x


@pytest.mark.parametrize("norm", [RmsNorm, Affine])
def test_trained_norms_of_any_spelling_keep_the_models_weights(norm):
    for trained in (False, True):
        model = nn.Sequential(norm(WIDTH), nn.Linear(WIDTH, WIDTH))
        if trained:
            nn.init.normal_(next(model[0].parameters()))
        before = model[1].weight.clone()
        init = nlr.augment(model, nlr.NobleConfig(rank=RANK), verbose=False).config.init
        assert (init == "pretrained", torch.equal(model[1].weight, before)) == (trained, trained)


class Attention(nn.Module):
    """Returns q, k and v, each (B, T, heads x width), of rows that go head by head."""

    def __init__(self, **attributes):
        super().__init__()
        self.num_heads, self.qkv = HEADS, nn.Linear(WIDTH, 3 * WIDTH)
        vars(self).update(attributes)

    def forward(self, x):
        rows = self.qkv(x).view(*x.shape[:2], HEADS, -1)
        return [each.flatten(2) for each in rows.chunk(3, dim=-1)]


@pytest.mark.parametrize("says", [{"head_first": True}, {"val_dim": WIDTH // HEADS}], ids=["MaxViT", "TinyViT"])
def test_queries_that_go_head_by_head_are_found(says):
    model, x = nn.ModuleDict({"attn": Attention(**says)}), torch.randn(2, 3, WIDTH)
    nlr.augment(model, nlr.NonlinearQueryConfig(), verbose=False)
    before = model["attn"](x)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query_" in name:
                parameter.add_(torch.randn_like(parameter))
    q, k, v = (torch.isclose(old, new).float().mean() for old, new in zip(before, model["attn"](x), strict=True))
    assert (q < 0.1, k == 1, v == 1) == (True, True, True)
    whole = Attention(**says)
    expected = whole(x)
    model = nn.ModuleDict({"attn": whole})
    nlr.augment(model, nlr.NobleConfig(rank=RANK, init="pretrained"), split_fused=True, verbose=False)
    queries = model["attn"].qkv.q_proj
    assert torch.allclose(queries.dense(x), expected[0], atol=1e-6)


@pytest.mark.parametrize("config", [nlr.NonlinearQueryConfig(), nlr.QKNormConfig(head_width=4)], ids=type)
def test_keys_and_values_alone_are_no_queries(config):
    """Global attention of GCViT has its query from elsewhere."""
    model = nn.ModuleDict({"attn": Attention(qkv=None)})
    model["attn"].head_dim, model["attn"].qkv = WIDTH // HEADS, nn.Linear(WIDTH, 2 * WIDTH)
    assert_refused("attn.qkv holds keys and values only", nlr.augment, model, config, verbose=False)


class Classifier(nn.Module):
    """A body, and heads that `get_classifier` or their names tell."""

    def __init__(self, **heads):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"fc": nn.Linear(WIDTH, WIDTH)})])
        for name, head in heads.items():
            self.add_module(name, head)

    def no_weight_decay(self):
        return {"blocks.0.fc.weight"}


class Timm(Classifier):
    def get_classifier(self):
        return self.out.fc, self.aux


def _linear():
    return nn.Linear(WIDTH, 3)


HEADED = {
    "get_classifier": lambda: Timm(out=nn.ModuleDict({"fc": _linear()}), aux=_linear()),
    "swin": lambda: Classifier(head=nn.ModuleDict({"fc": _linear()})),
    "deit": lambda: Classifier(head=_linear(), head_dist=_linear()),
    "resnet": lambda: Classifier(fc=_linear()),
    "torchvision": lambda: Classifier(classifier=nn.Sequential(nn.Dropout(), _linear())),
    "crossvit": lambda: Classifier(head=nn.ModuleList([_linear(), _linear()])),
    "diffusers": lambda: Classifier(proj_out=_linear()),
}


@pytest.mark.parametrize("make", HEADED.values(), ids=HEADED)
def test_heads_get_no_branch(make):
    assert nlr.augment(make(), nlr.NobleConfig(rank=2), verbose=False).swapped == ["blocks.0.fc"]


@pytest.mark.parametrize("held", [False, True], ids=["method", "attribute"])
def test_the_models_own_no_weight_decay_counts(held):
    model = Classifier(fc=_linear())
    if held:
        vars(model)["no_weight_decay"] = model.no_weight_decay()
    groups = nlr.param_groups(model, 1e-3, 0.1, verbose=False)
    decays = {name: group["weight_decay"] for group in groups for name, _ in group["params"]}
    assert decays == {"blocks.0.fc.weight": 0.0, "blocks.0.fc.bias": 0.0, "fc.weight": 0.1, "fc.bias": 0.0}


def test_lora_by_plain_names_goes_beside_the_branch():
    model = Classifier(fc=_linear())
    nlr.augment(model, nlr.NobleConfig(rank=RANK), verbose=False)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["blocks.0.fc"]))
    assert {name for name, each in tuned.named_modules() if isinstance(each, peft.tuners.lora.Linear)} == {
        "base_model.model.blocks.0.fc.dense"
    }


def test_diffusers_does_not_fuse_branches_away():
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8,),
        layers_per_block=1,
        cross_attention_dim=8,
        down_block_types=["CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D"],
        mid_block_type=None,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    nlr.augment(unet, nlr.NobleConfig(rank=2), include=r".*to_q", verbose=False)
    assert_refused("would drop the branches; fuse before augment", unet.fuse_qkv_projections)


class Bypassing(nn.Module):
    """BEiT's attention: the weight alone in one case."""

    def __init__(self):
        super().__init__()
        self.qkv, self.bias = nn.Linear(WIDTH, WIDTH, bias=False), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        if self.bias is None:
            return self.qkv(x)
        return nn.functional.linear(x, self.qkv.weight, self.bias)


@pytest.mark.parametrize("config", [nlr.SineLoraConfig, nlr.NobleAdapterConfig])
def test_adapters_that_one_path_goes_around_are_named(config):
    model = nn.ModuleDict({"attn": Bypassing()})
    with pytest.warns(UserWarning, match=r"do not act on every path .*\(1 of 1; attn\.qkv: .* on one of its paths"):
        peft.get_peft_model(model, config(r=2, target_modules=["qkv"]))


def test_a_sentence_transformer_is_read_back(tmp_path):
    finetune_helpers.tokenizer(True).save_pretrained(tmp_path / "bert")
    size = len(AutoTokenizer.from_pretrained(tmp_path / "bert"))
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=size, **sizes)).save_pretrained(tmp_path / "bert")
    model = SentenceTransformer(modules=[Transformer(str(tmp_path / "bert")), Pooling(WIDTH), Dense(WIDTH, 8)])
    report = nlr.augment(model, nlr.NobleConfig(rank=2), verbose=False)
    assert report.skipped["2.linear"] == "in a Dense, which sentence-transformers could not read back"
    model.save_pretrained(str(tmp_path / "saved"))
    again = SentenceTransformer(str(tmp_path / "saved"))
    texts = ["a cat", "the birds saw red"]
    assert (again.encode(texts) == model.encode(texts)).all()
