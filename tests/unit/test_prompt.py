# SPDX-License-Identifier: Apache-2.0
"""Vision runs, patch grids and observation rows of small prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from vllm_tgvkv.shared.prompt import PromptMap, VisionSpan, map_prompt, voters


def feature(
    offset: int,
    length: int,
    embeds: Sequence[int] | None = None,
    modality: str = "image",
    reported: Mapping[str, int | Sequence[int]] | None = None,
) -> MultiModalFeatureSpec:
    """Return a placeholder at `offset`.

    Args:
        embeds: positions in it that carry embeddings, by default all.
        reported: values that the model's processor reports in addition to pixels.
    """
    is_embed = None
    if embeds is not None:
        is_embed = torch.zeros(length, dtype=torch.bool)
        is_embed[list(embeds)] = True
    data = None
    if reported is not None:
        data = MultiModalKwargsItem(
            {
                key: MultiModalFieldElem(data=torch.tensor(value), field=MultiModalBatchedField())
                for key, value in reported.items()
            }
        )
    return MultiModalFeatureSpec(
        data=data,
        modality=modality,
        identifier=f"{modality}-{offset}",
        mm_position=PlaceholderRange(offset, length, is_embed),
    )


def model(model_type: str, **fields: Any) -> SimpleNamespace:
    """Return a configuration whose vision tower has inputs of 4 x 4 patches."""
    vision = SimpleNamespace(image_size=56, patch_size=14, spatial_merge_size=2)
    return SimpleNamespace(model_type=model_type, vision_config=vision, **fields)


def grids(found: MultiModalFeatureSpec, of: Any) -> list[tuple[int, tuple[int, int] | None]]:
    """Return length and grid of each run, which must follow each other without a gap."""
    found_runs = map_prompt(1000, [found], of).vision
    ends = [run.start + run.length for run in found_runs]
    assert [run.start for run in found_runs[1:]] == ends[:-1]
    return [(run.length, run.grid) for run in found_runs]


TILED = {"image_grid_pinpoints": [[56 * i, 56 * j] for i in range(1, 7) for j in range(1, 7)]}


def vision_positions(prompt: PromptMap) -> list[int]:
    return np.flatnonzero(prompt.is_vision()).tolist()


def text_rows(prompt: PromptMap, window: int = 512) -> list[int]:
    return voters(prompt, ("text",), window).sets["text"].tolist()


def test_observation_window_takes_the_last_text() -> None:
    prompt = map_prompt(20, [feature(2, 4), feature(8, 8)])
    for window, rows in ((1, [19]), (3, [17, 18, 19]), (5, [7, 16, 17, 18, 19])):
        assert text_rows(prompt, window) == rows
    prompt = map_prompt(10, [])
    assert not prompt.has_vision
    assert vision_positions(prompt) == []
    assert text_rows(prompt, 4) == [6, 7, 8, 9]
    assert text_rows(map_prompt(3, []), 4) == [0, 1, 2]


TILED_NEXT, ONEVISION = (model(name, **TILED) for name in ("llava_next", "llava_onevision"))
SQUARE = (16, (4, 4))
REPORTS: list[tuple[Any, int, dict[str, Any], list[Any]]] = [
    (model("qwen2_vl"), length, {"image_grid_thw": thw}, expected)
    for length, thw, expected in (
        (6, (1, 4, 6), [(6, (2, 3))]),
        (18, (3, 4, 6), [(6, (2, 3))] * 3),  # frames without text between them
        (24, (1, 4, 6), [(24, None)]),  # not merged: the report of another model
        (5, (1, 4, 6), [(5, None)]),  # tokens of a video were pruned
        (4, (4, 4, 4), [(4, None)]),  # pruned as well, although 4 frames of 1 x 1 would fit
    )
]
REPORTS += [
    case
    for height, width, rows, columns in (
        (112, 112, 8, 8),  # two tiles by two
        (56, 168, 4, 12),
        (150, 70, 12, 6),  # without columns of padding
        (70, 280, 6, 20),  # without rows of padding
    )
    for size in [{"image_sizes": (height, width)}]
    for length in [16 + rows * (columns + 1)]
    for case in (  # a square, and rows with ends
        (TILED_NEXT, length, size, [SQUARE, (length - 16, (rows, columns + 1))]),
        (TILED_NEXT, length + 1, size, [(length + 1, None)]),
    )
]
# 24 x 24 patches, scaled down to 9 tiles. Four tiles of 2 x 2 are as many tokens as 4 x 4.
REPORTS += [
    (ONEVISION, 16 + 12 * 13, {"image_sizes": (336, 336)}, [SQUARE, (156, (12, 13))]),
    (model("internvl"), 16, {"image_num_patches": 4}, [(4, (2, 2))] * 4),
    (model("internvl"), 15, {"image_num_patches": 3}, [(15, None)]),
]


@pytest.mark.parametrize(("of", "length", "reported", "expected"), REPORTS)
def test_reported_grids_are_used_if_they_fill_the_placeholder(
    of: Any, length: int, reported: dict[str, Any], expected: list[Any]
) -> None:
    """Without a report in this process, a square would be a guess."""
    assert grids(feature(3, length, reported=reported), of) == expected
    assert grids(feature(3, length), of) == [(length, None)]


def test_grids_without_a_report() -> None:
    """LLaVA's square, after the class token if the model keeps it. No other model has a square."""
    for length, expected in (
        (16, [SQUARE]),
        (17, [(1, (1, 1)), SQUARE]),
        (9, [(9, None)]),
        (18, [(18, None)]),
    ):
        assert grids(feature(3, length), model("llava")) == expected
    no_tower = SimpleNamespace(model_type="llava")
    for unknown in (None, SimpleNamespace(), model("minicpmv"), no_tower):
        assert grids(feature(3, 16), unknown) == [(16, None)]
    # Rows of an image that are separate runs: Pixtral, where a text token ends each row.
    embeds = [column + 5 * row for row in range(4) for column in range(4)]
    (first, *rest) = map_prompt(50, [feature(3, 20, embeds)], model("llava")).vision
    assert first == VisionSpan(3, 4, None)
    assert len(rest) == 3
    # A video ends with a token. Tiles lie between two tokens without embeddings.
    frames = [*[(4, (2, 2))] * 3, (1, (1, 1))]
    assert grids(feature(3, 13, modality="video"), ONEVISION) == frames
    assert grids(feature(3, 14, modality="video"), ONEVISION) == [(14, None)]
    # Pruned, with the times between its frames as long as what was dropped.
    fits = feature(3, 12, modality="video", reported={"video_grid_thw": (2, 4, 6)})
    (pruned,) = map_prompt(50, [fits], model("qwen3_vl"), are_pruned=True).vision
    assert pruned == VisionSpan(3, 12, None)
    tiles = feature(3, 18, range(1, 17), reported={"image_num_patches": 4})
    assert grids(tiles, model("internvl")) == [(4, (2, 2))] * 4


MODELS = [None, *map(model, ("llava", "internvl", "qwen3_vl")), TILED_NEXT, ONEVISION]


@st.composite
def features_of_any_kind(draw: st.DrawFn) -> list[MultiModalFeatureSpec]:
    """Overlapping, unordered, empty or outside the prompt, with wrong reports."""
    small = st.integers(0, 9)
    found = []
    for _ in range(draw(st.integers(0, 4))):
        length = draw(st.integers(0, 24))
        embeds = draw(st.none() | st.sets(st.integers(0, length - 1))) if length else None
        reported = draw(
            st.none()
            | st.fixed_dictionaries(
                {},
                optional={
                    "image_grid_thw": st.tuples(small, small, small),
                    "video_grid_thw": st.tuples(small, small, small),
                    "image_sizes": st.tuples(st.integers(0, 400), st.integers(0, 400)),
                    "image_num_patches": small,
                },
            )
        )
        modality = draw(st.sampled_from(["image", "video", "audio"]))
        offset = draw(st.integers(0, 50))
        listed = None if embeds is None else sorted(embeds)
        found.append(feature(offset, length, listed, modality, reported))
    return found


@given(features_of_any_kind(), st.integers(1, 60), st.sampled_from(MODELS), st.integers(1, 70))
def test_any_placeholders_are_mapped_or_marked_malformed(
    features: list[MultiModalFeatureSpec], num_tokens: int, of: Any, window: int
) -> None:
    prompt = map_prompt(num_tokens, features, of)
    embedded = [
        position
        for found in features
        if found.modality != "audio"
        for first, last in found.mm_position.extract_embeds_range()
        for position in range(first, last + 1)
    ]
    covered = [i for run in prompt.vision for i in range(run.start, run.start + run.length)]
    assert sorted(covered) == sorted(embedded)
    assert all(run.grid is None or math.prod(run.grid) == run.length for run in prompt.vision)
    apart = len(set(embedded)) == len(embedded)
    inside = all(0 <= position < num_tokens for position in embedded)
    assert prompt.is_well_formed == (apart and inside)
    if not prompt.is_well_formed:
        return
    assert covered == vision_positions(prompt)
    found = voters(prompt, ("text", "all_text", "after_vision", "window"), window)
    for rows in found.sets.values():
        assert len(rows)
        assert (np.diff(rows) > 0).all()
        assert rows[0] >= 0
        assert rows[-1] < num_tokens
    assert set(found.rows) == set().union(*(set(rows) for rows in found.sets.values()))


def test_tokens_of_the_answer_vote_in_every_set() -> None:
    prompt = map_prompt(60, [feature(2, 4), feature(8, 16)])
    kinds = ("text", "after_vision", "window", "answer", "all")
    found, without = voters(prompt, kinds, 40, 3), voters(prompt, kinds[:3], 40)
    everywhere = voters(prompt, ("all_text",), 39, 3)
    assert everywhere.sets["all_text"].tolist() == [1, 6, 7, *range(24, 63)]
    assert everywhere.last_cached == 1
    starts = {"text": [6, 7, 24], "after_vision": [24], "window": [28]}
    for kind, (*first, last) in starts.items():
        assert without.sets[kind].tolist() == [*first, *range(last, 60)]  # type: ignore[index]
    assert without.rows.tolist() == [6, 7, *range(24, 60)]
    assert not without.every_row
    assert without.last_cached == 6
    assert list(found.sets) == ["text", "after_vision", "window", "answer"]
    for kind, rows in without.sets.items():
        assert found.sets[kind].tolist() == [*rows, 60, 61, 62]
    assert found.sets["answer"].tolist() == [60, 61, 62]
    assert found.rows.tolist() == [6, 7, *range(24, 63)]
    assert all(rows.dtype == np.int64 for rows in (found.rows, *found.sets.values()))
    assert found.every_row


def test_the_latest_rows_are_those_of_the_answer_or_else_of_the_window() -> None:
    prompt = map_prompt(60, [feature(8, 16)])
    both = ("latest", "window")
    found, without = voters(prompt, both, 40, 3), voters(prompt, both, 40)
    assert found.sets["latest"].tolist() == [60, 61, 62]
    assert without.sets["latest"].tolist() == without.sets["window"].tolist()
    for kinds, last in ((("latest",), 60), (("answer",), 60), (("answer", "window"), 28)):
        # Rows of the answer do not limit prefix hits: 60 is the whole prompt.
        assert voters(prompt, kinds, 40, 3).last_cached == last
    with pytest.raises(ValueError, match="waits for none of its tokens"):
        voters(prompt, ("answer",), 40)
