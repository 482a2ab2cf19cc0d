# SPDX-License-Identifier: Apache-2.0
"""Shapes of vision-language models, and of a language model, written as folders without weights.

vLLM fills the weights itself (`load_format="dummy"`): speed does not depend on their values.
Tokenizers have one token per byte.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from transformers import LlamaConfig, Qwen3VLConfig

from measure.folders import (
    byte_tokenizer,
    clip_config,
    llava_config,
    llava_processor,
    text_sizes,
    written_once,
)

MAX_POSITIONS = 40960
MAX_TOKENS_PER_IMAGE = 2304
LLAVA_IMAGE = "<image>"
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_LLAVA_TOKENS = ("<|endoftext|>", "<|im_end|>", LLAVA_IMAGE)
_QWEN_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)


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
    """A model, as far as its speed depends on it."""

    name: str
    arch: Literal["llava", "qwen3_vl", "llama"]
    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    vision: VisionShape
    image_side: int = 24
    """Tokens along a side of every image of LLaVA, which resizes all to one size."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights and cache."""

    @property
    def dtype_bytes(self) -> int:
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.dtype_bytes

    @property
    def weight_bytes_per_step(self) -> int:
        """Return the bytes of weights that a decode step reads: layers and output head."""
        attention = 2 * self.hidden * (self.query_heads + self.kv_heads) * self.head_size
        layer = attention + 3 * self.hidden * self.intermediate
        return (self.layers * layer + self.hidden * self.vocabulary) * self.dtype_bytes

    @property
    def image_text(self) -> str:
        """Return the text of one image in a prompt."""
        return LLAVA_IMAGE if self.arch == "llava" else QWEN_IMAGE

    @property
    def pixels_per_token(self) -> int:
        """Return the side of the square of pixels that becomes one token."""
        return self.vision.patch if self.arch == "llava" else 2 * self.vision.patch


QWEN3_VL_8B = Shape(
    "Qwen3-VL-8B", "qwen3_vl", 4096, 36, 32, 8, 128, 12288, 151936,
    VisionShape(1152, 27, 16, 4304, 16),
)  # fmt: skip
LLAVA_7B = Shape(
    "LLaVA-1.5-7B", "llava", 4096, 32, 32, 32, 128, 11008, 32064,
    VisionShape(1024, 24, 16, 4096, 14),
)  # fmt: skip


def small_llava(
    name: str,
    hidden: int,
    layers: int,
    query_heads: int,
    kv_heads: int,
    head_size: int,
    intermediate: int,
    vocabulary: int = 32000,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
) -> Shape:
    """Return a LLaVA model for CPUs: LLaVA 1.5's 576 tokens per image, and a small tower."""
    return Shape(
        name, "llava", hidden, layers, query_heads, kv_heads, head_size, intermediate, vocabulary,
        VisionShape(64, 2, 2, 128, 14), dtype=dtype,
    )  # fmt: skip


def tiny(shape: Shape) -> Shape:
    """Return the same architecture in a size for tests."""
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


def model_folder(root: Path | str, shape: Shape) -> Path:
    """Return the folder of `shape` below `root`, written on the first call."""
    name = shape.name.replace(" ", "").replace(",", "-")
    return written_once(root, name, asdict(shape), partial(_write_model, shape))


def _write_model(shape: Shape, folder: Path) -> None:
    """Write configuration, tokenizer and processor to a new folder."""
    writers = {"llava": _write_llava, "qwen3_vl": _write_qwen3, "llama": _write_llama}
    writers[shape.arch](folder, shape)


def _write_llama(folder: Path, shape: Shape) -> None:
    tokenizer, ids = byte_tokenizer(
        _LLAVA_TOKENS, eos="<|im_end|>", pad="<|endoftext|>", max_length=MAX_POSITIONS
    )
    tokenizer.save_pretrained(folder)
    text = _text_config(shape, ids["<|im_end|>"], epsilon=1e-5)
    LlamaConfig(architectures=["LlamaForCausalLM"], **text).save_pretrained(folder)


def _write_qwen_tokenizer(folder: Path) -> tuple[int, dict[str, int]]:
    """Write the tokenizer; return the end token's id, and others under the configs' names."""
    tokenizer, ids = byte_tokenizer(
        _QWEN_TOKENS, eos="<|im_end|>", pad="<|endoftext|>", max_length=MAX_POSITIONS
    )
    tokenizer.save_pretrained(folder)
    # Qwen's processors load their own class of tokenizer.
    _write(folder, "vocab.json", tokenizer.get_vocab())
    (folder / "merges.txt").write_text("#version: 0.2\n")
    path = folder / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "tokenizer_class": "Qwen2TokenizerFast"}
    _write(folder, path.name, settings)
    return ids["<|im_end|>"], {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _text_config(shape: Shape, eos: int, epsilon: float = 1e-6) -> dict[str, Any]:
    return {
        **text_sizes(
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            layers=shape.layers,
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            max_positions=MAX_POSITIONS,
        ),
        "vocab_size": shape.vocabulary,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": epsilon,
        "bos_token_id": None,
        "eos_token_id": eos,
        "dtype": shape.dtype,
    }


def _write_qwen3(folder: Path, shape: Shape) -> None:
    eos, ids = _write_qwen_tokenizer(folder)
    vision = shape.vision
    # Pairs of the rotary embedding for time, height and width.
    height = width = shape.head_size // 2 * 20 // 64
    config = Qwen3VLConfig(
        text_config={
            **_text_config(shape, eos),
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5_000_000.0,
                "mrope_section": [shape.head_size // 2 - height - width, height, width],
                "mrope_interleaved": True,
            },
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
        dtype=shape.dtype,
        **ids,
    )
    config.save_pretrained(folder)
    area = shape.pixels_per_token**2
    images = {
        "processor_class": "Qwen3VLProcessor",
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "patch_size": vision.patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 4 * area, "longest_edge": MAX_TOKENS_PER_IMAGE * area},
    }
    of_images = {**images, "image_processor_type": "Qwen2VLImageProcessorFast"}
    of_videos = {**images, "video_processor_type": "Qwen3VLVideoProcessor"}
    _write(folder, "preprocessor_config.json", of_images)
    _write(folder, "video_preprocessor_config.json", of_videos)
    _write(folder, "processor_config.json", {"processor_class": "Qwen3VLProcessor"})


def _write_llava(folder: Path, shape: Shape) -> None:
    tokenizer, ids = byte_tokenizer(
        _LLAVA_TOKENS, eos="<|im_end|>", pad="<|endoftext|>", max_length=MAX_POSITIONS
    )
    vision = shape.vision
    side = shape.image_side * vision.patch
    tower = clip_config(
        image_size=side,
        patch=vision.patch,
        layers=vision.layers,
        hidden=vision.hidden,
        intermediate=vision.intermediate,
        heads=vision.heads,
    )
    text = _text_config(shape, ids["<|im_end|>"], epsilon=1e-5)
    llava_config(text, tower, ids[LLAVA_IMAGE], shape.dtype).save_pretrained(folder)
    llava_processor(tokenizer, side, vision.patch).save_pretrained(folder)


def _write(folder: Path, name: str, data: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(data, indent=1))
