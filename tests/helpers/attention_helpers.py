"""Models whose attention is not the usual one: fused rows, grouped or wide heads, keys and values beside a query."""

from functools import partial

from model_helpers import SIZES, TOKENS, build

_GPT = {**TOKENS, "n_embd": 32, "n_layer": 1, "n_head": 4}
_LLAMA = {**SIZES, **TOKENS, "intermediate_size": 48}

by_head = partial(build, "gpt_neox", **_LLAMA)
by_part = partial(build, "codegen", **_GPT, rotary_dim=4, n_positions=32)


def grouped_llama(heads=2, **options):
    return build("llama", **_LLAMA, num_key_value_heads=heads, **options)


def grouped_phi3(heads=2, **options):
    return build("phi3", **_LLAMA, num_key_value_heads=heads, **options)


def big_code(multi_query):
    return build("gpt_bigcode", **_GPT, n_positions=32, multi_query=multi_query)


def cross_attending():
    return build("gpt2", **_GPT, n_positions=64, add_cross_attention=True).eval()
