# SPDX-License-Identifier: Apache-2.0
"""Traces of requests that are cut several times, against the debug option `record_kept`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.questions import question
from tests.engine.running import engine, name_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def assert_reasons(
    method: str, kept: dict[str, Any], trace: dict[str, Any], num_judged: int, sinks: int
) -> None:
    """Check the reasons of a token set; which scores pooling raised, a unit test checks."""
    reasons, positions = kept["reasons"], kept["positions"]
    assert sorted(p for of_reason in reasons.values() for p in of_reason) == positions
    assert reasons["sink"] == list(range(sinks))
    assert reasons.get("tail", []) == [p for p in positions if p >= num_judged]
    vision = {p for s in trace["vision"] for p in range(s["start"], s["start"] + s["length"])}
    judged = [p for p in positions if sinks <= p < num_judged]
    if method == "tgv":
        assert reasons.get("text", []) == [p for p in judged if p not in vision]
        assert "neighbour" not in reasons  # it does not pool
    else:
        assert "score" in reasons  # "recent" as well, until the answer is longer than its window
        assert "text" not in reasons


@pytest.mark.parametrize(
    "settings",
    [
        {"decode": {"schedule": [[4, 0.6], [20, 0.4], [50, 0.2]]}},
        {"budget": 0.3, "defer": 3, "decode": {"max_tokens": 96}},
    ],
    ids=["schedule", "ceiling"],
)
@pytest.mark.parametrize("method", ["tgv", pytest.param("adakv", marks=pytest.mark.nightly)])
def test_a_trace_has_every_cut(
    tiny_model: Callable[..., Path], method: str, settings: dict[str, Any]
) -> None:
    config = {"policy": method, "debug": {"record_kept": True}, **settings}
    xargs = {"kv_eviction_trace": 1, "kv_eviction_report": 1}
    asks = [question(seed, 60, 130 + seed, max_tokens=200, xargs=xargs) for seed in range(2)]
    with engine(tiny_model("llava", image_size=112), config) as running:

        def found(*args: Any) -> Any:
            (answer,) = running.llm.collective_rpc("kv_eviction_trace", args=args)
            return answer

        before = running.counters
        outputs = running.run(asks)
        assert running.counters["requests_evicted"] - before["requests_evicted"] == 2
        shape = running.evictor.shape
        for output in outputs:
            name, num_prompt = output.request_id, len(output.prompt_token_ids)
            kept = [cut for of, cut in running.evictor.kept if name_of(of) == name]
            cuts = output.kv_transfer_params["kv_eviction"]["cuts"]
            assert len(kept) == len(cuts) >= 3
            gone: list[np.ndarray] = []
            for index, recorded in enumerate(kept):
                trace = found(name, None, index)
                assert trace["cuts"] == cuts
                counts = recorded.counts.numpy(force=True)
                assert trace["pages"] == counts.tolist()
                positions = recorded.positions.numpy(force=True)[: counts.sum()]
                num_full = num_prompt // shape.block_size
                if "max_tokens" in settings["decode"] and index:
                    num_answer = cuts[index]["answer_tokens"]
                    num_full = (num_prompt + num_answer) // shape.block_size
                num_judged = num_full * shape.block_size
                kept_by = np.bincount(positions.ravel(), minlength=max(num_judged, num_prompt))
                kept_by[num_judged:] = shape.num_pairs
                assert trace["kept_by"] == kept_by.tolist()
                mean = sum(trace["kept_by"]) / shape.num_pairs
                assert cuts[index]["kept_tokens"] == mean
                first = found(name, 0, index)["token_sets"][0]
                scores = np.array(first["scores"], dtype=float)
                assert len(scores) == num_judged
                assert_reasons(method, first, trace, num_judged, running.evictor.config.sinks)
                if gone:  # what the last cut evicted has no score
                    assert np.isnan(scores[gone[-1]]).all()
                    assert np.isfinite(scores).any()
                gone.append(np.setdiff1d(np.arange(num_judged), first["positions"]))
            assert found(name) == trace
            assert found(name, None, len(cuts)) is None
