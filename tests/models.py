# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, as folders that vLLM and transformers load.

Nothing is downloaded. The weights are stored in float32, so that both frameworks compute the same
function and greedy text can be compared token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    Cohere2VisionConfig,
    Cohere2VisionForConditionalGeneration,
    Cohere2VisionImageProcessor,
    Cohere2VisionProcessor,
    Exaone4_5_Config,
    Exaone4_5_ForConditionalGeneration,
    Exaone4_5_Processor,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_6ImageProcessor,
    MiniCPMV4_6Processor,
    MiniCPMV4_6VideoProcessor,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

from measure.folders import (
    byte_tokenizer,
    clip_config,
    clip_name_of_vllm,
    llava_config,
    llava_processor,
    rename_weights,
    text_sizes,
    written_once,
)

PATCH = 14
MAX_POSITIONS = 8192
WINDOW = 64
"""Tokens that layers with a sliding window attend to, in models that have some."""
LLAVA_IMAGE = "<image>"
LLAVA_VIDEO = "<video>"
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
INTERN_IMAGE = "<IMG_CONTEXT>"
GEMMA_IMAGE = "<start_of_image>"
GEMMA4_IMAGE = "<|image|>"
GEMMA4_TOKENS = 70
"""Most tokens of an image of Gemma 4, the least that vLLM takes."""

_CHAT_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LLAVA_TOKENS = [*_CHAT_TOKENS, LLAVA_IMAGE]
_INTERN_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": INTERN_IMAGE,
    "video_token": LLAVA_VIDEO,
}
_GEMMA_TOKENS = {
    "boi_token": GEMMA_IMAGE,
    "image_token": "<image_soft_token>",
    "eoi_token": "<end_of_image>",
}
_GEMMA4_TOKENS = {
    "image_token": GEMMA4_IMAGE,
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
_COHERE_TOKENS = {
    "image_token": "<|IMG_PATCH|>",
    "boi_token": "<|START_OF_IMG|>",
    "eoi_token": "<|END_OF_IMG|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}
COHERE_IMAGE = _COHERE_TOKENS["image_token"]
_MINICPM_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
MINICPM_IMAGE = _MINICPM_TOKENS["image_token"]
_EXAONE_TOKENS = ["<vision>", "</vision>", "<|image_pad|>", "<|video_pad|>"]
EXAONE_IMAGE = "<vision><|image_pad|></vision>"
_NEWLINES = ["\n" * number for number in range(1, 5)]
"""Gemma 3 writes empty lines around images, and vLLM joins them by these tokens."""
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
    """Description of a tiny model; equal descriptions give byte-identical weights.

    Attributes:
        arch: transformers' name of the kind of model, a key of `FAMILIES`.
        image_size: side of the square tiles of the vision tower in pixels, a multiple of 14
            (InternVL: 28). LLaVA makes one tile of an image, the others several. Qwen models keep
            the size of images and have one token per 28 x 28 pixels.
        full_kv_heads: KV heads in Gemma 4's layers with full attention, by default `kv_heads`.
        vision_gain: factor on the projector's weights, so that the text depends on the images.
    """

    arch: str = "llava"
    image_size: int = 56
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    full_kv_heads: int | None = None
    head_size: int = 32
    seed: int = 0
    initializer_range: float = 0.08
    query_key_gain: float = 1.5
    vision_gain: float = 4.0

    @property
    def image_text(self) -> str:
        """Return the text that stands for one image in a prompt."""
        return FAMILIES[self.arch].image_text

    @property
    def video_text(self) -> str:
        """Return the text that stands for one video in a prompt."""
        return FAMILIES[self.arch].video_text

    def text_config(self) -> dict[str, Any]:
        """Return the sizes of the language model."""
        hidden = self.heads * self.head_size
        return text_sizes(
            hidden=hidden,
            intermediate=2 * hidden,
            layers=self.layers,
            query_heads=self.heads,
            kv_heads=self.kv_heads,
            max_positions=MAX_POSITIONS,
        )


def model_folder(root: Path | str, model: TinyModel) -> Path:
    """Return the folder of `model` below `root`, which is written on the first call."""
    write = FAMILIES[model.arch].write
    return written_once(root, model.arch, asdict(model), lambda folder: write(folder, model))


def random_image(seed: int, width: int = 56, height: int = 56, cells: int = 7) -> Image.Image:
    """Return an RGB image of `cells` x `cells` randomly coloured rectangles."""
    colours = np.random.default_rng(seed).integers(0, 256, (cells, cells, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST)


def random_text(seed: int, length: int) -> str:
    """Return `length` random letters and spaces, one token each."""
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz    ", dtype=np.uint8)
    return np.random.default_rng(seed).choice(letters, length).tobytes().decode()


def random_video(seed: int, frames: int, width: int, height: int) -> tuple[np.ndarray, Any]:
    """Return a video of 2 frames a second as vLLM takes it: uint8 [frames, height, width, 3]."""
    images = [np.asarray(random_image(seed + i, width, height)) for i in range(frames)]
    return np.stack(images), {
        "fps": 2.0,
        "duration": frames / 2.0,
        "total_num_frames": frames,
        "frames_indices": list(range(frames)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def write_llava(folder: Path, model: TinyModel) -> None:
    """Write a LLaVA model: CLIP tower, two-layer projector, Llama."""
    tokenizer, ids = _tokenizer(_LLAVA_TOKENS, LLAVA_IMAGE)
    text = _text_config(model, tokenizer, ids)
    config = llava_config(text, _clip_config(model), ids[LLAVA_IMAGE], "float32")
    processor = llava_processor(tokenizer, model.image_size, PATCH)
    _save(folder, model, LlavaForConditionalGeneration(config), processor, ids)
    rename_weights(folder, clip_name_of_vllm)


def write_llava_next(folder: Path, model: TinyModel) -> None:
    """Write a LLaVA-NeXT model: an image is scaled down and tiled, with a token per row end."""
    tokenizer, ids = _tokenizer(_LLAVA_TOKENS, LLAVA_IMAGE)
    side = model.image_size
    config = LlavaNextConfig(
        text_config=_text_config(model, tokenizer, ids),
        vision_config=_clip_config(model),
        image_token_index=ids[LLAVA_IMAGE],
        image_grid_pinpoints=_pinpoints(side),
        image_seq_length=(side // PATCH) ** 2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    processor = LlavaNextProcessor(
        image_processor=LlavaNextImageProcessor(
            size={"shortest_edge": side},
            crop_size={"height": side, "width": side},
            image_grid_pinpoints=_pinpoints(side),
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    _save(folder, model, LlavaNextForConditionalGeneration(config), processor, ids)
    rename_weights(folder, clip_name_of_vllm)


def write_llava_onevision(folder: Path, model: TinyModel) -> None:
    """Write a LLaVA-OneVision model: tiles as in LLaVA-NeXT, and videos of pooled frames."""
    tokenizer, ids = _tokenizer([*_LLAVA_TOKENS, LLAVA_VIDEO], LLAVA_IMAGE)
    side = model.image_size
    config = LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **_text_config(model, tokenizer, ids, "Qwen2")},
        vision_config={**_clip_config(model), "model_type": "siglip_vision_model"},
        image_token_index=ids[LLAVA_IMAGE],
        video_token_index=ids[LLAVA_VIDEO],
        image_grid_pinpoints=_pinpoints(side, 6),
        tie_word_embeddings=False,
        dtype="float32",
    )
    size = {"height": side, "width": side}
    processor = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(
            size=size, image_grid_pinpoints=_pinpoints(side, 6)
        ),
        tokenizer=tokenizer,
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=(side // PATCH) ** 2,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    )
    _save(folder, model, LlavaOnevisionForConditionalGeneration(config), processor, ids)
    rename_weights(folder, clip_name_of_vllm)


def write_internvl(folder: Path, model: TinyModel) -> None:
    """Write an InternVL model, in transformers' format: images are tiles and a thumbnail."""
    tokenizer, ids = _tokenizer(
        [*_CHAT_TOKENS, *_INTERN_TOKENS.values()],
        INTERN_IMAGE,
        Qwen2Tokenizer,
        extra_special_tokens=_INTERN_TOKENS,
    )
    side = model.image_size
    num_tokens = (side // PATCH // 2) ** 2
    config = InternVLConfig(
        text_config={"model_type": "qwen3", **_text_config(model, tokenizer, ids, "Qwen3")},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "image_size": side,
            "patch_size": PATCH,
            "layer_scale_init_value": 1.0,
        },
        image_token_id=ids[INTERN_IMAGE],
        image_seq_length=num_tokens,
        tie_word_embeddings=False,
        dtype="float32",
    )
    size = {"height": side, "width": side}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, min_patches=1, max_patches=6),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=size),
        image_seq_length=num_tokens,
        chat_template=tokenizer.chat_template,
    )
    _save(folder, model, InternVLForConditionalGeneration(config), processor, ids)


def write_gemma3(folder: Path, model: TinyModel) -> None:
    """Write a Gemma 3 model: two layers with a window of 64 tokens, then one of full attention.

    Its queries are scaled by another number than the size of a head.
    """
    tokenizer, ids = _tokenizer(
        [*_CHAT_TOKENS, *_GEMMA_TOKENS.values(), *_NEWLINES],
        GEMMA_IMAGE,
        Qwen2Tokenizer,
        extra_special_tokens=_GEMMA_TOKENS,
    )
    side = model.image_size
    num_tokens = (side // PATCH) ** 2
    config = Gemma3Config(
        text_config={
            **_text_config(model, tokenizer, ids, "Gemma3"),
            "head_dim": model.head_size,
            "query_pre_attn_scalar": 2 * model.head_size,
            "sliding_window": WINDOW,
            "layer_types": _with_windows(model.layers),
        },
        vision_config={**_clip_config(model), "model_type": "siglip_vision_model"},
        mm_tokens_per_image=num_tokens,
        boi_token_index=ids[_GEMMA_TOKENS["boi_token"]],
        eoi_token_index=ids[_GEMMA_TOKENS["eoi_token"]],
        image_token_index=ids[_GEMMA_TOKENS["image_token"]],
        tie_word_embeddings=False,
        dtype="float32",
    )
    processor = Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": side, "width": side}),
        tokenizer=tokenizer,
        image_seq_length=num_tokens,
        chat_template=tokenizer.chat_template,
    )
    projector = "mm_input_projection"
    _save(folder, model, Gemma3ForConditionalGeneration(config), processor, ids, projector)
    rename_weights(folder, clip_name_of_vllm)


def write_cohere2_vision(folder: Path, model: TinyModel) -> None:
    """Write a Command A Vision model: windows as in `write_gemma3`, images in tiles.

    Its layers with full attention have no rotary positions. Their windows have one token more in
    vLLM than in transformers.
    """
    tokenizer, ids = _tokenizer(
        [*_CHAT_TOKENS, *_COHERE_TOKENS.values()],
        COHERE_IMAGE,
        Qwen2Tokenizer,
        extra_special_tokens=_COHERE_TOKENS,
    )
    side = model.image_size
    text = _text_config(model, tokenizer, ids, "Cohere2")
    del text["rms_norm_eps"]  # with it vLLM takes another norm than transformers
    config = Cohere2VisionConfig(
        text_config={
            **text,
            "model_type": "cohere2",
            "head_dim": model.head_size,
            "layer_norm_eps": 1e-5,
            "logit_scale": 1.0,
            "sliding_window": WINDOW,
            "layer_types": _with_windows(model.layers),
            "tie_word_embeddings": True,
        },
        vision_config={**_clip_config(model), "model_type": "siglip_vision_model"},
        downsample_factor=2,
        alignment_intermediate_size=128,
        image_token_id=ids[COHERE_IMAGE],
        dtype="float32",
    )
    processor = Cohere2VisionProcessor(
        image_processor=Cohere2VisionImageProcessor(
            size={"height": side, "width": side},
            patch_size=side // PATCH // 2,  # tokens of a tile in a row
            max_patches=4,
        ),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
    network = Cohere2VisionForConditionalGeneration(config)
    _save(folder, model, network, processor, ids)
    rename_weights(folder, clip_name_of_vllm)


def write_exaone4_5(folder: Path, model: TinyModel) -> None:
    """Write an Exaone 4.5 model: windows as in `write_gemma3`, images as in Qwen2.5-VL.

    Its layers with full attention have no rotary positions. Queries and keys are normalised.
    """
    tokenizer, ids = _tokenizer([*_CHAT_TOKENS, *_EXAONE_TOKENS], EXAONE_IMAGE, Qwen2Tokenizer)
    text = _text_config(model, tokenizer, ids, "Exaone4")
    config = Exaone4_5_Config(
        text_config={
            **text,
            "model_type": "exaone4",
            "head_dim": model.head_size,
            "sliding_window": WINDOW,
            "layer_types": _with_windows(model.layers),
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "num_key_value_heads": 1,
            "patch_size": PATCH,
            "fullatt_block_indexes": [1],
            "out_hidden_size": text["hidden_size"],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=False,
        dtype="float32",
    )
    side = model.image_size
    pixels = {"size": {"shortest_edge": side * side, "longest_edge": 1280 * 28 * 28}}
    processor = Exaone4_5_Processor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**pixels),
        chat_template=tokenizer.chat_template,
    )
    network = Exaone4_5_ForConditionalGeneration(config)
    _save(folder, model, network, processor, ids, "visual.merger.mlp.2")


def write_gemma4(folder: Path, model: TinyModel) -> None:
    """Write a Gemma 4 model, whose last third of layers reads the caches of those before.

    Layers with full attention have larger heads than those with a window, and one projection for
    keys and values.
    """
    tokenizer, ids = _tokenizer(
        [*_CHAT_TOKENS, *_GEMMA4_TOKENS.values(), "<|video|>"],
        GEMMA4_IMAGE,
        Qwen2Tokenizer,
        extra_special_tokens=_GEMMA4_TOKENS,
    )
    token = {name: ids[text] for name, text in _GEMMA4_TOKENS.items()}
    config = Gemma4Config(
        text_config={
            **_text_config(model, tokenizer, ids, "Gemma4"),
            "head_dim": model.head_size,
            "global_head_dim": 2 * model.head_size,
            "num_global_key_value_heads": model.full_kv_heads or model.kv_heads,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": model.layers // 3,
            "hidden_size_per_layer_input": 0,
            "sliding_window": WINDOW,
            "layer_types": _with_windows(model.layers),
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "patch_size": PATCH,
            "position_embedding_size": 64,
            "default_output_length": GEMMA4_TOKENS,
        },
        audio_config=None,
        boi_token_id=token["boi_token"],
        eoi_token_id=token["eoi_token"],
        image_token_id=token["image_token"],
        audio_token_id=token["audio_token"],
        boa_token_id=token["boa_token"],
        eoa_token_index=token["eoa_token"],
        video_token_id=ids["<|video|>"],
        tie_word_embeddings=False,
        dtype="float32",
    )
    processor = Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(patch_size=PATCH, max_soft_tokens=GEMMA4_TOKENS),
        tokenizer=tokenizer,
        video_processor=Gemma4VideoProcessor(patch_size=PATCH, max_soft_tokens=GEMMA4_TOKENS),
        chat_template=tokenizer.chat_template,
        image_seq_length=GEMMA4_TOKENS,
    )
    # Nothing else scales the products of its queries and keys.
    scaled = replace(model, query_key_gain=model.query_key_gain / 3)
    projector = "embedding_projection"
    _save(folder, scaled, Gemma4ForConditionalGeneration(config), processor, ids, projector)


def write_minicpm_v(folder: Path, model: TinyModel) -> None:
    """Write a MiniCPM-V 4.6 model: the layers of Qwen3.5, behind a tower that reads slices.

    Images of more than `image_size` squared pixels are read as a whole and in slices. A token
    stands for 4 x 4 patches.
    """
    tokenizer, ids = _tokenizer(
        [*_CHAT_TOKENS, *_MINICPM_TOKENS.values()],
        MINICPM_IMAGE,
        Qwen2Tokenizer,
        extra_special_tokens=_MINICPM_TOKENS,
    )
    config = MiniCPMV4_6Config(
        text_config={
            **_text_config(model, tokenizer, ids, "Qwen3_5"),
            "model_type": "qwen3_5_text",
            "head_dim": model.head_size,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                "partial_rotary_factor": 1.0,
            },
            **_delta_nets(model),
        },
        vision_config={**_clip_config(model), "hidden_act": "gelu_pytorch_tanh"},
        insert_layer_id=0,
        image_size=model.image_size,
        image_token_id=ids[MINICPM_IMAGE],
        video_token_id=ids[_MINICPM_TOKENS["video_token"]],
        tie_word_embeddings=False,
        dtype="float32",
    )
    sizes = {"patch_size": PATCH, "scale_resolution": model.image_size}
    processor = MiniCPMV4_6Processor(
        image_processor=MiniCPMV4_6ImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=MiniCPMV4_6VideoProcessor(**sizes),
        chat_template=tokenizer.chat_template,
    )
    network = MiniCPMV4_6ForConditionalGeneration(config)
    _save(folder, model, network, processor, ids, "merger.mlp.0.linear_2")


def _with_windows(layers: int) -> list[str]:
    """Return the kinds of layers: two with a window, then one with full attention."""
    return (["sliding_attention"] * 2 + ["full_attention"]) * (layers // 3)


def write_qwen3(folder: Path, model: TinyModel) -> None:
    """Write a Qwen3 language model, which has no vision."""
    tokenizer, ids = _tokenizer(_CHAT_TOKENS, "", Qwen2Tokenizer)
    config = Qwen3Config(**_text_config(model, tokenizer, ids, "Qwen3"))
    _save(folder, model, Qwen3ForCausalLM(config), tokenizer, ids, projector=None)


def write_qwen3_next(folder: Path, model: TinyModel) -> None:
    """Write a Qwen3-Next language model: a hybrid and a mixture of experts without vision."""
    tokenizer, ids = _tokenizer(_CHAT_TOKENS, "", Qwen2Tokenizer)
    config = Qwen3NextConfig(
        **_text_config(model, tokenizer, ids, "Qwen3Next"),
        **_delta_nets(model),
        **_EXPERTS,
        head_dim=model.head_size,
    )
    _save(folder, model, Qwen3NextForCausalLM(config), tokenizer, ids, projector=None)


def write_phi3(folder: Path, model: TinyModel) -> None:
    """Write a Phi-3 language model whose window is as long as its context."""
    tokenizer, ids = _tokenizer(_CHAT_TOKENS, "", Qwen2Tokenizer)
    text = _text_config(model, tokenizer, ids, "Phi3")
    config = Phi3Config(
        **text,
        pad_token_id=None,
        original_max_position_embeddings=MAX_POSITIONS,
        sliding_window=MAX_POSITIONS,
    )
    _save(folder, model, Phi3ForCausalLM(config), tokenizer, ids, projector=None)


def _text_config(
    model: TinyModel, tokenizer: Any, ids: dict[str, int], kind: str = "Llama"
) -> dict[str, Any]:
    """Return the language model's configuration, without its type unless it is Llama."""
    own = {"model_type": "llama"} if kind == "Llama" else {}
    return {
        **own,
        "architectures": [f"{kind}ForCausalLM"],
        "vocab_size": len(tokenizer),
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "dtype": "float32",
        **({"head_dim": model.head_size} if kind == "Qwen3" else {}),
        **model.text_config(),
    }


def _clip_config(model: TinyModel) -> dict[str, Any]:
    return clip_config(image_size=model.image_size, patch=PATCH, layers=3)


def _pinpoints(side: int, max_tiles: int = 3) -> list[list[int]]:
    """Return the sizes (height, width) that images are fitted to, up to `max_tiles` a side."""
    sides = range(1, max_tiles + 1)
    return [[side * rows, side * columns] for rows in sides for columns in sides]


def write_qwen_vl(folder: Path, model: TinyModel) -> None:
    """Write a Qwen-VL model; images of different sizes have different numbers of tokens."""
    kind = _QWEN_KINDS[model.arch]
    tokenizer, ids = _tokenizer(_QWEN_TOKENS, QWEN_IMAGE, Qwen2Tokenizer)
    sizes = model.text_config()
    quarter = model.head_size // 8  # rotary pairs per head = head size / 2, split 1 : 1.5 : 1.5
    sections = [2 * quarter, *2 * [(model.head_size // 2 - 2 * quarter) // 2]]
    config = kind.config(
        text_config={
            "vocab_size": len(tokenizer),
            "rms_norm_eps": 1e-6,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                "mrope_section": sections,
                **kind.rope,
            },
            "dtype": "float32",
            **kind.text(model),
            **sizes,
        },
        vision_config={
            "depth": 2,
            "num_heads": 2,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **kind.vision(sizes["hidden_size"]),
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        dtype="float32",
    )
    pixels = {"size": {"shortest_edge": 28 * 28, "longest_edge": 1280 * 28 * 28}, **kind.pixels}
    processor = kind.processor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=kind.video_processor(**pixels),
        chat_template=tokenizer.chat_template,
    )
    _save(folder, model, kind.network(config), processor, ids, kind.projector)


@dataclass(frozen=True)
class _QwenKind:
    """Differences between the generations of Qwen-VL."""

    config: Any
    network: Any
    processor: Any
    video_processor: Any
    projector: str
    vision: Callable[[int], dict[str, Any]]
    text: Callable[[TinyModel], dict[str, Any]]
    rope: Mapping[str, Any] = field(default_factory=dict)
    pixels: Mapping[str, Any] = field(default_factory=dict)


_QWEN3_PIXELS = {"patch_size": PATCH, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
"""vLLM normalises videos like images; transformers' defaults for the two differ."""


_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 4,  # all: rounding cannot choose among them
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


def _delta_nets(model: TinyModel) -> dict[str, Any]:
    """Return which layers of a hybrid are gated delta nets, and their sizes."""
    return {
        "layer_types": ["linear_attention", "full_attention"] * (model.layers // 2),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,  # the least that vLLM's CPU kernel takes
        "linear_value_head_dim": 64,
    }


def _qwen3_5(config: Any, network: Any, **text: Any) -> _QwenKind:
    """Return a hybrid with gated delta nets and full attention in turn."""
    return _QwenKind(
        config,
        network,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
        "linear_fc2",
        vision=lambda hidden: {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_position_embeddings": 64,
            "out_hidden_size": hidden,
        },
        text=lambda model: {"head_dim": model.head_size, **_delta_nets(model), **text},
        rope={"mrope_interleaved": True, "partial_rotary_factor": 1.0},
        pixels=_QWEN3_PIXELS,
    )


_QWEN_KINDS = {
    "qwen2_vl": _QwenKind(
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
        "visual.merger.mlp.2",
        vision=lambda hidden: {"embed_dim": 64, "mlp_ratio": 2, "hidden_size": hidden},
        text=lambda model: {"use_sliding_window": False},
    ),
    "qwen2_5_vl": _QwenKind(
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLVideoProcessor,
        "visual.merger.mlp.2",
        vision=lambda hidden: {
            "hidden_size": 64,
            "intermediate_size": 128,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            # Videos must not be longer than wide: after them transformers continues from the
            # width, vLLM from the larger of both.
            "tokens_per_second": 1,
            "out_hidden_size": hidden,
        },
        text=lambda model: {"use_sliding_window": False},
    ),
    "qwen3_vl": _QwenKind(
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
        "linear_fc2",
        # A level of deepstack after each layer of the tower.
        vision=lambda hidden: {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
            "out_hidden_size": hidden,
        },
        text=lambda model: {"head_dim": model.head_size},
        rope={"mrope_interleaved": True},
        pixels=_QWEN3_PIXELS,
    ),
    "qwen3_5": _qwen3_5(Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": _qwen3_5(Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, **_EXPERTS),
}


@dataclass(frozen=True)
class Family:
    """One architecture: how its models are written, and its placeholders in a prompt."""

    write: Callable[[Path, TinyModel], None]
    image_text: str = ""
    video_text: str = ""


FAMILIES = {
    "llava": Family(write_llava, LLAVA_IMAGE),
    "llava_next": Family(write_llava_next, LLAVA_IMAGE),
    "llava_onevision": Family(write_llava_onevision, LLAVA_IMAGE, LLAVA_VIDEO),
    "qwen2_vl": Family(write_qwen_vl, QWEN_IMAGE, QWEN_VIDEO),
    "qwen2_5_vl": Family(write_qwen_vl, QWEN_IMAGE, QWEN_VIDEO),
    "qwen3_vl": Family(write_qwen_vl, QWEN_IMAGE, QWEN_VIDEO),
    "qwen3_5": Family(write_qwen_vl, QWEN_IMAGE, QWEN_VIDEO),
    "qwen3_5_moe": Family(write_qwen_vl, QWEN_IMAGE, QWEN_VIDEO),
    "internvl": Family(write_internvl, INTERN_IMAGE, LLAVA_VIDEO),
    "gemma3": Family(write_gemma3, GEMMA_IMAGE),
    "gemma4": Family(write_gemma4, GEMMA4_IMAGE),
    "cohere2_vision": Family(write_cohere2_vision, COHERE_IMAGE),
    "exaone4_5": Family(write_exaone4_5, EXAONE_IMAGE),
    "minicpmv4_6": Family(write_minicpm_v, MINICPM_IMAGE),
    "qwen3": Family(write_qwen3),
    "qwen3_next": Family(write_qwen3_next),
    "phi3": Family(write_phi3),
}


def _tokenizer(
    special: Sequence[str],
    image_text: str,
    tokenizer_class: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast,
    **options: Any,
) -> tuple[PreTrainedTokenizerFast, dict[str, int]]:
    """Return a tokenizer with one token per byte, and the ids of its special tokens."""
    return byte_tokenizer(
        special,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        max_length=MAX_POSITIONS,
        tokenizer_class=tokenizer_class,
        chat_template=_CHAT_TEMPLATE.replace("IMAGE", image_text),
        **options,
    )


def _save(
    folder: Path,
    model: TinyModel,
    network: PreTrainedModel,
    processor: Any,
    ids: dict[str, int],
    projector: str | None = "multi_modal_projector.linear_2",
) -> None:
    """Fill `network` with random weights and save weights, configuration and processor."""
    _initialise(network, model, projector, silent=ids.values())
    network.generation_config.eos_token_id = ids["<|im_end|>"]
    network.generation_config.pad_token_id = ids["<|endoftext|>"]
    network.save_pretrained(folder)
    processor.save_pretrained(folder)


@torch.no_grad()
def _initialise(
    network: PreTrainedModel, model: TinyModel, projector: str | None, silent: Iterable[int]
) -> None:
    """Fill `network` with random weights under which greedy text varies and never ends.

    With the default initialisation such a network repeats two tokens forever, and comparing texts
    would prove nothing. The tokens in `silent` get a logit of 0, which never wins: the text
    neither stops nor contains image placeholders.
    """
    generator = torch.Generator().manual_seed(model.seed)
    for name, parameter in network.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            # Qwen3 and Gemma normalise the gain of the projections; Gemma 3 adds 1 to its own.
            parameter.add_(model.query_key_gain - 1)
        if parameter.ndim < 2 and "embedding" not in name and "newline" not in name:
            if name.endswith(".bias"):
                parameter.zero_()  # transformers draws some of SigLIP's without our seed
            continue  # norms keep their neutral values
        scale = model.initializer_range
        if "q_proj" in name or "k_proj" in name:
            scale *= model.query_key_gain
        if projector is not None and projector in name:
            scale *= model.vision_gain
        parameter.normal_(0.0, scale, generator=generator)
    network.get_output_embeddings().weight[list(silent)] = 0.0
