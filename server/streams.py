# SPDX-License-Identifier: Apache-2.0
"""Reports in streams of chats and completions, whose events have no place for them in vLLM."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from vllm.outputs import RequestOutput

from vllm_tgvkv.config.server import CONFIG_KEY

_DATA = "data: "
_TRANSFERS = "tgvkv_transfers"
"""Attribute of a result that is several together: `kv_transfer_params` by choice."""


async def with_reports(
    original: Callable[..., AsyncIterator[str]], *args: Any, **kwargs: Any
) -> AsyncIterator[str]:
    """Yield the events of a stream; the one with a `finish_reason` has that answer's report.

    Args:
        original: vLLM's generator of events.
        args: its arguments, first the server's part and the request. The only iterator among them
            yields the engine's results, which chats have alone and completions behind the number
            of their prompt.
    """
    number = args[1].n or 1
    reports: dict[int, Any] = {}
    """Of the answers that have ended, by the index of their choice."""

    async def watched(results: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for result in results:
            prompt, output = result if isinstance(result, tuple) else (0, result)
            for index, transfer in transfers_of(output).items():
                if report := (transfer or {}).get(CONFIG_KEY):
                    reports[index + prompt * number] = report
            yield result

    args = tuple(watched(arg) if isinstance(arg, AsyncIterator) else arg for arg in args)
    async for event in original(*args, **kwargs):
        yield _with_report(event, reports) if reports else event


def transfers_of(output: RequestOutput) -> dict[int, dict[str, Any] | None]:
    """Return the `kv_transfer_params` of each choice of a result, which may be several together."""
    found = getattr(output, _TRANSFERS, None)
    return found or {choice.index: output.kv_transfer_params for choice in output.outputs}


def add_result(
    original: Callable[..., None], result: RequestOutput, following: Any, *args: Any, **kwargs: Any
) -> None:
    """Add the following result, which may be another choice's, and keep what belongs to each."""
    transfers = transfers_of(result)
    for index, transfer in transfers_of(following).items():
        transfers[index] = transfer or transfers.get(index)
    original(result, following, *args, **kwargs)
    setattr(result, _TRANSFERS, transfers)


def _with_report(event: str, reports: dict[int, Any]) -> str:
    if not event.startswith(f"{_DATA}{{"):
        return event  # the end of the stream
    body = json.loads(event.removeprefix(_DATA))
    ended = [each["index"] for each in body.get("choices", ()) if each.get("finish_reason")]
    report = next((reports[index] for index in ended if index in reports), None)
    if report is None:
        return event
    body["kv_transfer_params"] = {**(body.get("kv_transfer_params") or {}), CONFIG_KEY: report}
    return f"{_DATA}{json.dumps(body, ensure_ascii=False)}\n\n"
