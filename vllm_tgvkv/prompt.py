# SPDX-License-Identifier: Apache-2.0
"""Where a prompt's image and video tokens lie, and which text rows vote on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec

VISION_MODALITIES = frozenset({"image", "video"})


@dataclass(frozen=True)
class VisionRun:
    """A contiguous run of vision tokens, with its patch grid (rows, columns) where known."""

    start: int
    length: int
    grid: tuple[int, int] | None


@dataclass(frozen=True)
class PromptMap:
    """Modalities of one prompt, as plain host data that travels from scheduler to worker."""

    num_tokens: int
    vision: tuple[VisionRun, ...]
    rows: np.ndarray
    """Observation rows, int64, ascending positions."""

    @property
    def has_vision(self) -> bool:
        return bool(self.vision)

    def is_vision(self) -> np.ndarray:
        """Boolean mask of shape [num_tokens]."""
        mask = np.zeros(self.num_tokens, dtype=bool)
        for run in self.vision:
            mask[run.start : run.start + run.length] = True
        return mask


def map_prompt(
    num_tokens: int, features: Sequence[MultiModalFeatureSpec], observation_window: int
) -> PromptMap:
    """Find the vision runs and observation rows of a prompt.

    Vision positions are those placeholder tokens of images and videos that carry
    embeddings; a video whose frames are separated by text gives one run a frame.
    Observation rows are the text positions after the first vision token, at most
    the last `observation_window` of them; without such text the last position,
    and without vision the last `observation_window` positions.
    """
    vision = tuple(run for feature in features for run in _vision_runs(feature))
    prompt = PromptMap(num_tokens, vision, np.empty(0, dtype=np.int64))
    first = min((run.start for run in vision), default=0)
    text = np.flatnonzero(~prompt.is_vision()[first:]) + first
    rows = text[-observation_window:] if len(text) else np.array([num_tokens - 1])
    return PromptMap(num_tokens, vision, rows.astype(np.int64))


def _vision_runs(feature: MultiModalFeatureSpec) -> Iterator[VisionRun]:
    if feature.modality not in VISION_MODALITIES:
        return
    patches = _patch_grid(feature.data, feature.modality)
    for start, last in feature.mm_position.extract_embeds_range():
        length = last + 1 - start
        if length <= 0:
            continue
        grid = _grid_of_run(length, patches)
        # Frames that follow each other without text are runs of their own, so that pooling
        # over a grid stays within a frame.
        frame = grid[0] * grid[1] if grid else length
        for offset in range(0, length, frame):
            yield VisionRun(start + offset, frame, grid)


def _patch_grid(data: Any, modality: str) -> tuple[int, int] | None:
    """Rows and columns (of merged or unmerged patches) as Qwen-style processors report them."""
    key = f"{modality}_grid_thw"
    if data is None or key not in data:
        return None
    _, rows, columns = (int(n) for n in data[key].data.flatten()[:3])
    return rows, columns


def _grid_of_run(length: int, patches: tuple[int, int] | None) -> tuple[int, int] | None:
    """Grid of one frame in a run of `length` tokens.

    `patches` are rows and columns before the processor merges patches, 2 x 2 in the
    models of today; a run is a whole number of frames. Without `patches` a square
    number of tokens is taken as one square image, as CLIP towers give it.
    """
    if patches is None:
        side = math.isqrt(length)
        return (side, side) if side * side == length else None
    rows, columns = patches
    if length == rows * columns:
        return patches
    merged = (rows // 2, columns // 2)
    num_tokens = merged[0] * merged[1]
    return merged if num_tokens and length % num_tokens == 0 else None
