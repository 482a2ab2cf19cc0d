# SPDX-License-Identifier: Apache-2.0
"""Models with sliding windows in some layers: eviction in those with full attention.

Prompts are several windows long, and chunks cut images and windows. vLLM's CPU kernels are causal
inside images, so the oracle is Hugging Face's model without its image mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from oracle.emulation import Eviction, Oracle, Prompt
from tests.engine.questions import DEBUG
from tests.engine.running import Ask, SteppedEngine, engine, name_of, stable_ask
from tests.models import FAMILIES, WINDOW, random_image, random_text
from vllm_tgvkv.blocks.manager import EvictingSpec
from vllm_tgvkv.gain import Gain, gain, layer_kinds, specs_of_layers
from vllm_tgvkv.shared.budget import Budget

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

BLOCK_SIZE = 16
SETTINGS = {
    "policy": "snapkv",
    "budget": 0.3,
    "min_prompt_tokens": 64,
    "debug": {**DEBUG, "evict_at_full_budget": True},
}
OPTIONS = {
    "num_gpu_blocks_override": 1200,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 160,
    "skip_mm_profiling": True,
    "enable_prefix_caching": True,
}
TOKENS = 20
MODELS: dict[str, dict[str, int]] = {
    "gemma3": {"layers": 6},
    "gemma4": {"layers": 9},
    "cohere2_vision": {"layers": 6, "image_size": 112},
    "exaone4_5": {"layers": 6, "image_size": 112},
}
"""Tiny models. A third of the layers has full attention, in the last two without positions."""
BY_DAY = ("gemma4", "cohere2_vision")
"""Layers that read the caches of others, and those without positions."""
MORE_OPTIONS: dict[str, dict[str, Any]] = {"exaone4_5": {"mm_device_do_normalize": False}}
"""vLLM 0.32 leaves it to Exaone's tower to normalise pixels, and the tower does not."""


class CausalOracle(Oracle):
    """An oracle whose images are seen by the rows behind them only, as in vLLM's CPU kernels.

    Attributes:
        window: tokens that a layer with a window sees in vLLM, with the row's own.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        text = self.model.config.get_text_config()
        # vLLM's Cohere 2 sees a row's own token and as many before it as the configuration says.
        text.sliding_window += text.model_type == "cohere2"
        self.window: int = text.sliding_window

    def prompt(self, *args: Any) -> Prompt:
        prompt = super().prompt(*args)
        for name in ("token_type_ids", "mm_token_type_ids"):
            prompt.inputs.pop(name, None)
        return prompt


@dataclass(frozen=True)
class Served:
    """A tiny model in an engine, and its oracle."""

    arch: str
    folder: Path
    options: dict[str, Any]
    running: SteppedEngine
    oracle: CausalOracle

    def ask(self, seed: int, xargs: dict[str, Any], **fields: Any) -> Ask:
        """Return a request with two images, which ends in a long question."""
        image = FAMILIES[self.arch].image_text
        texts = [random_text(3 * seed + i, length) for i, length in enumerate((40, 90, 160))]
        images = tuple(random_image(2 * seed + i) for i in range(2))
        return Ask(image.join(texts), images, TOKENS, xargs, **fields)

    def eviction(self, ask: Ask, **fields: Any) -> Eviction:
        given = {name.removeprefix("kv_eviction_"): value for name, value in ask.xargs.items()}
        method, budget = given.pop("kv_eviction"), given.pop("budget")
        return Eviction(budget, BLOCK_SIZE, observation_window=128, method=method, **given)

    def stable(self, seed: int, xargs: dict[str, Any], **fields: Any) -> tuple[Ask, Prompt]:
        """Return a request whose kept tokens do not depend on rounding, and its prompt."""
        wanted = self.eviction(self.ask(seed, xargs, **fields))

        def make(attempt: int) -> Ask:
            return self.ask(seed + 100 * attempt, xargs, **fields)

        return stable_ask(self.oracle, make, wanted)


def evicted_with(method: str, budget: float, **more: Any) -> dict[str, Any]:
    return {"kv_eviction": method, "kv_eviction_budget": budget, **more}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(arch, marks=() if arch in BY_DAY else pytest.mark.nightly) for arch in MODELS
    ],
)
def served(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Iterator[Served]:
    arch = request.param
    folder = tiny_model(arch, **MODELS[arch])
    options = OPTIONS | MORE_OPTIONS.get(arch, {})
    with engine(folder, SETTINGS, block_size=BLOCK_SIZE, **options) as running:
        yield Served(arch, folder, options, running, CausalOracle(folder))


def test_full_attention_has_its_own_blocks(served: Served) -> None:
    """All layers that own a cache with full attention are evicted, and no other."""
    scheduler, evictor = served.running.scheduler, served.running.evictor
    groups = scheduler.kv_cache_config.kv_cache_groups
    evicted = [group for group in groups if isinstance(group.kv_cache_spec, EvictingSpec)]
    sliding = [group for group in groups if isinstance(group.kv_cache_spec, SlidingWindowSpec)]
    assert groups[scheduler.group] is evicted[0]
    assert len(evicted) == 1
    assert len(sliding) == len(groups) - 1
    # Gemma 4's last three layers read the caches of others.
    assert evictor.shape.num_layers == served.oracle.layers == 2
    assert evictor.shape.head_size == (64 if served.arch == "gemma4" else 32)
    assert {group.kv_cache_spec.sliding_window for group in sliding} == {served.oracle.window}
    # A block has the pages of all full-attention layers, or as many bytes of others.
    views = evictor.pool.raw.view(evictor.pool.num_blocks, -1)
    for group in groups:
        assert group.kv_cache_spec.page_size_bytes * len(group.layer_names) <= views[0].nbytes


def test_tokens_and_kept_positions_are_the_oracles_alone_and_in_a_batch(served: Served) -> None:
    """Arrivals interleave with chunks and decodes; blocks that were freed hold NaN.

    Alone, a request takes the start of its prompt from the prefix cache, and its windows.
    """
    running, oracle = served.running, served.oracle
    cases = [("snapkv", 0.3), ("tgv", 0.5), ("h2o", 0.2), ("elastic", 0.4), ("adakv", 0.1)]
    before = running.counters["requests_evicted"]
    made = [served.stable(i, evicted_with(*case), arrival=2 * i) for i, case in enumerate(cases)]
    outputs = running.run([ask for ask, _ in made])
    assert running.counters["requests_evicted"] - before == len(cases)
    cached = {}
    for (ask, prompt), output in zip(made, outputs, strict=True):
        wanted = served.eviction(ask)
        selection = oracle.select(prompt, wanted)
        length = len(prompt.token_ids)
        assert length > 4 * WINDOW
        kept = running.kept(output.request_id, length)
        assert torch.equal(kept, selection.kept), f"{ask.xargs} keeps other tokens"
        tokens = list(output.outputs[0].token_ids)
        merging = length // BLOCK_SIZE * BLOCK_SIZE if wanted.merges else 0
        assert tokens == oracle.generate(prompt, TOKENS, kept, merging, tokens), ask.xargs
        (alone,) = running.run([replace(ask, arrival=0)])
        assert list(alone.outputs[0].token_ids) == tokens
        assert torch.equal(running.kept(alone.request_id, length), kept)
        cached[ask.xargs["kv_eviction"]] = alone.num_cached_tokens
    assert min(cached["snapkv"], cached["tgv"]) > WINDOW


def test_waits_preemptions_and_aborts(served: Served) -> None:
    """A preempted request answers as before, and an aborted one leaves nothing behind."""
    running, oracle = served.running, served.oracle
    asks = [
        served.ask(30, evicted_with("snapkv", 0.3, kv_eviction_defer=3)),
        served.ask(31, evicted_with("h2o", 0.2)),
        served.ask(32, {"kv_eviction": "none"}),
        served.ask(33, evicted_with("tgv", 0.4)),
    ]
    alone = [running.tokens([ask])[0] for ask in asks]
    prompt = oracle.prompt(asks[0].text, asks[0].images)
    assert oracle.answer(prompt, TOKENS, served.eviction(asks[0])).tokens == alone[0]
    names = [running.add(ask) for ask in asks]
    preempted = set()

    def disturb() -> None:
        for request in list(running.scheduler.running):
            if request.num_output_tokens != 6 or request.request_id in preempted:
                continue
            preempted.add(request.request_id)
            if name_of(request.request_id) == names[3]:
                running.engine.abort_request([names[3]])
            else:
                running.preempt(request)

    outputs = running.drain(disturb)
    assert len(preempted) == len(names)
    for name, tokens in list(zip(names, alone, strict=True))[:3]:
        assert list(outputs[name].outputs[0].token_ids) == tokens


def held_while_decoding(running: SteppedEngine, ask: Ask) -> tuple[Any, int, int]:
    """Return the answer, and the blocks in use behind its prompt and behind its last token."""
    scheduler = running.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    held = []

    def count() -> None:
        if any(request.num_output_tokens for request in scheduler.running):
            held.append(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    running.add(ask)
    (output,) = running.drain(count).values()
    # A step later the windows have moved behind the prompt.
    return output, held[1], held[-1]


def gain_of(running: SteppedEngine, num_prompt: int, budget: Budget) -> Gain:
    """Return what `python -m vllm_tgvkv.gain` computes for the layers of an engine."""
    scheduler = running.scheduler
    kinds = layer_kinds(specs_of_layers(scheduler.vllm_config), scheduler.vllm_config)
    return gain(kinds, num_prompt, 0, budget, scheduler.tokens_per_block)


def padding(running: SteppedEngine, num_windows: int) -> int:
    """Return the bytes that these blocks of windows have and no layer uses; all groups are alike.

    The command does not know how vLLM groups layers.
    """
    scheduler = running.scheduler
    (used,) = {
        group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        for group in scheduler.kv_cache_config.kv_cache_groups
        if isinstance(group.kv_cache_spec, SlidingWindowSpec)
    }
    stride = max(each.block_stride for each in scheduler.kv_cache_config.kv_cache_tensors)
    return num_windows * (stride - used)


def test_the_report_tells_what_the_pool_holds(served: Served) -> None:
    """Layers with full attention shrink, windows keep their length: by the pool's free blocks."""
    running = served.running
    scheduler, pool = running.scheduler, running.evictor.pool
    groups = len(scheduler.other_managers)
    block_bytes = pool.raw.nbytes // pool.num_blocks
    for seed in (40, 41):
        ask = served.ask(seed, evicted_with("snapkv", 0.25, kv_eviction_report=True))
        output, first, last = held_while_decoding(running, ask)
        report = output.kv_transfer_params["kv_eviction"]
        memory = report["memory"]
        length = len(output.prompt_token_ids)
        retained = int(0.25 * length - length % BLOCK_SIZE) // BLOCK_SIZE
        tail = bool(length % BLOCK_SIZE)
        assert report["blocks_before"] == length // BLOCK_SIZE + tail
        assert report["blocks_after"] == retained + tail
        opened = (1 + groups) * (not tail)  # by the token behind the prompt
        assert memory["after"] == (first - opened) * block_bytes
        windows = memory["windows"] // block_bytes
        assert groups * (WINDOW // BLOCK_SIZE) <= windows <= groups * (WINDOW // BLOCK_SIZE + 1)
        assert memory["states"] == 0
        assert memory["given_back"] == memory["before"] - memory["after"]
        computed = gain_of(running, length, Budget(fraction=0.25))
        assert computed.before == memory["before"] - padding(running, windows)
        assert computed.after == memory["after"] - padding(running, windows)
        last_length = length + TOKENS - 1
        assert last <= retained + -(-last_length // BLOCK_SIZE) - length // BLOCK_SIZE + windows + (
            groups
        )
        # The same request without eviction.
        full = replace(ask, xargs={"kv_eviction": "none", "kv_eviction_report": True})
        output, first, _ = held_while_decoding(running, full)
        assert output.kv_transfer_params["kv_eviction"]["memory"] is None
        assert memory["before"] == (first - opened) * block_bytes


def test_everything_kept_is_whole(served: Served) -> None:
    """Hugging Face's model, whose blocks vLLM has in groups of layers."""
    running, oracle = served.running, served.oracle
    asks = [served.ask(20 + i, evicted_with("snapkv", 1.0), arrival=i) for i in range(3)]
    before = running.counters["requests_evicted"]
    evicted = running.tokens(asks)
    assert running.counters["requests_evicted"] - before == len(asks)
    running.assert_forgotten()
    prompts = [oracle.prompt(ask.text, ask.images) for ask in asks]
    assert evicted == [oracle.generate(prompt, TOKENS) for prompt in prompts]
