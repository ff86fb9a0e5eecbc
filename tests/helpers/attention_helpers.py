"""Models whose attention is not the usual one: fused rows, grouped or wide heads, keys and values beside a query."""

from transformers import (
    CodeGenConfig,
    CodeGenForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from model_helpers import SIZES, TOKENS

_GPT = {**TOKENS, "n_embd": 32, "n_layer": 1, "n_head": 4}


def grouped_llama(heads=2, **options):
    return LlamaForCausalLM(LlamaConfig(**SIZES, **TOKENS, intermediate_size=48, num_key_value_heads=heads, **options))


def grouped_phi3(heads=2, **options):
    return Phi3ForCausalLM(Phi3Config(**SIZES, **TOKENS, intermediate_size=48, num_key_value_heads=heads, **options))


def by_head():
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, **TOKENS, intermediate_size=48))


def by_part():
    return CodeGenForCausalLM(CodeGenConfig(**_GPT, rotary_dim=4, n_positions=32))


def big_code(multi_query):
    return GPTBigCodeForCausalLM(GPTBigCodeConfig(**_GPT, n_positions=32, multi_query=multi_query))


def cross_attending():
    return GPT2LMHeadModel(GPT2Config(**_GPT, n_positions=64, add_cross_attention=True)).eval()
