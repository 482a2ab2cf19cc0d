# SPDX-License-Identifier: Apache-2.0
"""What the routes below `/kv-eviction` take and answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

BudgetValue = Annotated[
    float | int | str,
    Field(
        description="A fraction of the prompt, tokens per KV head, or `auto:SHARE`.", examples=[0.1]
    ),
]


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
    """What the server was started with."""

    policy: str
    budget: str
    granularity: str
    observation_window: int
    sinks: int
    floor_pages: int
    min_prompt_tokens: int
    text_only: str
    prefix_reuse: str


class Defaults(BaseModel):
    """What new requests get that wish nothing else."""

    policy: str
    budget: BudgetValue
    changed: bool = Field(description="Whether this is not what the server was started with.")


class Status(BaseModel):
    """Answer of `GET /kv-eviction/status`."""

    model: str
    settings: Settings
    defaults: Defaults
    methods: list[str] = Field(description="What a request's `kv_eviction` may be.")
    engines: list[Engine]


class DefaultsChange(BaseModel):
    """Body of `PUT /kv-eviction/defaults`; what is left out is as the server was started with."""

    model_config = ConfigDict(extra="forbid", strict=True)

    policy: str | None = Field(None, examples=["snapkv"])
    budget: BudgetValue | None = None


class TraceSummary(BaseModel):
    """A traced request's cache before and after."""

    id: str
    policy: str
    budget: str
    granularity: str
    time: float = Field(description="Seconds since 1970.")
    prompt_tokens: int
    kept_tokens: int = Field(description="Mean over layers and KV heads.")
    blocks_before: int
    blocks_after: int


class TraceList(BaseModel):
    """Answer of `GET /kv-eviction/requests`."""

    requests: list[TraceSummary] = Field(description="Newest first.")


class VisionSpan(BaseModel):
    """Tokens of an image, or of a frame of a video, that follow each other."""

    start: int
    length: int
    grid: tuple[int, int] | None = Field(description="Rows and columns of patches, where known.")


class Trace(TraceSummary):
    """Answer of `GET /kv-eviction/requests/{id}`."""

    block_size: int
    layers: int
    kv_heads: int
    vision: list[VisionSpan]
    pages: list[list[int]] = Field(description="By layer and KV head.")
    kept_by: list[int] = Field(description="How many of all layers x KV heads keep each token.")


class TokenSet(BaseModel):
    """Tokens that some heads of a layer share."""

    heads: list[int]
    positions: list[int] = Field(description="Kept ones, ascending.")
    scores: list[float | None] = Field(description="Of the tokens in full blocks.")


class TraceLayer(BaseModel):
    """Answer of `GET /kv-eviction/requests/{id}/layers/{layer}`."""

    layer: int
    token_sets: list[TokenSet]


class Question(BaseModel):
    """Body of `POST /kv-eviction/ask`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    image: str = Field(
        description="A data URL, or base64 alone: PNG, JPEG, WebP, GIF or BMP.",
        examples=[
            "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAGklEQVR42mM8YWPDQ"
            "ApgYiARjGoY1TB0NAAABlgBYEhylLAAAAAASUVORK5CYII="
        ],
    )
    question: str = Field(min_length=1, max_length=8192)
    policy: str | None = Field(None, examples=["tgv"])
    budget: BudgetValue | None = None
    max_tokens: int = Field(64, ge=1, le=1024)
    compare: bool = Field(True, description="Whether the full cache is asked as well.")


class FullAnswer(BaseModel):
    """What the full cache says."""

    text: str
    blocks: int = Field(description="That the prompt holds.")


class EvictedAnswer(FullAnswer):
    """What the evicted cache says, and what was evicted."""

    policy: str
    budget: BudgetValue
    prompt_tokens: int
    kept_tokens: int | None = Field(description="Mean over layers and KV heads.")
    blocks_before: int
    skip_reason: str | None = Field(description="Why nothing was evicted.")
    trace: str | None = Field(description="Name below `/kv-eviction/requests`.")


class Answers(BaseModel):
    """Answer of `POST /kv-eviction/ask`."""

    model: str
    full: FullAnswer | None
    evicted: EvictedAnswer
