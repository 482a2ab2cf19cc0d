# SPDX-License-Identifier: Apache-2.0
"""Answers of the full and the evicted cache to one question about images.

Both requests go through the server's own `/v1/chat/completions`, inside the process, so the server
treats them like any other.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import httpx
from fastapi import FastAPI, HTTPException
from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.server.schemas import Answers, EvictedAnswer, FullAnswer, Question

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 64_000_000

Options = dict[str, str | int | float]
"""A request's `vllm_xargs`."""


async def ask(
    app: FastAPI,
    key: str | None,
    model: str,
    config: EvictionConfig,
    question: Question,
    decode: Callable[[list[int]], str],
) -> Answers:
    """Ask both caches.

    Args:
        decode: returns the text of tokens, with their special ones.

    Raises:
        HTTPException: 400 for an invalid image, 413 for one that is too large, and any error that
            the server returns for the request.
    """
    images = [question.image] if isinstance(question.image, str) else question.image
    urls = [await run_in_threadpool(_checked, image) for image in images]
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(_with_disconnects(app), raise_app_exceptions=False)
    asked = {
        "kv_eviction": question.policy,
        "kv_eviction_budget": question.budget,
        "kv_eviction_when": question.when,
        "kv_eviction_defer": question.defer,
        "kv_eviction_schedule": question.schedule,
        "kv_eviction_max_tokens": question.ceiling,
    }
    options: Options = {key: value for key, value in asked.items() if value is not None}
    options["kv_eviction_trace"] = int(config.max_traces > 0)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://itself", headers=headers, timeout=None
    ) as client:

        async def answer(xargs: Options) -> tuple[str, dict[str, Any], list[int]]:
            body = _request(model, urls, question, {**xargs, "kv_eviction_report": 1})
            return _read(await client.post("/v1/chat/completions", json=body))

        # In sequence: concurrent requests would share the prompt's blocks, and free none of them.
        text, report, ids = await answer(options)
        full = (await answer({"kv_eviction": "none"}))[0] if question.compare else None
    tokens = await run_in_threadpool(token_texts, ids, decode) if question.tokens else None
    before = report["blocks_before"]
    return Answers(
        model=model,
        full=None if full is None else FullAnswer(text=full, blocks=before),
        evicted=EvictedAnswer(
            **report,
            text=text,
            blocks=before if report["blocks_after"] is None else report["blocks_after"],
            tokens=tokens,
        ),
    )


def _with_disconnects(app: ASGIApp) -> ASGIApp:
    """Wrap an app so that cancelling a call looks like a client that disconnects.

    vLLM's handler runs in its own task. A disconnect ends it; cancelling the call alone does not.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        cancelled, body_ended = asyncio.Event(), False

        async def receive_or_disconnect() -> Message:
            nonlocal body_ended
            if body_ended:
                await cancelled.wait()
                return {"type": "http.disconnect"}
            message = await receive()
            body_ended = not message.get("more_body", False)
            return message

        try:
            await asyncio.shield(asyncio.ensure_future(app(scope, receive_or_disconnect, send)))
        finally:
            cancelled.set()

    return call


def _checked(image: str) -> str:
    """Return the image as a data URL, after decoding it once as a check.

    Raises:
        HTTPException: 400 or 413.
    """
    _, comma, data = image.rpartition(",")
    try:
        raw = base64.b64decode(data if comma else image, validate=True)
    except (binascii.Error, ValueError) as error:
        raise HTTPException(400, f"image is not base64: {error}") from error
    try:
        with Image.open(io.BytesIO(raw), formats=FORMATS) as opened:
            kind, (width, height) = opened.format, opened.size
            if width * height <= MAX_PIXELS:
                opened.load()
    except Exception as error:  # decoders raise almost any error for invalid data
        raise HTTPException(
            400, f"image cannot be read: send one of {', '.join(FORMATS)}"
        ) from error
    if width * height > MAX_PIXELS:
        raise HTTPException(
            413, f"image has {width} x {height} pixels: send at most {MAX_PIXELS // 10**6} million"
        )
    return f"data:image/{str(kind).lower()};base64,{base64.b64encode(raw).decode()}"


def _request(model: str, urls: Sequence[str], question: Question, xargs: Options) -> dict[str, Any]:
    """Build the body of a chat request."""
    content: list[dict[str, Any]] = [
        *({"type": "image_url", "image_url": {"url": url}} for url in urls),
        {"type": "text", "text": question.question},
    ]
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": question.max_tokens,
        "return_token_ids": question.tokens,
        "vllm_xargs": xargs,
    }
    if question.start:
        body["messages"].append({"role": "assistant", "content": question.start})
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    return body


def token_texts(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Return the text of each token: what it adds to the text of the token before it.

    A token alone may lose its space. A character of several tokens comes as replacement characters.
    """

    @cache
    def added(before: int, token: int) -> str:
        return decode([before, token]).removeprefix(decode([before]))

    return [decode([token]) for token in ids[:1]] + [
        added(before, token) for before, token in pairwise(ids)
    ]


def _read(response: httpx.Response) -> tuple[str, dict[str, Any], list[int]]:
    """Return text and report of a response, and the ids of prompt and answer if they were asked.

    Raises:
        HTTPException: with the server's error.
    """
    answer = response.json()
    if response.status_code != 200:
        message = answer.get("error", {}).get("message") or response.text
        raise HTTPException(response.status_code, message)
    report: dict[str, Any] = answer["kv_transfer_params"]["kv_eviction"]
    choice = answer["choices"][0]
    ids = [*(answer.get("prompt_token_ids") or ()), *(choice.get("token_ids") or ())]
    return choice["message"]["content"] or "", report, ids
