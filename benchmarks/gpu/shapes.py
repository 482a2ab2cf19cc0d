# SPDX-License-Identifier: Apache-2.0
"""Shapes of well-known vision-language models, written as folders without weights.

vLLM fills the weights itself (`load_format="dummy"`). Sizes of the vision towers are the real ones
as well; tokenizers have one token a byte.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DTYPE_BYTES = 2
"""bfloat16, weights and cache."""

MAX_POSITIONS = 40960
MOST_TOKENS_PER_IMAGE = 2304
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_SPECIAL = {
    "llava": ["<|endoftext|>", "<|im_end|>", "<image>"],
    "qwen": [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ],
}
_MEAN, _DEVIATION = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


@dataclass(frozen=True)
class VisionShape:
    """The vision tower."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    patch: int


@dataclass(frozen=True)
class Shape:
    """A model, as far as its speed depends on it. `arch` is llava, qwen2_5_vl or qwen3_vl."""

    name: str
    arch: str
    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    vision: VisionShape
    image_side: int = 24
    """Tokens a side of every image, where they are all resized to one size (LLaVA)."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * DTYPE_BYTES

    @property
    def image_text(self) -> str:
        """What stands for one image in a prompt."""
        return "<image>" if self.arch == "llava" else QWEN_IMAGE

    @property
    def pixels_per_token(self) -> int:
        """Side of the square that becomes one token; LLaVA's images are all resized to one size."""
        return self.vision.patch if self.arch == "llava" else 2 * self.vision.patch


QWEN3_VL_8B = Shape(
    "Qwen3-VL-8B", "qwen3_vl", 4096, 36, 32, 8, 128, 12288, 151936,
    VisionShape(1152, 27, 16, 4304, 16),
)  # fmt: skip
QWEN2_5_VL_7B = Shape(
    "Qwen2.5-VL-7B", "qwen2_5_vl", 3584, 28, 28, 4, 128, 18944, 152064,
    VisionShape(1280, 32, 16, 3420, 14),
)  # fmt: skip
LLAVA_7B = Shape(
    "LLaVA-1.5-7B", "llava", 4096, 32, 32, 32, 128, 11008, 32064,
    VisionShape(1024, 24, 16, 4096, 14),
)  # fmt: skip


def tiny(shape: Shape) -> Shape:
    """The same architecture in a size that any machine runs at once."""
    return replace(
        shape,
        name=f"{shape.name}, tiny",
        hidden=128,
        layers=2,
        query_heads=4,
        kv_heads=2,
        head_size=32,
        intermediate=256,
        vocabulary=320,
        image_side=8,
        vision=replace(shape.vision, hidden=64, layers=2, heads=2, intermediate=128),
    )


def write_model(folder: Path, shape: Shape) -> Path:
    """Write configuration, tokenizer and processor of `shape` to a new folder, and return it."""
    folder.mkdir(parents=True)
    ids = _write_tokenizer(folder, shape)
    write = {"llava": _write_llava, "qwen2_5_vl": _write_qwen2_5, "qwen3_vl": _write_qwen3}
    write[shape.arch](folder, shape, ids)
    return folder


def _write_tokenizer(folder: Path, shape: Shape) -> dict[str, int]:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    special = _SPECIAL["llava" if shape.arch == "llava" else "qwen"]
    tokens.add_special_tokens([AddedToken(token, special=True) for token in special])
    PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_POSITIONS,
    ).save_pretrained(folder)
    if shape.arch != "llava":
        # Qwen's processors load a tokenizer of their own class.
        _write(folder, "vocab.json", tokens.get_vocab())
        (folder / "merges.txt").write_text("#version: 0.2\n")
        path = folder / "tokenizer_config.json"
        settings = {**json.loads(path.read_text()), "tokenizer_class": "Qwen2TokenizerFast"}
        _write(folder, path.name, settings)
    vocabulary: dict[str, int] = tokens.get_vocab()
    return {token: vocabulary[token] for token in special}


def _text_config(shape: Shape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


def _rope(shape: Shape, weights: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    """Multimodal rotary embedding, its pairs split between time, height and width."""
    pairs = shape.head_size // 2
    sections = [pairs * weight // sum(weights) for weight in weights]
    sections[0] += pairs - sum(sections)
    return {"rope_type": "default", "mrope_section": sections, **more}


def _qwen_ids(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _write_qwen2_5(folder: Path, shape: Shape, ids: dict[str, int]) -> None:
    from transformers import Qwen2_5_VLConfig

    vision = shape.vision
    config = Qwen2_5_VLConfig(
        text_config={
            **_text_config(shape),
            "rms_norm_eps": 1e-6,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "rope_parameters": _rope(shape, (2, 3, 3), rope_theta=1_000_000.0),
        },
        vision_config={
            "depth": vision.layers,
            "hidden_size": vision.hidden,
            "intermediate_size": vision.intermediate,
            "num_heads": vision.heads,
            "patch_size": vision.patch,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 8 * vision.patch,
            "fullatt_block_indexes": list(range(7, vision.layers, 8)) or [vision.layers - 1],
            "out_hidden_size": shape.hidden,
        },
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        tie_word_embeddings=False,
        dtype="bfloat16",
        **_qwen_ids(ids),
    )
    config.save_pretrained(folder)
    _write_qwen_processor(folder, shape, "Qwen2_5_VLProcessor", _MEAN, _DEVIATION)


def _write_qwen3(folder: Path, shape: Shape, ids: dict[str, int]) -> None:
    from transformers import Qwen3VLConfig

    vision = shape.vision
    config = Qwen3VLConfig(
        text_config={
            **_text_config(shape),
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "rope_parameters": _rope(
                shape, (24, 20, 20), rope_theta=5_000_000.0, mrope_interleaved=True
            ),
        },
        vision_config={
            "depth": vision.layers,
            "hidden_size": vision.hidden,
            "intermediate_size": vision.intermediate,
            "num_heads": vision.heads,
            "patch_size": vision.patch,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24] if vision.layers > 24 else [0],
            "out_hidden_size": shape.hidden,
        },
        architectures=["Qwen3VLForConditionalGeneration"],
        tie_word_embeddings=False,
        dtype="bfloat16",
        **_qwen_ids(ids),
    )
    config.save_pretrained(folder)
    _write_qwen_processor(folder, shape, "Qwen3VLProcessor", [0.5] * 3, [0.5] * 3)


def _write_qwen_processor(
    folder: Path, shape: Shape, name: str, mean: list[float], deviation: list[float]
) -> None:
    area = shape.pixels_per_token**2
    common = {
        "processor_class": name,
        "image_mean": mean,
        "image_std": deviation,
        "patch_size": shape.vision.patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 4 * area, "longest_edge": MOST_TOKENS_PER_IMAGE * area},
    }
    _write(
        folder,
        "preprocessor_config.json",
        {**common, "image_processor_type": "Qwen2VLImageProcessorFast"},
    )
    kind = "Qwen3VLVideoProcessor" if shape.arch == "qwen3_vl" else "Qwen2VLVideoProcessor"
    _write(folder, "video_preprocessor_config.json", {**common, "video_processor_type": kind})
    _write(folder, "processor_config.json", {"processor_class": name})


def _write_llava(folder: Path, shape: Shape, ids: dict[str, int]) -> None:
    from transformers import LlavaConfig

    vision = shape.vision
    side = shape.image_side * vision.patch
    config = LlavaConfig(
        text_config={
            **_text_config(shape),
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "rms_norm_eps": 1e-5,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
        },
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": vision.hidden,
            "intermediate_size": vision.intermediate,
            "num_attention_heads": vision.heads,
            "num_hidden_layers": vision.layers,
            "image_size": side,
            "patch_size": vision.patch,
            "projection_dim": vision.hidden,
        },
        image_token_index=ids["<image>"],
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlavaForConditionalGeneration"],
    )
    config.save_pretrained(folder)
    _write(
        folder,
        "preprocessor_config.json",
        {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "size": {"shortest_edge": side},
            "crop_size": {"height": side, "width": side},
            "image_mean": _MEAN,
            "image_std": _DEVIATION,
        },
    )
    _write(
        folder,
        "processor_config.json",
        {
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "patch_size": vision.patch,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    )


def _write(folder: Path, name: str, data: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(data, indent=1))
