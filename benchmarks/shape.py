# SPDX-License-Identifier: Apache-2.0
"""Shapes of the models that are measured, written as folders without weights.

vLLM fills the weights itself (`load_format="dummy"`): speed does not depend on what they say.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import CLIPImageProcessor, LlavaConfig, LlavaProcessor, PreTrainedTokenizerFast

PATCH = 14
IMAGE = "<image>"


@dataclass(frozen=True)
class ModelShape:
    """A LLaVA model: a small CLIP tower, whose images have many tokens, and a Llama.

    `image_size` is the side of the square every image is resized to, in pixels; 336 gives LLaVA
    1.5's 576 tokens an image.
    """

    name: str
    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int = 32000
    image_size: int = 336
    max_positions: int = 32768
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights and cache."""

    @property
    def dtype_bytes(self) -> int:
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def tokens_per_image(self) -> int:
        return (self.image_size // PATCH) ** 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.dtype_bytes

    @property
    def weight_bytes_per_step(self) -> int:
        """Weights that a decode step reads: all layers and the output head, no embedding table."""
        attention = 2 * self.hidden * (self.query_heads + self.kv_heads) * self.head_size
        layer = attention + 3 * self.hidden * self.intermediate
        return (self.layers * layer + self.hidden * self.vocabulary) * self.dtype_bytes


def model_folder(root: Path, shape: ModelShape) -> Path:
    """The folder of `shape` below `root`, written on the first call."""
    key = hashlib.sha256(json.dumps(asdict(shape), sort_keys=True).encode()).hexdigest()[:12]
    folder = root / f"{shape.name}-{key}"
    if folder.exists():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        _write(Path(scratch, "model"), shape)
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(Path(scratch, "model"), folder)
    return folder


def _write(folder: Path, shape: ModelShape) -> None:
    """Write configuration, tokenizer (one token a byte) and processor."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", IMAGE]
    tokens.add_special_tokens([AddedToken(token, special=True) for token in special])
    ids = tokens.get_vocab()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token="<eos>",
        pad_token="<pad>",
        model_max_length=shape.max_positions,
    )
    config = LlavaConfig(
        text_config={
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.query_heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_size,
            "max_position_embeddings": shape.max_positions,
            "bos_token_id": None,
            "eos_token_id": ids["<eos>"],
            "tie_word_embeddings": False,
            "dtype": shape.dtype,
        },
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "image_size": shape.image_size,
            "patch_size": PATCH,
            "projection_dim": 64,
        },
        image_token_index=ids[IMAGE],
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
        dtype=shape.dtype,
        architectures=["LlavaForConditionalGeneration"],
    )
    config.save_pretrained(folder)
    LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": shape.image_size},
            crop_size={"height": shape.image_size, "width": shape.image_size},
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
