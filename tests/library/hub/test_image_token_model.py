"""The language model of image tokens: rotary positions on the grid, the class token, files, and generation."""

import math

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import nonlinear_lowrank as nlr
from nonlinear_lowrank.hub.image_tokens import GridRotary, ImageTokensConfig, ImageTokensForCausalLM, ImageTokensModel

ROWS, COLUMNS, CODES, CLASSES, HEADS, HEAD_DIM = 3, 5, 23, 4, 2, 12
PLACES = [(0, 0)] + [(1 + row, 1 + column) for row in range(ROWS) for column in range(COLUMNS)]


def config(**changes):
    grid = {"vocab_size": CODES, "num_classes": CLASSES, "grid_rows": ROWS, "grid_columns": COLUMNS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM}
    sizes = {"hidden_size": HEADS * HEAD_DIM, "intermediate_size": 40, "num_hidden_layers": 2}
    kind = {"hidden_act": "gelu", "attention_bias": False, "initializer_range": 0.5}
    return ImageTokensConfig(**{**grid, **heads, **sizes, **kind, **changes})


def images(count=2):
    classes = CODES + torch.randint(CLASSES, (count, 1))
    return torch.cat((classes, torch.randint(CODES, (count, ROWS * COLUMNS))), dim=1)


def rotated(x, row, column, theta=10_000.0):
    """One head's vector, turned pair by pair as complex numbers: the first half by row, the second by column."""
    pairs = torch.view_as_complex(x.reshape(-1, 2))
    half = len(pairs) // 2
    turns = torch.tensor([place * theta ** (-j / half) for place in (row, column) for j in range(half)]).double()
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(turns), turns)).flatten()


def test_attention_is_that_of_the_formula():
    model = ImageTokensForCausalLM._from_config(config(num_hidden_layers=1), attn_implementation="eager").double()
    ids = images(1)
    found = model(ids, output_attentions=True).attentions[0][0]
    attention = model.model.layers[0].self_attn
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))[0]

    def turned(linear):
        heads = [linear(x).view(HEADS, HEAD_DIM) for x in hidden]
        turns = [rotated(head, *place) for x, place in zip(heads, PLACES, strict=True) for head in x]
        return torch.stack(turns).view(len(PLACES), HEADS, HEAD_DIM).transpose(0, 1)

    scores = turned(attention.q_proj) @ turned(attention.k_proj).mT / math.sqrt(HEAD_DIM)
    causal = torch.ones(len(PLACES), len(PLACES)).tril().bool()
    expected = scores.masked_fill(~causal, -math.inf).softmax(-1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # transformers' softmax is float32


def test_rotating_is_exact_in_short_types_and_has_no_tensors():
    rotary = GridRotary(HEAD_DIM, 32)
    assert not list(rotary.state_dict()) + list(rotary.buffers()) + list(rotary.parameters())
    positions = torch.arange(1025)[None]
    wide = rotary(torch.zeros(1).double(), positions)
    for dtype in (torch.bfloat16, torch.float32):
        for found, expected in zip(rotary.to(dtype)(torch.zeros(1, dtype=dtype), positions), wide, strict=True):
            assert found.dtype == dtype
            # Rounded once, after the cosine: an angle of up to 32 in bfloat16 would be off by 0.1.
            assert (found.double() - expected).abs().max() <= torch.finfo(dtype).eps / 2 + 4e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 10}, "head dimension divisible by 4, got 10"),
        ({"grid_rows": 0}, "grid_rows must be a positive integer, got 0"),
        ({"num_classes": 0}, "num_classes must be a positive integer, got 0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be false"),
    ],
)
def test_config_refuses_what_no_model_can_have(changes, message):
    with pytest.raises(nlr.UserError, match=message):
        ImageTokensForCausalLM(config(**changes))


def test_classes_are_inputs_and_never_predicted():
    model = ImageTokensForCausalLM(config())
    assert model.get_input_embeddings().weight.shape == (CODES + CLASSES, HEADS * HEAD_DIM)
    assert model.lm_head.weight.shape == (CODES, HEADS * HEAD_DIM)
    ids = images(3)
    output = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].reshape(-1, CODES), ids[:, 1:].reshape(-1))
    torch.testing.assert_close(output.loss, expected)
    assert (model.config.max_position_embeddings, model.config.eos_token_id) == (1 + ROWS * COLUMNS, None)


def test_the_class_reaches_every_token_and_no_token_sees_a_later_one():
    model = ImageTokensForCausalLM(config()).double()
    ids = images(1)
    other = ids.clone()
    other[0, 0] = CODES + (ids[0, 0] - CODES + 1) % CLASSES
    assert ((model(ids).logits - model(other).logits).abs().amax(-1) > 1e-6).all()
    late = ids.clone()
    late[0, 9] = (late[0, 9] + 1) % CODES
    same = (model(ids).logits - model(late).logits).abs().amax(-1)[0] < 1e-12
    assert same.tolist() == [True] * 9 + [False] * (len(PLACES) - 9)


def test_generating_with_a_cache_equals_without():
    model = ImageTokensForCausalLM(config()).double().eval()
    nlr.augment(model, nlr.NobleConfig(rank=3), verbose=False)
    prompt = CODES + torch.arange(CLASSES)[:, None]
    options = {"max_new_tokens": ROWS * COLUMNS, "return_dict_in_generate": True, "output_logits": True}
    for choices in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
        torch.manual_seed(5)
        one = model.generate(prompt, use_cache=True, **choices, **options)
        torch.manual_seed(5)
        two = model.generate(prompt, use_cache=False, **choices, **options)
        assert torch.equal(one.sequences, two.sequences)
        whole = model(one.sequences).logits[:, :-1].float()  # generate() keeps logits in float32
        for logits in (one.logits, two.logits):
            torch.testing.assert_close(torch.stack(logits, dim=1), whole, rtol=1e-6, atol=1e-6)
        assert one.sequences[:, 1:].max() < CODES
    assert len({tuple(row) for row in one.sequences[:, 1:].tolist()}) == CLASSES


def test_loading_and_building(tmp_path):
    ImageTokensForCausalLM(config()).save_pretrained(tmp_path)
    assert nlr.hub.load_model(tmp_path).config.eos_token_id is None
    assert type(AutoModel.from_pretrained(tmp_path)) is ImageTokensModel
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16
    built = AutoModelForCausalLM.from_config(config())
    assert all(0 < tensor.std() < 1 for name, tensor in built.named_parameters() if "norm" not in name)
    with torch.device("meta"):
        assert {each.device.type for each in ImageTokensForCausalLM(config()).parameters()} == {"meta"}
