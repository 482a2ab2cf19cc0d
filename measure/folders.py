# SPDX-License-Identifier: Apache-2.0
"""Folders of LLaVA-like models: their tokenizer, their configuration, and writing them once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    CLIPImageProcessor,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)


def written_once(
    root: Path | str, name: str, description: Mapping[str, Any], write: Callable[[Path], None]
) -> Path:
    """Return the folder of a model below `root`; `write` fills it on the first call.

    The folder's name holds a hash of `description`. With several processes, the folder appears
    complete or not at all.
    """
    key = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:12]
    folder = Path(root, f"{name}-{key}")
    if folder.exists():
        return folder
    Path(root).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        write(Path(scratch, "model"))
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(Path(scratch, "model"), folder)
    return folder


def byte_tokenizer(
    special: Sequence[str],
    *,
    eos: str,
    pad: str,
    max_length: int,
    tokenizer_class: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast,
    **options: Any,
) -> tuple[PreTrainedTokenizerFast, dict[str, int]]:
    """Return a tokenizer with one token per byte, and the ids of its special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = tokenizer_class(
        tokenizer_object=tokens,
        eos_token=eos,
        pad_token=pad,
        model_max_length=max_length,
        **options,
    )
    vocabulary = tokenizer.get_vocab()
    return tokenizer, {token: vocabulary[token] for token in special}


def text_sizes(
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    query_heads: int,
    kv_heads: int,
    max_positions: int,
) -> dict[str, Any]:
    """Return the sizes of a language model under transformers' names."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
    }


def clip_config(
    *,
    image_size: int,
    patch: int,
    layers: int,
    hidden: int = 64,
    intermediate: int = 128,
    heads: int = 2,
) -> dict[str, Any]:
    """Return the configuration of a CLIP vision tower; sizes of images and patches in pixels."""
    return {
        "model_type": "clip_vision_model",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "image_size": image_size,
        "patch_size": patch,
        "projection_dim": hidden,
    }


def llava_config(
    text: Mapping[str, Any], tower: Mapping[str, Any], image_token: int, dtype: str
) -> LlavaConfig:
    """Return the configuration of a LLaVA model with a Llama."""
    return LlavaConfig(
        text_config={"model_type": "llama", "architectures": ["LlamaForCausalLM"], **text},
        vision_config=dict(tower),
        image_token_index=image_token,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
        dtype=dtype,
        architectures=["LlavaForConditionalGeneration"],
    )


def llava_processor(
    tokenizer: PreTrainedTokenizerBase, image_size: int, patch: int
) -> LlavaProcessor:
    """Return the processor of a LLaVA model whose images all become squares of `image_size`."""
    return LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": image_size},
            crop_size={"height": image_size, "width": image_size},
        ),
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=getattr(tokenizer, "chat_template", None),
    )


def clip_name_of_vllm(name: str) -> str:
    """Return the name under which vLLM expects a weight of the CLIP tower."""
    before, tower, after = name.partition("vision_tower.")
    if not tower or after.startswith("vision_model."):
        return name
    return f"{before}{tower}vision_model.{after}"


def rename_weights(folder: Path, rename: Callable[[str], str]) -> None:
    """Rename every stored weight; transformers understands both spellings."""
    path = str(folder / "model.safetensors")
    weights = {rename(name): weight for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
