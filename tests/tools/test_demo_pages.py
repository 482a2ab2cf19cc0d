# SPDX-License-Identifier: Apache-2.0
"""The pages of the demonstration: the same everywhere, never shared by splits, answerable."""

import io

import numpy as np
import pytest
from PIL import Image

from demo.pages import KEYS, PAGE_SIZE, SPLITS, VALUE_CHARACTERS, draw_page, make_page

pytestmark = pytest.mark.apparatus


def test_same_seed_gives_same_page() -> None:
    first, second = make_page("test", 7), make_page("test", 7)
    assert first.image.tobytes() == second.image.tobytes()
    assert first.entries == second.entries
    assert first.questions == second.questions


def test_splits_and_indices_differ() -> None:
    images = [make_page(split, index).image.tobytes() for split in SPLITS for index in range(20)]
    assert len(set(images)) == len(images)


@pytest.mark.parametrize("index", range(10))
def test_every_question_has_one_answer_on_its_page(index: int) -> None:
    page = make_page("test", index)
    values = {entry.key: entry.value for entry in page.entries}
    assert len(values) == len(page.entries) == len(page.questions)
    for question in page.questions:
        assert question.answer == values[question.key]
        assert question.key in question.text
        assert question.answer not in question.text
        assert set(question.answer) <= set(VALUE_CHARACTERS)


@pytest.mark.parametrize("index", range(10))
def test_boxes_hold_the_ink(index: int) -> None:
    page = make_page("test", index)
    darkness = 255 - np.asarray(page.image.convert("L"), float)
    paper = np.median(darkness)
    for entry in page.entries:
        assert len(entry.boxes) == len(entry.text)
        for left, top, right, bottom in entry.boxes:
            assert 0 <= left < right <= PAGE_SIZE
            assert 0 <= top < bottom <= PAGE_SIZE
            assert darkness[top:bottom, left:right].max() > paper + 50


def test_png_keeps_every_pixel() -> None:
    image = make_page("test", 0).image
    assert image.mode == "RGB"
    assert image.size == (PAGE_SIZE, PAGE_SIZE)
    file = io.BytesIO()
    image.save(file, "PNG")
    assert Image.open(file).tobytes() == image.tobytes()


def test_pages_of_one_prompt_need_not_share_keys() -> None:
    first, second = make_page("test", 1, KEYS[:13]), make_page("test", 2, KEYS[13:])
    assert not {entry.key for entry in first.entries} & {entry.key for entry in second.entries}


def test_too_many_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        draw_page(np.random.default_rng(0), KEYS)
