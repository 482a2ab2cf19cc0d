# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, as folders that vLLM and transformers load.

Nothing is downloaded. The weights are stored in float32, so that both frameworks compute the same
function and greedy text can be compared token for token.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast
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
EXAONE_IMAGE = "<vision><|image_pad|></vision>"
_QWEN_TOKENS = [
    f"<|{name}|>" for name in ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
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


@dataclass(frozen=True)
class Parts:
    """Parts of a family's configuration and processor."""

    model: TinyModel
    family: Family
    tokenizer: PreTrainedTokenizerFast
    ids: Mapping[str, int]

    @property
    def side(self) -> int:
        """Return the side of a tile in pixels."""
        return self.model.image_size

    @property
    def square(self) -> dict[str, int]:
        """Return the size of a tile, as image processors read it."""
        return {"height": self.side, "width": self.side}

    def clip(self, **fields: Any) -> dict[str, Any]:
        """Return the configuration of a CLIP tower."""
        return {**clip_config(image_size=self.side, patch=PATCH, layers=3), **fields}

    def text(self, kind: str = "Llama", **fields: Any) -> dict[str, Any]:
        """Return the language model's configuration, without its type unless it is Llama."""
        model = self.model
        return {
            **({"model_type": "llama"} if kind == "Llama" else {}),
            "architectures": [f"{kind}ForCausalLM"],
            "vocab_size": len(self.tokenizer),
            "rms_norm_eps": 1e-5,
            "bos_token_id": None,
            "eos_token_id": self.ids["<|im_end|>"],
            "dtype": "float32",
            **model.text_config(),
            **fields,
        }

    def with_windows(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return the text's configuration: two layers with a window, then one without."""
        kinds = ["sliding_attention"] * 2 + ["full_attention"]
        return {
            **self.text(kind, head_dim=self.model.head_size, sliding_window=WINDOW),
            "layer_types": kinds * (self.model.layers // 3),
            **fields,
        }

    def hybrid(self, **fields: Any) -> dict[str, Any]:
        """Return the fields of a text with gated delta nets and full attention in turn."""
        return {
            "head_dim": self.model.head_size,
            "layer_types": ["linear_attention", "full_attention"] * (self.model.layers // 2),
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,  # the least that vLLM's CPU kernel takes
            "linear_value_head_dim": 64,
            **fields,
        }

    def config(self, **fields: Any) -> Any:
        """Return the configuration of the whole model."""
        ids = {name: self.ids[token] for name, token in self.family.config_tokens.items()}
        given = {"tie_word_embeddings": False, "dtype": "float32", **ids, **fields}
        return getattr(transformers, f"{self.family.name}Config")(**given)

    def processor(self, images: str, videos: str = "", **fields: Any) -> Any:
        """Return the family's processor around processors of these names."""
        own = self.family.processor or self.family.name
        sizes, more = fields.pop("sizes"), fields.pop("of_images", {})
        given = {"image_processor": getattr(transformers, images)(**sizes, **more)}
        if videos:
            given["video_processor"] = getattr(transformers, videos)(**sizes)
        return getattr(transformers, f"{own}Processor")(
            tokenizer=self.tokenizer, chat_template=self.tokenizer.chat_template, **given, **fields
        )


def _llava(parts: Parts) -> tuple[Any, Any]:
    """CLIP tower, two-layer projector, Llama."""
    config = llava_config(parts.text(), parts.clip(), parts.ids[LLAVA_IMAGE], "float32")
    return config, llava_processor(parts.tokenizer, parts.side, PATCH)


def _llava_next(parts: Parts) -> tuple[Any, Any]:
    """An image is scaled down and tiled, with a token per row end."""
    config = parts.config(
        text_config=parts.text(),
        vision_config=parts.clip(),
        image_grid_pinpoints=_pinpoints(parts.side),
        image_seq_length=(parts.side // PATCH) ** 2,
    )
    processor = parts.processor(
        "LlavaNextImageProcessor",
        sizes={
            "size": {"shortest_edge": parts.side},
            "crop_size": parts.square,
            "image_grid_pinpoints": _pinpoints(parts.side),
        },
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return config, processor


def _llava_onevision(parts: Parts) -> tuple[Any, Any]:
    """Tiles as in LLaVA-NeXT, and videos of pooled frames."""
    pinpoints = _pinpoints(parts.side, 6)
    config = parts.config(
        text_config=parts.text("Qwen2", model_type="qwen2"),
        vision_config=parts.clip(**_SIGLIP),
        image_grid_pinpoints=pinpoints,
    )
    processor = parts.processor(
        "LlavaOnevisionImageProcessor",
        "LlavaOnevisionVideoProcessor",
        sizes={"size": parts.square},
        of_images={"image_grid_pinpoints": pinpoints},
        num_image_tokens=(parts.side // PATCH) ** 2,
        vision_feature_select_strategy="full",
    )
    return config, processor


def _internvl(parts: Parts) -> tuple[Any, Any]:
    """In transformers' format: images are tiles and a thumbnail."""
    num_tokens = (parts.side // PATCH // 2) ** 2
    config = parts.config(
        text_config=parts.text("Qwen3", model_type="qwen3", head_dim=parts.model.head_size),
        vision_config={
            **_TOWER,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "image_size": parts.side,
            "patch_size": PATCH,
            "layer_scale_init_value": 1.0,
        },
        image_seq_length=num_tokens,
    )
    processor = parts.processor(
        "GotOcr2ImageProcessor",
        "InternVLVideoProcessor",
        sizes={"size": parts.square},
        of_images={"min_patches": 1, "max_patches": 6},
        image_seq_length=num_tokens,
    )
    return config, processor


def _gemma3(parts: Parts) -> tuple[Any, Any]:
    """Two layers with a window of 64 tokens, then one of full attention.

    Its queries are scaled by another number than the size of a head.
    """
    num_tokens = (parts.side // PATCH) ** 2
    scalar = 2 * parts.model.head_size
    config = parts.config(
        text_config=parts.with_windows("Gemma3", query_pre_attn_scalar=scalar),
        vision_config=parts.clip(**_SIGLIP),
        mm_tokens_per_image=num_tokens,
    )
    sizes = {"size": parts.square}
    return config, parts.processor("Gemma3ImageProcessor", sizes=sizes, image_seq_length=num_tokens)


def _cohere2_vision(parts: Parts) -> tuple[Any, Any]:
    """Windows as in Gemma 3, images in tiles.

    Its layers with full attention have no rotary positions. Their windows have one token more in
    vLLM than in transformers.
    """
    text = parts.with_windows(
        "Cohere2",
        model_type="cohere2",
        layer_norm_eps=1e-5,
        logit_scale=1.0,
        tie_word_embeddings=True,
    )
    del text["rms_norm_eps"]  # with it vLLM takes another norm than transformers
    config = parts.config(
        text_config=text,
        vision_config=parts.clip(**_SIGLIP),
        downsample_factor=2,
        alignment_intermediate_size=128,
        tie_word_embeddings=True,
    )
    tokens = parts.side // PATCH // 2  # of a tile in a row
    sizes = {"size": parts.square, "patch_size": tokens, "max_patches": 4}
    return config, parts.processor("Cohere2VisionImageProcessor", sizes=sizes)


def _exaone4_5(parts: Parts) -> tuple[Any, Any]:
    """Windows as in Gemma 3, images as in Qwen2.5-VL.

    Its layers with full attention have no rotary positions. Queries and keys are normalised.
    """
    text = parts.with_windows("Exaone4", model_type="exaone4")
    config = parts.config(
        text_config=text,
        vision_config={
            **_TOWER,
            "depth": 2,
            "num_heads": 2,
            "num_key_value_heads": 1,
            "patch_size": PATCH,
            "fullatt_block_indexes": [1],
            "out_hidden_size": text["hidden_size"],
        },
    )
    sizes = {"size": {"shortest_edge": parts.side**2, "longest_edge": 1280 * 28 * 28}}
    return config, parts.processor("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", sizes=sizes)


def _gemma4(parts: Parts) -> tuple[Any, Any]:
    """The last third of layers reads the caches of those before.

    Layers with full attention have larger heads than those with a window, and one projection for
    keys and values.
    """
    model = parts.model
    config = parts.config(
        text_config=parts.with_windows(
            "Gemma4",
            global_head_dim=2 * model.head_size,
            num_global_key_value_heads=model.full_kv_heads or model.kv_heads,
            attention_k_eq_v=True,
            num_kv_shared_layers=model.layers // 3,
            hidden_size_per_layer_input=0,
        ),
        vision_config={
            **_TOWER,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "patch_size": PATCH,
            "position_embedding_size": 64,
            "default_output_length": GEMMA4_TOKENS,
        },
        audio_config=None,
    )
    processor = parts.processor(
        "Gemma4ImageProcessor",
        "Gemma4VideoProcessor",
        sizes={"patch_size": PATCH, "max_soft_tokens": GEMMA4_TOKENS},
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_seq_length=GEMMA4_TOKENS,
    )
    return config, processor


def _minicpm_v(parts: Parts) -> tuple[Any, Any]:
    """The layers of Qwen3.5, behind a tower that reads slices.

    Images of more than `image_size` squared pixels are read as a whole and in slices. A token
    stands for 4 x 4 patches.
    """
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 1.0}
    text = parts.hybrid(model_type="qwen3_5_text", rope_parameters=rope)
    config = parts.config(
        text_config=parts.text("Qwen3_5", **text),
        vision_config={**parts.clip(), "hidden_act": "gelu_pytorch_tanh"},
        insert_layer_id=0,
        image_size=parts.side,
    )
    return config, parts.processor(
        "MiniCPMV4_6ImageProcessor",
        "MiniCPMV4_6VideoProcessor",
        sizes={"patch_size": PATCH, "scale_resolution": parts.side},
    )


def _qwen_vl(
    vision: Mapping[str, Any],
    text: Callable[[Parts], Mapping[str, Any]],
    rope: Mapping[str, Any] = MappingProxyType({}),
    hidden: str = "out_hidden_size",
) -> Callable[[Parts], tuple[Any, Any]]:
    """Return the parts of a generation: images of different sizes have different numbers of tokens.

    Args:
        hidden: the tower's name for the size of the language model.
    """

    def build(parts: Parts) -> tuple[Any, Any]:
        sizes = parts.model.text_config()
        # Rotary pairs per head = head size / 2, split 1 : 1.5 : 1.5.
        half = parts.model.head_size // 2
        first = 2 * (parts.model.head_size // 8)
        positions = {
            "rope_type": "default",
            "rope_theta": 1_000_000.0,
            "mrope_section": [first, *2 * [(half - first) // 2]],
            **rope,
        }
        config = parts.config(
            text_config={
                "vocab_size": len(parts.tokenizer),
                "rms_norm_eps": 1e-6,
                "bos_token_id": None,
                "eos_token_id": parts.ids["<|im_end|>"],
                "rope_parameters": positions,
                "dtype": "float32",
                **text(parts),
                **sizes,
            },
            vision_config={
                "depth": 2,
                "num_heads": 2,
                "patch_size": PATCH,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                hidden: sizes["hidden_size"],
                **vision,
            },
        )
        given: dict[str, Any] = {"size": {"shortest_edge": 28 * 28, "longest_edge": 1280 * 28 * 28}}
        if rope:  # vLLM normalises videos like images; transformers' defaults for the two differ
            given |= {"patch_size": PATCH, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        videos = "Qwen3VLVideoProcessor" if rope else "Qwen2VLVideoProcessor"
        return config, parts.processor("Qwen2VLImageProcessor", videos, sizes=given)

    return build


def _language_model(
    kind: str, fields: Callable[[Parts], Mapping[str, Any]]
) -> Callable[[Parts], tuple[Any, Any]]:
    """Return the parts of a language model, which has no vision and no processor."""

    def build(parts: Parts) -> tuple[Any, Any]:
        config = getattr(transformers, f"{kind}Config")
        return config(**parts.text(kind, **fields(parts))), parts.tokenizer

    return build


def _pinpoints(side: int, max_tiles: int = 3) -> list[list[int]]:
    """Return the sizes (height, width) that images are fitted to, up to `max_tiles` a side."""
    sides = range(1, max_tiles + 1)
    return [[side * rows, side * columns] for rows in sides for columns in sides]


_SIGLIP = {"model_type": "siglip_vision_model"}
_TOWER = {"hidden_size": 64, "intermediate_size": 128}
_QWEN3_TOWER = {**_TOWER, "num_position_embeddings": 64}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 4,  # all: rounding cannot choose among them
    "moe_intermediate_size": 64,
}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 64}


@dataclass(frozen=True)
class Family:
    """One architecture: how its models are written, and its placeholders in a prompt."""

    name: str
    """Of transformers' classes, without `Config` and so on."""
    parts: Callable[[Parts], tuple[Any, Any]]
    """Returns the configuration and the processor."""
    image_text: str = ""
    video_text: str = ""
    tokens: Sequence[str] | Mapping[str, str] = ()
    """Special tokens besides the chat's, by the tokenizer's names for them if it has some."""
    more_tokens: Sequence[str] = ()
    config_tokens: Mapping[str, str] = field(default_factory=dict)
    """Special tokens whose ids are in the configuration, by its names."""
    projector: str | None = "multi_modal_projector.linear_2"
    """The last projection behind the tower."""
    processor: str = ""
    """By default `name`."""
    network: str = "ForConditionalGeneration"
    has_clip: bool = False
    """Whether vLLM has other names for the tower's weights."""
    transposes_experts: bool = False
    """Whether published models store experts' matrices transposed, which vLLM demands."""
    gain: float = 1.0
    """Factor on the products of queries and keys."""

    def tokenizer(self) -> tuple[PreTrainedTokenizerFast, dict[str, int]]:
        """Return a tokenizer with one token per byte, and the ids of its special tokens."""
        named = isinstance(self.tokens, Mapping)
        special = self.tokens.values() if isinstance(self.tokens, Mapping) else self.tokens
        is_llava = self.image_text == LLAVA_IMAGE
        return byte_tokenizer(
            [*_CHAT_TOKENS, *special, *self.more_tokens],
            eos="<|im_end|>",
            pad="<|endoftext|>",
            max_length=MAX_POSITIONS,
            tokenizer_class=PreTrainedTokenizerFast if is_llava else transformers.Qwen2Tokenizer,
            chat_template=_CHAT_TEMPLATE.replace("IMAGE", self.image_text),
            **({"extra_special_tokens": self.tokens} if named else {}),
        )

    def write(self, folder: Path, model: TinyModel) -> None:
        """Write a model: weights, configuration, tokenizer and processor."""
        tokenizer, ids = self.tokenizer()
        config, processor = self.parts(Parts(model, self, tokenizer, ids))
        with torch.random.fork_rng():
            torch.manual_seed(model.seed)  # transformers draws the decay of delta nets
            network = getattr(transformers, self.name + self.network)(config)
        _initialise(network, model, self.projector, self.gain, silent=ids.values())
        network.generation_config.eos_token_id = ids["<|im_end|>"]
        network.generation_config.pad_token_id = ids["<|endoftext|>"]
        network.save_pretrained(folder)
        processor.save_pretrained(folder)
        if self.has_clip:
            rename_weights(folder, clip_name_of_vllm)
        if self.transposes_experts:
            transpose_experts(folder)


_LLAVA = {"image_text": LLAVA_IMAGE, "tokens": [LLAVA_IMAGE], "has_clip": True}
_LLAVA_IDS = {"image_token_index": LLAVA_IMAGE}
_PADS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
_QWEN_IDS = {
    **_PADS,
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_QWEN = {
    "image_text": QWEN_IMAGE,
    "video_text": QWEN_VIDEO,
    "tokens": _QWEN_TOKENS,
    "config_tokens": _QWEN_IDS,
}
_QWEN2 = {**_QWEN, "projector": "visual.merger.mlp.2"}
_QWEN3 = {**_QWEN, "projector": "linear_fc2", "processor": "Qwen3VL"}
_QWEN3_5_ROPE = {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
_TEXT = {"network": "ForCausalLM", "projector": None}

FAMILIES = {
    "llava": Family("Llava", _llava, **_LLAVA),
    "llava_next": Family("LlavaNext", _llava_next, **_LLAVA, config_tokens=_LLAVA_IDS),
    "llava_onevision": Family(
        "LlavaOnevision",
        _llava_onevision,
        **_LLAVA,
        video_text=LLAVA_VIDEO,
        more_tokens=[LLAVA_VIDEO],
        config_tokens={**_LLAVA_IDS, "video_token_index": LLAVA_VIDEO},
    ),
    "qwen2_vl": Family(
        "Qwen2VL",
        _qwen_vl(
            {"embed_dim": 64, "mlp_ratio": 2},
            lambda parts: {"use_sliding_window": False},
            hidden="hidden_size",
        ),
        **_QWEN2,
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VL",
        _qwen_vl(
            {
                **_TOWER,
                "window_size": 112,
                "fullatt_block_indexes": [1],
                # Videos must not be longer than wide: after them transformers continues from the
                # width, vLLM from the larger of both.
                "tokens_per_second": 1,
            },
            lambda parts: {"use_sliding_window": False},
        ),
        **_QWEN2,
    ),
    "qwen3_vl": Family(
        "Qwen3VL",
        _qwen_vl(
            # A level of deepstack after each layer of the tower.
            {**_QWEN3_TOWER, "deepstack_visual_indexes": [0, 1]},
            lambda parts: {"head_dim": parts.model.head_size},
            {"mrope_interleaved": True},
        ),
        **_QWEN3,
    ),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoe",
        _qwen_vl(
            {**_QWEN3_TOWER, "deepstack_visual_indexes": [0, 1]},
            lambda parts: {
                "head_dim": parts.model.head_size,
                "norm_topk_prob": True,  # published models have it, transformers' default does not
                **_EXPERTS,
                # No matrix is square, or transformers would not see that it is transposed.
                "moe_intermediate_size": 96,
            },
            {"mrope_interleaved": True},
        ),
        **_QWEN3,
        transposes_experts=True,
    ),
    # Hybrids.
    "qwen3_5": Family(
        "Qwen3_5", _qwen_vl(_QWEN3_TOWER, lambda parts: parts.hybrid(), _QWEN3_5_ROPE), **_QWEN3
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5Moe",
        _qwen_vl(
            _QWEN3_TOWER, lambda parts: parts.hybrid(**_EXPERTS, **_SHARED_EXPERT), _QWEN3_5_ROPE
        ),
        **_QWEN3,
    ),
    "internvl": Family(
        "InternVL",
        _internvl,
        INTERN_IMAGE,
        LLAVA_VIDEO,
        tokens=_INTERN_TOKENS,
        config_tokens={"image_token_id": INTERN_IMAGE},
    ),
    "gemma3": Family(
        "Gemma3",
        _gemma3,
        GEMMA_IMAGE,
        tokens=_GEMMA_TOKENS,
        # It writes empty lines around images, and vLLM joins them by these tokens.
        more_tokens=["\n" * number for number in range(1, 5)],
        config_tokens={
            "boi_token_index": GEMMA_IMAGE,
            "eoi_token_index": "<end_of_image>",
            "image_token_index": "<image_soft_token>",
        },
        projector="mm_input_projection",
        has_clip=True,
    ),
    "gemma4": Family(
        "Gemma4",
        _gemma4,
        GEMMA4_IMAGE,
        tokens=_GEMMA4_TOKENS,
        more_tokens=["<|video|>"],
        config_tokens={
            **{f"{name}_id": token for name, token in _GEMMA4_TOKENS.items() if name[:3] != "eoa"},
            "eoa_token_index": _GEMMA4_TOKENS["eoa_token"],
            "video_token_id": "<|video|>",
        },
        projector="embedding_projection",
        gain=1 / 3,  # nothing else scales the products of its queries and keys
    ),
    "cohere2_vision": Family(
        "Cohere2Vision",
        _cohere2_vision,
        COHERE_IMAGE,
        tokens=_COHERE_TOKENS,
        config_tokens={"image_token_id": COHERE_IMAGE},
        has_clip=True,
    ),
    "exaone4_5": Family(
        "Exaone4_5_",
        _exaone4_5,
        EXAONE_IMAGE,
        tokens=["<vision>", "</vision>", "<|image_pad|>", "<|video_pad|>"],
        config_tokens=_PADS,
        projector="visual.merger.mlp.2",
    ),
    "minicpmv4_6": Family(
        "MiniCPMV4_6",
        _minicpm_v,
        MINICPM_IMAGE,
        tokens=_MINICPM_TOKENS,
        config_tokens=_PADS,
        projector="merger.mlp.0.linear_2",
    ),
    # Language models; Phi-3 has a window as long as its context.
    "qwen3": Family(
        "Qwen3",
        _language_model("Qwen3", lambda parts: {"head_dim": parts.model.head_size}),
        **_TEXT,
    ),
    "qwen3_next": Family(
        "Qwen3Next",
        _language_model("Qwen3Next", lambda parts: parts.hybrid(**_EXPERTS, **_SHARED_EXPERT)),
        **_TEXT,
    ),
    # Every other layer has a window, and all have learned attention sinks.
    "gpt_oss": Family(
        "GptOss",
        _language_model(
            "GptOss",
            lambda parts: {
                "head_dim": parts.model.head_size,
                "num_local_experts": 4,
                "num_experts_per_tok": 4,  # all: rounding cannot choose among them
                "sliding_window": WINDOW,
                "pad_token_id": None,
            },
        ),
        **_TEXT,
    ),
    "phi3": Family(
        "Phi3",
        _language_model(
            "Phi3",
            lambda parts: {
                "pad_token_id": None,
                "original_max_position_embeddings": MAX_POSITIONS,
                "sliding_window": MAX_POSITIONS,
            },
        ),
        **_TEXT,
    ),
}


def language_part(folder: Path, layers: int) -> Path:
    """Return the folder of a LLaVA's language model with its first layers, which is written."""
    whole = transformers.LlavaForConditionalGeneration.from_pretrained(folder)
    config = whole.config.text_config
    config.num_hidden_layers = layers
    part = transformers.LlamaForCausalLM(config)
    part.model.load_state_dict(whole.model.language_model.state_dict(), strict=False)
    part.lm_head = whole.lm_head
    part.save_pretrained(target := folder.with_name(f"{folder.name}-{layers}-layers"))
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return target


def eagle_head(folder: Path, method: str) -> Path:
    """Return the folder of an EAGLE head for a LLaVA: its last layer again, which is written."""
    whole = transformers.LlavaForConditionalGeneration.from_pretrained(folder)
    config = whole.config.text_config
    config.num_hidden_layers, config.architectures = 1, ["LlamaForCausalLM"]
    layer = whole.model.language_model.layers[-1].state_dict()
    size = config.hidden_size
    weights = {f"layers.0.{name}": weight for name, weight in layer.items()}
    del weights["layers.0.input_layernorm.weight"]
    weights["fc.weight"] = torch.eye(size).repeat(1, 2) / 2
    if method == "eagle3":
        weights = {f"midlayer.{name}": weight for name, weight in layer.items()}
        for name in "qkv":  # of the embedding and the hidden state
            key = f"midlayer.self_attn.{name}_proj.weight"
            weights[key] = weights[key].repeat(1, 2) / 2
        weights["midlayer.hidden_norm.weight"] = torch.ones(size)
        weights["norm.weight"] = whole.model.language_model.norm.weight
        weights["fc.weight"] = torch.eye(size).repeat(1, 3) / 3
        weights["lm_head.weight"] = whole.lm_head.weight
        config.architectures = ["LlamaForCausalLMEagle3"]
        config.draft_vocab_size = config.vocab_size
        config.eagle_aux_hidden_state_layer_ids = [1, 2, 3]
    config.save_pretrained(target := folder.with_name(f"{folder.name}-{method}"))
    weights = {name: weight.detach().clone() for name, weight in weights.items()}
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    return target


def with_mtp(folder: Path) -> Path:
    """Return the folder of a Qwen3.5 with weights of MTP, its last layer again; it is written."""
    shutil.copytree(folder, target := folder.with_name(f"{folder.name}-mtp"))
    path, settings = target / "model.safetensors", target / "config.json"
    weights, config = load_file(path), json.loads(settings.read_text())
    text = config["text_config"]
    last = f"model.language_model.layers.{text['num_hidden_layers'] - 1}."
    size = text["hidden_size"]
    text["mtp_num_hidden_layers"] = 1
    layer = {name.replace(last, "mtp.layers.0."): weights[name] for name in weights if last in name}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    weights |= {name: weight.clone() for name, weight in layer.items()}
    weights |= {f"mtp.{name}.weight": torch.zeros(size) for name in norms}  # of weights less 1
    weights["mtp.fc.weight"] = torch.eye(size).repeat(1, 2) / 2
    save_file(weights, path, metadata={"format": "pt"})
    settings.write_text(json.dumps(config))
    return target


def transpose_experts(folder: Path) -> None:
    """Transpose the stored matrices of experts; transformers reads them either way."""
    path = str(folder / "model.safetensors")
    weights = load_file(path)
    for name, weight in weights.items():
        if ".experts." in name:
            weights[name] = weight.transpose(1, 2).contiguous()
    save_file(weights, path, metadata={"format": "pt"})


@torch.no_grad()
def _initialise(
    network: Any, model: TinyModel, projector: str | None, gain: float, silent: Iterable[int]
) -> None:
    """Fill `network` with random weights under which greedy text varies and never ends.

    With the default initialisation such a network repeats two tokens forever, and comparing texts
    would prove nothing. The tokens in `silent` get a logit of 0, which never wins: the text
    neither stops nor contains image placeholders.
    """
    generator = torch.Generator().manual_seed(model.seed)
    gain *= model.query_key_gain
    for name, parameter in network.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            # Qwen3 and Gemma normalise the gain of the projections; Gemma 3 adds 1 to its own.
            parameter.add_(gain - 1)
        if name.endswith(".sinks"):
            # As large as the softmax denominators of some hundred keys.
            parameter.normal_(5.0, 2.0, generator=generator)
            continue
        if parameter.ndim < 2 and "embedding" not in name and "newline" not in name:
            if name.endswith(".bias"):
                parameter.zero_()  # transformers draws some of SigLIP's without our seed
            continue  # norms keep their neutral values
        scale = model.initializer_range
        if "q_proj" in name or "k_proj" in name:
            scale *= gain
        if projector is not None and projector in name:
            scale *= model.vision_gain
        parameter.normal_(0.0, scale, generator=generator)
    network.get_output_embeddings().weight[list(silent)] = 0.0
