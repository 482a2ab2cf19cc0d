# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts on several engines."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import pytest
import torch
from vllm.utils.network_utils import get_open_port

from tests.engine import lockstep
from tests.engine.processes import FORKED
from tests.engine.questions import DEBUG, album, budget
from tests.engine.running import engine
from tests.models import QWEN_IMAGE

pytestmark = [pytest.mark.compatibility, pytest.mark.engine, pytest.mark.slow]

SETTINGS = {"policy": "tgv", "budget": 0.2, "debug": DEBUG}
OPTIONS = {"max_num_batched_tokens": 128, "skip_mm_profiling": True}


@pytest.mark.nightly
def test_engines_that_step_together_answer_as_one(tiny_model: Callable[..., Path]) -> None:
    """Each evicts while the other is idle, and both at once; one request is aborted when evicted.

    An idle step after that one must not evict again.
    """
    folder = tiny_model("qwen3_vl_moe")
    asks = [
        [
            album(10 * rank + i, 40, 150, image_text=QWEN_IMAGE, max_tokens=20, arrival=arrival)
            for i, arrival in enumerate(arrivals)
        ]
        for rank, arrivals in enumerate(((0, 60), (22, 61)))
    ]
    gone = album(30, 20, 200, image_text=QWEN_IMAGE, max_tokens=20, arrival=0, xargs=budget(0.4))
    asks[1].insert(0, gone)
    port = get_open_port()
    with ProcessPoolExecutor(2, FORKED) as processes:
        both = [
            processes.submit(
                lockstep.serve,
                rank,
                port,
                folder,
                SETTINGS,
                asks[rank],
                100,
                aborted=[0] if rank else [],
                **OPTIONS,
            )
            for rank in range(2)
        ]
        for done in as_completed(both):  # the first to fail has the reason
            done.result()
    (first, idle), (second, also_idle) = (found.result() for found in both)
    assert idle > 10
    assert also_idle > 10
    aborted, *second = second
    assert len(aborted.kept) == 1
    with engine(folder, SETTINGS, **OPTIONS) as single:
        for served, ask in zip([*first, *second], [*asks[0], *asks[1][1:]], strict=True):
            (output,) = single.run([ask])
            (kept,) = single.kept_after_cuts(output.request_id)
            assert len(served.kept) == 1
            assert torch.equal(served.kept[0], kept)
            assert served.tokens == list(output.outputs[0].token_ids)
