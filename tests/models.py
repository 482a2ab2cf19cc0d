# SPDX-License-Identifier: Apache-2.0
"""Tiny vision-language models with random weights, as folders that vLLM and transformers load.

Nothing is downloaded. The weights are float32 and stored, not made up by the loader, so that both
frameworks compute the same function and greedy text can be compared token for token.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

PATCH = 14
MAX_POSITIONS = 8192
LLAVA_IMAGE = "<image>"
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"

_CHAT_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LLAVA_TOKENS = [*_CHAT_TOKENS, LLAVA_IMAGE]
_QWEN_TOKENS = [
    *_CHAT_TOKENS,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}"
    "{% if c['type'] in ('image', 'image_url') %}IMAGE{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    """What a tiny model looks like; equal descriptions give byte-identical weights.

    Attributes:
        arch: "llava" or "qwen2_5_vl".
        image_size: side of the square LLaVA resizes every image to, in pixels, a multiple of 14;
            an image has (image_size / 14)^2 vision tokens. Qwen2.5-VL takes images as they are
            and has one token per 28 x 28 pixels.
        vision_gain: factor on the projector's output, so that the text depends on the images.
    """

    arch: str = "llava"
    image_size: int = 56
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    seed: int = 0
    initializer_range: float = 0.08
    query_key_gain: float = 1.5
    vision_gain: float = 4.0

    @property
    def image_text(self) -> str:
        """Return the text that stands for one image in a prompt."""
        return {"llava": LLAVA_IMAGE, "qwen2_5_vl": QWEN_IMAGE}[self.arch]

    def text_config(self) -> dict[str, Any]:
        """Return the sizes of the language model."""
        hidden = self.heads * self.head_size
        return {
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": MAX_POSITIONS,
            "tie_word_embeddings": False,
        }


def model_folder(root: Path | str, model: TinyModel) -> Path:
    """Return the folder of `model` below `root`, writing it on the first call.

    Safe under concurrent test processes: the folder appears complete or not at all.
    """
    key = hashlib.sha256(json.dumps(asdict(model), sort_keys=True).encode()).hexdigest()[:12]
    folder = Path(root, f"{model.arch}-{key}")
    if folder.exists():
        return folder
    Path(root).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        _WRITERS[model.arch](Path(scratch, "model"), model)
        with contextlib.suppress(OSError):  # another process was faster
            os.rename(Path(scratch, "model"), folder)
    return folder


def random_image(seed: int, width: int = 56, height: int = 56, cells: int = 7) -> Image.Image:
    """Return an RGB image of `cells` x `cells` randomly coloured rectangles."""
    colours = np.random.default_rng(seed).integers(0, 256, (cells, cells, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST)


def random_text(seed: int, length: int) -> str:
    """Return `length` random letters and spaces, one token each."""
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz    ", dtype=np.uint8)
    return np.random.default_rng(seed).choice(letters, length).tobytes().decode()


def write_llava(folder: Path, model: TinyModel) -> None:
    """Write a LLaVA model: CLIP tower, two-layer projector, Llama."""
    tokenizer, ids = _tokenizer(_LLAVA_TOKENS, LLAVA_IMAGE)
    config = LlavaConfig(
        text_config={
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": len(tokenizer),
            "rms_norm_eps": 1e-5,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "dtype": "float32",
            **model.text_config(),
        },
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_hidden_layers": 3,
            "image_size": model.image_size,
            "patch_size": PATCH,
            "projection_dim": 64,
        },
        image_token_index=ids[LLAVA_IMAGE],
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
        dtype="float32",
    )
    network = LlavaForConditionalGeneration(config)
    _initialise(network, model, "multi_modal_projector.linear_2", silent=ids.values())
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": model.image_size},
            crop_size={"height": model.image_size, "width": model.image_size},
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    _save(folder, network, processor, ids)
    _rename_weights(folder, _clip_name_of_vllm)


def write_qwen2_5_vl(folder: Path, model: TinyModel) -> None:
    """Write a Qwen2.5-VL model; images of different sizes have different numbers of tokens."""
    tokenizer, ids = _tokenizer(_QWEN_TOKENS, QWEN_IMAGE, Qwen2Tokenizer)
    sizes = model.text_config()
    quarter = model.head_size // 8  # rotary pairs per head = head size / 2, split 1 : 1.5 : 1.5
    sections = [2 * quarter, *2 * [(model.head_size // 2 - 2 * quarter) // 2]]
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "rms_norm_eps": 1e-6,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "use_sliding_window": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                "mrope_section": sections,
            },
            "dtype": "float32",
            **sizes,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "out_hidden_size": sizes["hidden_size"],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        dtype="float32",
    )
    network = Qwen2_5_VLForConditionalGeneration(config)
    _initialise(network, model, "visual.merger.mlp.2", silent=ids.values())
    pixels = {"size": {"shortest_edge": 28 * 28, "longest_edge": 1280 * 28 * 28}}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**pixels),
        chat_template=tokenizer.chat_template,
    )
    _save(folder, network, processor, ids)


_WRITERS: dict[str, Callable[[Path, TinyModel], None]] = {
    "llava": write_llava,
    "qwen2_5_vl": write_qwen2_5_vl,
}


def _tokenizer(
    special: Sequence[str],
    image_text: str,
    tokenizer_class: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast,
) -> tuple[PreTrainedTokenizerFast, dict[str, int]]:
    """Return a tokenizer with one token per byte, and the ids of its special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = tokenizer_class(
        tokenizer_object=tokens,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE.replace("IMAGE", image_text),
        model_max_length=MAX_POSITIONS,
    )
    return tokenizer, {token: tokenizer.convert_tokens_to_ids(token) for token in special}


@torch.no_grad()
def _initialise(
    network: PreTrainedModel, model: TinyModel, projector: str, silent: Iterable[int]
) -> None:
    """Fill `network` with random weights under which greedy text varies and never ends.

    With the default initialisation such a network repeats two tokens for ever, and a comparison
    of texts would prove nothing. The tokens in `silent` get a logit of 0, which never wins: the
    text neither stops nor contains image placeholders.
    """
    generator = torch.Generator().manual_seed(model.seed)
    for name, parameter in network.named_parameters():
        if parameter.ndim < 2 and "embedding" not in name:
            continue  # norms and biases keep their neutral values
        scale = model.initializer_range
        if "q_proj" in name or "k_proj" in name:
            scale *= model.query_key_gain
        if projector in name:
            scale *= model.vision_gain
        parameter.normal_(0.0, scale, generator=generator)
    network.get_output_embeddings().weight[list(silent)] = 0.0


def _save(folder: Path, network: PreTrainedModel, processor: Any, ids: dict[str, int]) -> None:
    """Save weights, configuration and processor."""
    network.generation_config.eos_token_id = ids["<|im_end|>"]
    network.generation_config.pad_token_id = ids["<|endoftext|>"]
    network.save_pretrained(folder)
    processor.save_pretrained(folder)


def _clip_name_of_vllm(name: str) -> str:
    """Return the name under which vLLM expects a weight of the CLIP tower."""
    before, tower, after = name.partition("vision_tower.")
    if not tower or after.startswith("vision_model."):
        return name
    return f"{before}{tower}vision_model.{after}"


def _rename_weights(folder: Path, rename: Callable[[str], str]) -> None:
    """Rename every stored weight; transformers understands both spellings."""
    path = str(folder / "model.safetensors")
    weights = {rename(name): weight for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
