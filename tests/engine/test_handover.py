# SPDX-License-Identifier: Apache-2.0
"""Two engines in processes of their own: one computes and cuts prompts, the other decodes them.

Freed blocks are filled with NaN, all blocks are recounted after every step, and several prompts run
together in pools that are too small for all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.handing import ASKED, Remote, Served, engine_process
from tests.engine.questions import DEBUG, album
from tests.engine.running import Ask

pytest.importorskip("nixl", reason="NIXL is not installed: make setup")
pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

METHODS = ("reach", "tgv", "h2o", "reach", "snapkv", "adakv")
SETTINGS = {"policy": "reach", "when": "always", "budget": 0.2, "debug": DEBUG}
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
    first = prefill.run(given, [ASKED] * len(given), **{**sampling, "max_tokens": 1})
    return decode.run(given, [each.parameters for each in first], **sampling)


@pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        "ahead",
        pytest.param("v2", marks=pytest.mark.nightly),
        pytest.param("ranks", marks=pytest.mark.nightly),
    ],
)
def test_answers_are_of_one_engine(tiny_model: Callable[..., Path], kind: str) -> None:
    folder = tiny_model("llava", image_size=112)
    given = asks()
    with (
        engine_process(folder, SETTINGS, kind, **OPTIONS) as prefill,
        engine_process(folder, SETTINGS, kind, **OPTIONS) as decode,
    ):
        alone = [prefill.run([ask], [None])[0] for ask in given]
        for _ in range(2):  # the second time with hits of the prefix cache
            apart = pass_on(prefill, decode, given)
            for one, other in zip(alone, apart, strict=True):
                assert one.tokens == other.tokens
                assert len(other.first) == 1 + other.parameters["kv_eviction"]["defer"]
                same = ("kept_tokens", "blocks_after", "kept_vision_tokens")
                for name in same:
                    report, expected = (x.parameters["kv_eviction"] for x in (other, one))
                    assert report[name] == expected[name]
        assert prefill.counters()["handovers"] == {"sent": 12}
        assert decode.counters()["handovers"] == {"received": 12}
