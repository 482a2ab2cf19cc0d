# SPDX-License-Identifier: Apache-2.0
"""Reports in streams of chats and completions, whose events have no place for them in vLLM."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from vllm_tgvkv.config.server import CONFIG_KEY

_DATA = "data: "


async def with_reports(
    original: Callable[..., AsyncIterator[str]], *args: Any, **kwargs: Any
) -> AsyncIterator[str]:
    """Yield the events of a stream; the one with a `finish_reason` has that answer's report.

    Args:
        original: vLLM's generator of events.
        args: its arguments. The only iterator among them yields the engine's results, which chats
            have alone and completions behind a number.
    """
    report: Any = None

    async def watched(results: AsyncIterator[Any]) -> AsyncIterator[Any]:
        nonlocal report
        async for result in results:
            output = result[1] if isinstance(result, tuple) else result
            report = (output.kv_transfer_params or {}).get(CONFIG_KEY)
            yield result

    args = tuple(watched(arg) if isinstance(arg, AsyncIterator) else arg for arg in args)
    async for event in original(*args, **kwargs):
        yield event if report is None else _with_report(event, report)


def _with_report(event: str, report: Any) -> str:
    if not event.startswith(f"{_DATA}{{"):
        return event  # the end of the stream
    body = json.loads(event.removeprefix(_DATA))
    if not any(choice.get("finish_reason") for choice in body.get("choices", ())):
        return event
    body["kv_transfer_params"] = {**(body.get("kv_transfer_params") or {}), CONFIG_KEY: report}
    return f"{_DATA}{json.dumps(body, ensure_ascii=False)}\n\n"
