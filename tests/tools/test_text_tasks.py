# SPDX-License-Identifier: Apache-2.0
"""Questions about texts, and the scores of their answers."""

from __future__ import annotations

import hashlib
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from measure.text_tasks import (
    FRESH,
    PASSAGE_TOKENS,
    TRAINING,
    TextExample,
    TextQuestion,
    TextTask,
)
from measure.text_words import ADJECTIVES, NOUNS, python_prose

pytestmark = pytest.mark.apparatus

FRAME = 30
FOUR = TextTask("number", "prose", 1024, keys=4)
FACT = TextTask("fact", "prose", 1024, keys=4)
AMONG = TextTask("number", "needles", 1024)
PASSAGE_IN_PROSE = TextTask("passage", "prose", 1024)
TASKS = [
    TextTask("number", "noise", 512),
    TextTask("number", "prose", 1024),
    FOUR,
    TextTask("passage", "noise", 1024),
    PASSAGE_IN_PROSE,
    FACT,
    AMONG,
]
COPY = TextTask("copy", "noise", 1024, keys=20)
NEEDLE = r"magic numbers for (\S+) is: (\d{7})\."


def count(words: str) -> int:
    """Count words, as a tokenizer counts tokens."""
    return len(words.split())


def ask(task: TextTask, number: int) -> TextExample:
    return TextQuestion(task, number).example(FRAME, count)


# -- questions ------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_questions_follow_from_their_numbers_and_fill_their_length(task: TextTask) -> None:
    """The answer stands in the text once, anywhere."""
    # Documents are cut after a sentence each.
    lost = max(map(count, python_prose())) * (task.keys if task.kind == "fact" else 1)
    examples = [ask(task, number) for number in range(30)]
    assert ask(task, 3) == examples[3]
    assert len({example.message for example in examples}) == 30
    for example in examples:
        length = FRAME + count(example.message) + count(example.start)
        # Where a needle comes between two sentences no word is lost, and heads end with a newline.
        assert task.tokens - lost < length <= task.tokens
        assert example.answer not in example.start
    if task.kind != "fact":
        assert all(example.message.count(example.answer) == 1 for example in examples)
        assert len({example.answer for example in examples}) == 30
        places = [e.message.index(e.answer) / len(e.message) for e in examples]
        assert min(places) < 0.3
        assert max(places) > 0.7


def test_questions_are_the_published_ones() -> None:
    """Results belong to their words. Prose, which varies with Python, is left out."""
    noise = [task for task in (*TASKS, COPY) if task.haystack != "prose"]
    words = repr([ask(task, n) for task in noise for n in (0, FRESH, TRAINING)])
    assert hashlib.sha256(words.encode()).hexdigest()[:12] == "b7d312c64ee4"


def test_one_of_four_numbers_is_asked_for() -> None:
    asked = Counter()
    for number in range(40):
        example = ask(FOUR, number)
        needles = re.findall(NEEDLE, example.message)
        assert len(dict(needles)) == len({value for _, value in needles}) == 4
        (key,) = (key for key, value in needles if value == example.answer)
        assert example.start == (
            f"The special magic number for {key} mentioned in the provided text is"
        )
        asked[[value for _, value in needles].index(example.answer)] += 1
    assert len(asked) == 4


def test_all_of_several_numbers_are_asked_for() -> None:
    """In another order than they stand in."""
    in_order = 0
    for number in range(20):
        example = ask(TextTask("numbers", "noise", 448, keys=3), number)
        needles = dict(re.findall(NEEDLE, example.message))
        names = re.findall(r"\w+-\w+", example.start)
        assert example.items == tuple(needles[name] for name in names)
        assert len(set(names)) == len(needles) == 3
        assert example.hits(f": {example.answer}.", ()) == "1111"
        in_order += example.items == tuple(needles.values())
    assert in_order < 10


def test_a_passage_says_no_word_twice() -> None:
    for number in range(50):
        example = ask(PASSAGE_IN_PROSE, number)
        assert PASSAGE_TOKENS[0] <= count(example.answer) <= PASSAGE_TOKENS[1]
        assert example.answer.count(".") == 1
        words = example.answer.rstrip(".").split()
        names = [w for w in words if w in ADJECTIVES or w in NOUNS or w[:-1] in NOUNS]
        assert len(names) == len(set(names))
        # The passage stands in the text after the words with which the answer begins.
        assert f'{example.start}{example.answer}"' in example.message


def test_a_text_that_is_too_short_for_its_needles() -> None:
    with pytest.raises(ValueError, match="too few for 4 hidden sentences"):
        ask(TextTask("number", "noise", 100, keys=4), 0)


def test_a_fact_stands_in_one_document() -> None:
    asked = Counter()
    for number in range(20):
        example = ask(FACT, number)
        documents = re.split(r"Document \d:\n", example.message)[1:]
        fact = f"{example.start.removeprefix('Answer: ')} {example.answer}."
        (place,) = (n for n, document in enumerate(documents) if fact in document)
        asked[place] += 1
        assert len(documents) == 4
    assert len(asked) == 4


def test_no_other_number_has_the_name_that_is_asked_for() -> None:
    for number in range(20):
        example = ask(AMONG, number)
        needles = re.findall(NEEDLE, example.message)
        name = re.search(r"for (\S+) mentioned", example.start)[1]  # type: ignore[index]
        assert [value for key, value in needles if key == name] == [example.answer]
        assert len(needles) > 50


def test_a_list_is_copied_line_by_line() -> None:
    example = ask(COPY, 1)
    lines = example.answer.split("\n")
    assert example.message.count(f"{example.start}{example.answer}\n") == 1
    assert [line.partition(". ")[0] for line in lines] == [str(n) for n in range(1, 21)]
    assert example.hits(f"{example.answer}\n\nIt", ()) == "1" * 21
    assert example.hits(example.answer.replace(lines[7], "8. 12"), ()) == "1" * 19 + "00"


def test_splits() -> None:
    numbers = (FRESH - 1, FRESH, TRAINING - 1, TRAINING)
    splits = [TextQuestion(AMONG, number).split for number in numbers]
    assert splits == ["test", "fresh", "fresh", "training"]


# -- scores ---------------------------------------------------------------------------------

NUMBER = TextExample("", "", "8812311", "number")
PASSAGE = TextExample("", "", "The old fox ran.", "passage")
LIST = TextExample("", "", "12 and 345", "copy", ("12", "345"))
PIECES = {
    "number": NUMBER.answer,
    "passage": ("The", " old", " fox", " ran", "."),
    "copy": ("12", " and", " 345"),
}


@pytest.mark.parametrize(
    ("asked", "said", "hits"),
    [
        (NUMBER, " 8812311.", "11111111"),
        (NUMBER, ": 8812311 and 42", "11111111"),
        (NUMBER, " 88123.", "11111000"),
        (NUMBER, " 8812301.", "11111000"),
        (NUMBER, " 88123110.", "11111110"),  # all digits are right, and the number does not end
        (NUMBER, " 9 and 8812311", "00000000"),
        (NUMBER, "", "00000000"),
        (PASSAGE, 'The old fox ran."', "111111"),
        (PASSAGE, "The old fox ran. The grass is green.", "111111"),
        (PASSAGE, 'The old fox ran" and', "111100"),
        (PASSAGE, "The old fox sat. The old fox ran.", "111000"),
        (PASSAGE, "The old foxes ran.", "111000"),
        (PASSAGE, " The old fox ran.", "000000"),
        (PASSAGE, '"', "000000"),
        (LIST, ":\n\n- 345\n- 12\n", "111"),
        (LIST, " 12, 345, and 6789", "111"),  # RULER counts what is named, whatever else is
        (LIST, " 12 and 3456", "100"),
        (LIST, " 1234512", "000"),
        (LIST, " 345 345", "100"),
    ],
)
def test_hits(asked: TextExample, said: str, hits: str) -> None:
    assert asked.hits(said, PIECES[asked.kind]) == hits


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (" near the old fox.", "near the old fox"),
        (" near the old fox, and", "near the old fox"),
        ("\nnear the old fox\nDocument", "near the old fox"),
        ("...", ""),
    ],
)
def test_a_fact_ends_with_its_sentence(said: str, found: str) -> None:
    assert TextExample("", "", "near the old fox", "fact").found(said) == found


@given(st.text(alphabet="0123456789. ", max_size=12))
def test_no_hit_follows_a_mistake(said: str) -> None:
    hits = NUMBER.hits(said, NUMBER.answer)
    assert "01" not in hits
    assert ("0" not in hits) == (NUMBER.found(said) == NUMBER.answer)
