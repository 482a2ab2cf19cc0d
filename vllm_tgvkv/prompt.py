# SPDX-License-Identifier: Apache-2.0
"""Where a prompt's image and video tokens lie, and which rows vote on what is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from transformers.image_processing_utils import select_best_resolution

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec

VISION_MODALITIES = frozenset({"image", "video"})

Grid = tuple[int, int]
"""Rows and columns of tokens."""

RowSet = Literal["none", "text", "after_vision", "window", "all"]
"""Whose queries vote, see `voters`:

`text` the text after the first vision token, `after_vision` the text after the last one (of
both at most the last `observation_window`), `window` the last tokens of the prompt, `all`
every token; `none` for what needs no attention.
"""

WINDOW = 32
"""Rows of the row set `window`."""


@dataclass(frozen=True)
class VisionSpan:
    """A contiguous run of vision tokens: an image, a tile of one, or a frame of a video."""

    start: int
    length: int
    grid: Grid | None = None
    """How its tokens lie in the image, row by row, or None where that is not known for certain.

    A token that ends a row (LLaVA-NeXT, LLaVA-OneVision) is the row's last column.
    """


@dataclass(frozen=True)
class PromptMap:
    """Modalities of one prompt, as plain host data that travels from scheduler to worker."""

    num_tokens: int
    vision: tuple[VisionSpan, ...]
    """By their start."""

    @property
    def has_vision(self) -> bool:
        return bool(self.vision)

    @property
    def is_well_formed(self) -> bool:
        """Whether all runs lie within the prompt, none over another.

        vLLM's processors see to that. Everything here relies on it, and none of it is worth an
        engine that ends: a prompt that is not is served with its whole cache.
        """
        ends = (0, *(run.start + run.length for run in self.vision))
        starts = (*(run.start for run in self.vision), self.num_tokens)
        return all(end <= start for end, start in zip(ends, starts, strict=True))

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


def map_prompt(
    num_tokens: int, features: Sequence[MultiModalFeatureSpec], model: Any = None
) -> PromptMap:
    """Find the vision runs of a prompt.

    Vision positions are those placeholder tokens of images and videos that carry embeddings. A
    tile of an image and a frame of a video are runs of their own, whether text is between them
    or not.

    Args:
        model: configuration of the model, as transformers has it; it says what the grids are.
    """
    runs = (run for feature in features for run in _vision_runs(feature, model))
    return PromptMap(num_tokens, tuple(sorted(runs, key=lambda run: run.start)))


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


def _vision_runs(feature: MultiModalFeatureSpec, model: Any) -> Iterator[VisionSpan]:
    if feature.modality not in VISION_MODALITIES:
        return
    embedded = feature.mm_position.extract_embeds_range()
    spans = [(start, last + 1 - start) for start, last in embedded if last >= start]
    grids = _patch_grids(feature, model)
    runs = _deal(spans, grids) if grids else None
    # Grids that do not fill the placeholder to the last token are another model's.
    yield from runs or [VisionSpan(start, length, None) for start, length in spans]


def _deal(spans: Sequence[tuple[int, int]], grids: Sequence[Grid]) -> list[VisionSpan] | None:
    """Cut stretches of tokens, given by start and length, into one run for each grid."""
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


def _patch_grids(feature: MultiModalFeatureSpec, model: Any) -> list[Grid] | None:
    """The grids that an image's or a video's tokens spell out, one after the other.

    vLLM does not say how tokens lie in an image, and their number does not either: four tiles of
    16 x 16 are as many as one of 32 x 32. So this is known model by model, or not at all.
    """
    reported = {} if feature.data is None else feature.data
    thw = reported.get(f"{feature.modality}_grid_thw")
    if thw is not None:
        return _merged_grids(thw.data, model)
    read = _GRIDS_OF.get(getattr(model, "model_type", ""))
    return read(feature, model) if read else None


def _merged_grids(thw: Any, model: Any) -> list[Grid] | None:
    """Qwen's processors report frames, rows and columns of patches; squares of them are merged."""
    merge = getattr(getattr(model, "vision_config", None), "spatial_merge_size", None)
    if not isinstance(merge, int):
        return None
    frames, rows, columns = (int(n) for n in thw.flatten()[:3])
    return [(rows // merge, columns // merge)] * frames


def _llava_grids(feature: MultiModalFeatureSpec, model: Any) -> list[Grid] | None:
    """One square, behind the class token where the model keeps it."""
    side = _tile_side(model)
    extra = feature.mm_position.get_num_embeds() - side * side
    return [*[(1, 1)] * extra, (side, side)] if extra in (0, 1) else None


def _llava_next_grids(feature: MultiModalFeatureSpec, model: Any) -> list[Grid] | None:
    """The whole image in a square, then its tiles as one grid without the padding.

    Each row of the second ends with a token that stands for its end.
    """
    size = None if feature.data is None else feature.data.get("image_sizes")
    side = _tile_side(model)
    if size is None or side == 0:
        return None
    height, width = (int(n) for n in size.data.flatten()[:2])
    if height < 1 or width < 1:
        return None
    fitted = select_best_resolution((height, width), model.image_grid_pinpoints)
    rows, columns = (n // model.vision_config.image_size * side for n in fitted)
    # The padding is an even number of rows, or of columns, half of them on either side.
    if width * rows > height * columns:
        rows -= (rows - height * columns // width) // 2 * 2
    else:
        columns -= (columns - width * rows // height) // 2 * 2
    if model.model_type == "llava_onevision":
        # More than nine tiles are scaled down; vLLM has that number from nowhere else.
        ratio = math.sqrt(rows * columns / (9 * side * side))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
    return [(side, side), (rows, columns + 1)]


def _onevision_grids(feature: MultiModalFeatureSpec, model: Any) -> list[Grid] | None:
    """Images as in LLaVA-NeXT; of a video's frames 2 x 2 patches each, and one token at its end."""
    if feature.modality == "image":
        return _llava_next_grids(feature, model)
    side = -(-_tile_side(model) // 2)
    if side == 0:
        return None
    frames = feature.mm_position.get_num_embeds() // (side * side)
    return [*[(side, side)] * frames, (1, 1)]


def _internvl_grids(feature: MultiModalFeatureSpec, model: Any) -> list[Grid] | None:
    """Square tiles one after the other, the last of them the whole image; a frame is a tile."""
    reported = {} if feature.data is None else feature.data
    tiles = reported.get(f"{feature.modality}_num_patches")
    if tiles is None:
        return None
    num_tiles = int(tiles.data)
    side = math.isqrt(feature.mm_position.get_num_embeds() // max(num_tiles, 1))
    return [(side, side)] * num_tiles


def _tile_side(model: Any) -> int:
    """Patches along a side of what goes into the vision tower; 0 if it is not said plainly."""
    vision = getattr(model, "vision_config", None)
    image, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    return image // patch if isinstance(image, int) and isinstance(patch, int) else 0


_GRIDS_OF: dict[str, Callable[[MultiModalFeatureSpec, Any], list[Grid] | None]] = {
    "llava": _llava_grids,
    "llava_next": _llava_next_grids,
    "llava_onevision": _onevision_grids,
    "internvl": _internvl_grids,
    "internvl_chat": _internvl_grids,
}
