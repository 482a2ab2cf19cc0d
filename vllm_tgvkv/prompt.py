# SPDX-License-Identifier: Apache-2.0
"""Where a prompt's image and video tokens lie, and which rows vote on what is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_tgvkv.policies import RowSet
from vllm_tgvkv.policies.snapkv import WINDOW

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

    @property
    def has_vision(self) -> bool:
        return bool(self.vision)

    def is_vision(self) -> np.ndarray:
        """Boolean mask of shape [num_tokens]."""
        mask = np.zeros(self.num_tokens, dtype=bool)
        for run in self.vision:
            mask[run.start : run.start + run.length] = True
        return mask


@dataclass(frozen=True)
class Voters:
    """The rows of a prompt whose attention a policy looks at."""

    sets: Mapping[RowSet, np.ndarray]
    """Positions of each row set but `all`, int64, ascending, not empty."""
    rows: np.ndarray
    """Their union, int64, ascending."""
    every_row: bool
    """Whether the row set `all` is asked for as well."""

    def last_cached(self, exact: bool) -> int | None:
        """How many first tokens may come from the prefix cache, which brings no queries.

        With `exact`, all rows have to be computed, so that what is kept does not depend on the
        cache; else one row of each set. None is any number.
        """
        if self.every_row:
            return 0
        if not self.sets:
            return None
        return int(min(rows[0 if exact else -1] for rows in self.sets.values()))


def map_prompt(num_tokens: int, features: Sequence[MultiModalFeatureSpec]) -> PromptMap:
    """Find the vision runs of a prompt.

    Vision positions are those placeholder tokens of images and videos that carry
    embeddings; a video whose frames are separated by text gives one run a frame.
    """
    runs = (run for feature in features for run in _vision_runs(feature))
    return PromptMap(num_tokens, tuple(runs))


def voters(prompt: PromptMap, row_sets: Sequence[RowSet], observation_window: int) -> Voters:
    """Positions of the given row sets.

    `text` are the text positions after the first vision token and `after_vision` those
    after the last one, at most the last `observation_window` of them; without such text
    the last position, and without vision the last `observation_window` positions.
    `window` are the last positions of the prompt.
    """
    sets: dict[RowSet, np.ndarray] = {
        kind: _rows(prompt, kind, observation_window) for kind in row_sets if kind != "all"
    }
    union = np.unique(np.concatenate([*sets.values(), np.empty(0, np.int64)]))
    return Voters(sets, union, "all" in row_sets)


def _rows(prompt: PromptMap, kind: RowSet, observation_window: int) -> np.ndarray:
    if kind == "window":
        return np.arange(max(prompt.num_tokens - WINDOW, 0), prompt.num_tokens)
    first = 0
    if prompt.has_vision:
        starts = [run.start for run in prompt.vision]
        ends = [run.start + run.length for run in prompt.vision]
        first = max(ends) if kind == "after_vision" else min(starts)
    text = np.flatnonzero(~prompt.is_vision()[first:]) + first
    return text[-observation_window:] if len(text) else np.array([prompt.num_tokens - 1])


def _vision_runs(feature: MultiModalFeatureSpec) -> Iterator[VisionRun]:
    if feature.modality not in VISION_MODALITIES:
        return
    reported = _reported_grid(feature)
    for start, last in feature.mm_position.extract_embeds_range():
        length = last + 1 - start
        if length <= 0:
            continue
        # Without a report a square number of tokens is taken as a square image, as CLIP
        # towers give it.
        grid = reported or _square(length)
        frame = grid[0] * grid[1] if grid else length
        if length % frame:
            frame, grid = length, None
        # Frames that follow each other without text are runs of their own, so that pooling
        # over a grid stays within a frame.
        for offset in range(0, length, frame):
            yield VisionRun(start + offset, frame, grid)


def _reported_grid(feature: MultiModalFeatureSpec) -> tuple[int, int] | None:
    """Rows and columns of tokens in an image, or in a frame of a video, by its processor.

    Qwen-style processors report frames, rows and columns of patches; the side of the squares
    of patches that they merge into one token follows from the number of tokens.
    """
    key = f"{feature.modality}_grid_thw"
    if feature.data is None or key not in feature.data:
        return None
    thw: Any = feature.data[key].data
    frames, rows, columns = (int(n) for n in thw.flatten()[:3])
    num_tokens = feature.mm_position.get_num_embeds()
    merge = math.isqrt(frames * rows * columns // max(num_tokens, 1))
    if merge and frames * (rows // merge) * (columns // merge) == num_tokens:
        return rows // merge, columns // merge
    return None


def _square(num_tokens: int) -> tuple[int, int] | None:
    side = math.isqrt(num_tokens)
    return (side, side) if side * side == num_tokens else None
