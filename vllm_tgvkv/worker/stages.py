# SPDX-License-Identifier: Apache-2.0
"""The pipeline stages that hold the layers of a model one after the other.

There is one scheduler, so one block table: every stage has its own pool with the same block ids,
and a block is a page of every (layer, head) of the stage. Pages cannot move to another stage. So
each stage runs the whole eviction for its own layers by the same plan, as if there were no others.

Only the last stage answers the scheduler. In a step whose plan asks for evictions or choices, each
earlier stage sends the last one its outcomes; all stages know it from the plan. It does so from a
thread, which waits for the device, so that steps overlap as before. Of several tensor-parallel
ranks only the first one of each stage does so, since vLLM reads the output of no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch
import torch.distributed
from vllm.logger import init_logger

from vllm_tgvkv.shared.plan import ChoiceOutcome, Failure, Outcome, sums
from vllm_tgvkv.shared.trace import join_traces

logger = init_logger("vllm.tgvkv")

StageOutcomes: TypeAlias = list[Outcome | ChoiceOutcome | Failure]
"""The outcomes of one step in the layers of a stage."""


class Stages:
    """This stage's place in the pipeline. By default it is the only one and exchanges nothing.

    All stages run the same steps in the same order. `layers` has the number of layers of each.
    `send` sends an object to the last stage; `receive` waits for the next object from the stage of
    that index: outcomes, or what went wrong as text. A rank without them is not asked for an
    answer. `prepare` runs in the thread that sends, before its first message.
    """

    def __init__(
        self,
        *layers: int,
        stage: int = 0,
        send: Callable[[StageOutcomes | str], object] | None = None,
        receive: Callable[[int], StageOutcomes | str] | None = None,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self.model_layers = sum(layers)
        """Layers of the whole model."""
        self.first_layer = sum(layers[:stage])
        """Index of this stage's first layer in the model."""
        self.size = len(layers)
        self.is_last = stage == self.size - 1
        self._send, self._receive = send, receive
        self._thread = ThreadPoolExecutor(1, "outcomes", prepare)  # starts with the first message
        self._sent: deque[Future[object]] = deque()

    def tell(self, outcomes: Callable[[], StageOutcomes]) -> None:
        """Send this stage's outcomes of a step, which may wait for the device, to the last stage.

        It returns at once. What an earlier message raised is raised here.
        """
        if self._send is None:
            return
        while self._sent and self._sent[0].done():
            self._sent.popleft().result()
        self._sent.append(self._thread.submit(_send, self._send, outcomes))

    def join(self, outcomes: StageOutcomes) -> StageOutcomes:
        """Return the outcomes of a step in the layers of all stages; for the last stage only."""
        if self._receive is None:
            return outcomes
        found: list[StageOutcomes] = []
        for stage in range(self.size - 1):
            part = self._receive(stage)
            if isinstance(part, str):
                raise RuntimeError(f"the outcomes of pipeline stage {stage} are lost: {part}")
            found.append(part)
        return join_outcomes([*found, outcomes])


def _send(
    send: Callable[[StageOutcomes | str], object], outcomes: Callable[[], StageOutcomes]
) -> None:
    try:
        found = outcomes()
    except Exception as error:
        logger.exception("KV eviction: the outcomes of a pipeline stage are lost")
        send(f"{type(error).__name__}: {error}")  # the last stage waits
        raise
    send(found)


def join_outcomes(stages: Sequence[StageOutcomes]) -> StageOutcomes:
    """Return the stages' outcomes as if one stage had all layers.

    A request that failed on one stage has failed. It keeps the most blocks that any stage needs.
    """
    parts: dict[str, list[Outcome]] = {}
    choices: dict[str, list[ChoiceOutcome]] = {}
    failures: dict[str, Failure] = {}
    for part in chain.from_iterable(stages):
        if isinstance(part, Failure):
            failures.setdefault(part.request_id, part)
        elif isinstance(part, ChoiceOutcome):
            choices.setdefault(part.request_id, []).append(part)
        else:
            parts.setdefault(part.request_id, []).append(part)
    joined = [_join(of_all) for name, of_all in parts.items() if name not in failures]
    chosen = [_join_choices(of_all, len(stages)) for of_all in choices.values()]
    return [*joined, *chosen, *failures.values()]


def _join_choices(parts: Sequence[ChoiceOutcome], num_stages: int) -> ChoiceOutcome:
    """Return a choice as if one stage had all layers; if the tier of one failed, all lose it."""
    num_pairs, moved = sum(part.num_pairs for part in parts), 0.0
    for part in parts:
        if part.num_recalled is None:
            return part
        moved += part.num_recalled * part.num_pairs
    traces = [part.trace for part in parts if part.trace is not None]
    return replace(
        parts[0],
        num_recalled=moved / num_pairs,
        num_pairs=num_pairs,
        trace=join_traces(traces) if len(traces) == num_stages else None,
    )


def _join(parts: Sequence[Outcome]) -> Outcome:
    traces = [part.trace for part in parts if part.trace is not None]
    numbers = [part.num_retained for part in parts if part.num_retained is not None]
    return replace(
        parts[0],
        num_retained=max(numbers, default=None),
        kept=sums(part.kept for part in parts),
        seconds=sums(part.seconds for part in parts),
        num_pairs=sum(part.num_pairs for part in parts),
        trace=join_traces(traces) if traces else None,
    )


def pipeline_stages(num_layers: int, device: torch.device) -> Stages:
    """Return this worker's place among the pipeline stages; it has `num_layers` layers.

    All stages must call it at the same time.
    """
    from vllm.distributed import get_pp_group, get_tp_group
    from vllm.platforms import current_platform

    group = get_pp_group()
    if group.world_size == 1:
        return Stages(num_layers)
    layers = [0] * group.world_size
    torch.distributed.all_gather_object(layers, num_layers, group=group.cpu_group)
    # Messages of vLLM's groups must not come between the thread's.
    own = torch.distributed.new_group(group.ranks, backend="gloo", use_local_synchronization=True)
    last = group.ranks[-1]

    def send(outcomes: StageOutcomes | str) -> None:
        torch.distributed.send_object_list([outcomes], dst=last, group=own)

    def receive(stage: int) -> StageOutcomes | str:
        received: list[StageOutcomes | str] = [""]
        torch.distributed.recv_object_list(received, src=group.ranks[stage], group=own)
        return received[0]

    stage, answers = group.rank_in_group, get_tp_group().is_first_rank
    return Stages(
        *layers,
        stage=stage,
        send=send if answers and not group.is_last_rank else None,
        receive=receive if answers and group.is_last_rank else None,
        # A new thread would wait for events in a context of its own, on the first GPU.
        prepare=partial(current_platform.set_device, device),
    )
