# SPDX-License-Identifier: Apache-2.0
"""The pipeline stages that hold the layers of a model one after the other.

There is one scheduler, so one block table: every stage has its own pool with the same block ids,
and a block is a page of every (layer, head) of the stage. Pages cannot move to another stage. So
each stage runs the whole eviction for its own layers by the same plan, as if there were no others.

Only the last stage answers the scheduler. In a step whose plan asks for evictions or choices, each
earlier stage sends the last one its outcomes; all stages know it from the plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol, TypeAlias

from vllm_tgvkv.shared.plan import ChoiceOutcome, Failure, Outcome, sums
from vllm_tgvkv.shared.trace import join_traces

StageOutcomes: TypeAlias = list[Outcome | ChoiceOutcome | Failure]
"""The outcomes of one step in the layers of a stage."""


class Message(Protocol):
    """A message that is being sent."""

    def wait(self) -> object:
        """Wait until it is sent."""


class Stages:
    """This stage's place in the pipeline. By default it is the only one and exchanges nothing.

    All stages run the same steps in the same order. `layers` has the number of layers of each.
    `send` starts to send an object to the last stage; `receive` waits for the next object from the
    stage of that index.
    """

    def __init__(
        self,
        *layers: int,
        stage: int = 0,
        send: Callable[[StageOutcomes], Message] | None = None,
        receive: Callable[[int], StageOutcomes] | None = None,
    ) -> None:
        self.model_layers = sum(layers)
        """Layers of the whole model."""
        self.first_layer = sum(layers[:stage])
        """Index of this stage's first layer in the model."""
        self.size = len(layers)
        self.is_last = stage == self.size - 1
        self._send, self._receive = send, receive
        self._sent: deque[Message] = deque()

    def tell(self, outcomes: StageOutcomes) -> None:
        """Send this stage's outcomes of a step to the last stage."""
        assert self._send is not None, "there is no other stage"
        # At most `size` steps are in flight, so the oldest message has long arrived.
        if len(self._sent) == self.size:
            self._sent.popleft().wait()
        self._sent.append(self._send(outcomes))

    def join(self, outcomes: StageOutcomes) -> StageOutcomes:
        """Return the outcomes of a step in the layers of all stages; for the last stage only."""
        if self._receive is None:
            return outcomes
        return join_outcomes([*map(self._receive, range(self.size - 1)), outcomes])


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


def pipeline_stages(num_layers: int) -> Stages:
    """Return this worker's place among the pipeline stages; it has `num_layers` layers.

    All stages must call it at the same time.
    """
    import torch.distributed
    from vllm.distributed import get_pp_group

    group = get_pp_group()
    if group.world_size == 1:
        return Stages(num_layers)
    layers = [0] * group.world_size
    torch.distributed.all_gather_object(layers, num_layers, group=group.cpu_group)
    return Stages(
        *layers,
        stage=group.rank_in_group,
        send=lambda outcomes: group.isend_object(outcomes, dst=group.world_size - 1),
        receive=lambda stage: group.recv_object(src=stage),
    )
