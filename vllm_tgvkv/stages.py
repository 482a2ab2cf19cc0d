# SPDX-License-Identifier: Apache-2.0
"""The pipeline stages that hold the layers of a model one after the other.

There is one scheduler, so one block table: every stage has a pool of its own with the same block
ids, and a block is a page of every (layer, head) of the stage. Pages cannot move to another stage,
so each runs the whole eviction for its own layers by the same plan, as if there were no others.

Only the last stage answers the scheduler. In a step whose plan asks for eviction work, which all
stages know from the plan, each earlier stage sends the last one what it found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_tgvkv.plan import Failure
from vllm_tgvkv.trace import Trace, join_traces


@dataclass(frozen=True)
class StageOutcome:
    """What came of one eviction in the layers of a stage."""

    request_id: str
    num_retained: int
    """Blocks of the region that hold pages."""
    num_pages: int
    """Pages that were dealt, over layers and heads."""
    num_vision: int
    """Vision tokens in them."""
    num_pairs: int
    """Layers times heads."""
    seconds: dict[str, float]
    """Time on the device by part."""
    trace: Trace | None


class Stages:
    """One stage's place in the pipeline; this one has all layers, and nothing costs it anything."""

    size = 1
    is_last = True
    first_layer = 0
    """Of the model's layers, the first of this stage."""

    def __init__(self, model_layers: int) -> None:
        self.model_layers = model_layers
        """Layers of the whole model."""

    def tell(self, found: list[StageOutcome | Failure]) -> None:
        """Send the last stage what this one found in a step."""
        raise NotImplementedError("there is no other stage")

    def join(self, found: list[StageOutcome | Failure]) -> list[StageOutcome | Failure]:
        """What all stages found in a step; to be called by the last one."""
        return found


class PipelineStages(Stages):
    """One of several stages, all of which run the same steps in the same order.

    `layers` are the numbers of layers of all stages. `send` gives the last stage an object and
    returns a handle to wait for, `receive` takes an earlier stage's next one.
    """

    def __init__(
        self,
        layers: Sequence[int],
        stage: int,
        send: Callable[[Any], Any],
        receive: Callable[[int], Any],
    ) -> None:
        super().__init__(sum(layers))
        self.first_layer = sum(layers[:stage])
        self.size = len(layers)
        self.is_last = stage == self.size - 1
        self._send, self._receive = send, receive
        self._sent: deque[Any] = deque()

    def tell(self, found: list[StageOutcome | Failure]) -> None:
        # At most so many steps are in flight: what is waited for has long arrived.
        if len(self._sent) == self.size:
            self._sent.popleft().wait()
        self._sent.append(self._send(found))

    def join(self, found: list[StageOutcome | Failure]) -> list[StageOutcome | Failure]:
        return join_found([*map(self._receive, range(self.size - 1)), found])


def join_found(stages: Sequence[Sequence[StageOutcome | Failure]]) -> list[StageOutcome | Failure]:
    """What stages found, as if one had all layers: what fails on one of them has failed.

    The blocks that a request needs are those that the neediest stage does.
    """
    parts: dict[str, list[StageOutcome]] = {}
    failures: dict[str, Failure] = {}
    for found in stages:
        for part in found:
            if isinstance(part, Failure):
                failures.setdefault(part.request_id, part)
            else:
                parts.setdefault(part.request_id, []).append(part)
    joined = [_join(of_all) for name, of_all in parts.items() if name not in failures]
    return [*joined, *failures.values()]


def _join(parts: Sequence[StageOutcome]) -> StageOutcome:
    traces = [part.trace for part in parts if part.trace is not None]
    names = dict.fromkeys(name for part in parts for name in part.seconds)
    return replace(
        parts[0],
        num_retained=max(part.num_retained for part in parts),
        num_pages=sum(part.num_pages for part in parts),
        num_vision=sum(part.num_vision for part in parts),
        num_pairs=sum(part.num_pairs for part in parts),
        seconds={name: sum(part.seconds.get(name, 0.0) for part in parts) for name in names},
        trace=join_traces(traces) if traces else None,
    )


def pipeline_stages(num_layers: int) -> Stages:
    """This worker's place among the pipeline stages of its engine, of which it has `num_layers`.

    All stages call it at once.
    """
    import torch.distributed
    from vllm.distributed import get_pp_group

    group = get_pp_group()
    if group.world_size == 1:
        return Stages(num_layers)
    layers = [0] * group.world_size
    torch.distributed.all_gather_object(layers, num_layers, group=group.cpu_group)
    return PipelineStages(
        layers,
        group.rank_in_group,
        lambda found: group.isend_object(found, dst=group.world_size - 1),
        lambda stage: group.recv_object(src=stage),
    )
