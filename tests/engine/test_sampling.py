# SPDX-License-Identifier: Apache-2.0
"""Every kind of sampling: if all pages are kept, answers must be stock vLLM's."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams

from tests.engine.questions import DEBUG, JSON_SCHEMA, SETTINGS, question
from tests.engine.running import SteppedEngine, engine

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

LETTERS = "abcdefghijklmnopqrstuvwxyz:"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "seed": {"temperature": 1, "seed": 7},
    "top k, top p, min p": {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "seed": 3,
    },
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "logit bias": {"logit_bias": {65: 5.0, 70: -50.0}},
    "bad words": {"bad_words": ["a", "e", "th"]},
    "allowed tokens": {"allowed_token_ids": list(range(64, 90))},
    "min tokens, then a stop token": {"stop_token_ids": list(range(60, 120)), "min_tokens": 10},
    "stop string": {"stop": list(LETTERS), "min_tokens": 3, "include_stop_str_in_output": True},
    "logprobs": {"logprobs": 5},
    "logprobs of the prompt": {"logprobs": 2, "prompt_logprobs": 3},
    "several": {"n": 2, "temperature": 1, "seed": 11, "output_kind": RequestOutputKind.FINAL_ONLY},
    "choice": {"structured_outputs": StructuredOutputsParams(choice=["yes", "no, it is not"])},
    "regex": {"structured_outputs": StructuredOutputsParams(regex="[a-f ]{30,45}[.]")},
    "json": {"structured_outputs": StructuredOutputsParams(json=JSON_SCHEMA)},
    "grammar": {
        "structured_outputs": StructuredOutputsParams(grammar='root ::= ("ab" | "cd")+ "."')
    },
    "greedy, to the end of the model's length": {"max_tokens": None},
}
FULLY = {**SETTINGS, "budget": 1.0, "debug": {**DEBUG, "evict_at_full_budget": True}}


def sample(running: SteppedEngine, preempt_every: int | None = None) -> dict[str, Any]:
    """Serve a request of every kind of sampling, one arriving in each step."""
    steps = itertools.count(1)
    names: dict[str, str] = {}
    finished: dict[str, Any] = {}
    waiting = list(enumerate(SAMPLINGS.items()))
    while waiting or running.engine.has_unfinished_requests():
        if waiting:
            seed, (kind, sampling) = waiting.pop(0)
            ends = "structured_outputs" not in sampling
            ask = question(100 + seed, 20, 90 + 7 * seed, max_tokens=40)
            names[kind] = running.add(ask, **{"ignore_eos": ends, **sampling})
        if preempt_every and not next(steps) % preempt_every and running.scheduler.running:
            running.preempt(running.scheduler.running[-1])
        finished.update({o.request_id: o for o in running.step() if o.finished})
    running.assert_empty()
    return {kind: finished[name] for kind, name in names.items()}


def numbers(logprobs: Any) -> torch.Tensor:
    """Return the log-probabilities of all positions, ordered by token id."""
    rows = [position for position in logprobs if position]
    return torch.tensor([row[token].logprob for row in rows for token in sorted(row)])


def embedded(running: SteppedEngine) -> list[int]:
    """Return the tokens after a prompt of embeddings."""
    vectors = torch.randn(150, 128, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    (output,) = running.llm.generate([{"prompt_embeds": vectors}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def beams(running: SteppedEngine) -> list[Any]:
    """Return the beams of a prompt with their scores."""
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    (output,) = running.llm.beam_search([question(99, 20, 120).prompt()], params)
    return [(beam.tokens, pytest.approx(beam.cum_logprob, 1e-3)) for beam in output.sequences]


def test_with_everything_kept_every_way_to_sample_gives_what_stock_gives(folder: Path) -> None:
    """Through compressed caches, in chunks and after preemptions; stock has none of these."""
    options = {"max_model_len": 336, "enable_prefix_caching": True, "enable_prompt_embeds": True}
    with engine(folder, **options) as stock:
        want, want_beams, want_embedded = sample(stock), beams(stock), embedded(stock)
    small = {"num_gpu_blocks_override": 44, "max_num_batched_tokens": 256}
    with engine(folder, FULLY, **options, **small) as running:
        found = sample(running, preempt_every=9)
        preempted = [request.sampling_params for request in running.preempted.values()]
        assert any(params.seed is not None for params in preempted)
        assert any(params.structured_outputs is not None for params in preempted)
        assert running.counters["requests_evicted"] > len(SAMPLINGS) + 1
        # A beam is a request of one token; a prompt of embeddings has no token ids to hash.
        assert beams(running) == want_beams
        assert embedded(running) == want_embedded
        skipped = running.counters["requests_skipped"]
        assert skipped.keys() == {"single_token", "unsupported_request"}
        with pytest.raises(ValueError, match="only supported for pooling"):
            running.llm.embed(["a prompt"])
    for kind, stocks in want.items():
        ours = found[kind]
        for mine, its in zip(ours.outputs, stocks.outputs, strict=True):
            assert list(mine.token_ids) == list(its.token_ids), kind
            assert (mine.text, mine.finish_reason) == (its.text, its.finish_reason), kind
            assert mine.stop_reason == its.stop_reason, kind
            if its.logprobs:
                torch.testing.assert_close(numbers(mine.logprobs), numbers(its.logprobs))
        if stocks.prompt_logprobs:
            ours, stocks = numbers(ours.prompt_logprobs), numbers(stocks.prompt_logprobs)
            torch.testing.assert_close(ours, stocks, atol=1e-4, rtol=1e-4)
    to_the_end = found["greedy, to the end of the model's length"]
    assert len(to_the_end.prompt_token_ids) + len(to_the_end.outputs[0].token_ids) == 336
    assert len({choice.text for choice in found["several"].outputs}) == 2
    assert found["stop string"].outputs[0].stop_reason in LETTERS
    assert found["min tokens, then a stop token"].outputs[0].finish_reason == "stop"
    assert json.loads(found["json"].outputs[0].text).keys() == {"a", "b"}
    assert re.fullmatch("[a-f ]{30,45}[.]", found["regex"].outputs[0].text)
    assert re.fullmatch("(ab|cd)+[.]?", found["grammar"].outputs[0].text)
    assert found["choice"].outputs[0].text in ("yes", "no, it is not")
