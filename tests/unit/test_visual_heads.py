# SPDX-License-Identifier: Apache-2.0
"""The scores of visual heads: pages, patches and hits by hand, and right and wrong answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle.emulation import Moment, Oracle
from vllm_tgvkv import visual_heads
from vllm_tgvkv.policies.head_scores import HeadScores
from vllm_tgvkv.visual_heads import (
    PAGE_SIZE,
    Answer,
    CalibrationError,
    Entry,
    Reader,
    Tally,
    calibrate,
    count_hits,
    draw_page,
    font_files,
    main,
    patches_of,
)

SIZE = PAGE_SIZE / 4
"""Side of a patch in a grid of 4 x 4."""


def test_patches_that_a_box_touches() -> None:
    assert patches_of((1, 1, SIZE - 1, SIZE - 1), (4, 4)) == {0}
    assert patches_of((SIZE * 1.5, SIZE * 2.1, SIZE * 2.5, SIZE * 2.9), (4, 4)) == {9, 10}
    assert patches_of((SIZE * 3.5, SIZE * 2.5, SIZE * 4, SIZE * 4), (4, 4)) == {11, 15}
    assert patches_of((0, 0, PAGE_SIZE, PAGE_SIZE / 2 - 1), (2, 3)) == {0, 1, 2}


@pytest.mark.parametrize("faces", [font_files(), [""]])
def test_the_ink_of_a_page_is_in_its_boxes(faces: list[str]) -> None:
    """Each box has ink, and behind the keys there is none outside of them."""
    for index in range(5):
        page = draw_page(np.random.default_rng([7, index]), faces)
        pixels = np.asarray(page.image).astype(int)[..., 0]
        ink = pixels < pixels.max() - 60
        assert 3 <= len(page.entries) <= 8
        assert len({entry.key for entry in page.entries}) == len(page.entries)
        for entry in page.entries:
            assert len(entry.boxes) == len(entry.value) in (5, 6)
            for left, top, right, bottom in entry.boxes:
                box = ink[int(top) : int(bottom) + 2, int(left) : int(right) + 1]
                assert box.any()
                ink[max(0, int(top) - 1) : int(bottom) + 3, int(left) - 2 : int(right) + 3] = False
        # What is left are the keys and colons: two characters of seven or eight.
        assert 0 < ink.sum() < 60 * 20 * len(page.entries)
        again = draw_page(np.random.default_rng([7, index]), faces)
        assert again.entries == page.entries
        assert np.array_equal(np.asarray(again.image), np.asarray(page.image))


def box(patch: int) -> tuple[float, float, float, float]:
    """Return a box inside one patch of the grid of 4 x 4."""
    row, column = divmod(patch, 4)
    return (column * SIZE + 2, row * SIZE + 2, column * SIZE + SIZE - 2, row * SIZE + SIZE - 2)


def test_hits_by_hand() -> None:
    """Two heads, patches from position 10 on, tokens of one and of several characters."""
    entry = Entry("K", "1234", (box(0), box(1), box(6), box(7)))
    pieces = ("it is ", "1", "23", "4.", "")
    # Head 0 looks at the right patch each time; head 1 only for "23", and elsewhere in the page.
    tops = torch.tensor([[[10, 3]], [[10, 11]], [[16, 11]], [[17, 3]], [[10, 10]]])
    answer = Answer(pieces, tops, torch.arange(10, 26), (4, 4))
    tally = Tally(torch.zeros(1, 2, dtype=torch.float64))
    assert count_hits(tally, answer, entry)
    # "23" has two patches, and so counts half.
    assert tally.scores.tolist() == [[1 + 0.5 + 1, 0.5]]
    assert (tally.num_answers, tally.num_right, tally.num_tokens) == (1, 1, 3)
    for value in ("1235", "i"):  # wrong, and twice in the answer
        assert not count_hits(tally, answer, Entry("K", value, entry.boxes))
    assert tally.scores.tolist() == [[2.5, 0.5]]
    assert (tally.num_answers, tally.num_right, tally.num_tokens) == (3, 1, 3)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(image_size=PAGE_SIZE)


@pytest.fixture(scope="module")
def reader(model: Path) -> Reader:
    return Reader(str(model), "cpu", "float32")


class RightReader:
    """A reader whose answers are right, and whose head 1 of layer 0 looks at each character."""

    shape = (2, 2)
    kv_heads = 1
    image_start = 10
    """Position of the first patch in the prompt."""

    def __init__(self, *_: Any, pages: int = 2, seed: int = 0) -> None:
        self.entries = [
            entry
            for index in range(pages)
            for entry in draw_page(np.random.default_rng([seed, index]), font_files()).entries
        ]

    def answer(self, _: Any, question: str) -> Answer:
        entry = self.entries.pop(0)
        assert entry.key in question
        tops = torch.zeros(len(entry.value), *self.shape, dtype=torch.int64)
        for step, box_of_character in enumerate(entry.boxes):
            tops[step, 0, 1] = self.image_start + min(patches_of(box_of_character, (24, 24)))
        vision = torch.arange(self.image_start, self.image_start + 24 * 24)
        return Answer(tuple(entry.value), tops, vision, (24, 24))


def test_the_keys_that_heads_attend_to_most(model: Path, reader: Reader) -> None:
    """Against the rows of attention that the oracle's model shows while it decodes."""
    oracle = Oracle(model)
    page = draw_page(np.random.default_rng([0, 0]), font_files())
    question = f"What is the value of {page.entries[0].key}?"
    ours = reader.answer(page.image, question)
    text = f"<|im_start|>user\n<image>{question}<|im_end|>\n<|im_start|>assistant\n"
    prompt = oracle.prompt(text, [page.image])
    rows = []

    def look(moment: Moment) -> None:
        rows.append(moment.rows[-1][:, :, -1])

    oracle.decode(prompt, len(ours.pieces), look)
    assert len(rows) == len(ours.pieces) > 3
    for of_heads, tops in zip(rows, ours.tops, strict=True):
        most = of_heads.amax(dim=-1)
        # The same key, or one with the same attention up to rounding.
        chosen = of_heads.gather(-1, tops.unsqueeze(-1)).squeeze(-1)
        assert ((most - chosen) < 1e-5).all()
    assert ours.vision.tolist() == prompt.vision.nonzero().flatten().tolist()
    assert ours.grid == (24, 24)


def test_heads_that_look_where_the_answer_stands(reader: Reader) -> None:
    right: Any = RightReader(seed=1)
    characters = sum(len(entry.value) for entry in right.entries)
    tally = calibrate(right, pages=2, seed=1)
    assert tally.num_right == tally.num_answers > 2
    assert tally.num_tokens == characters
    assert tally.scores[0, 1] > 0
    assert tally.scores.sum() == tally.scores[0, 1]
    with pytest.raises(CalibrationError, match=r"0 of .* answers were right, and no head was hit"):
        calibrate(reader, pages=1, seed=1)


def test_the_command_writes_a_file_that_servers_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visual_heads, "Reader", RightReader)
    file = tmp_path / "heads.json"
    main([str(model), "--output", str(file), "--pages", "1", "--dtype", "float32"])
    found = HeadScores.read(str(file), "here")
    found.check_model(RightReader.shape[0], RightReader.kv_heads)
    assert (found.model, len(found.scores[0])) == (model.name, RightReader.shape[1])
    made = json.loads(file.read_text(encoding="utf-8"))["made"]
    assert made["pages"] == 1
    assert made["right_answers"] >= 1
    assert {"question", "seed", "tokens", "fonts", "versions"} <= made.keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pages", "0"], "--pages is 0: give at least 1"),
        (["--question", "What?"], "it needs {key}"),
        (["--output", "/no/such/folder/file"], "its folder does not exist"),
    ],
)
def test_wrong_arguments_of_the_command(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--output", str(tmp_path / "file"), *arguments])
    assert words in capsys.readouterr().err


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="cannot be loaded as a vision-language model"):
        main([str(tmp_path), "--output", str(tmp_path / "file")])
