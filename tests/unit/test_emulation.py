# SPDX-License-Identifier: Apache-2.0
"""Tests of the oracle itself, by examples worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.emulation import Change, Eviction, Oracle, Prompt
from oracle.kernels import apportion, ranking
from oracle.methods import (
    HEAD,
    LAYER,
    Auto,
    Case,
    Earlier,
    Image,
    Layout,
    Mix,
    Pool,
    Selection,
    Settings,
    pooled,
    retained_blocks,
    rows,
    select,
    tiers,
)
from oracle.scores import tgv_scores
from tests.models import LLAVA_IMAGE, QWEN_IMAGE, random_image, random_text

TOKENS = 60
SIZES = [(112, 196), (140, 84)]


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl"])
def oracle(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Oracle:
    return Oracle(tiny_model(request.param, image_size=112))


@pytest.fixture(scope="module")
def prompt(oracle: Oracle) -> Prompt:
    return oracle.prompt(*two_images(oracle.model.config.model_type))


def two_images(arch: str) -> tuple[str, list]:
    """Return a prompt text with two separate images, and the images."""
    image = LLAVA_IMAGE if arch == "llava" else QWEN_IMAGE
    text = random_text(1, 40) + image + random_text(2, 60) + image + random_text(3, 70)
    return text, [random_image(i, *size) for i, size in enumerate(SIZES)]


def masked(states: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Return each head's kept states, from states [H, P, D] and masks bool [H, P]."""
    return torch.stack([head[mask] for head, mask in zip(states, masks, strict=True)])


def test_masks_of_both_ways_to_generate(oracle: Oracle, prompt: Prompt) -> None:
    """With everything it is the model's own; what a mask means, a smaller cache shows below."""
    plain = oracle.model.generate(**prompt.inputs, max_new_tokens=TOKENS, do_sample=False)
    plain = plain[0, len(prompt.token_ids) :].tolist()
    everything = torch.ones(oracle.layers, oracle.kv_heads, len(prompt.token_ids), dtype=torch.bool)
    assert oracle.generate(prompt, TOKENS) == plain
    assert oracle.generate(prompt, TOKENS, everything) == plain
    kept = torch.rand(everything.shape) < 0.5
    tokens = oracle.generate(prompt, TOKENS, kept)
    assert tokens == oracle.decode(prompt, TOKENS, {0: kept}).tokens != plain


def test_scores_of_a_small_example() -> None:
    """Two text rows (2, 3) attend to one vision token (1); worked out by hand."""
    attention = torch.tensor(
        [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.5, 0.25, 0], [0.1, 0.2, 0.3, 0.4]],
        dtype=torch.float64,
    )
    layout = Layout(4, (Image(1, 1),))
    weights = [0.55 / 2, 0.4 / 1]
    expected = (weights[0] * 0.5 + weights[1] * 0.2) / sum(weights)
    scores = tgv_scores(attention, rows("text", layout, 512), layout.vision)
    torch.testing.assert_close(scores, torch.tensor([0.35, expected, 0.55, 0.4]).double())


def test_retention_order() -> None:
    case = Case(Layout(8, (Image(1, 2), Image(5, 1))), 1, 512, block_size=7)
    scores = torch.tensor([0.0, 9, 5, 1, 2, 9, 2, 99], dtype=torch.float64)
    # One sink, then text 4 and 6 (tied) and 3, then vision 1 and 5 (tied) and 2; 7 is no candidate.
    order = ranking(scores, tiers("text_first", case, 7), case.candidates)
    assert order == [0, 4, 6, 3, 1, 5, 2]


# -- cuts while the answer grows ----------------------------------------------------------------

ANSWER = 40
EVICTIONS = [
    Eviction(budget, 16, granularity, method=method, text_only="evict", floor=floor)
    for method, budget, granularity, floor in [
        ("tgv", 0.3, HEAD, 0),
        ("adakv", 0.3, HEAD, 1),
        ("aircache", 0.3, LAYER, 1),
        ("vlcache", 0.4, HEAD, 1),
        ("prefixkv", Auto(0.8), LAYER, 1),
        ("elastic", 0.2, LAYER, 1),
    ]
]
AHEAD = Mix(
    "snapkv",
    "uniform",
    "by_score",
    HEAD,
    Pool("sequence", reduce="max", forward=16, back=1),
    rows="answer",
    reduce="max",
)
"""Only the answer's rows vote, and what follows the places they look at is kept with them."""
WAITING = [*EVICTIONS, Eviction(0.2, 16, method=AHEAD, text_only="evict")]
IN_STEPS = [WAITING[0], WAITING[2], WAITING[-1]]


def name_of(eviction: Eviction) -> str:
    name = eviction.method if isinstance(eviction.method, str) else "ahead"
    return f"{name}-{eviction.granularity}"


def kept_at(oracle: Oracle, prompt: Prompt, m: int) -> torch.Tensor:
    """Return a mask [L, H, P + m] that hides most of the vision tokens."""
    length = len(prompt.token_ids)
    kept = torch.ones(oracle.layers, oracle.kv_heads, length + m, dtype=torch.bool)
    kept[:, :, :length][:, :, prompt.vision] = False
    kept[:, 0, :length:2] = True
    return kept


@pytest.mark.parametrize("m", [0, 1, 9])
def test_a_cut_after_m_tokens_leaves_m_plus_1_tokens_alone(
    oracle: Oracle, prompt: Prompt, m: int
) -> None:
    full, kept = oracle.generate(prompt, ANSWER), kept_at(oracle, prompt, m)
    answer = oracle.decode(prompt, ANSWER, {m: kept})
    assert answer.tokens[: m + 1] == full[: m + 1]
    plain = oracle.decode(prompt, ANSWER, tokens=answer.tokens)
    same = [torch.equal(a, b) for a, b in zip(answer.logprobs, plain.logprobs, strict=True)]
    assert same == [True] * (m + 1) + [False] * (ANSWER - m - 1)


@torch.no_grad()
def test_later_tokens_come_from_a_smaller_cache(oracle: Oracle, prompt: Prompt) -> None:
    """Masks that change twice give the logits of a cache from which keys were removed twice."""
    length, generator = len(prompt.token_ids), torch.Generator().manual_seed(0)
    shape = (oracle.layers, oracle.kv_heads)

    def halved(kept: torch.Tensor) -> torch.Tensor:
        """Return half of the keys of each head, which all have the same number."""
        order = torch.rand(kept.shape, generator=generator).masked_fill(~kept, 2).argsort(-1)
        half = int(kept[0, 0].sum()) // 2
        return torch.zeros_like(kept).scatter_(-1, order[..., :half], True)

    first = halved(torch.ones(*shape, length + 3, dtype=torch.bool))
    second = halved(torch.nn.functional.pad(first, (0, 5), value=True))
    answer = oracle.decode(prompt, 20, {3: first, 8: second})

    output = oracle.model(**prompt.inputs, use_cache=True)
    cache = output.past_key_values
    shift = getattr(oracle.model.model, "rope_deltas", None)
    place = length + (0 if shift is None else int(shift))
    alive = torch.ones(*shape, length, dtype=torch.bool)
    for i in range(1, 20):
        positions = torch.full((1, 1) if shift is None else (3, 1, 1), place + i - 1)
        token = torch.tensor([[answer.tokens[i - 1]]])
        output = oracle.model(input_ids=token, position_ids=positions, past_key_values=cache)
        logits = output.logits[0, -1].double().log_softmax(-1)
        torch.testing.assert_close(logits, answer.logprobs[i], rtol=1e-4, atol=1e-4)
        alive = torch.nn.functional.pad(alive, (0, 1), value=True)
        if i in (3, 8):
            for number, layer in enumerate(cache.layers):
                new = (first if i == 3 else second)[number]
                # Positions in the smaller cache, of those that were alive.
                still = torch.stack([n[a] for n, a in zip(new, alive[number], strict=True)])
                layer.keys = masked(layer.keys[0], still)[None]
                layer.values = masked(layer.values[0], still)[None]
            alive = first.clone() if i == 3 else second.clone()


@pytest.mark.parametrize("eviction", WAITING, ids=name_of)
def test_deferred_cut(oracle: Oracle, prompt: Prompt, eviction: Eviction) -> None:
    """Votes come from a forward pass over prompt and answer; tokens from a mask from m + 2 on."""
    m = 6
    answer = oracle.answer(prompt, 20, replace(eviction, defer=m))
    full = oracle.generate(prompt, m + 1)
    assert answer.tokens[: m + 1] == full
    (cut,) = answer.cuts
    assert cut.after == m
    length = len(prompt.token_ids)
    assert cut.layout == replace(prompt.layout, length=length + m, answer=m)

    longer = oracle.attention(extended(prompt, full[:m]))
    torch.testing.assert_close(cut.attention, longer, rtol=1e-4, atol=1e-5)

    kept, size = cut.selection.kept, eviction.block_size
    candidates = length // size * size
    assert kept[..., candidates:].all()
    pages = cut.selection.pages
    assert torch.equal(kept[..., :candidates].sum(-1), pages * size)
    if not isinstance(eviction.budget, Auto):
        assert cut.selection.blocks == retained_blocks(length, size, eviction.budget)
    assert pages.sum() == cut.selection.blocks * pages.numel()
    if not eviction.merges:
        assert oracle.decode(prompt, 20, {m: kept}).tokens == answer.tokens


def extended(prompt: Prompt, tokens: list[int]) -> Prompt:
    """Return the prompt with tokens of an answer behind it."""
    inputs = dict(prompt.inputs)
    for name, value in inputs.items():
        if value.shape == (1, len(prompt.token_ids)):
            more = {"input_ids": tokens, "attention_mask": [1] * len(tokens)}
            row = torch.tensor([more.get(name, [0] * len(tokens))], dtype=value.dtype)
            inputs[name] = torch.cat((value, row), dim=1)
    vision = torch.nn.functional.pad(prompt.vision, (0, len(tokens)), value=False)
    return Prompt(inputs, prompt.token_ids + tokens, vision, prompt.images)


@pytest.mark.parametrize("eviction", IN_STEPS, ids=name_of)
def test_cuts_in_steps(oracle: Oracle, prompt: Prompt, eviction: Eviction) -> None:
    defer = 4
    steps = replace(
        eviction, budget=0.6, defer=defer, schedule=((10, 0.3), (25, 0.15)), answer_rows=8
    )
    answer, size = oracle.answer(prompt, ANSWER, steps), steps.block_size
    length = len(prompt.token_ids)
    candidates = length // size * size
    assert [cut.after for cut in answer.cuts] == [defer, 10, 25]
    before = torch.ones(oracle.layers, oracle.kv_heads, length, dtype=torch.bool)
    for cut, budget in zip(answer.cuts, (0.6, 0.3, 0.15), strict=True):
        kept, pages = cut.selection.kept, cut.selection.pages
        before = torch.nn.functional.pad(
            before, (0, length + cut.after - before.shape[-1]), value=1
        )
        assert not (kept & ~before).any(), "something came back"
        assert kept[..., candidates:].all()
        assert torch.equal(kept[..., :candidates].sum(-1), pages * size)
        assert pages.sum() == retained_blocks(length, size, budget) * pages.numel()
        before = kept
    masks = {cut.after: kept for cut, kept in zip(answer.cuts, answer.kept, strict=True)}
    again = oracle.decode(prompt, ANSWER, masks)
    assert again.tokens == answer.tokens
    assert torch.equal(again.logprobs, answer.logprobs)
    plain = oracle.generate(prompt, defer + 1)
    assert answer.tokens[: defer + 1] == plain


@pytest.mark.parametrize(
    ("fields", "passes"),
    [
        ({}, 2),
        ({"defer": 3}, 3),
        ({"defer": 4, "schedule": ((10, 0.3), (25, 0.15)), "budget": 0.6}, 5),
        ({"ceiling": 128, "buffer": 32, "budget": 0.9}, None),
        ({"changes": (Change(5, 4, 5), Change(9, None), Change(12, 3, 2))}, 5),
        ({"changes": (Change(5, 4, 5), Change(20, None, recomputes=True))}, 5),
        ({"method": "elastic", "defer": 6}, 3),
    ],
    ids=["", "waits", "steps", "ceiling", "changes", "recomputes", "merges"],
)
def test_a_right_guess_is_the_answer(
    oracle: Oracle, prompt: Prompt, fields: dict[str, Any], passes: int | None
) -> None:
    """With the same cuts, in a pass for each part between two of them; a wrong one is not used."""
    eviction = replace(Eviction(0.3, 16, method="tgv"), **fields)
    answer = oracle.answer(prompt, ANSWER, eviction)
    counted: list[Any] = []
    handle = oracle.model.register_forward_hook(lambda *_: counted.append(1))
    guessed = oracle.answer(prompt, ANSWER, eviction, guess=answer.tokens)
    handle.remove()
    assert len(counted) < ANSWER // 4
    assert passes is None or len(counted) == passes
    wrong = [*answer.tokens[:-1], answer.tokens[-1] + 1]
    for other in (guessed, oracle.answer(prompt, ANSWER, eviction, guess=wrong)):
        assert other.tokens == answer.tokens
        torch.testing.assert_close(other.logprobs, answer.logprobs, rtol=0, atol=1e-4)
        for ours, theirs in zip(other.cuts, answer.cuts, strict=True):
            assert ours.after == theirs.after
            assert torch.equal(ours.selection.kept, theirs.selection.kept)
            torch.testing.assert_close(ours.attention, theirs.attention, rtol=1e-4, atol=1e-5)
    if not fields:
        for guess in (answer.tokens, wrong):
            assert oracle.generate(prompt, ANSWER, *answer.kept, guess=guess) == answer.tokens


def test_rows_of_a_later_cut(oracle: Oracle, prompt: Prompt) -> None:
    """SnapKV without pooling: column sums over the last 8 rows, over the keys still there."""
    options = {"sinks": 0, "schedule": ((20, 0.2),), "answer_rows": 8}
    eviction = Eviction(0.5, 16, HEAD, method="snapkv", pooling=Pool(), **options)
    answer = oracle.answer(prompt, 21, eviction)
    first, last = answer.kept
    length, group = len(prompt.token_ids), oracle.query_heads // oracle.kv_heads
    candidates = length // 16 * 16
    rows = oracle.decode(prompt, 21, {0: first})  # the same tokens
    assert rows.tokens == answer.tokens
    for layer in range(oracle.layers):
        for head in range(oracle.kv_heads):
            heads = answer.cuts[1].attention[layer, head * group : (head + 1) * group]
            # Rows after the first cut never saw what it dropped, and rows still sum to 1.
            votes = heads[:, length + 12 : length + 20]
            assert not votes[..., :length][..., ~first[layer, head]].any()
            totals = votes.sum(-1)
            torch.testing.assert_close(totals, torch.ones_like(totals), rtol=0, atol=1e-5)
            scores = votes.mean(0).sum(0)[:candidates]
            number = int(last[layer, head, :candidates].sum())
            scores[length + 20 - 32 :] += 100  # candidates in the window
            scores[~first[layer, head, :candidates]] = -1
            best = scores.sort(descending=True, stable=True).indices[:number]
            wanted = torch.zeros(candidates, dtype=torch.bool).index_fill_(0, best, True)
            assert torch.equal(last[layer, head, :candidates], wanted)


def test_pooling_leaves_out_what_has_no_score() -> None:
    scores = torch.tensor([1.0, math.nan, 5, math.nan, math.nan, 2, 4], dtype=torch.float64)
    most, mean = (Pool("sequence", 3, kind) for kind in ("max", "mean"))
    assert str(pooled(scores, Layout(7), most).tolist()) == "[1.0, nan, 5.0, nan, nan, 4.0, 4.0]"
    assert str(pooled(scores, Layout(7), mean).tolist()) == "[1.0, nan, 5.0, nan, nan, 3.0, 3.0]"
    wider = Pool("sequence", 5, "mean")
    assert pooled(scores, Layout(7), wider)[[0, 2, 5]].tolist() == [3, 3, 3]


def test_pages_of_a_later_cut_are_bounded_by_what_is_left() -> None:
    """Two heads have 1 and 3 pages left of 4. All votes are for the first, which cannot grow."""
    assert apportion([5, 1], 3, floor=0, cap=[1, 3]) == [1, 2]
    assert apportion([5, 1, 1], 5, floor=1, cap=[2, 1, 4]) == [2, 1, 2]
    attention = torch.zeros(1, 2, 10, 10, dtype=torch.float64)
    kept = torch.ones(1, 2, 10, dtype=torch.bool)
    kept[0, 0, 2:8] = False
    kept[0, 1, :2] = False
    attention[0, 0, 9, [0, 1, 9]] = torch.tensor([0.4, 0.5, 0.1]).double()
    attention[0, 1, 9, 2:8] = torch.tensor([3, 1, 4, 1, 5, 9]).double() / 1000
    attention[0, 1, 9, 9] = 0.977
    mix = Mix("snapkv", "tt", "by_score", HEAD)

    def left(budget: int, **settings: int) -> Selection:
        wanted = Settings(budget, block_size=2, sinks=0, **settings)
        return select(mix, attention, Layout(10, answer=2), 2, wanted, earlier=Earlier(kept, (9,)))

    # 3 of 4 pages per head at first is 8 in all, of which 4 are left, less than 2 * 3.
    assert torch.equal(left(6).kept, kept)
    # One page each on average. By attention to text the heads are equal, and each keeps one.
    found = left(2, floor=0)
    assert found.pages.tolist() == [[1, 1]]
    assert found.kept[0, 0].nonzero().flatten().tolist() == [0, 1, 8, 9]
    assert found.kept[0, 1].nonzero().flatten().tolist() == [6, 7, 8, 9]


def test_rows_of_prompt_and_answer() -> None:
    layout = Layout(9, (Image(1, 2), Image(5, 1)), answer=2)
    assert rows("text", layout, 512) == [3, 4, 6, 7, 8]
    assert rows("text", layout, 2) == [4, 6, 7, 8]
    assert rows("after_vision", layout, 512) == [6, 7, 8]
    assert rows("window", layout, 512) == list(range(9))
    assert rows("window", Layout(100, answer=3), 512) == list(range(65, 100))
    assert rows("all", layout, 512) == list(range(9))
    assert rows("answer", layout, 512) == [7, 8]
    assert rows("answer", Layout(7), 512) == []
    # A prompt that ends with an image still votes with its last position.
    assert rows("after_vision", Layout(8, (Image(1, 6),), answer=1), 512) == [6, 7]
    assert Case(layout, 0, 512, block_size=4).candidates == 4


# -- a ceiling ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("granularity", "defer"), [(LAYER, 0), (HEAD, 3)])
def test_ceiling(oracle: Oracle, prompt: Prompt, granularity: str, defer: int) -> None:
    """The request never has more than M + B tokens in full blocks, and blocks of the answer go.

    The first cut is bound by the ceiling as well, and takes nothing that the ceiling drops at once.
    """
    size, ceiling, buffer = 16, 64, 32
    options = {"ceiling": ceiling, "buffer": buffer, "answer_rows": 8, "defer": defer}
    eviction = Eviction(1.0, size, granularity, method="snapkv", **options)
    answer = oracle.answer(prompt, 110, eviction)
    length = len(prompt.token_ids)
    first, *cuts = answer.cuts
    assert len(cuts) >= 2
    assert (first.after, first.selection.blocks) == (defer, ceiling // size)
    assert first.layout == replace(prompt.layout, length=length + defer, answer=defer)
    assert first.earlier is None
    alive = first.selection.kept
    due = {cut.after: cut for cut in cuts}
    for m in range(defer, 110):
        n = length + m
        alive = torch.nn.functional.pad(alive, (0, n - alive.shape[-1]), value=True)
        full = n // size * size
        held = alive[..., :full].sum(-1).double().mean()
        assert (m in due) == bool(held > ceiling + buffer), m
        if m in due:
            kept = due[m].selection.kept
            assert not (kept & ~alive).any()
            assert n == full
            assert kept.sum() == ceiling // size * size * kept[..., 0].numel()
            alive = kept
    assert not alive[..., length : length + 64].all(), "no token of the answer was evicted"
    assert alive[..., :4].all()
    masks = {cut.after: cut.selection.kept for cut in answer.cuts}
    assert oracle.decode(prompt, 110, masks).tokens == answer.tokens


# -- changes at any token -----------------------------------------------------------------------


def test_what_was_cut_comes_back(oracle: Oracle, prompt: Prompt) -> None:
    """A further cut chooses among what is left, and one after a return among everything."""
    size, length = 16, len(prompt.token_ids)
    changes = (
        Change(9, 8, rows=4),
        Change(20, 3, rows=4),
        Change(26, None),
        Change(40, 3, rows=2),
        Change(50, None, recomputes=True),
    )
    eviction = Eviction(0.5, size, HEAD, method="snapkv", changes=changes)
    answer = oracle.answer(prompt, 70, eviction)
    first, second, third = answer.cuts
    assert [cut.after for cut in answer.cuts] == [9, 20, 40]
    assert [cut.selection.blocks for cut in answer.cuts] == [8, 3, 3]
    assert [len(cut.earlier.voters) for cut in answer.cuts if cut.earlier] == [4, 4, 2]
    for cut in answer.cuts:
        assert cut.earlier
        assert cut.earlier.voters[-1] == length + cut.after - 1
        assert cut.selection.kept[..., length // size * size :].all()
    assert first.earlier.kept.all()
    assert third.earlier.kept.all()
    assert torch.equal(second.earlier.kept[..., :length], first.selection.kept[..., :length])
    assert not (second.selection.kept[..., :length] & ~first.selection.kept[..., :length]).any()
    assert (third.selection.kept[..., :length] & ~first.selection.kept[..., :length]).any()

    # What follows a return sees the whole prompt, and keys of the answer as they were.
    kept = {cut.after: cut.selection.kept for cut in answer.cuts}
    whole = {26: False, 50: True}
    assert oracle.decode(prompt, 70, kept, whole_after=whole).tokens == answer.tokens
    plain = oracle.decode(prompt, 70, tokens=answer.tokens)
    torch.testing.assert_close(answer.logprobs[:10], plain.logprobs[:10])
    for part, is_plain in ((slice(10, 27), False), (slice(27, 51), False), (slice(51, 70), True)):
        assert is_plain == torch.allclose(answer.logprobs[part], plain.logprobs[part], atol=1e-4)


def test_nothing_changes_if_nothing_is_cut(oracle: Oracle, prompt: Prompt) -> None:
    """A return of the prompt, with or without new keys, changes nothing then."""
    changes = (Change(7, None), Change(12, None, recomputes=True))
    answer = oracle.answer(prompt, 30, Eviction(0.1, 16, method="tgv", changes=changes))
    assert not answer.cuts
    assert answer.tokens == oracle.generate(prompt, 30)
