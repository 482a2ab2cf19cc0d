# SPDX-License-Identifier: Apache-2.0
"""Schemas of requests and responses of the routes below `/kv-eviction`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from vllm_tgvkv.config.server import EvictionConfig
from vllm_tgvkv.config.settings import settings_of

BudgetValue = Annotated[
    float | int | str,
    Field(
        description="A fraction of the prompt, tokens per KV head, or `auto:SHARE`.", examples=[0.1]
    ),
]


class Totals(BaseModel):
    """Totals of one engine since it started."""

    requests_evicted: int
    requests_skipped: dict[str, int] = Field(description="By reason.")
    prompt_tokens_seen: int = Field(description="Prompt tokens of evicted requests.")
    prompt_tokens_kept: int = Field(
        description="Kept tokens of evicted requests, mean over layers and KV heads."
    )
    cuts: dict[str, int] = Field(
        description="Evictions by cause: `first`, `later`, `pressure`; a request may have several."
    )
    requests_restored: int = Field(description="Times that a request got its whole prompt back.")
    requests_whole: int = Field(
        description="Requests that ended uncut because memory was never short."
    )
    blocks_given_back: int


class Pool(BaseModel):
    """The KV cache of one engine."""

    blocks: int = Field(description="Blocks that requests can use.")
    block_size: int = Field(description="Tokens in a block, and slots in a page.")
    layers: int
    kv_heads: int


class Engine(BaseModel):
    """One engine; there are several with data parallelism."""

    settings: str = Field(
        description="Digest of the settings that the engine was started with. Engines whose nodes "
        "have the same flags and versions show the same."
    )
    totals: Totals
    pool: Pool


_fields: dict[str, Any] = {
    found.name: (int if found.type is int else str, Field(description=found.help))
    for found in settings_of(EvictionConfig)
    if found.in_status
}
_DeclaredSettings: Any = create_model("_DeclaredSettings", **_fields)


class Decode(BaseModel):
    """The setting `decode`: evictions after the first one."""

    schedule: list[tuple[int, BudgetValue]] = Field(
        description="Numbers of answer tokens, and what is kept of the prompt from then on."
    )
    max_tokens: int | None = Field(description="Ceiling, in tokens per KV head.")
    on_request: bool


class Settings(_DeclaredSettings):
    """Settings that the server was started with."""

    granularity: str = Field(
        description="Of the method `policy`. `layer`: one token set for all heads of a layer; "
        "`head`: one for each."
    )
    decode: Decode | None = Field(
        description="Evictions while the answer grows; without them, no request may ask for some."
    )


class Defaults(BaseModel):
    """Policy and budget of requests that set neither."""

    policy: str
    budget: BudgetValue
    changed: bool = Field(description="Whether these differ from what the server was started with.")


class Status(BaseModel):
    """Answer of `GET /kv-eviction/status`."""

    model: str
    settings: Settings
    defaults: Defaults
    methods: list[str] = Field(description="Values of a request's `kv_eviction`.")
    engines: list[Engine]


class DefaultsChange(BaseModel):
    """Body of `PATCH /kv-eviction/defaults`; a missing field stays as it is."""

    model_config = ConfigDict(extra="forbid", strict=True)

    policy: str | None = Field(None, examples=["snapkv"])
    budget: BudgetValue | None = None


class NewDefaults(DefaultsChange):
    """Body of `PUT /kv-eviction/defaults`; a missing budget is as the server was started with."""

    policy: str = Field(examples=["snapkv"])


class Cut(BaseModel):
    """One eviction of a request."""

    answer_tokens: int = Field(description="Tokens of the answer that were computed by then.")
    blocks_before: int
    blocks_after: int
    kept_tokens: int = Field(
        description="Tokens kept in full blocks, and tokens of the prompt's last block; mean over "
        "layers and KV heads."
    )
    recalled_tokens: float | None = Field(
        None,
        description="Tokens that came back where the kept ones were chosen again out of the whole "
        "prompt (`recall`), mean over layers and KV heads; null for an eviction.",
    )


class Change(Cut):
    """One change of a request's cache."""

    cause: str = Field(
        description="`first` or `later`: an eviction at a token that was known before; `pressure`: "
        "one because memory was short; `restored`: the whole prompt came back; `preempted`: all "
        "was given back and computed again."
    )


class Memory(BaseModel):
    """Memory of a request in the pool, in bytes."""

    before: int = Field(description="Before its first eviction, in all layers.")
    after: int = Field(description="After its last eviction.")
    windows: int = Field(description="Part of both in layers with a sliding window.")
    states: int = Field(description="Part of both in layers with a state.")
    drafts: int = Field(description="Part of both in the layers of a draft model.")
    given_back: int = Field(description="What its evictions gave back to the pool.")


class TraceSummary(BaseModel):
    """Cache of a traced request before its first eviction and after its last one."""

    id: str
    policy: str
    budget: str
    granularity: str
    time: float = Field(description="Time of the last eviction, in seconds since 1970.")
    prompt_tokens: int
    kept_tokens: int = Field(description="Mean over layers and KV heads.")
    blocks_before: int
    blocks_after: int
    cuts: list[Cut] = Field(description="All evictions of the request that are kept, in order.")


class TraceList(BaseModel):
    """Answer of `GET /kv-eviction/requests`."""

    requests: list[TraceSummary] = Field(description="Newest first.")


class VisionSpan(BaseModel):
    """Consecutive tokens of an image, or of a frame of a video."""

    start: int
    length: int
    grid: tuple[int, int] | None = Field(description="Rows and columns of patches, where known.")


class Trace(TraceSummary):
    """Answer of `GET /kv-eviction/requests/{id}`."""

    cut: int = Field(description="Index of the cut that `pages` and `kept_by` are of.")
    block_size: int
    layers: int
    kv_heads: int
    vision: list[VisionSpan]
    pages: list[list[int]] = Field(description="Number of pages, by layer and KV head.")
    kept_by: list[int] = Field(
        description="Number of (layer, KV head) pairs that keep each token: first of the prompt, "
        "then of the answer that the cut could evict."
    )


class TokenSet(BaseModel):
    """Tokens that some heads of a layer share."""

    heads: list[int]
    positions: list[int] = Field(description="Kept positions, ascending.")
    scores: list[float | None] = Field(description="Scores of the tokens in full blocks.")
    reasons: dict[str, list[int]] = Field(
        description="The kept positions by what kept them: `sink`, `tail` (behind the full "
        "blocks), what the method puts first (`text`, `vision`, `recent`), `score`, and "
        "`neighbour` where only pooling raised the score as high as kept tokens have."
    )


class TraceLayer(BaseModel):
    """Answer of `GET /kv-eviction/requests/{id}/layers/{layer}`."""

    layer: int
    token_sets: list[TokenSet]


class Question(BaseModel):
    """Body of `POST /kv-eviction/ask`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    image: str | Annotated[list[str], Field(min_length=1, max_length=64)] = Field(
        description="A data URL, or base64 alone: PNG, JPEG, WebP, GIF or BMP. Several in a list.",
        examples=[
            "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAGklEQVR42mM8YWPDQ"
            "ApgYiARjGoY1TB0NAAABlgBYEhylLAAAAAASUVORK5CYII="
        ],
    )
    question: str = Field(min_length=1, max_length=8192)
    start: str = Field(
        "",
        max_length=8192,
        description="Words that begin the answer. They belong to the prompt, and the answers go on "
        "behind them.",
    )
    policy: str | None = Field(None, examples=["tgv"])
    budget: BudgetValue | None = None
    when: Literal["always", "pressure"] = Field(
        "always", description="By default the question is evicted although memory is not short."
    )
    defer: int | None = Field(
        None, ge=0, le=1024, description="Tokens of the answer that the eviction waits for."
    )
    schedule: str | None = Field(
        None,
        max_length=1024,
        description="Answer tokens and fractions of the prompt, such as `8:0.3,32:0.1`, in place "
        "of `budget` and `defer`; `none` evicts once.",
    )
    ceiling: int | None = Field(
        None, description="Most tokens per KV head after each eviction: `kv_eviction_max_tokens`."
    )
    max_tokens: int = Field(64, ge=1, le=1024, description="Most tokens of an answer.")
    compare: bool = Field(True, description="Whether to ask the full cache as well.")
    tokens: bool = Field(
        False, description="Whether to return the text of each token; the server keeps none of it."
    )


class FullAnswer(BaseModel):
    """Answer from the full cache."""

    text: str
    blocks: int = Field(description="Blocks that the prompt holds.")


class EvictedAnswer(FullAnswer):
    """Answer from the evicted cache, and a report of the eviction."""

    policy: str
    budget: BudgetValue = Field(description="Of the first eviction.")
    defer: int = Field(description="Tokens of the answer that the first eviction waits for.")
    when: str = Field(description="`pressure` if only a lack of memory evicts.")
    decode: dict[str, Any] | None = Field(
        description="Later evictions, as the setting `decode` has them."
    )
    prompt_tokens: int
    kept_tokens: int | None = Field(description="Mean over layers and KV heads.")
    vision_tokens: int | None = Field(description="Of the prompt; null if nothing was evicted.")
    kept_text_tokens: int | None = Field(description="Part of `kept_tokens` that is text.")
    kept_vision_tokens: int | None = Field(description="Part of `kept_tokens` that is images.")
    seconds: dict[str, float] | None = Field(
        description="Time on the device of all evictions, by part: `statistics`, `selection` and "
        "`copy`."
    )
    blocks_before: int
    memory: Memory | None = Field(description="Of all layers; null if nothing was evicted.")
    cuts: list[Change] = Field(description="All changes of the cache, in order.")
    skip_reason: str | None = Field(description="Why nothing was evicted.")
    trace: str | None = Field(description="Name of the trace below `/kv-eviction/requests`.")
    tokens: list[str] | None = Field(
        description="Text of each token of the prompt and of the answer, if the question asks."
    )


class Answers(BaseModel):
    """Answer of `POST /kv-eviction/ask`."""

    model: str
    full: FullAnswer | None
    evicted: EvictedAnswer
