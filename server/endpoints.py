# SPDX-License-Identifier: Apache-2.0
"""HTTP routes below `/kv-eviction`, an endpoint plugin of vLLM's OpenAI server.

vLLM loads it only where `VLLM_PLUGINS` names `tgvkv`.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Query, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from fastapi.security import HTTPBearer
from starlette.datastructures import State
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from vllm_tgvkv.config.defaults import Defaults
from vllm_tgvkv.config.server import EvictionConfig, config_of
from vllm_tgvkv.server import schemas
from vllm_tgvkv.server.access import Access, GuardedRoute, changeable_server, evicting_server
from vllm_tgvkv.server.ask import ask
from vllm_tgvkv.server.engines import ask_engines, check_engines
from vllm_tgvkv.shared.budget import written
from vllm_tgvkv.shared.errors import EvictionConfigError

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

PAGE = FilePath(__file__).parent / "inspector"
SAMPLE = "inspector_question.json"
"""A question that the model can answer, as the inspector saves it, in the model's folder."""

WELCOME = (
    '<!doctype html><html lang="en"><title>vLLM with KV eviction</title>'
    '<p>This server evicts KV-cache entries: <a href="kv-eviction/">the inspector</a> shows which, '
    '<a href="docs">the API</a> lists its routes.</p></html>'
)
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}

# For the OpenAPI document only: `GuardedRoute` checks the key.
_bearer = HTTPBearer(auto_error=False, description="The server's --api-key, if it has one.")
router = APIRouter(
    prefix="/kv-eviction",
    tags=["kv-eviction"],
    route_class=GuardedRoute,
    dependencies=[Depends(_bearer)],
    responses={"4XX": {"model": ErrorResponse, "description": "The error, and the way out."}},
)

EvictingServer = Annotated[Access, Depends(evicting_server)]
ChangeableServer = Annotated[Access, Depends(changeable_server)]
TraceName = Annotated[
    str, Path(max_length=512, description="Name of a trace, or `id` of a response.")
]
Cut = Annotated[
    int | None,
    Query(ge=0, lt=2**31, description="Index among the trace's `cuts`; by default, the last one."),
]


@router.get("/status", summary="Settings, totals and pool of every engine")
async def status(server: EvictingServer) -> schemas.Status:
    """Settings, defaults, and totals up to each engine's last step."""
    config = server.defaults.config
    decode = config.decode
    budget, defer = config.first_eviction(config.policy)
    settings = {
        **vars(config),
        "budget": str(budget),
        "defer": defer,
        "granularity": config.build_policy(config.policy).granularity,
        "decode": decode and {**vars(decode), "schedule": written(decode.schedule)},
    }
    engines = await ask_engines(server.engine_client, "kv_eviction_status")
    return schemas.Status(
        model=_model(server),
        settings=schemas.Settings(**settings),
        defaults=_defaults(server),
        methods=list(config.method_names),
        # All workers of an engine give the same answer.
        engines=[schemas.Engine(**workers[0]) for workers in engines],
    )


@router.put("/defaults", summary="Replace policy and budget of new requests")
def replace_defaults(values: schemas.NewDefaults, server: ChangeableServer) -> schemas.Defaults:
    """The new defaults apply to requests that arrive after the answer, on every API server and
    engine that shares the file system.

    403: the caller is not the admin, or changes are not enabled; 409: the file cannot be written.
    """
    return _write(server, values.model_dump(exclude_none=True))


@router.patch("/defaults", summary="Change policy or budget of new requests")
def change_defaults(change: schemas.DefaultsChange, server: ChangeableServer) -> schemas.Defaults:
    """As `PUT`, but what the body leaves out stays: a budget alone never switches eviction on."""
    return _write(server, change.model_dump(exclude_none=True), keep=True)


@router.delete("/defaults", summary="Restore what the server was started with")
def restore_defaults(server: ChangeableServer) -> schemas.Defaults:
    """As `PUT` with the policy and budget that the server was started with."""
    return _write(server, {})


@router.api_route("/defaults", methods=["GET", "POST", "OPTIONS"], include_in_schema=False)
def other_methods() -> Response:
    """Name all methods of the path; Starlette would name one route's."""
    return JSONResponse({"detail": "Method Not Allowed"}, 405, {"Allow": "DELETE, PATCH, PUT"})


def _write(server: Access, values: dict[str, Any], keep: bool = False) -> schemas.Defaults:
    """Replace the defaults; with `keep`, what `values` leave out stays.

    Raises:
        HTTPException: 400 for values or a present file that are wrong, 409 if the file cannot be
            written.
    """
    try:
        server.defaults.write(values, keep)
    except EvictionConfigError as error:
        raise HTTPException(400, str(error)) from error
    except OSError as error:
        path = server.defaults.config.defaults_file
        raise HTTPException(409, f"{path} cannot be written: {error.strerror}") from error
    return _defaults(server)


@router.get("/requests", summary="The last requests that asked for a trace")
async def traces(server: EvictingServer) -> schemas.TraceList:
    """Evicted requests that set `vllm_xargs: {"kv_eviction_trace": 1}`."""
    engines = await ask_engines(server.engine_client, "kv_eviction_traces")
    # One worker of each engine keeps the traces.
    found = [
        schemas.TraceSummary(**trace)
        for workers in engines
        for traces_of_worker in workers
        for trace in traces_of_worker
    ]
    return schemas.TraceList(requests=sorted(found, key=lambda trace: -trace.time))


@router.get("/requests/{name}", summary="What was kept of a request's prompt")
async def trace(name: TraceName, server: EvictingServer, cut: Cut = None) -> schemas.Trace:
    """All cuts; of one, pages by layer and head, and how many heads keep each token."""
    return schemas.Trace(**await _find(server, name, None, cut))


@router.get(
    "/requests/{name}/layers/{layer}",
    summary="Kept positions and scores of one layer",
)
async def trace_layer(
    name: TraceName,
    layer: Annotated[int, Path(ge=0, lt=2**31)],
    server: EvictingServer,
    cut: Cut = None,
) -> schemas.TraceLayer:
    """One token set for all heads at granularity `layer`, one for each at `head`."""
    return schemas.TraceLayer(**await _find(server, name, layer, cut))


@router.post(
    "/ask",
    summary="Ask the full and the evicted cache about images",
    response_model=schemas.Answers,
)
async def ask_both(
    question: schemas.Question, raw_request: Request, server: EvictingServer
) -> schemas.Answers | Response:
    """Greedy answers of both caches to one question, and the name of the trace."""
    answers = await _ask_both(question, raw_request, server)
    # If the client has disconnected: None with vLLM 0.32, an empty response with 0.33. Nobody reads
    # what the route returns then; the log of requests has the status.
    return answers if isinstance(answers, schemas.Answers) else Response(status_code=499)


@with_cancellation
async def _ask_both(
    question: schemas.Question, raw_request: Request, server: Access
) -> schemas.Answers:
    def decode(ids: list[int]) -> str:
        assert server.engine_client is not None  # see `evicting_server`
        tokenizer = server.engine_client.renderer.get_tokenizer()
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    return await ask(
        raw_request.app,
        server.given_key(raw_request.headers),
        _model(server),
        server.defaults.current(),
        question,
        decode,
    )


def page(request: Request, server: EvictingServer) -> FileResponse:
    """Return a file of the inspector, the page that uses the routes above."""
    name = request.url.path.rpartition("/")[2] or "index.html"
    return FileResponse(PAGE / name, headers=PAGE_HEADERS)


for _file in ("", *(path.name for path in sorted(PAGE.iterdir()))):
    router.add_api_route(f"/{_file}", page, include_in_schema=False)


def sample(server: EvictingServer) -> FileResponse:
    """Return the question that the model's folder holds for the inspector.

    Raises:
        HTTPException: 404 if it holds none, or if the model is no folder.
    """
    assert server.engine_client is not None  # see `evicting_server`
    path = FilePath(server.engine_client.model_config.model, SAMPLE)
    if not path.is_file():
        raise HTTPException(404, f"the model's folder has no {SAMPLE}")
    return FileResponse(path, headers=PAGE_HEADERS)


router.add_api_route("/sample", sample, include_in_schema=False)


def welcome(request: Request) -> HTMLResponse:
    """Say where the inspector is, at the server's root, where vLLM has no page.

    Raises:
        HTTPException: 404 if the server does not evict, as from vLLM itself.
    """
    found: Access = request.app.state.kv_eviction
    if found.engine_client is None or not found.defaults.config.active:
        raise HTTPException(404)
    return HTMLResponse(WELCOME, headers=PAGE_HEADERS)


async def _find(server: Access, name: str, layer: int | None, cut: int | None) -> dict[str, Any]:
    """Return a trace, or one layer of it, from the engine that keeps it.

    Raises:
        HTTPException: 404 if no engine does.
    """
    for workers in await ask_engines(server.engine_client, "kv_eviction_trace", name, layer, cut):
        for found in workers:
            if found is not None:
                return dict(found)
    raise HTTPException(
        404,
        "there is no such trace, layer or cut: the request is unknown, has not ended its prefill, "
        "was not evicted, did not set kv_eviction_trace, or its trace was pushed out by newer ones "
        "(max_traces)",
    )


def _model(server: Access) -> str:
    assert server.engine_client is not None  # see `evicting_server`
    return str(server.engine_client.model_config.served_model_name)


def _defaults(server: Access) -> schemas.Defaults:
    current, started = server.defaults.current(), server.defaults.config
    budget, _ = current.first_eviction(current.policy)
    return schemas.Defaults(policy=current.policy, budget=budget.value, changed=current != started)


class EvictionEndpoints:
    """Entry point of the group `vllm.endpoint_plugins`."""

    name = "tgvkv"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)
        if not any(getattr(route, "path", None) == "/" for route in app.routes):
            app.add_api_route("/", welcome, include_in_schema=False)

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        config = EvictionConfig() if engine_client is None else config_of(engine_client.vllm_config)
        if engine_client is not None and config.active:
            await check_engines(engine_client)
        state.kv_eviction = Access.of_server(engine_client, Defaults(config), args)
