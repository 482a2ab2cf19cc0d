# SPDX-License-Identifier: Apache-2.0
"""Vision runs, patch grids and observation rows of prompts made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from vllm_tgvkv.prompt import PromptMap, VisionRun, map_prompt, voters


def feature(
    offset: int,
    length: int,
    embeds: Sequence[int] | None = None,
    modality: str = "image",
    grid_thw: tuple[int, int, int] | None = None,
) -> MultiModalFeatureSpec:
    """A placeholder at `offset`; `embeds` are the positions in it that carry embeddings."""
    is_embed = None
    if embeds is not None:
        is_embed = torch.zeros(length, dtype=torch.bool)
        is_embed[list(embeds)] = True
    data = None
    if grid_thw is not None:
        elem = MultiModalFieldElem(data=torch.tensor(grid_thw), field=MultiModalBatchedField())
        data = MultiModalKwargsItem({f"{modality}_grid_thw": elem})
    return MultiModalFeatureSpec(
        data=data,
        modality=modality,
        identifier=f"{modality}-{offset}",
        mm_position=PlaceholderRange(offset, length, is_embed),
    )


def runs(prompt: PromptMap) -> list[tuple[int, int]]:
    return [(run.start, run.length) for run in prompt.vision]


def vision_positions(prompt: PromptMap) -> list[int]:
    return np.flatnonzero(prompt.is_vision()).tolist()


def text_rows(prompt: PromptMap, window: int = 512) -> list[int]:
    return voters(prompt, ("text",), window).sets["text"].tolist()


def test_one_image() -> None:
    """Text before the image does not vote; all text after it does."""
    prompt = map_prompt(20, [feature(5, 9)])
    assert prompt.num_tokens == 20
    assert prompt.vision == (VisionRun(5, 9, (3, 3)),)
    assert vision_positions(prompt) == list(range(5, 14))
    assert text_rows(prompt) == [14, 15, 16, 17, 18, 19]
    assert voters(prompt, ("text",), 512).rows.dtype == np.int64
    assert prompt.has_vision


def test_several_images() -> None:
    """Text between images votes too."""
    prompt = map_prompt(20, [feature(2, 4), feature(8, 4), feature(12, 4)])
    assert runs(prompt) == [(2, 4), (8, 4), (12, 4)]
    assert text_rows(prompt) == [6, 7, 16, 17, 18, 19]


def test_first_vision_token_counts_whatever_the_order_of_features() -> None:
    prompt = map_prompt(20, [feature(12, 4), feature(2, 4, modality="video")])
    assert text_rows(prompt) == [*range(6, 12), 16, 17, 18, 19]


@pytest.mark.parametrize(
    ("window", "rows"), [(1, [19]), (3, [17, 18, 19]), (5, [7, 16, 17, 18, 19])]
)
def test_observation_window_takes_the_last_text(window: int, rows: list[int]) -> None:
    assert text_rows(map_prompt(20, [feature(2, 4), feature(8, 8)]), window) == rows


def test_image_at_the_end_lets_the_last_position_vote() -> None:
    prompt = map_prompt(20, [feature(11, 9)])
    assert text_rows(prompt) == [19]
    assert vision_positions(prompt) == list(range(11, 20))


def test_text_between_images_votes_though_an_image_ends_the_prompt() -> None:
    assert text_rows(map_prompt(20, [feature(2, 4), feature(8, 12)])) == [6, 7]


def test_text_only() -> None:
    prompt = map_prompt(10, [])
    assert not prompt.has_vision
    assert vision_positions(prompt) == []
    assert text_rows(prompt, 4) == [6, 7, 8, 9]
    assert text_rows(map_prompt(3, []), 4) == [0, 1, 2]


def test_audio_is_text() -> None:
    prompt = map_prompt(10, [feature(2, 4, modality="audio")])
    assert not prompt.has_vision
    assert text_rows(prompt, 3) == [7, 8, 9]


def test_video_with_text_between_its_frames() -> None:
    """Start tokens and time stamps inside the placeholder are text; each frame is a run."""
    embeds = [1, 2, 3, 4, 7, 8, 9, 10]
    prompt = map_prompt(20, [feature(3, 12, embeds, "video")])
    assert prompt.vision == (VisionRun(4, 4, (2, 2)), VisionRun(10, 4, (2, 2)))
    assert text_rows(prompt) == [8, 9, *range(14, 20)]


def test_placeholder_without_embeddings_is_text() -> None:
    prompt = map_prompt(10, [feature(2, 4, [])])
    assert not prompt.has_vision
    assert text_rows(prompt, 3) == [7, 8, 9]


@pytest.mark.parametrize(
    ("length", "grid_thw", "grid"),
    [
        (9, None, (3, 3)),
        (8, None, None),
        (24, (1, 4, 6), (4, 6)),  # patches as they are
        (6, (1, 4, 6), (2, 3)),  # 2 x 2 patches merged into a token
        (5, (1, 4, 6), None),
    ],
)
def test_patch_grids(
    length: int, grid_thw: tuple[int, int, int] | None, grid: tuple[int, int] | None
) -> None:
    (run,) = map_prompt(50, [feature(3, length, grid_thw=grid_thw)]).vision
    assert run == VisionRun(3, length, grid)


def test_contiguous_frames_of_a_video_are_runs_of_their_own() -> None:
    video = feature(3, 18, modality="video", grid_thw=(3, 4, 6))
    prompt = map_prompt(30, [video])
    assert prompt.vision == tuple(VisionRun(start, 6, (2, 3)) for start in (3, 9, 15))
    assert vision_positions(prompt) == list(range(3, 21))
    assert text_rows(prompt) == list(range(21, 30))


def test_grid_of_another_modality_is_not_taken() -> None:
    """A video's grid says nothing about an image."""
    image = feature(3, 4)
    image.data = feature(0, 6, modality="video", grid_thw=(1, 4, 6)).data
    (run,) = map_prompt(30, [image]).vision
    assert run.grid == (2, 2)


def test_row_sets() -> None:
    prompt = map_prompt(60, [feature(2, 4), feature(8, 16)])
    found = voters(prompt, ("text", "after_vision", "window"), 40)
    assert found.sets["text"].tolist() == [6, 7, *range(24, 60)]
    assert found.sets["after_vision"].tolist() == list(range(24, 60))
    assert found.sets["window"].tolist() == list(range(28, 60))
    assert found.rows.tolist() == [6, 7, *range(24, 60)]
    assert not found.every_row
    assert found.last_cached(exact=True) == 6
    assert found.last_cached(exact=False) == 59


def test_rows_that_are_not_asked_for_limit_no_prefix_hit() -> None:
    prompt = map_prompt(60, [feature(8, 16)])
    assert voters(prompt, (), 40).last_cached(exact=True) is None
    assert voters(prompt, ("window",), 40).last_cached(exact=True) == 28
    everything = voters(prompt, ("text", "all"), 40)
    assert everything.every_row
    assert everything.last_cached(exact=False) == 0
    assert list(everything.sets) == ["text"]
