# SPDX-License-Identifier: Apache-2.0
"""Access to the routes below `/kv-eviction`: keys, and the size of a request."""

from __future__ import annotations

import base64
import binascii
import os
from argparse import Namespace
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Message, Receive
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_tgvkv.config.defaults import Defaults

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

ADMIN_KEY_VARIABLE = "KV_EVICTION_ADMIN_KEY"
MAX_BODY_BYTES = 32 << 20


@dataclass(frozen=True)
class Access:
    """Engines, settings and keys of the server that the routes are attached to."""

    engine_client: EngineClient | None
    """None on a server without an engine."""
    defaults: Defaults
    keys: tuple[str, ...]
    """Keys that open all routes except the admin's. Without any, these routes are open."""
    admin_key: str | None
    """Key of the admin; without it, defaults cannot be changed."""

    @classmethod
    def of_server(
        cls, engine_client: EngineClient | None, defaults: Defaults, args: Namespace
    ) -> Access:
        """Build it with the server's keys: from the flag, else from the variable."""
        keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
        return cls(engine_client, defaults, tuple(keys), os.environ.get(ADMIN_KEY_VARIABLE) or None)

    def given_key(self, headers: Headers) -> str | None:
        """Return the key that a request sends, if it is one of the server's."""
        key = _offered(headers)
        return key if key is not None and _is_one_of(key, self.keys) else None


class GuardedRoute(APIRoute):
    """A route that checks the key before it reads the body, and limits the body's size."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            found: Access = request.app.state.kv_eviction
            if not _may_enter(self, found, request.headers):
                return _unauthorized()
            try:
                return await handler(Request(request.scope, _bounded(request)))
            except StarletteHTTPException as error:
                # FastAPI's error for an unreadable body. vLLM formats only its subclass.
                raise HTTPException(error.status_code, error.detail) from error

        return guarded


def evicting_server(request: Request) -> Access:
    """Return the server's `Access`.

    Raises:
        HTTPException: 409 if the server does not evict.
    """
    found: Access = request.app.state.kv_eviction
    if found.engine_client is None or not found.defaults.config.active:
        raise HTTPException(409, "this server does not evict: start it with --kv-eviction")
    return found


def changeable_server(request: Request) -> Access:
    """Return the server's `Access` to its admin.

    Raises:
        HTTPException: 403 if defaults cannot be changed or the caller is not the admin, 401
            without a key.
    """
    found = evicting_server(request)
    if found.defaults.config.defaults_file is None:
        raise HTTPException(
            403,
            "defaults cannot be changed on this server: start it with defaults_file in "
            "--kv-eviction-config",
        )
    if found.admin_key is None:
        raise HTTPException(
            403, f"nobody is the admin of this server: start it with {ADMIN_KEY_VARIABLE} set"
        )
    # A password is refused: a browser would also send it with requests that other sites make.
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not _is_one_of(key, (found.admin_key,)):
        code = 403 if scheme else 401
        raise HTTPException(code, f"send {ADMIN_KEY_VARIABLE} as a bearer token")
    return found


def _may_enter(route: APIRoute, access: Access, headers: Headers) -> bool:
    for_admin = any(d.call is changeable_server for d in route.dependant.dependencies)
    # The admin's own check is stricter, and says what is missing.
    return for_admin or not access.keys or access.given_key(headers) is not None


def _offered(headers: Headers) -> str | None:
    """Return the key in a request: a bearer token, or the password of HTTP Basic."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credentials
    if scheme.lower() != "basic":
        return None
    try:
        _, _, password = base64.b64decode(credentials, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return password


def _is_one_of(key: str, keys: tuple[str, ...]) -> bool:
    """Compare a key with several in constant time, as vLLM does."""
    if not keys:
        return False
    checker = AuthenticationMiddleware(lambda *_: None, list(keys))
    return bool(checker.verify_token(Headers({"Authorization": f"Bearer {key}"})))


def _unauthorized() -> Response:
    status = HTTPStatus.UNAUTHORIZED
    message = "send the server's --api-key as a bearer token, or as a password with any user name"
    return JSONResponse(
        {"error": {"message": message, "type": status.phrase, "code": status.value}},
        status,
        {"WWW-Authenticate": 'Basic realm="The password is the API key", charset="UTF-8"'},
    )


def _bounded(request: Request) -> Receive:
    """Return a reader of the request's body that raises beyond `MAX_BODY_BYTES`."""
    left = MAX_BODY_BYTES

    async def receive() -> Message:
        nonlocal left
        message = await request.receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
        return message

    return receive
