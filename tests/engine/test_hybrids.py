# SPDX-License-Identifier: Apache-2.0
"""A hybrid of gated delta nets and full attention: eviction in its full-attention layers.

vLLM's CPU kernels of delta nets compute in bfloat16 only, and what a request is computed with
depends in the last bits on its company and on where its chunks end. So vLLM's own tokens are the
reference where nothing is lost, and elsewhere Hugging Face's model in float32, within tolerances
that a wrong kept set or a wrong state would exceed many times over. Requests that run alone and
have the same chunks give the same bits, whether a prefix was cached or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from oracle.emulation import Eviction, Oracle
from tests.engine.changes import causes_of, changes_of, restore_soon
from tests.engine.questions import DEBUG, budget
from tests.engine.running import Ask, SteppedEngine, engine
from tests.models import FAMILIES, MINICPM_IMAGE, QWEN_IMAGE, random_image, random_text
from vllm_tgvkv.gain import gain, layer_kinds, specs_of_layers
from vllm_tgvkv.shared.budget import Budget

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROWS = 32
SETTINGS = {
    "policy": "snapkv",
    "budget": 0.4,
    "min_prompt_tokens": 1,
    "observation_window": ROWS,
    "decode": {"on_request": True},
    "debug": {**DEBUG, "evict_at_full_budget": True},
}
BLOCK = 96
"""Tokens of a block, which holds a state."""
OPTIONS = {
    "dtype": "bfloat16",
    "block_size": 16,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 2 * BLOCK,
    # As vLLM has it by itself on processors with instructions for bfloat16.
    "mamba_ssm_cache_dtype": "float32",
}
CACHING = {"enable_prefix_caching": True, "prefix_cache_retention_interval": None}
"""Every state at the end of a block is cached."""
TOKENS = 12


def ask(seed: int, letters: int = 420, **fields: Any) -> Ask:
    text = random_text(2 * seed, 40) + QWEN_IMAGE + random_text(2 * seed + 1, letters)
    return Ask(text, (random_image(seed, 224, 224),), max_tokens=TOKENS, logprobs=0, **fields)


def logprobs(output: Any) -> np.ndarray:
    """Return the log-probability of each token of an answer."""
    (answer,) = output.outputs
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return np.array([found[token].logprob for token, found in pairs])


@pytest.fixture(scope="module")
def hybrid(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3_5", layers=8)


@pytest.fixture(scope="module")
def running(hybrid: Path) -> Iterator[SteppedEngine]:
    """Yield an engine with prefix caching."""
    with engine(hybrid, SETTINGS, **OPTIONS, **CACHING) as started:
        yield started


def test_blocks_hold_one_state(running: SteppedEngine) -> None:
    """Blocks are as small as `--block-size` and a state allow, and each state has a group.

    A request holds two blocks of each: the state that a step starts from, and its result.
    """
    scheduler, shape = running.scheduler, running.evictor.shape
    groups = scheduler.kv_cache_config.kv_cache_groups
    states = [g.kv_cache_spec for g in groups if isinstance(g.kv_cache_spec, MambaSpec)]
    assert len(states) == shape.num_layers == 4
    assert scheduler.manager.others.most(9) == 2 * len(states)
    assert {(s.block_size, s.mamba_cache_mode) for s in states} == {(BLOCK, "align")}
    token_bytes = shape.num_pairs * 2 * shape.head_size * 2
    least = -(-states[0].page_size_bytes // token_bytes)
    assert shape.block_size == -(-least // 32) * 32 == BLOCK


def test_the_report_tells_what_the_pool_holds(running: SteppedEngine) -> None:
    """Full attention shrinks and states stay, by the pool's free blocks."""
    pool, raw = running.scheduler.kv_cache_manager.block_pool, running.evictor.pool
    block_bytes = raw.raw.nbytes // raw.num_blocks
    held, outputs = [], []
    for xargs in (budget(0.3), {"kv_eviction": "none"}):
        running.add(ask(5, xargs={**xargs, "kv_eviction_report": True}))
        used = []
        outputs += running.drain(
            lambda used=used: used.append(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        ).values()
        held.append(used[-2])  # the last step in which it runs
    memory = outputs[0].kv_transfer_params["kv_eviction"]["memory"]
    groups = running.scheduler.kv_cache_config.kv_cache_groups
    num_states = sum(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
    assert memory["states"] == num_states * block_bytes
    assert memory["windows"] == 0
    assert memory["given_back"] == (held[1] - held[0]) * block_bytes > 0
    opened = held[0] - memory["after"] // block_bytes  # by the answer
    assert 0 <= opened <= 1
    assert memory["before"] == (held[1] - opened) * block_bytes
    # What `python -m vllm_tgvkv.gain` computes; it counts states without padding, and with prefix
    # caching two of each, as vLLM does: that of a step's beginning, too.
    config = running.scheduler.vllm_config
    kinds = layer_kinds(specs_of_layers(config), config)
    states = sum(kind.state_bytes for kind in kinds)
    assert 0 < states <= 2 * memory["states"]
    length, size = len(outputs[0].prompt_token_ids), running.scheduler.tokens_per_block
    computed = gain(kinds, length, 0, Budget(fraction=0.3), size)
    assert computed.before - states == memory["before"] - memory["states"]
    assert computed.after - states == memory["after"] - memory["states"]


def test_answers_are_those_of_the_oracle(running: SteppedEngine, hybrid: Path) -> None:
    """Nearly the same tokens are kept as in float32, and nothing else is attended to."""
    oracle = Oracle(hybrid)
    asks = [ask(10 + i, xargs=budget(share)) for i, share in enumerate((0.7, 0.5, 0.3))]
    names = [running.add(asked) for asked in asks]
    outputs = running.drain()
    for name, asked in zip(names, asks, strict=True):
        assert_nearly_the_oracles(running, oracle, asked, outputs[name], least=0.9, most=0.25)


def assert_nearly_the_oracles(
    running: SteppedEngine,
    oracle: Oracle,
    asked: Ask,
    output: Any,
    *,
    least: float,
    most: float,
    ranks: int = 1,
) -> None:
    """Assert that nearly the tokens of the oracle are kept, and that nothing else is attended to.

    Args:
        least: share of the kept tokens that are the oracle's.
        most: mean difference of log-probabilities.
    """
    prompt = oracle.prompt(asked.text, asked.images)
    kept = running.kept(output.request_id, len(prompt.token_ids))
    assert kept is not None
    size, share = running.scheduler.tokens_per_block, asked.xargs["kv_eviction_budget"]
    method = asked.xargs.get("kv_eviction", "snapkv")
    eviction = Eviction(
        share, size, observation_window=ROWS, method=method, text_only="evict", ranks=ranks
    )
    wanted = oracle.select(prompt, eviction).kept
    assert kept.sum() == wanted.sum()
    assert (kept & wanted).sum() > least * kept.sum()
    tokens, ours = list(output.outputs[0].token_ids), logprobs(output)
    whole, evicted = (
        np.abs(ours - of(oracle.logprobs(prompt, tokens, mask), tokens)) for mask in (None, kept)
    )
    assert evicted.mean() < most
    if share < 1:
        assert wanted.sum() < wanted.numel()
        assert evicted.mean() < 0.5 * whole.mean()


def of(logprobs: torch.Tensor, tokens: Sequence[int]) -> np.ndarray:
    """Return the log-probability of each token, from those of all."""
    return logprobs[range(len(tokens)), list(tokens)].numpy()


def run_with_preemptions(
    running: SteppedEngine, asks: Sequence[Ask]
) -> tuple[list[str], dict[str, Any]]:
    """Return the names and outputs of requests, each of which is preempted in its answer once."""
    names, preempted = [running.add(asked) for asked in asks], set()

    def preempt() -> None:
        for request in list(running.scheduler.running):
            if request.num_output_tokens == 5 and request.request_id not in preempted:
                preempted.add(request.request_id)
                running.preempt(request)

    outputs = running.drain(preempt)
    assert len(preempted) == len(names)
    return names, outputs


def test_evictions_after_waits_in_steps_and_after_preemptions(running: SteppedEngine) -> None:
    """Blocks are recounted after every step, freed ones hold NaN, and every answer is finite."""
    xargs = [{"kv_eviction_defer": 3}, budget(0.3), {"kv_eviction": "none"}, budget(0.5)]
    names, outputs = run_with_preemptions(
        running, [ask(20 + i, xargs=x) for i, x in enumerate(xargs)]
    )
    again = running.run([ask(20 + i, xargs=x, arrival=9 * i) for i, x in enumerate(xargs)])
    for name, alone in zip(names, again, strict=True):
        first = outputs[name]
        assert len(first.outputs[0].token_ids) == TOKENS
        assert np.isfinite(logprobs(first)).all()
        assert np.isfinite(logprobs(alone)).all()


def test_under_pressure_and_whole_again(
    running: SteppedEngine, hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States stay as the tokens were computed, whatever keys come back.

    The oracle, with the same keys hidden at the same tokens, answers nearly the same.
    """
    restore_soon(monkeypatch)
    oracle, size = Oracle(hybrid), running.scheduler.tokens_per_block
    xargs = {"kv_eviction_when": "pressure", "kv_eviction_report": 1, **budget(0.2)}
    methods = ("snapkv", "reach", "streaming")
    asks = [
        replace(ask(60 + i, 850, xargs={**xargs, "kv_eviction": method}), max_tokens=60)
        for i, method in enumerate(methods)
    ]
    names = [running.add(asked) for asked in asks]
    for _ in range(30):
        running.step()
    crowd = running.add(ask(70, 850, xargs={"kv_eviction": "none"}))
    for _ in range(40):
        if any(map(running.scheduler.manager.is_compressed, running.scheduler.requests)):
            break
        running.step()
    running.engine.abort_request([crowd])
    outputs = running.drain()
    found = [causes_of(outputs[name]) for name in names]
    assert sum("pressure" in each for each in found) >= 1
    assert sum("restored" in each for each in found) >= 1
    for name, asked in zip(names, asks, strict=True):
        output, prompt = outputs[name], oracle.prompt(asked.text, asked.images)
        changes, num_full = changes_of(output, size), len(prompt.token_ids) // size * size
        cuts = [change for change in changes if change.blocks is not None]
        masks = {}
        for cut, kept in zip(cuts, running.kept_after_cuts(name), strict=True):
            masks[cut.after] = kept[..., : len(prompt.token_ids) + cut.after].clone()
            assert masks[cut.after].sum() == cut.blocks * size * kept[..., 0].numel()
            masks[cut.after][..., num_full:] = True
        whole_after = {each.after: each.recomputes for each in changes if each.blocks is None}
        tokens, ours = list(output.outputs[0].token_ids), logprobs(output)
        theirs = oracle.decode(prompt, len(tokens), masks, tokens, whole_after=whole_after)
        assert np.abs(ours - of(theirs.logprobs, tokens)).mean() < 0.25


def test_a_conversation_goes_on_over_what_was_computed_before_the_cut(
    running: SteppedEngine,
) -> None:
    """Neither keys nor states of an answer over an evicted cache are another request's prefix.

    Without eviction they are: the answer fills a block.
    """
    tokenizer = running.llm.get_tokenizer()
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    first = replace(ask(40, 330), max_tokens=110)
    for xargs, end in (({"kv_eviction": "none"}, 5), (budget(0.2), 4)):
        assert running.scheduler.reset_prefix_cache()
        name = running.add(replace(first, xargs=xargs), allowed_token_ids=letters)
        said = running.drain()[name]
        num_prompt = len(said.prompt_token_ids)
        assert 4 * BLOCK + ROWS <= num_prompt < 5 * BLOCK < num_prompt + len(said.outputs[0].text)
        text = first.text + said.outputs[0].text + random_text(41, 8)
        more = replace(first, text=text, max_tokens=TOKENS, xargs={"kv_eviction": "none"})
        (warm,) = running.run([more])
        assert warm.num_cached_tokens == end * BLOCK
    assert running.scheduler.reset_prefix_cache()
    (cold,) = running.run([more])
    assert cold.num_cached_tokens == 0
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    np.testing.assert_array_equal(logprobs(warm), logprobs(cold))


def test_nothing_is_lost_at_full_budget_and_with_cached_prefixes(
    running: SteppedEngine, hybrid: Path
) -> None:
    """Regions of all tokens in the order of the prompt give stock's answers.

    Other budgets give the same answers without prefix caching, and from cached keys and states.
    """
    xargs = [budget(0.3), {"kv_eviction_defer": 3}, {"kv_eviction": "none"}, budget(1.0)]
    alone = [ask(50 + i, 330, xargs=x) for i, x in enumerate(xargs)]
    cold = [running.run([a])[0] for a in alone]
    warm = [running.run([a])[0] for a in alone]
    assert [o.num_cached_tokens for o in (*cold, *warm)] == [0] * 4 + [4 * BLOCK] * 4
    asks = [ask(seed, arrival=3 * seed) for seed in range(3)]
    with engine(hybrid, SETTINGS, **OPTIONS) as plain:
        uncached = [plain.run([a])[0] for a in alone]
        evicted = plain.run([replace(a, xargs=budget(1.0)) for a in asks])
        assert plain.counters["requests_evicted"] == 6
        plain.assert_forgotten()
        for output in uncached[:2]:
            length = len(output.prompt_token_ids)
            kept = plain.kept(output.request_id, length)
            for other in (cold, warm):
                same = other[uncached.index(output)].request_id
                assert torch.equal(running.kept(same, length), kept)
    for outputs in zip(cold, warm, uncached, strict=True):
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
        np.testing.assert_array_equal(logprobs(outputs[0]), logprobs(outputs[1]))
        np.testing.assert_array_equal(logprobs(outputs[0]), logprobs(outputs[2]))
    with engine(hybrid, None, **OPTIONS) as stock:
        expected = stock.run(asks)
        (whole,) = stock.run([replace(alone[2], xargs={})])
    assert whole.outputs[0].token_ids == cold[2].outputs[0].token_ids
    for ours, theirs in zip(evicted, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        np.testing.assert_allclose(logprobs(ours), logprobs(theirs), atol=0.05)


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param("qwen3_5_moe", marks=pytest.mark.nightly),
        pytest.param("qwen3_next", marks=pytest.mark.nightly),
        pytest.param("minicpmv4_6", marks=pytest.mark.compatibility),
    ],
)
def test_other_hybrids(arch: str, tiny_model: Callable[..., Path]) -> None:
    """Answers are nearly the oracle's, also at the full budget, and the same from cached states.

    Mixtures of experts use all of their experts here: rounding would otherwise send some tokens to
    others than in the oracle. MiniCPM-V reads an image as a whole and in slices.
    """
    folder = tiny_model(arch, layers=8, image_size=224)
    oracle = Oracle(folder)
    asks = [ask(50 + i, 330, xargs=budget(share)) for i, share in enumerate((1.0, 0.5, 0.3))]
    settings = SETTINGS
    if not FAMILIES[arch].image_text:
        asks = [replace(a, text=random_text(i, 440), images=()) for i, a in enumerate(asks)]
        settings = {**SETTINGS, "text_only": "evict"}
        oracle.model.config.image_token_id = -1
    if arch == "minicpmv4_6":
        image = random_image(50, 448, 224)
        texts = [a.text.replace(QWEN_IMAGE, MINICPM_IMAGE) for a in asks]
        asks = [replace(a, text=t, images=(image,)) for a, t in zip(asks, texts, strict=True)]
        assert len(oracle.prompt(texts[0], (image,)).images) == 3
    with engine(folder, settings, **OPTIONS, **CACHING) as running:
        cold, warm = ([running.run([a])[0] for a in asks] for _ in range(2))
        for asked, output, again in zip(asks, cold, warm, strict=True):
            assert again.num_cached_tokens == 4 * BLOCK
            np.testing.assert_array_equal(logprobs(output), logprobs(again))
            assert_nearly_the_oracles(running, oracle, asked, again, least=0.9, most=0.25)
