"""Models whose attention is not the usual one: fused rows, grouped or wide heads, keys and values beside a query."""

from functools import partial

from model_helpers import SIZES, TOKENS, build

_GPT = {**TOKENS, "n_embd": 32, "n_layer": 1, "n_head": 4}
_LLAMA = {**SIZES, **TOKENS, "intermediate_size": 48}

by_head = partial(build, "gpt_neox", **_LLAMA)
by_part = partial(build, "codegen", **_GPT, rotary_dim=4, n_positions=32)
falcon = partial(build, "falcon", **SIZES, **TOKENS)
_LATENT = {**_LLAMA, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
_EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}


def latent(q_lora_rank):
    return build("deepseek_v3", **_LATENT, **_EXPERTS, q_lora_rank=q_lora_rank, first_k_dense_replace=2)


MIXED = {
    "gpt_neox": by_head,
    "gpt_neox_japanese": partial(build, "gpt_neox_japanese", **SIZES, **TOKENS, intermediate_multiple_size=2),
    "persimmon": partial(build, "persimmon", **_LLAMA),
    "bloom": partial(build, "bloom", **TOKENS, hidden_size=32, n_layer=2, n_head=4),
    "falcon-rw": partial(falcon, multi_query=False, alibi=True),
    "falcon-7b": partial(falcon, multi_query=True),
    "falcon-40b": partial(falcon, new_decoder_architecture=True, num_kv_heads=2),
    "codegen": by_part,
    "gpt_bigcode": lambda: big_code(False),
    "gpt_bigcode-mq": lambda: big_code(True),
    "minimax": partial(
        build,
        "minimax",
        **_LLAMA,
        head_dim=8,
        num_key_value_heads=2,
        num_local_experts=2,
        layer_types=["linear_attention", "linear_attention"],
    ),
    "phi3": lambda: grouped_phi3(1, head_dim=16),
    "qwen3_next": partial(
        build,
        "qwen3_next",
        **_LLAMA,
        **_EXPERTS,
        head_dim=8,
        num_experts=2,
        shared_expert_intermediate_size=16,
        layer_types=["full_attention", "full_attention"],
    ),
}
"""Fused projections whose queries are not the first rows, as many as the model is wide."""


def grouped_llama(heads=2, **options):
    return build("llama", **_LLAMA, num_key_value_heads=heads, **options)


def grouped_phi3(heads=2, **options):
    return build("phi3", **_LLAMA, num_key_value_heads=heads, **options)


def big_code(multi_query):
    return build("gpt_bigcode", **_GPT, n_positions=32, multi_query=multi_query)


def cross_attending():
    return build("gpt2", **_GPT, n_positions=64, add_cross_attention=True).eval()
