# SPDX-License-Identifier: Apache-2.0
"""Positions of a prompt's image and video tokens, and of the rows that vote on what is kept.

To support the patch grids of another model family, add a function to `_GRID_READERS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from transformers.image_processing_utils import select_best_resolution

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec

VISION_MODALITIES = frozenset({"image", "video"})

Grid = tuple[int, int]
"""Rows and columns of tokens."""

RowSet = Literal["none", "text", "all_text", "after_vision", "window", "all", "answer", "latest"]
"""Tokens whose queries vote, see `voters`:

`text` is the text after the first vision token, `after_vision` the text after the last one, and
`all_text` all text (at most the last `observation_window` tokens of each), `window` the last tokens
of the prompt, `all` every token, and `none` no token, for scores that use no attention. Where
eviction waits for the first tokens of the answer, these vote in each of the sets but `none`;
`answer` is only these, and `latest` as well, or `window` if there are none.
"""

WINDOW = 32
"""Number of rows in the row set `window`."""

PRESSURE_ROWS = 4
"""Next tokens that vote at an eviction under pressure, where the method does not wait for more."""

CHOICE_ROWS = 8
"""Newest tokens whose votes count where tokens are chosen again, as recall does."""

ANSWER_ROWS = 32
"""Last tokens of the answer that vote at an eviction after the first, at most those since the
eviction before."""


@dataclass(frozen=True)
class VisionSpan:
    """A contiguous run of vision tokens: an image, a tile of one, or a frame of a video."""

    start: int
    length: int
    grid: Grid | None = None
    """Layout of its tokens in the image, row by row, or None where it is not known for certain.

    End-of-row tokens (LLaVA-NeXT, LLaVA-OneVision) are the last column.
    """


@dataclass(frozen=True)
class PromptMap:
    """Modalities of one prompt: plain host data, sent from the scheduler to the worker."""

    num_tokens: int
    vision: tuple[VisionSpan, ...]
    """Ordered by start."""

    @property
    def has_vision(self) -> bool:
        return bool(self.vision)

    @property
    def is_well_formed(self) -> bool:
        """Whether all runs lie within the prompt and none overlap.

        vLLM's processors ensure this, and eviction relies on it. A malformed prompt is served with
        its whole cache rather than ending the engine.
        """
        ends = (0, *(run.start + run.length for run in self.vision))
        starts = (*(run.start for run in self.vision), self.num_tokens)
        return all(end <= start for end, start in zip(ends, starts, strict=True))

    def followed_by(self, num_text: int) -> PromptMap:
        """Return the map of this prompt and `num_text` tokens of text after it."""
        return PromptMap(self.num_tokens + num_text, self.vision)

    def is_vision(self) -> np.ndarray:
        """Return the boolean mask of vision tokens, of shape [num_tokens]."""
        mask = np.zeros(self.num_tokens, dtype=bool)
        for run in self.vision:
            mask[run.start : run.start + run.length] = True
        return mask


@dataclass(frozen=True)
class Voters:
    """Rows of a prompt, and of its answer so far, whose attention a policy reads."""

    sets: Mapping[RowSet, np.ndarray]
    """Positions of each row set but `all`, int64, ascending, not empty."""
    rows: np.ndarray
    """Their union, int64, ascending."""
    every_row: bool
    """Whether the policy reads the row set `all` as well."""

    @property
    def kinds(self) -> tuple[RowSet, ...]:
        """All row sets that the policy reads."""
        return (*self.sets, "all") if self.every_row else tuple(self.sets)

    @property
    def last_cached(self) -> int | None:
        """Number of first tokens that may come from the prefix cache, which holds no queries.

        All rows must be computed, so that the kept tokens do not depend on the cache. None means no
        limit. A set of rows of the answer alone, which come after the prompt, limits no hit.
        """
        if self.every_row:
            return 0
        if not self.sets:
            return None
        return int(min(rows[0] for rows in self.sets.values()))


def prunes_videos(model: ModelConfig) -> bool:
    """Return whether vLLM drops tokens of this model's videos (`--video-pruning-rate`)."""
    vision = model.multimodal_config
    return vision is not None and vision.is_multimodal_pruning_enabled()


def map_prompt(
    num_tokens: int,
    features: Sequence[MultiModalFeatureSpec],
    model: Any = None,
    are_pruned: bool = False,
) -> PromptMap:
    """Find the vision runs of a prompt.

    Vision positions are the placeholder tokens of images and videos that carry embeddings. Each
    tile of an image and each frame of a video is a run, with or without text between them. A
    pruned video is one run with the times between its frames, which only the worker locates.

    Args:
        model: transformers configuration of the model, which determines the grids.
        are_pruned: whether vLLM drops tokens of the videos, see `prunes_videos`.
    """
    runs = (run for feature in features for run in _vision_runs(feature, model, are_pruned))
    return PromptMap(num_tokens, tuple(sorted(runs, key=lambda run: run.start)))


def voters(
    prompt: PromptMap, row_sets: Sequence[RowSet], observation_window: int, num_answer: int = 0
) -> Voters:
    """Return the positions of the given row sets, with `num_answer` tokens of the answer.

    Without text after vision, `text` and `after_vision` hold the last position, as `all_text` does
    without any text; without vision, all three hold the last `observation_window` positions.

    Raises:
        ValueError: for the row set `answer` without tokens of the answer.
    """
    if "answer" in row_sets and num_answer < 1:
        raise ValueError("rows of the answer vote, and eviction waits for none of its tokens")
    answer = np.arange(prompt.num_tokens, prompt.num_tokens + num_answer)
    sets: dict[RowSet, np.ndarray] = {
        kind: answer
        if kind == "latest" and num_answer
        else np.concatenate((_rows(prompt, kind, observation_window), answer))
        for kind in row_sets
        if kind != "all"
    }
    union = np.unique(np.concatenate([*sets.values(), np.empty(0, np.int64)]))
    return Voters(sets, union, "all" in row_sets)


def _rows(prompt: PromptMap, kind: RowSet, observation_window: int) -> np.ndarray:
    if kind == "answer":
        return np.empty(0, np.int64)
    if kind in ("window", "latest"):
        return np.arange(max(prompt.num_tokens - WINDOW, 0), prompt.num_tokens)
    first = 0
    if prompt.has_vision and kind != "all_text":
        first, last = prompt.vision[0].start, prompt.vision[-1]
        if kind == "after_vision":
            first = last.start + last.length
    text = np.flatnonzero(~prompt.is_vision()[first:]) + first
    return text[-observation_window:] if len(text) else np.array([prompt.num_tokens - 1])


def _vision_runs(
    feature: MultiModalFeatureSpec, model: Any, are_pruned: bool
) -> Iterator[VisionSpan]:
    if feature.modality not in VISION_MODALITIES:
        return
    embedded = feature.mm_position.extract_embeds_range()
    spans = [(start, last + 1 - start) for start, last in embedded if last >= start]
    is_pruned = are_pruned and feature.modality == "video"
    grids = None if is_pruned else _patch_grids(feature, model)
    runs = _split(spans, grids) if grids else None
    # If the grids do not fill the placeholder exactly, they belong to another model.
    yield from runs or [VisionSpan(start, length, None) for start, length in spans]


def _split(spans: Sequence[tuple[int, int]], grids: Sequence[Grid]) -> list[VisionSpan] | None:
    """Split spans (start, length) into one run per grid; None unless they match exactly."""
    runs, rest = [], list(grids)
    for start, length in spans:
        end = start + length
        while start < end:
            size = math.prod(rest[0]) if rest else 0
            if not 0 < size <= end - start:
                return None
            runs.append(VisionSpan(start, size, rest.pop(0)))
            start += size
    return None if rest else runs


# -- patch grids of model families ------------------------------------------------------


def _patch_grids(feature: MultiModalFeatureSpec, model: Any) -> list[Grid] | None:
    """Return the grids of an image's or a video's tokens, in order, or None if they are unknown.

    vLLM does not report the layout of the tokens, and their number does not determine it: four
    tiles of 16 x 16 have as many tokens as one of 32 x 32. So it takes a reader for each family;
    Qwen's families are recognised by what their processors report.
    """
    thw = _reported(feature, f"{feature.modality}_grid_thw")
    if thw is not None:
        return _merged_grids(thw, model)
    read = _GRID_READERS.get(getattr(model, "model_type", ""))
    return read(feature, model) if read else None


def _merged_grids(thw: Any, model: Any) -> list[Grid] | None:
    """Qwen: `thw` is frames, rows and columns of patches; squares of patches are merged."""
    merge = getattr(getattr(model, "vision_config", None), "spatial_merge_size", None)
    if not isinstance(merge, int):
        return None
    frames, rows, columns = (int(n) for n in thw.flatten()[:3])
    return [(rows // merge, columns // merge)] * frames


def _llava_grids(feature: MultiModalFeatureSpec, model: Any) -> list[Grid] | None:
    """One square, after the class token if the model keeps it."""
    side = _tile_side(model)
    extra = feature.mm_position.get_num_embeds() - side * side
    return [*[(1, 1)] * extra, (side, side)] if extra in (0, 1) else None


def _llava_next_grids(feature: MultiModalFeatureSpec, model: Any) -> list[Grid] | None:
    """The whole image as a square, then its tiles as one grid without the padding.

    Each row of the second grid ends with an end-of-row token.
    """
    size = _reported(feature, "image_sizes")
    side = _tile_side(model)
    if size is None or side == 0:
        return None
    height, width = (int(n) for n in size.flatten()[:2])
    if height < 1 or width < 1:
        return None
    fitted = select_best_resolution((height, width), model.image_grid_pinpoints)
    rows, columns = (n // model.vision_config.image_size * side for n in fitted)
    # The padding is an even number of rows or columns, half of them on each side.
    if width * rows > height * columns:
        rows -= (rows - height * columns // width) // 2 * 2
    else:
        columns -= (columns - width * rows // height) // 2 * 2
    if model.model_type == "llava_onevision":
        # More than nine tiles are scaled down; vLLM hard-codes this number as well.
        ratio = math.sqrt(rows * columns / (9 * side * side))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
    return [(side, side), (rows, columns + 1)]


def _onevision_grids(feature: MultiModalFeatureSpec, model: Any) -> list[Grid] | None:
    """Images as in LLaVA-NeXT; video frames with 2 x 2 patches merged, then one end token."""
    if feature.modality == "image":
        return _llava_next_grids(feature, model)
    side = -(-_tile_side(model) // 2)
    if side == 0:
        return None
    frames = feature.mm_position.get_num_embeds() // (side * side)
    return [*[(side, side)] * frames, (1, 1)]


def _internvl_grids(feature: MultiModalFeatureSpec, model: Any) -> list[Grid] | None:
    """Square tiles in order, the whole image last; a video frame is a tile."""
    tiles = _reported(feature, f"{feature.modality}_num_patches")
    if tiles is None:
        return None
    num_tiles = int(tiles)
    side = math.isqrt(feature.mm_position.get_num_embeds() // max(num_tiles, 1))
    return [(side, side)] * num_tiles


GridReader = Callable[["MultiModalFeatureSpec", Any], "list[Grid] | None"]
"""Returns the grids of a feature's tokens, in order, or None where they are unknown.

The second argument is the model's configuration.
"""

_GRID_READERS: dict[str, GridReader] = {
    "llava": _llava_grids,
    "llava_next": _llava_next_grids,
    "llava_onevision": _onevision_grids,
    "internvl": _internvl_grids,
    "internvl_chat": _internvl_grids,
}
"""By model type."""


def _reported(feature: MultiModalFeatureSpec, field: str) -> Any:
    """Return a value that the model's processor reported for this feature, or None."""
    element = (feature.data or {}).get(field)
    return None if element is None else element.data


def _tile_side(model: Any) -> int:
    """Return the patches along a side of the vision tower's input; 0 if it is not configured."""
    vision = getattr(model, "vision_config", None)
    image, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    return image // patch if isinstance(image, int) and isinstance(patch, int) else 0
