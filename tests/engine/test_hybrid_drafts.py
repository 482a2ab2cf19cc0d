# SPDX-License-Identifier: Apache-2.0
"""Drafts for a hybrid of gated delta nets and full attention, by n-grams and by MTP.

A layer's state after each draft is kept until it is known which drafts are accepted. As in
`test_hybrids.py`, rounding in bfloat16 depends on a request's company, so the reference is Hugging
Face's model in float32, within tolerances that a wrong state exceeds many times over.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from oracle.emulation import Oracle
from tests.engine.questions import budget
from tests.engine.running import SteppedEngine, engine
from tests.engine.test_hybrids import (
    BLOCK,
    CACHING,
    OPTIONS,
    SETTINGS,
    ask,
    assert_nearly_the_oracles,
    logprobs,
)
from tests.engine.test_speculation import NGRAM, NUM_DRAFTS
from tests.models import random_text, with_mtp
from vllm_tgvkv.blocks.manager import DraftSpec

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

METHODS = {"ngram": NGRAM, "mtp": {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}}
WITH_DRAFTS = {**OPTIONS, "max_num_batched_tokens": 2 * BLOCK + 30, "max_num_seqs": 6}
ASKS = [
    replace(ask(10 + i, 230 + 57 * i, arrival=4 * i, xargs=xargs), max_tokens=30)
    for i, xargs in enumerate((budget(0.5), {"kv_eviction": "none"}, budget(0.3), budget(1.0)))
]


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return with_mtp(tiny_model("qwen3_5", layers=8))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((method, caches), marks=() if caches else pytest.mark.nightly)
        for method in METHODS
        for caches in (True, False)
    ],
    ids=str,
)
def drafting(request: pytest.FixtureRequest, folder: Path) -> Iterator[SteppedEngine]:
    """Yield an engine with a method of drafts, and with a prefix cache or without."""
    method, caches = request.param
    options = {**WITH_DRAFTS, **(CACHING if caches else {})}
    with engine(folder, SETTINGS, speculative_config=METHODS[method], **options) as running:
        yield running


class Drafts:
    """Stands between the drafter and the scheduler, and takes drafts away or replaces them."""

    def __init__(self, running: SteppedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[tuple[int, ...], list[int]] = {}
        """By prompt; without one, a request has no drafts."""
        self.block_size = 0
        """Tokens of a block whose last token is known before drafts follow it; 0 if it need not."""
        self.num_right = self.num_wrong = self.num_fewer = self.num_left_out = 0
        self._scheduler = scheduler = running.scheduler
        self._dice = random.Random(0)
        self._limit = scheduler._chunk_limits.limit
        self._update = scheduler.update_draft_token_ids
        monkeypatch.setattr(scheduler, "update_draft_token_ids", self.update)
        monkeypatch.setattr(scheduler._chunk_limits, "limit", self.limit)

    def update(self, drafts: Any) -> None:
        chosen = [
            self._choose(self._scheduler.requests.get(name), list(own))
            for name, own in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
        ]
        self._update(replace(drafts, draft_token_ids=chosen))

    def _choose(self, request: Any, own: list[int]) -> list[int]:
        """Return drafts of which some are right, or the drafter's own."""
        if request is None or not (answer := self.answers.get(tuple(request.prompt_token_ids))):
            return []
        at = request.num_output_tokens
        if self.block_size and (left := -request.num_tokens % self.block_size) <= NUM_DRAFTS:
            return [] if left else answer[at : at + NUM_DRAFTS]
        if self._dice.random() < 0.25:
            return own
        number = self._dice.choice((NUM_DRAFTS, NUM_DRAFTS, self._dice.randrange(NUM_DRAFTS)))
        right = answer[at : at + self._dice.randint(0, number)]
        wrong = [self._dice.randrange(64, 90) for _ in range(number - len(right))]
        self.num_right += bool(right)
        self.num_wrong += bool(wrong)
        self.num_fewer += number < NUM_DRAFTS
        return right + wrong

    def limit(self, request: Any, candidate: Any, start: int, num_new: int) -> int:
        """Leave requests out of steps of their answers."""
        if self.answers and request.num_output_tokens and self._dice.random() < 0.1:
            self.num_left_out += 1
            return 0
        return self._limit(request, candidate, start, num_new)


def test_drafts_leave_the_states_of_accepted_tokens(
    drafting: SteppedEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all, some or no drafts, right and wrong, after steps without a request."""
    drafts, oracle, preempted = Drafts(drafting, monkeypatch), Oracle(folder), set()
    step = drafting.step

    def step_and_preempt() -> list[Any]:
        for request in list(drafting.scheduler.running):
            if request.num_output_tokens > 15 and request.request_id not in preempted:
                preempted.add(request.request_id)
                drafting.preempt(request)
                break
        return step()

    for is_drafting in (False, True):
        outputs = drafting.run(ASKS)
        for asked, output in zip(ASKS, outputs, strict=True):
            assert_nearly(drafting, oracle, asked, output)
            if not is_drafting:
                tokens = list(output.outputs[0].token_ids)
                drafts.answers[tuple(output.prompt_token_ids)] = tokens
        monkeypatch.setattr(drafting, "step", step_and_preempt)
    assert len(preempted) == len(ASKS)
    counts = drafts.num_right, drafts.num_wrong, drafts.num_fewer, drafts.num_left_out
    assert min(counts) > 4, counts


def test_the_next_turn_begins_with_the_state_behind_accepted_drafts(
    drafting: SteppedEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block ends with the first token of a step with drafts. The state there is cached, and is
    nearly what the next turn's prompt leaves there if it is computed."""
    if has_mtp(drafting) or not drafting.scheduler.cache_config.enable_prefix_caching:
        pytest.skip("no prefix as short as this is hit")
    drafts = Drafts(drafting, monkeypatch)
    drafts.block_size = drafting.scheduler.block_size
    tokenizer = drafting.llm.get_tokenizer()
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    first = replace(ask(40, 370, xargs={"kv_eviction": "none"}), max_tokens=50)
    for _ in range(2):  # the second time with drafts
        drafting.scheduler.reset_prefix_cache()
        name = drafting.add(first, allowed_token_ids=letters)
        said = drafting.drain()[name]
        drafts.answers[tuple(said.prompt_token_ids)] = list(said.outputs[0].token_ids)
    text = first.text + said.outputs[0].text + random_text(42, 8)
    more = replace(first, text=text, max_tokens=12)
    drafts.answers.clear()
    oracle, found = Oracle(folder), []
    for is_cached in (True, False):
        name = drafting.add(more)
        while not (now := drafting.requests([name])) or not now[0].num_output_tokens:
            drafting.step()
        found.append(cached_states(drafting, name))
        output = drafting.drain()[name]
        assert_nearly(drafting, oracle, more, output)
        assert (output.num_cached_tokens > len(said.prompt_token_ids)) == is_cached
        assert drafting.scheduler.reset_prefix_cache()
    for ours, computed in zip(*found, strict=True):
        assert (ours - computed).norm() < 0.1 * computed.norm()


def cached_states(running: SteppedEngine, name: str) -> list[torch.Tensor]:
    """Return the states in the last block of a request's prompt that is cached, of each layer."""
    (request,) = running.requests([name])
    scheduler, modules = running.scheduler, running.llm.llm_engine.vllm_config.compilation_config
    block_hash = request.block_hashes[request.num_prompt_tokens // scheduler.block_size - 1]
    found = []
    for group, layers in enumerate(scheduler.kv_cache_config.kv_cache_groups):
        if isinstance(layers.kv_cache_spec, MambaSpec):
            pool = scheduler.kv_cache_manager.block_pool
            (block,) = pool.get_cached_block(block_hash, [group])
            for layer in layers.layer_names:
                inputs, state = modules.static_forward_context[layer].kv_cache
                inputs = inputs[block.block_id, :-NUM_DRAFTS]  # without places for drafts
                found += [inputs.float().clone(), state[block.block_id].float().clone()]
    return found


@pytest.mark.nightly
def test_drafts_of_mtp_are_those_of_stock(folder: Path) -> None:
    """With everything kept, as are the tokens; stock has no prefix cache with it."""
    found = []
    for settings, xargs in ((None, {}), (SETTINGS, budget(1.0))):
        asks = [ask(seed, 330, xargs=xargs, arrival=30 * seed) for seed in range(3)]
        options = {"speculative_config": METHODS["mtp"], **WITH_DRAFTS}
        with engine(folder, settings, **options) as running:
            spy = mock.Mock(wraps=running.scheduler.update_draft_token_ids)
            running.scheduler.update_draft_token_ids = spy
            tokens = running.tokens(asks)
            found.append((tokens, [call.args[0].draft_token_ids for call in spy.call_args_list]))
    assert found[0] == found[1]


def has_mtp(running: SteppedEngine) -> bool:
    """Return whether MTP's layer has a group of blocks, which is the last one."""
    *others, last = running.scheduler.kv_cache_config.kv_cache_groups
    assert not any(isinstance(group.kv_cache_spec, DraftSpec) for group in others)
    return isinstance(last.kv_cache_spec, DraftSpec)


def assert_nearly(running: SteppedEngine, oracle: Oracle, asked: Any, output: Any) -> None:
    """Assert that an answer is nearly the oracle's, which hides what was evicted."""
    if asked.xargs.get("kv_eviction") != "none":
        assert_nearly_the_oracles(running, oracle, asked, output, least=0.9, most=0.15)
        return
    tokens = list(output.outputs[0].token_ids)
    wanted = oracle.logprobs(oracle.prompt(asked.text, asked.images), tokens)
    of_tokens = wanted[range(len(tokens)), tokens].numpy()
    assert abs(logprobs(output) - of_tokens).mean() < 0.15
