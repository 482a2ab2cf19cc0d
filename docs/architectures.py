# SPDX-License-Identifier: Apache-2.0
"""Configurations of architectures for which neither transformers nor vLLM has a complete one.

The code for most of them comes with the published models. The kind of language model is the
published one, mostly with transformers' default sizes; towers are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.transformers_utils.configs.dotsocr import DotsOCRConfig

Fields = dict[str, Any]

_VIT: Fields = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_channels": 3,
    "patch_size": 14,
    "image_size": 448,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "initializer_factor": 1.0,
}
_SIGLIP = {**_VIT, "model_type": "siglip_vision_model"}
_INTERN_VIT = {
    **_VIT,
    "model_type": "intern_vit_6b",
    "norm_type": "layer_norm",
    "qkv_bias": True,
    "qk_normalization": False,
}
_QWEN_VIT: Fields = {
    "model_type": "vit_of_qwen",
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "tokens_per_second": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1],
    "hidden_act": "silu",
}
_INTERN = {
    "vision_config": _INTERN_VIT,
    "downsample_ratio": 0.5,
    "select_layer": -1,
    "ps_version": "v2",
    "force_image_size": 448,
    "dynamic_image_size": True,
    "use_thumbnail": True,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 12,
    "use_msac": False,
}


def _like(kind: str, **fields: Any) -> Fields:
    """Return transformers' default configuration of a kind, with other fields."""
    return {**CONFIG_MAPPING[kind]().to_dict(), **fields}


def _around(kind: str, name: str = "text_config", **fields: Any) -> Fields:
    """Return a configuration around a kind of language model, which has this name in it."""
    return {name: {"model_type": kind}, **fields}


_DEEPSEEK = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32}
_DEEPSEEK |= {"num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 4}
_DEEPSEEK |= {"n_routed_experts": 4, "first_k_dense_replace": 1, "vocab_size": 256}
_RANKS = ("kv_lora_rank", "q_lora_rank")
_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_PLAIN = {"language_config": {**_DEEPSEEK, **dict.fromkeys(_RANKS), **dict.fromkeys(_SIZES, 0)}}
"""DeepSeek's language model with keys and values per head, in place of latent attention."""
_LATENT = {"language_config": {**_DEEPSEEK, "kv_lora_rank": 32, "q_lora_rank": None}}
_LINEAR = {"projector_type": "linear", "input_dim": 2048, "n_embed": 64}
_OCR = {"model_type": "deepseek_vl_v2", **_PLAIN, "projector_config": _LINEAR, "tile_tag": "2D"}
_DEEPSEEK_V4 = _like("deepseek_v4")
_DEEPSEEK_V4.pop("mlp_layer_types")  # vLLM's class does not know them
_NEMOTRON_H = _around("nemotron_h", "llm_config", vision_config=_VIT)
_KEYE = {"vision_config": {**_VIT, "spatial_merge_size": 2}}
_OVIS: Fields = {
    "vit_config": {
        **_VIT,
        "model_type": "siglip2_navit",
        "hidden_stride": 2,
        "temporal_patch_size": 1,
        "window_size": 112,
        "fullatt_block_indexes": None,
        "use_rope": True,
        "preserve_original_pe": False,
        "num_patches": -1,
        "attention_dropout": 0.0,
    }
}
_OVIS |= {"visual_vocab_size": 128, "hidden_size": 4096}

_MINICPM: Fields = {"version": "4.5", "vision_config": _SIGLIP, "query_num": 64}
_MINICPM["drop_vision_last_layer"] = False

PUBLISHED: Mapping[str, Fields] = {
    "BeeForConditionalGeneration": _like("llava_onevision", text_config={"model_type": "qwen3"}),
    "CohereAsrForConditionalGeneration": {
        "is_encoder_decoder": True,
        "encoder": {"n_heads": 4, "d_model": 64},
        "transf_decoder": {"config_dict": {"num_attention_heads": 4, "hidden_size": 64}},
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
    },
    "DeepseekV4ForConditionalGeneration": {**_DEEPSEEK_V4, "model_type": "deepseek_v4"},
    "DeepseekV41ForCausalLM": {"model_type": "deepseek_v41", "text_config": _DEEPSEEK_V4},
    "DeepseekOCRForCausalLM": _OCR,
    "DeepseekOCR2ForCausalLM": _OCR,
    "UnlimitedOCRForCausalLM": {"model_type": "unlimited-ocr", **_PLAIN},
    "DeepseekVLV2ForCausalLM": {"model_type": "deepseek_vl_v2", **_LATENT},
    "DotsOCRForCausalLM": {"vision_config": {"num_hidden_layers": 2}},
    "Eagle2_5_VLForConditionalGeneration": {
        **_INTERN,
        **_around("qwen2", vision_config={**_SIGLIP, "vision_use_head": False}),
    },
    "H2OVLChatModel": {**_INTERN, **_around("llama", "llm_config")},
    "HfMoondream": {"model_type": "moondream3", "config": {}},
    "InternS1ForConditionalGeneration": _around(
        "qwen3",
        vision_config={
            **_VIT,
            "image_size": [448, 448],
            "patch_size": [14, 14],
            "norm_type": "layer_norm",
            "use_qk_norm": False,
            "attention_bias": True,
            "use_absolute_position_embeddings": True,
            "use_mask_token": False,
            "use_mean_pooling": True,
            "layer_scale_init_value": 0.1,
        },
        downsample_ratio=0.5,
        projector_hidden_act="gelu",
    ),
    "InternS1ProForConditionalGeneration": _like("qwen3_vl_moe"),
    "InternS2MobiusForConditionalGeneration": {
        **_like("qwen3_5_moe"),
        "text_config": _like("qwen3_5_moe_text", num_blocks=4),
    },
    "InternS2PreviewForConditionalGeneration": _like("qwen3_5_moe"),
    "InternVLChatModel": {**_INTERN, **_around("qwen2", "llm_config")},
    "KeyeForConditionalGeneration": _like("qwen3", **_KEYE),
    "KeyeVL1_5ForConditionalGeneration": _like("qwen3", **_KEYE),
    "Llama_Nemotron_Nano_VL": {
        **_INTERN,
        **_around("llama", "llm_config", vision_config={"model_type": "radio"}),
        "vit_hidden_size": 64,
        "projector_hidden_size": 64,
    },
    "LlavaOnevision2ForConditionalGeneration": _around(
        "qwen3", vision_config={**_VIT, "spatial_merge_size": 2}, image_token_id=1
    ),
    "MiMoV2OmniForCausalLM": _like(
        "mimo_v2_flash",
        hybrid_layer_pattern=[0, 1, 1, 1] * 12,
        layer_types=["full_attention", *["sliding_attention"] * 3] * 12,
        num_hidden_layers=48,
        moe_layer_freq=[0, *[1] * 47],
        sliding_window_size=128,
        sliding_window=128,
        swa_num_attention_heads=64,
        swa_num_key_value_heads=8,
        swa_head_dim=192,
        swa_v_head_dim=128,
        v_head_dim=128,
        add_swa_attention_sink_bias=True,
        attention_bias=False,
        layernorm_epsilon=1e-5,
        vision_config={
            **_QWEN_VIT,
            "out_hidden_size": 4096,
            "vit_window_attn_types": [-1, -1],
            "use_sink": True,
            "num_query_groups": 2,
            "num_key_value_heads": 2,
            "kv_channels": 32,
            "qk_channels": 32,
            "visual_token_window_size": 64,
        },
    ),
    "MiniCPMO": _like(
        "qwen3", **_MINICPM, audio_pool_step=5, audio_config={"model_type": "whisper"}
    ),
    "MiniCPMV": _like("qwen3", **_MINICPM),
    "MolmoForCausalLM": {
        "hidden_size": 3584,
        "intermediate_size": 37_888,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "embedding_size": 152_064,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "layer_norm_eps": 1e-6,
        "layer_norm_type": "rms",
        "attention_layer_norm": False,
        "norm_after": False,
        "qkv_bias": True,
        "weight_tying": False,
    },
    "Molmo2ForConditionalGeneration": {
        "text_config": {
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "additional_vocab_size": 128,
            "qkv_bias": False,
            "hidden_act": "silu",
            "max_position_embeddings": 36_864,
            "rope_theta": 1_000_000.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "use_qk_norm": True,
            "qk_norm_type": "qwen3",
            "layer_norm_eps": 1e-6,
            "norm_after": False,
            "rope_scaling_layers": None,
        },
        "vit_config": {
            **_VIT,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "image_default_input_size": [378, 378],
            "image_patch_size": 14,
            "image_num_pos": 577,
        },
        "adapter_config": {
            "vit_layers": [-1],
            "pooling_attention_mask": True,
            "hidden_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "intermediate_size": 128,
            "text_hidden_size": 4096,
        },
        "image_patch_id": 1,
        "is_mm_prefix_lm": True,
    },
    "Moondream3ForCausalLM": {"model_type": "moondream3", "config": {}},
    "MoonshotKimiaForCausalLM": _like("qwen2"),
    "MossAudioModel": _around("qwen3", audio_config=_VIT),
    "NemotronH_Nano_Omni_Reasoning_V3": _NEMOTRON_H,
    "NemotronH_Nano_VL_V2": _NEMOTRON_H,
    "NemotronH_Super_Omni_Reasoning_V3": _NEMOTRON_H,
    "NemotronParseForConditionalGeneration": _around(
        "mbart", "decoder", encoder=_VIT, is_encoder_decoder=True
    ),
    "NVLM_D": {**_INTERN, **_around("qwen2", "llm_config")},
    "OpenCUAForConditionalGeneration": _around(
        "qwen2", vision_config={**_QWEN_VIT, "out_hidden_size": 4096}
    ),
    "OpenPanguVLForConditionalGeneration": _like(
        "qwen2", vision_config={**_QWEN_VIT, "out_hidden_size": 4096}, image_token_id=1
    ),
    "Ovis": {
        "model_type": "ovis",
        **_around("qwen2", "llm_config"),
        "visual_tokenizer_config": {
            "model_type": "siglip_visual_tokenizer",
            "backbone_config": _SIGLIP,
        },
        "hidden_size": 4096,
    },
    "Ovis2_5": _around("qwen3", **_OVIS),
    "Ovis2_6ForCausalLM": _around("qwen3", **_OVIS),
    "Ovis2_6_MoeForCausalLM": _around("qwen3_moe", **_OVIS),
    "Phi3VForCausalLM": _like(
        "phi3",
        max_position_embeddings=131_072,
        sliding_window=262_144,
        img_processor={"image_dim_out": 1024, "num_img_tokens": 144},
        embd_layer={"use_hd_transform": True, "with_learnable_separator": True},
    ),
    "Phi4ForCausalLMV": _like("phi3", mm_hidden_size=1152, sliding_window=None),
    "Phi4MMForCausalLM": _like("phi3", max_position_embeddings=131_072, sliding_window=262_144),
    "PixtralForConditionalGeneration": {
        "text_config": {"model_type": "mistral", "sliding_window": None},
        "vision_config": {
            **_VIT,
            "rope_theta": 10_000.0,
            "adapter_bias": True,
            "image_token_id": 1,
        },
    },
    "RForConditionalGeneration": _like("llava_onevision", text_config={"model_type": "qwen3"}),
    "SkyworkR1VChatModel": {**_INTERN, **_around("qwen2", "llm_config")},
    "StepVLForConditionalGeneration": _around(
        "qwen3",
        vision_config={
            "width": 64,
            "layers": 2,
            "heads": 2,
            "output_dim": None,
            "patch_size": 14,
            "image_size": 728,
            "mlp_ratio": 2.0,
            "hidden_act": "quick_gelu",
            "ls_init_value": 0.1,
            "use_abs_posemb": True,
            "use_cls_token": False,
            "use_rope2d": True,
            "use_ln_pre": True,
            "use_ln_post": False,
        },
        projector_bias=False,
    ),
    "VoxtralRealtimeGeneration": _like("voxtral_realtime"),
}
"""Fields of `config.json` by architecture, see `register`."""


ADDED: Mapping[str, Mapping[str, Fields]] = {
    "Glm4vMoeForConditionalGeneration": {"text_config": {"head_dim": 128, "use_qk_norm": False}},
    "Qwen3VLMoeForConditionalGeneration": {"text_config": {"norm_topk_prob": True}},
}
"""Fields that vLLM reads and transformers' default configuration lacks, by part."""


def _init(self: PreTrainedConfig, **fields: Any) -> None:
    """Store the fields; a configuration in them gets its own class if transformers knows it."""
    for name, value in fields.items():
        if isinstance(value, dict) and name.endswith(("_config", "decoder", "encoder")):
            kind = value.get("model_type")
            known = kind in CONFIG_MAPPING
            fields[name] = CONFIG_MAPPING[kind](**value) if known else PreTrainedConfig(**value)
    PreTrainedConfig.__init__(self, **fields)


def register(architecture: str) -> Fields:
    """Return an architecture's fields, with a `model_type` that transformers knows from now on."""
    fields = PUBLISHED[architecture]
    if fields.get("model_type") in _CONFIG_REGISTRY:
        return fields  # a class of vLLM's own
    if architecture == "DotsOCRForCausalLM":  # vLLM asks for this class
        AutoConfig.register(DotsOCRConfig.model_type, DotsOCRConfig, exist_ok=True)
        return {**fields, "model_type": DotsOCRConfig.model_type}
    kind = architecture.lower()
    # A subclass that inherits `__init__` would get another one.
    config_class = type(architecture, (PreTrainedConfig,), {"model_type": kind, "__init__": _init})
    AutoConfig.register(kind, config_class, exist_ok=True)
    return {**fields, "model_type": kind}
