# SPDX-License-Identifier: Apache-2.0
"""HTTP routes below `/kv-eviction`, an endpoint plugin of vLLM's OpenAI server.

vLLM loads it only where `VLLM_PLUGINS` names `tgvkv`.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, Field
from starlette.datastructures import State
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_tgvkv.config import EvictionConfig, config_of

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient


class Totals(BaseModel):
    """What one engine did since it started."""

    requests_evicted: int
    requests_skipped: dict[str, int] = Field(description="By reason.")
    prompt_tokens_seen: int = Field(description="Prompt tokens of evicted requests.")
    prompt_tokens_kept: int = Field(description="Of these, mean over layers and KV heads.")
    blocks_given_back: int


class Pool(BaseModel):
    """The KV cache of one engine."""

    blocks: int = Field(description="That requests can have.")
    block_size: int = Field(description="Tokens of a block, and slots of a page.")
    layers: int
    kv_heads: int


class Engine(BaseModel):
    """One engine; there are several with data parallelism."""

    totals: Totals
    pool: Pool


class Settings(BaseModel):
    """What new requests get that wish nothing else."""

    policy: str
    budget: str
    granularity: str
    observation_window: int
    sinks: int
    floor_pages: int
    min_prompt_tokens: int
    text_only: str
    prefix_reuse: str


class Status(BaseModel):
    """Answer of `GET /kv-eviction/status`."""

    settings: Settings
    engines: list[Engine]


@dataclass(frozen=True)
class Access:
    """What the routes need of the server they are attached to."""

    engine_client: Any
    """An `EngineClient`; None on a server without an engine."""
    config: EvictionConfig
    authentication: AuthenticationMiddleware | None
    """vLLM's own check of `--api-key`; None if the server has no key."""


def access(request: Request) -> Access:
    """The server's `Access`, for requests that bring the key.

    Raises:
        HTTPException: 401 without the key, 409 if the server does not evict.
    """
    found: Access = request.app.state.kv_eviction
    authentication = found.authentication
    if authentication is not None and not authentication.verify_token(request.headers):
        raise HTTPException(401, "Unauthorized: send the server's --api-key as a bearer token")
    if found.engine_client is None or not found.config.active:
        raise HTTPException(409, "this server does not evict: start it with --kv-eviction")
    return found


router = APIRouter(prefix="/kv-eviction", tags=["kv-eviction"])


@router.get("/status", summary="Settings, totals and pool of every engine")
async def status(access: Annotated[Access, Depends(access)]) -> Status:
    """Totals are as of each engine's last step."""
    config = access.config
    workers: list[dict[str, Any]] = await access.engine_client.collective_rpc("kv_eviction_status")
    return Status(
        settings=Settings(
            policy=config.policy,
            budget=str(config.budget),
            granularity=config.build_policy(config.policy).granularity,
            observation_window=config.observation_window,
            sinks=config.sinks,
            floor_pages=config.floor_pages,
            min_prompt_tokens=config.min_prompt_tokens,
            text_only=config.text_only,
            prefix_reuse=config.prefix_reuse,
        ),
        engines=[Engine(**worker) for worker in workers],
    )


class EvictionEndpoints:
    """The entry point of the group `vllm.endpoint_plugins`."""

    name = "tgvkv"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        # As vLLM reads it: the flag comes before the variable.
        keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
        state.kv_eviction = Access(
            engine_client,
            EvictionConfig() if engine_client is None else config_of(engine_client.vllm_config),
            AuthenticationMiddleware(lambda *_: None, keys) if keys else None,
        )
