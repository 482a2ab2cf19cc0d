# SPDX-License-Identifier: Apache-2.0
"""The tasks of the demonstration: the same everywhere, answerable from their pages alone."""

import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

from demo import chat, tasks
from demo.batches import Stage, make_batch
from demo.blocks import IGNORE, make_blocks
from demo.pages import SLOT_HEIGHT, Entry, Page, make_page
from demo.tasks import MAX_ANSWER_TOKENS, TASKS, Example, can_ask, make_example

pytestmark = pytest.mark.apparatus

INDICES = range(12)
EXAMPLES = [make_example(task, "test", index) for task in TASKS for index in INDICES]


def examples(task: str) -> list[Example]:
    return [example for example in EXAMPLES if example.task == task]


def keys(question: str) -> list[str]:
    return re.findall(r"\b[A-Z]\b", question)


def values(example: Example) -> dict[str, str]:
    """Value of each key on the pages; fails if two entries share a key."""
    entries = [entry for page in example.pages for entry in page.entries]
    found = {entry.key: entry.value for entry in entries}
    assert len(found) == len(entries)
    return found


def middle(entry: Entry) -> float:
    return sum(top + bottom for _, top, _, bottom in entry.boxes) / (2 * len(entry.boxes))


def image_part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image", "image": image}


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_gives_same_example(task: str) -> None:
    first, second = make_example(task, "test", 3), make_example(task, "test", 3)
    assert [page.image.tobytes() for page in first.pages] == [
        page.image.tobytes() for page in second.pages
    ]
    assert (first.history, first.question, first.answer) == (
        second.history,
        second.question,
        second.answer,
    )
    assert first.sources == second.sources
    other = make_example(task, "validation", 3)
    assert other.pages[0].image.tobytes() != first.pages[0].image.tobytes()


def test_all_tasks_show_the_same_first_page() -> None:
    for task in TASKS:
        for index, example in zip(INDICES, examples(task), strict=True):
            assert example.pages[0].entries == make_page("test", index).entries


@pytest.mark.parametrize("task", ["value", "chat"])
def test_values_are_those_of_the_keys(task: str) -> None:
    for example in examples(task):
        asked = [
            *((t.question, t.answer) for t in example.history),
            (example.question, example.answer),
        ]
        assert len(asked) == (2 if task == "chat" else 1)
        for question, answer in asked:
            assert answer == values(example)[keys(question)[0]]
        assert len({answer for _, answer in asked}) == len(asked)


def test_value_asks_every_question_of_the_page_in_turn() -> None:
    for index, example in zip(INDICES, examples("value"), strict=True):
        page = example.pages[0]
        assert example.question == page.questions[index % len(page.questions)].text


def test_row_reads_what_stands_side_by_side() -> None:
    lengths = set()
    for example in examples("row"):
        (key,) = keys(example.question)
        entries = sorted(example.pages[0].entries, key=lambda entry: entry.boxes[0][0])
        asked = next(entry for entry in entries if entry.key == key)
        # The slots of other rows are further away than half of their height.
        row = [e for e in entries if abs(middle(e) - middle(asked)) < SLOT_HEIGHT / 2]
        assert example.answer == " ".join(entry.text for entry in row)
        lengths.add(len(row))
    assert lengths == {1, 2}


def test_two_images_asks_one_key_of_each_page() -> None:
    orders = set()
    for example in examples("two_images"):
        first, second = keys(example.question)
        assert example.answer == f"{values(example)[first]} {values(example)[second]}"
        owners = [{entry.key for entry in page.entries} for page in example.pages]
        assert (first in owners[0]) + (second in owners[0]) == 1
        orders.add(first in owners[0])
    assert orders == {True, False}


def test_compare_answers_with_the_larger_first_digit() -> None:
    winners = set()
    for example in examples("compare"):
        pair = keys(example.question)
        digits = {key: int(values(example)[key][0]) for key in pair}
        best = max(digits, key=digits.__getitem__)
        assert len(set(digits.values())) == 2
        assert example.answer == f"{best}:{values(example)[best]}"
        winners.add(pair.index(best))
    assert winners == {0, 1}


def test_page_with_nothing_to_compare_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(split: str, index: int) -> Page:
        page = make_page(split, index)
        if index != 5:
            return page
        one = page.entries[0]
        return Page(page.image, (one, Entry("?", one.value, one.boxes)), page.questions[:2])

    monkeypatch.setattr(tasks, "make_page", make)
    assert not can_ask("compare", (make("test", 5),))
    pages = make_example("compare", "test", 5).pages
    assert pages[0].entries == make_page("test", 5 + tasks.REDRAW).entries


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.task)
def test_sources_spell_the_answer(example: Example) -> None:
    whole = example.task in ("row", "compare")
    texts = [s.entry.text if whole else s.entry.value for s in example.sources]
    assert " ".join(texts) == example.answer
    for source in example.sources:
        assert source.entry in example.pages[source.page].entries


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.task)
def test_text_is_within_the_vocabulary(example: Example) -> None:
    turns = [*example.history, example]
    text = "".join(turn.question + turn.answer for turn in turns)
    assert chat.TOKENS[chat.UNK] not in chat.encode(text)
    assert len(chat.encode(example.answer)) + 1 <= MAX_ANSWER_TOKENS


def test_longest_answer_is_reached() -> None:
    longest = max(len(make_example("row", "train", index).answer) for index in range(100))
    assert longest + 1 == MAX_ANSWER_TOKENS


def test_messages_put_the_pages_first_and_alternate_roles() -> None:
    for example in EXAMPLES:
        messages = example.messages(image_part)
        roles = [message["role"] for message in messages]
        assert roles == ["user", "assistant"] * len(example.history) + ["user"]
        *images, text = messages[0]["content"]
        assert [part["image"] for part in images] == [page.image for page in example.pages]
        questions = [text["text"], *(m["content"] for m in messages[2::2])]
        assert questions == [*(turn.question for turn in example.history), example.question]
        assert [m["content"] for m in messages[1::2]] == [t.answer for t in example.history]


def test_blocks_spell_the_prompt_of_the_chat_template() -> None:
    for example in EXAMPLES:
        blocks = make_blocks([[example]])
        turns = [*example.history, tasks.Turn(example.question, example.answer)]
        text = [f"{t.question}<|assistant|>{t.answer}</s>" for t in turns]
        names = {number: token for token, number in chat.TOKENS.items()}
        spelled = "".join(names[number] for number in blocks.tokens[0].tolist())
        assert spelled == "<|user|>".join(text)
        answers = [names[n] for n in blocks.targets[0].tolist() if n != IGNORE]
        assert "".join(answers) == "".join(f"{turn.answer}</s>" for turn in turns)


def test_blocks_of_a_batch_keep_their_rows_apart() -> None:
    one, two = ([make_example(task, "train", i) for task in ("row", "chat")] for i in (0, 1))
    alone = [make_blocks([[example]]) for example in (*one, *two)]
    together = make_blocks([one, two])
    for number, single in enumerate(alone):
        rows = together.tokens[number // 2][together.owners == number % 2]
        length = single.tokens.shape[1]
        assert rows[:length].tolist() == single.tokens[0].tolist()
        assert set(rows[length:].tolist()) <= {chat.TOKENS[chat.PAD]}


def test_a_batch_shows_all_ink_before_blank_paper() -> None:
    rates = (1e-3, 1e-3)
    whole = Stage(1, 2, (24, 24), (8, 8), rates, ("value",), pairs=0)
    some = Stage(1, 2, (24, 24), (8, 8), rates, ("value",), pairs=0, seen=200)
    ink, shown = (
        (make_batch(np.random.default_rng(0), stage).glyphs != IGNORE).sum(1).tolist()
        for stage in (whole, some)
    )
    assert ink == shown
