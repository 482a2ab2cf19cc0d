# SPDX-License-Identifier: Apache-2.0
"""Two engines in processes of their own: one computes and cuts prompts, the other decodes them.

Freed blocks are filled with NaN, all blocks are recounted after every step, and several prompts run
together in pools that are too small for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from measure.pairs import COMPUTE
from measure.serving import free_port
from tests.engine.handing import Remote, Served, engine_process
from tests.engine.questions import DEBUG, album
from tests.engine.running import Ask, engine
from tests.models import random_text

pytest.importorskip("nixl", reason="NIXL is not installed: make setup")
pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

METHODS = ("reach", "tgv", "h2o", "reach", "snapkv", "adakv")
SETTINGS = {"policy": "reach", "when": "always", "debug": DEBUG}
OPTIONS = {
    "max_num_batched_tokens": 128,
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 44,
}
WAIT = 4


def asks() -> list[Ask]:
    """Return requests of all methods; the first and the fourth have the same prompt."""
    return [
        album(seed % 3, 40 + 30 * seed % 3, 170, max_tokens=40, xargs=xargs(method))
        for seed, method in enumerate(METHODS)
    ]


def xargs(method: str) -> dict[str, Any]:
    return {"kv_eviction": method, "kv_eviction_report": 1}


def pass_on(prefill: Remote, decode: Remote, given: list[Ask], **sampling: Any) -> list[Served]:
    """Let one engine compute prompts, and the other decode them, as a router does."""
    first = prefill.run(given, [COMPUTE] * len(given), **{**sampling, "max_tokens": 1})
    found = decode.run(given, [each.parameters for each in first], **sampling)
    assert [each.num_cached for each in found] == [each.num_cached for each in first]
    return found


SCHEDULE = {"decode": {"schedule": [[WAIT, 0.4], [15, 0.2], [30, 0.1]]}}
CEILING = {"decode": {"max_tokens": 96}, "defer": WAIT}
PRESSURE = {"when": "pressure", "handover": "cut"}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("ahead", SCHEDULE),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                *(("cpu", SCHEDULE), ("v2", SCHEDULE)),
                *(("ranks", {"budget": 0.2}), ("ahead", CEILING)),
            )
        ),
    ],
)
def test_answers_are_of_one_engine(
    tiny_model: Callable[..., Path], kind: str, settings: dict[str, Any]
) -> None:
    """The second engine makes the later cuts, out of what the first one has left."""
    folder = tiny_model("llava", image_size=112)
    given, settings = asks(), {**SETTINGS, **settings}
    with (
        engine_process(folder, settings, kind, **OPTIONS) as prefill,
        engine_process(folder, settings, kind, **OPTIONS) as decode,
    ):
        alone = [prefill.run([ask], [None])[0] for ask in given]
        for _ in range(2):  # the second time with hits of the prefix cache
            apart = pass_on(prefill, decode, given)
            for one, other in zip(alone, apart, strict=True):
                assert one.tokens == other.tokens
                report, expected = (x.parameters["kv_eviction"] for x in (other, one))
                assert len(other.first) == 1 + report["defer"]
                for name in ("kept_tokens", "blocks_after", "kept_vision_tokens", "cuts"):
                    assert report[name] == expected[name], name
        assert prefill.counters()["handovers"] == {"sent": 2 * len(given)}
        assert decode.counters()["handovers"] == {"received": 2 * len(given)}


def test_what_fails_or_ends_in_between(tiny_model: Callable[..., Path]) -> None:
    """Failed evictions are not read, and no first token is lost or block given back twice."""
    folder, one = tiny_model("llava", image_size=112), asks()[0]
    # One step computes a prompt, and the pool holds two that come.
    computing = {**OPTIONS, "max_model_len": 384}
    decoding = {**computing, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 15}
    later = {**SETTINGS, "decode": {"schedule": [[WAIT, 0.4], [15, 0.39]]}}
    with (
        engine_process(folder, later, **computing) as prefill,
        engine_process(folder, later, **decoding) as decode,
    ):
        (alone,) = prefill.run([one], [None])
        many = [album(seed, 40, 170, max_tokens=40, xargs=xargs("reach")) for seed in range(4)]
        assert all(len(each.tokens) == 40 for each in pass_on(prefill, decode, many))
        # The decode server evicts nothing, and its first token is the answer's last.
        (found,) = prefill.run([one], [COMPUTE], max_tokens=1)
        stock = replace(one, xargs=xargs("none"))
        (expected,) = decode.run([stock], [None], max_tokens=WAIT + 2)
        (answer,) = decode.run([stock], [found.parameters], max_tokens=WAIT + 2)
        assert answer.tokens == expected.tokens
        prefill.counters()  # it was told, and holds nothing, long before its lease is over
        (found,) = prefill.run([one], [COMPUTE], max_tokens=1)
        elsewhere = {"remote_engine_id": "silent", "remote_port": free_port()}
        decode.hang_up(one, {**found.parameters, **elsewhere})
        prefill.fail()
        (found,) = prefill.run([one], [COMPUTE], max_tokens=1)
        (answer,) = decode.run([one], [found.parameters])
        assert answer.tokens == alone.tokens
        counted = decode.counters()["handovers"]
        assert counted == {"received": len(many), "refused": 2}


def test_prompts_in_a_store_are_cut_like_computed_ones(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """A hit ends where rows vote, of a method that waits for answers with the prompt.

    vLLM's example of a store has whole blocks of prompts in files, and reads them within a step.
    """
    folder = tiny_model("llava", image_size=112)
    store = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    options = {"kv_transfer_config": store, "disable_hybrid_kv_cache_manager": True}
    with engine(folder, SETTINGS, **options) as running:
        for seed, (method, least) in enumerate({"reach": 1.0, "tgv": 0.5, "h2o": 0.0}.items()):
            ask = album(10 + seed, 200, 170, max_tokens=40, xargs=xargs(method))
            (computed,) = running.run([ask])
            (found,) = running.run([ask])
            assert found.outputs[0].token_ids == computed.outputs[0].token_ids
            (one,), (other,) = (running.kept_after_cuts(x.request_id) for x in (computed, found))
            assert torch.equal(one, other)
            whole = (len(computed.prompt_token_ids) - 1) // 32 * 32
            assert computed.num_cached_tokens == 0
            assert least * whole <= found.num_cached_tokens <= whole * (least > 0)


def test_a_store_that_copies_late_has_whole_prompts(tiny_model: Callable[..., Path]) -> None:
    """Cuts give blocks back that wait to be copied; other requests take them in the next step.

    No block of an answer is found that was computed over an evicted cache.
    """
    folder = tiny_model("llava", image_size=112)
    extra = {
        "spec_name": "LazySpec",
        "spec_module_path": "tests.engine.lazy_store",
        "offload_prompt_only": False,
    }
    store = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**extra, "cpu_bytes_to_use": 1 << 26},
    }
    methods = ("reach", "tgv", "reach", "snapkv")
    given = [album(20 + i, 120, 300, max_tokens=60, xargs=xargs(m)) for i, m in enumerate(methods)]
    debug = {"record_kept": True, "check_integrity": True}
    settings = {**SETTINGS, "text_only": "evict", "debug": debug}
    options = {**OPTIONS, "num_gpu_blocks_override": 34, "max_num_batched_tokens": 512}
    with engine(folder, settings, **options) as running:
        expected = [running.run([ask])[0] for ask in given]
        kept = [running.kept_after_cuts(output.request_id) for output in expected]
    with engine(folder, settings, kv_transfer_config=store, **options) as running:
        for turn in range(3):
            for number, found in enumerate(running.run(given)):
                assert found.outputs[0].token_ids == expected[number].outputs[0].token_ids
                (one,), (other,) = running.kept_after_cuts(found.request_id), kept[number]
                assert torch.equal(one, other)
                assert (found.num_cached_tokens > 0) == (turn > 0)
            running.scheduler.reset_prefix_cache()
        ask = Ask(random_text(99, 300), max_tokens=60, xargs=xargs("reach"))
        (output,) = running.run([ask])
        assert running.kept_after_cuts(output.request_id)
        running.scheduler.reset_prefix_cache()
        both = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        (found,) = running.llm.generate([{"prompt_token_ids": both}], ask.sampling())
        assert 0 < found.num_cached_tokens <= len(output.prompt_token_ids) + WAIT
