"""Tiny models of transformers' families, with inputs that use every part of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

BATCH, LENGTH, VOCABULARY, LABELS = 2, 16, 64, 16

Inputs = dict[str, torch.Tensor]
Settings = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One family: a model class of transformers at a size that a test affords."""

    kind: str
    """"causal", "masked", "seq2seq", "vision" or "audio"."""
    model_type: str
    auto: str
    """The Auto class that builds and loads it."""
    settings: Mapping[str, Any]
    """Fields of its config. Widths are multiples of 16, as float8 needs them."""
    inputs: Callable[[PreTrainedModel], Inputs]
    """With labels, where the model computes a loss."""
    generates: bool

    def build(self, **settings: Any) -> PreTrainedModel:
        """A model with the same weights each time, in evaluation mode."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            config = AutoConfig.for_model(self.model_type, **{**self.settings, **settings})
            return self.auto_class.from_config(config).eval()

    @property
    def auto_class(self) -> Any:
        """E.g. transformers.AutoModelForCausalLM."""
        return getattr(transformers, self.auto)


FAMILIES: dict[str, Family] = {}
"""By name, which is the model_type, and more where a type has several architectures."""
REFUSED = ("ibert", "squeezebert", "resnet")
"""They have no linears but their heads and poolers: convolutions, and layers of a class of their own."""


def _tokens() -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (BATCH, LENGTH))


def _labels() -> torch.Tensor:
    return torch.randint(LABELS, (BATCH,))


def _globally(inputs: Callable[[PreTrainedModel], Inputs]) -> Callable[[PreTrainedModel], Inputs]:
    """Inputs whose first token attends to all, which some projections are for."""
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.long).index_fill(1, torch.tensor([0]), 1)
    return lambda model: {**inputs(model), "global_attention_mask": mask.clone()}


def text_inputs(model: PreTrainedModel) -> Inputs:
    """Token ids (B, T), which are the labels too."""
    ids = _tokens()
    return {"input_ids": ids, "labels": ids}


def text_to_text_inputs(model: PreTrainedModel) -> Inputs:
    """Token ids (B, T) for the encoder, labels (B, T) for the decoder."""
    return {"input_ids": _tokens(), "labels": _tokens()}


def speech_to_text_inputs(model: PreTrainedModel) -> Inputs:
    """Mel frames for the encoder, labels (B, T) for the decoder."""
    bands = model.config.to_dict().get("num_mel_bins") or model.config.input_feat_per_channel
    frames = torch.randn(BATCH, 40, bands)
    return {"input_features": frames.mT if "num_mel_bins" in model.config.to_dict() else frames, "labels": _tokens()}


def picture_inputs(model: PreTrainedModel) -> Inputs:
    """Pictures (B, 3, S, S) with S = 32 where the config says no other size, labels (B)."""
    size = getattr(model.config, "image_size", 32)
    size = size if isinstance(size, int) else size[0]
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": _labels()}


def wave_inputs(model: PreTrainedModel) -> Inputs:
    """Samples (B, 640), labels (B)."""
    return {"input_values": torch.randn(BATCH, 640), "labels": _labels()}


def spectrogram_inputs(model: PreTrainedModel) -> Inputs:
    """Mel frames (B, 32, 16), labels (B)."""
    name = "input_values" if hasattr(model.config, "num_mel_bins") else "input_features"
    return {name: torch.randn(BATCH, 32, 16), "labels": _labels()}


_KINDS = {
    "causal": ("AutoModelForCausalLM", text_inputs),
    "masked": ("AutoModelForMaskedLM", text_inputs),
    "seq2seq": ("AutoModelForSeq2SeqLM", text_to_text_inputs),
    "vision": ("AutoModelForImageClassification", picture_inputs),
    "audio": ("AutoModelForAudioClassification", wave_inputs),
}


def _add(
    kind: str, names: str, settings: Settings, *, model_type: str = "", auto: str = "", inputs: Any = None
) -> None:
    """Add families, by their names with spaces between them."""
    if kind in ("vision", "audio"):
        settings = {"num_labels": LABELS, **({"drop_path_rate": 0.0} if kind == "vision" else {}), **settings}
    usual, given = _KINDS[kind]
    for name in names.split():
        generates = kind in ("causal", "seq2seq")
        FAMILIES[name] = Family(kind, model_type or name, auto or usual, settings, inputs or given, generates)


def _without(settings: Settings, *names: str) -> Settings:
    return {name: value for name, value in settings.items() if name not in names}


_causal, _masked, _seq2seq, _vision, _audio = (partial(_add, kind) for kind in _KINDS)

# One family a line: the formatter would give each setting its own.
# fmt: off
_NO_TOKENS = {"pad_token_id": None, "eos_token_id": None, "bos_token_id": None}
_WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
_TEXT = {**_WIDTHS, **_NO_TOKENS, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
_DECODER = {**_TEXT, "num_key_value_heads": 1, "head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


_causal("llama mistral ministral qwen2 qwen3 gemma gemma2 gemma3_text phi3 glm glm4 olmo2 granite cohere cohere2 "
        "stablelm starcoder2 nemotron smollm3 ernie4_5 helium bitnet exaone4 seed_oss arcee apertus olmo3", _DECODER)
_causal("diffllama", {**_DECODER, "num_key_value_heads": 2})
_causal("phi persimmon gpt_neox xglm biogpt", _TEXT)

_GPT2 = {**_NO_TOKENS, "vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
_causal("gpt2", _GPT2)
_causal("gpt_bigcode", _GPT2)
_causal("openai-gpt", _GPT2)
_causal("gptj", {**_GPT2, "rotary_dim": 8})
_causal("codegen", {**_GPT2, "rotary_dim": 8, "n_head": 4})
_causal("gpt_neo", {**_without(_TEXT, "num_attention_heads"), "num_layers": 2, "num_heads": 2,
                    "attention_types": [[["global", "local"], 1]]})
_causal("opt", {**_TEXT, "ffn_dim": 48, "word_embed_proj_dim": 16})
_causal("bloom", {**_NO_TOKENS, "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 2})
_causal("mpt", {**_NO_TOKENS, "vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 64})
_causal("falcon-7b", {**_TEXT, "ffn_hidden_size": 48}, model_type="falcon")
_causal("falcon-40b", {**_TEXT, "ffn_hidden_size": 48, "new_decoder_architecture": True, "num_kv_heads": 1},
        model_type="falcon")
_causal("xlnet", {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48})
_causal("ctrl", {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "dff": 48})
_causal("modernbert-decoder", {**_TEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
                               "sep_token_id": 2})

# Experts.
_causal("mixtral", {**_DECODER, "num_local_experts": 4})
_causal("qwen2_moe", {**_DECODER, **_EXPERTS, "shared_expert_intermediate_size": 32})
_causal("qwen3_moe", {**_DECODER, **_EXPERTS})
_causal("olmoe", {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2})
_causal("gpt_oss", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2})
_causal("granitemoe", {**_DECODER, "num_local_experts": 4})
_causal("phimoe", {**_DECODER, "num_local_experts": 4})
_causal("llama4_text", {**_DECODER, "intermediate_size_mlp": 48, "num_local_experts": 2, "moe_layers": [1],
                        "no_rope_layers": [1, 0]})
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
           "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
           "moe_intermediate_size": 32}
_causal("deepseek_v2", {**_TEXT, **_LATENT, "num_key_value_heads": 2})
_causal("deepseek_v3", {**_TEXT, **_LATENT, "num_key_value_heads": 2})
_causal("jetmoe", {**_TEXT, "num_key_value_heads": 1, "kv_channels": 16, "num_local_experts": 4})
_causal("longcat_flash", {
    **_without(_TEXT, "num_hidden_layers", "intermediate_size"), "num_layers": 1, "head_dim": 16, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "ffn_hidden_size": 48,
    "n_routed_experts": 4, "expert_ffn_hidden_size": 32, "moe_topk": 2, "zero_expert_num": 2})
_causal("dbrx", {**_NO_TOKENS, "vocab_size": VOCABULARY, "d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 64,
                 "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0},
                 "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}})
_causal("minimax", {**_DECODER, "num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"],
                    "block_size": 8})

# Recurrent and hybrid.
_STATE = {**_NO_TOKENS, "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 16}
_MAMBA2 = {"mamba_n_heads": 16, "mamba_d_head": 4, "mamba_d_state": 16, "mamba_chunk_size": 8}
_causal("mamba", {**_STATE, "time_step_rank": 16})
_causal("falcon_mamba", {**_STATE, "time_step_rank": 16})
_causal("mamba2", {**_STATE, "num_heads": 16, "head_dim": 4, "n_groups": 1, "chunk_size": 8})
_causal("rwkv", {**_STATE, "attention_hidden_size": 32, "intermediate_size": 48, "context_length": 64})
_causal("jamba", {**_DECODER, "num_experts": 2, "num_experts_per_tok": 2, "attn_layer_period": 2,
                  "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_dt_rank": 16,
                  "use_mamba_kernels": False})
_causal("bamba", {**_DECODER, **_MAMBA2, "attn_layer_indices": [1]})
_causal("granitemoehybrid", {**_DECODER, **_MAMBA2, "num_local_experts": 4, "shared_intermediate_size": 48,
                             "layer_types": ["mamba", "attention"]})
_causal("zamba2", {**_TEXT, "num_key_value_heads": 2, "mamba_d_state": 16, "n_mamba_heads": 16, "chunk_size": 8,
                   "layers_block_type": ["mamba", "hybrid"], "adapter_rank": 16})
_causal("nemotron_h", {**_without(_DECODER, "num_hidden_layers"), "ssm_state_size": 16, "mamba_num_heads": 16,
                       "mamba_head_dim": 4, "n_groups": 1, "chunk_size": 8, "n_routed_experts": 4,
                       "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
                       "layers_block_type": ["mamba", "moe", "attention"]})
_causal("lfm2", {**_DECODER, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False})
_causal(
    "recurrent_gemma",
    {**_TEXT, "num_hidden_layers": 3, "intermediate_size": 96, "num_key_value_heads": 1, "attention_window_size": 64},
)
_causal("qwen3_next", {**_DECODER, **_EXPERTS, "layer_types": ["linear_attention", "full_attention"],
                       "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
                       "linear_key_head_dim": 16, "linear_value_head_dim": 16})
_causal(
    "xlstm",
    {**_STATE, "hidden_size": 64, "num_heads": 2, "num_blocks": 2, "qk_dim_factor": 1.0, "ffn_proj_factor": 1.5},
)

# Masked language models.
_masked("bert roberta camembert xlm-roberta xlm-roberta-xl roberta-prelayernorm data2vec-text ernie megatron-bert "
        "mpnet roformer nystromformer ibert layoutlm yoso gte nomic_bert electra rembert",
        {**_TEXT, "pad_token_id": 1, "type_vocab_size": 2})
_masked("squeezebert", {**_TEXT, "pad_token_id": 1, "embedding_size": 32, "q_groups": 1, "k_groups": 1})
_masked("albert", {**_TEXT, "embedding_size": 16})
_masked("distilbert", {**_NO_TOKENS, "vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48,
                       "max_position_embeddings": 64})
_DISENTANGLED = {**_TEXT, "pad_token_id": 0, "relative_attention": True, "max_relative_positions": 16,
                 "pos_att_type": ["p2c", "c2p"]}
_masked("deberta", _DISENTANGLED)
_masked("deberta-v2", _DISENTANGLED)
_masked("deberta-v2-shared", {**_DISENTANGLED, "share_att_key": True, "position_buckets": 8}, model_type="deberta-v2")
_masked("modernbert", {**_TEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
                       "sep_token_id": 2})
_masked("eurobert", {**_DECODER, "mask_token_id": 1})
_masked("esm", {**_TEXT, "pad_token_id": 1, "mask_token_id": 2, "emb_layer_norm_before": True})
_masked("mobilebert", {**_TEXT, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16,
                       "pad_token_id": 0, "num_feedforward_networks": 2})
_masked("convbert", {**_TEXT, "embedding_size": 16, "num_attention_heads": 4, "head_ratio": 2, "conv_kernel_size": 3})
_masked("fnet", {**_TEXT, "pad_token_id": 3})
_masked("funnel", {"vocab_size": VOCABULARY, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 32, "n_head": 2,
                   "d_head": 16, "d_inner": 48})
_masked("big_bird", {**_TEXT, "pad_token_id": 0, "attention_type": "original_full"})
_masked("longformer", {**_TEXT, "pad_token_id": 1, "attention_window": 8}, inputs=_globally(text_inputs))
_masked("xlm", {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 64})
_masked(
    "flaubert", {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 64}
)

# Sequence to sequence.
_T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2,
       "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 0}
_BART = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
         "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
         "decoder_start_token_id": 2, "forced_eos_token_id": None, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
_seq2seq("t5 mt5 umt5 longt5", _T5)
_seq2seq("switch_transformers", {**_T5, "num_decoder_layers": 2, "num_experts": 2, "num_sparse_encoder_layers": 1,
                                 "num_sparse_decoder_layers": 1})
_seq2seq("bart mbart pegasus marian m2m_100 blenderbot blenderbot-small plbart mvp", _BART)
_seq2seq("led", {**_BART, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
                 "attention_window": 8}, inputs=_globally(text_to_text_inputs))
_seq2seq("bigbird_pegasus", {**_BART, "attention_type": "original_full"})
_seq2seq("pegasus_x", {**_BART, "block_size": 8, "num_global_tokens": 4})
_seq2seq("prophetnet", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2,
                        "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2, "encoder_ffn_dim": 48,
                        "decoder_ffn_dim": 48, "max_position_embeddings": 64})


_SPEECH = {**_without(_BART, "max_position_embeddings"), "max_source_positions": 20, "max_target_positions": 64}
_seq2seq("whisper", {**_SPEECH, "num_mel_bins": 16, "suppress_tokens": None, "begin_suppress_tokens": None},
         auto="AutoModelForSpeechSeq2Seq", inputs=speech_to_text_inputs)
_seq2seq("speech_to_text", {**_SPEECH, "max_source_positions": 64, "input_feat_per_channel": 16, "conv_channels": 32},
         auto="AutoModelForSpeechSeq2Seq", inputs=speech_to_text_inputs)

# Pictures.
_VIT = {**_WIDTHS, "image_size": 32, "patch_size": 8}
_vision("vit beit data2vec-vision ijepa vit_msn dinov2 dinov2_with_registers", _VIT)
_vision("deit", {**_VIT, "architectures": ["DeiTForImageClassification"]})
_STAGES = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
_vision("swin swinv2 donut-swin", _STAGES)
_vision("focalnet", {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "focal_levels": [1, 1],
                     "focal_windows": [3, 3]})
_CONVNEXT = {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1], "patch_size": 2, "image_size": 32}
_vision("convnext", _CONVNEXT)
_vision("convnextv2", _CONVNEXT)
_vision("hiera", {"image_size": [32, 32], "patch_stride": [4, 4], "embed_dim": 16, "depths": [1, 1],
                  "num_heads": [1, 2], "num_query_pool": 1, "masked_unit_size": [4, 4]})
_vision("segformer", {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
                      "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
                      "mlp_ratios": [2, 2]})
_vision("pvt", {"image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1], "sequence_reduction_ratios": [2, 1],
                "hidden_sizes": [16, 32], "patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [1, 2],
                "mlp_ratios": [2, 2]})
_vision("mobilevit", {"image_size": 128, "initializer_range": 0.2, "hidden_sizes": [16, 32, 32],
                      "neck_hidden_sizes": [16, 16, 16, 32, 32, 32, 64],
                      "num_attention_heads": 2})
_vision("cvt", {"embed_dim": [16, 32, 32], "num_heads": [1, 2, 2], "depth": [1, 2, 3], "mlp_ratio": [2.0, 2.0, 2.0],
                "cls_token": [False, False, True], "drop_path_rate": [0.0, 0.0, 0.0]})
_vision("levit", {"image_size": 128, "drop_path_rate": 0, "hidden_sizes": [16, 32, 48],
                  "num_attention_heads": [1, 2, 2], "depths": [1, 1, 1], "key_dim": [16, 16, 16],
                  "architectures": ["LevitForImageClassification"]})
_vision("resnet", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]})
_CLIP = {"vision_config": _VIT, "text_config": _TEXT}
_vision("clip", _CLIP)
_vision("siglip", {"vision_config": {**_VIT, "vision_use_head": False}, "text_config": _TEXT})

# Sound.
_WAVES = {**_WIDTHS, "vocab_size": VOCABULARY, "conv_dim": [16, 16], "conv_kernel": [8, 4], "conv_stride": [4, 4],
          "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
          "classifier_proj_size": 16, "apply_spec_augment": False, "layerdrop": 0.0}
_audio("wav2vec2 hubert wavlm unispeech-sat wav2vec2-conformer", {**_WAVES, "use_weighted_layer_sum": True})
_audio("unispeech data2vec-audio sew sew-d", _WAVES)
_audio(
    "wav2vec2-bert",
    {**_WAVES, "feature_projection_input_dim": 16, "use_weighted_layer_sum": True},
    inputs=spectrogram_inputs,
)
_audio("audio-spectrogram-transformer", {**_WIDTHS, "num_mel_bins": 16, "max_length": 32, "patch_size": 8,
                                         "frequency_stride": 8, "time_stride": 8}, inputs=spectrogram_inputs)
# fmt: on
