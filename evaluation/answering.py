# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in this process that is kept busy with requests, and what they report of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from measure.engines import LocalLLM
from vllm_tgvkv.config.server import CONFIG_KEY

T = TypeVar("T")


@dataclass(frozen=True)
class Request(Generic[T]):
    """An input of the engine, and what it is for."""

    name: str
    subject: T
    prompt: Any
    """As vLLM's renderer makes it."""
    sampling: Any


class ArmEngine(LocalLLM):
    """One vLLM engine that answers for all arms, closed at the end of a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def finish(self, requests: Iterable[Request[T]], most: int) -> Iterator[tuple[T, Any]]:
        """Yield the subject and the output of each request, in the order in which they finish.

        Args:
            most: requests that the engine has at a time. Twice its batch keeps the batch full.
        """
        waiting = iter(requests)
        asked: dict[str, T] = {}
        exhausted = False
        while True:
            while not exhausted and len(asked) < most:
                request = next(waiting, None)
                if request is None:
                    exhausted = True
                else:
                    self.engine.add_request(request.name, request.prompt, request.sampling)
                    asked[request.name] = request.subject
            if not asked:
                return
            for output in self.engine.step():
                if output.finished:
                    yield asked.pop(output.request_id), output


@dataclass(frozen=True)
class Held:
    """The part of a prompt that a request holds after its evictions, from its report."""

    prompt_tokens: int
    kept_tokens: float
    blocks_before: int
    blocks_after: int

    @classmethod
    def of(cls, output: Any) -> Held:
        """Return it; a prompt that was not evicted is held whole."""
        report = output.kv_transfer_params[CONFIG_KEY]
        tokens, before = report["prompt_tokens"], report["blocks_before"]
        if report["blocks_after"] is None:
            return cls(tokens, tokens, before, before)
        return cls(tokens, report["kept_tokens"], before, report["blocks_after"])
