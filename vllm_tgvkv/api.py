# SPDX-License-Identifier: Apache-2.0
"""The public Python interface: options of a request, its report, and the tokens that were kept.

The package exports the same names: `from vllm_tgvkv import EvictionOptions`. All other modules
are private and may change in any release; `vllm_tgvkv.policies` is what methods are written with.

In the shapes, L is the number of layers, H of KV heads, P of prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vllm_tgvkv.config.server import CONFIG_KEY
from vllm_tgvkv.policies import method_names
from vllm_tgvkv.shared.errors import EvictionConfigError, UnsupportedByEvictionError
from vllm_tgvkv.shared.report import CutReport, EvictionReport, MemoryReport

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

__all__ = (
    "CutReport",
    "EvictionConfigError",
    "EvictionOptions",
    "EvictionReport",
    "KeptTokens",
    "MemoryReport",
    "UnsupportedByEvictionError",
    "kept_tokens",
    "method_names",
    "report_of",
)


@dataclass(frozen=True)
class EvictionOptions:
    """Options of one request; None leaves an option to the engine's own settings.

    They are checked when the request is added: for a wrong value vLLM raises its
    `VLLMValidationError`, which names it.
    """

    method: str | None = None
    """Method, one of `method_names()`, a mix of the engine's, or `none` to keep everything."""
    budget: float | int | str | None = None
    """Share of the prompt that is kept, tokens per KV head, or `auto:SHARE`."""
    defer: int | None = None
    """Tokens of the answer that the first eviction waits for."""
    schedule: str | Sequence[Sequence[float]] | None = None
    """Evictions in steps, such as `"8:0.3,32:0.1"`, in place of budget and wait; `none` for one."""
    max_tokens: int | str | None = None
    """Ceiling of prompt and answer together in tokens per KV head, or `none`."""
    when: Literal["always", "pressure"] | None = None
    """`pressure`: evict only if memory is short. `always`: evict in any case."""
    report: bool = True
    """Whether the answer comes with a report, see `report_of`."""
    trace: bool = False
    """Whether the engine keeps positions and scores, see `kept_tokens`."""
    protect: str | None = None
    """`system` keeps what stands before the first user's message of a chat; `none` does not."""
    recall: bool | None = None
    """Whether evicted tokens may come back, on an engine with `recall`."""
    protected_tokens: int | None = None
    """Number of first tokens to keep in its place, for prompts that are no chat."""

    def extra_args(self) -> dict[str, Any]:
        """Return the value of `SamplingParams(extra_args=...)`, or of `vllm_xargs` over HTTP."""
        named = {
            CONFIG_KEY if name == "method" else f"{CONFIG_KEY}_{name}": value
            for name, value in asdict(self).items()
        }
        switches = {name: int(value) for name, value in named.items() if isinstance(value, bool)}
        return {name: value for name, value in {**named, **switches}.items() if value is not None}


@dataclass(frozen=True)
class KeptTokens:
    """The tokens of a prompt that one eviction kept, without any of its text or image."""

    report: EvictionReport
    """Sizes of the request's cache."""
    pages: np.ndarray
    """Pages of every layer and KV head, int64 `[L, H]`."""
    kept_by: np.ndarray
    """Number of (layer, head) pairs that keep each prompt token, int64 `[P]`, at most L * H."""
    is_vision: np.ndarray
    """True for tokens of images and videos, bool `[P]`."""
    positions: tuple[tuple[np.ndarray, ...], ...]
    """Kept positions of every layer and KV head, ascending, int64 `[kept tokens of the pair]`."""

    @property
    def text(self) -> float:
        """Kept text tokens, mean over layers and heads."""
        return self._mean(~self.is_vision)

    @property
    def vision(self) -> float:
        """Kept tokens of images and videos, mean over layers and heads."""
        return self._mean(self.is_vision)

    def _mean(self, chosen: np.ndarray) -> float:
        return float(self.kept_by[chosen].sum()) / self.pages.size


def report_of(output: RequestOutput) -> EvictionReport | None:
    """Return the report that an answer came with; None if its request did not ask for one.

    Args:
        output: an answer of `LLM.generate` or `LLM.chat`, or of an OpenAI client: anything with
            `kv_transfer_params`, or a chunk of a stream. A choice's last chunk has the report.
    """
    found = (getattr(output, "kv_transfer_params", None) or {}).get(CONFIG_KEY)
    if found is None:
        return None
    known = {field.name for field in fields(EvictionReport)}
    values = {name: value for name, value in found.items() if name in known}
    cuts = [CutReport(**cut) for cut in values.pop("cuts", ())]
    memory = values.pop("memory", None)
    return EvictionReport(**values, cuts=cuts, memory=memory and MemoryReport(**memory))


def kept_tokens(llm: LLM, output: RequestOutput) -> KeptTokens:
    """Return the tokens that the last eviction of a request kept.

    The engine holds the last `max_traces` of them. Reading one takes it some milliseconds: use it
    to inspect answers, not for every request of a service.

    Args:
        llm: the engine that gave the answer.
        output: an answer to a request with `EvictionOptions(trace=True)`.

    Raises:
        ValueError: if nothing was evicted, with the reason, or if there is no trace of the request.
    """
    report = report_of(output)
    if report is None:
        raise ValueError(
            f"the answer {output.request_id} has no report: ask for it with "
            "EvictionOptions(trace=True).extra_args() in SamplingParams(extra_args=...)"
        )
    if not report.cuts:
        reason = report.skip_reason or "memory was not short, and the request did not say always"
        raise ValueError(
            f"nothing was evicted for the answer {output.request_id} ({reason}): its "
            "cache holds every token"
        )
    trace = _ask(llm, report.trace) if report.trace else None
    if trace is None:
        raise ValueError(
            f"there is no trace of the answer {output.request_id}: ask for one with "
            "EvictionOptions(trace=True), and read it before max_traces others have come"
        )
    layers = [_ask(llm, report.trace, layer) for layer in range(trace["layers"])]
    return _kept(report, trace, [layer for layer in layers if layer is not None])


def _ask(llm: LLM, *args: Any) -> dict[str, Any] | None:
    """Return what the first worker that knows the request answers; ranks may not know it."""
    answers = llm.collective_rpc("kv_eviction_trace", args=args)
    return next((answer for answer in answers if answer is not None), None)


def _kept(
    report: EvictionReport, trace: Mapping[str, Any], layers: list[dict[str, Any]]
) -> KeptTokens:
    num_prompt = report.prompt_tokens
    is_vision = np.zeros(num_prompt, dtype=bool)
    for run in trace["vision"]:
        is_vision[run["start"] : run["start"] + run["length"]] = True
    positions = []
    for layer in layers:
        heads: dict[int, np.ndarray] = {}
        for of_set in layer["token_sets"]:
            kept = np.asarray(of_set["positions"], dtype=np.int64)
            heads |= dict.fromkeys(of_set["heads"], kept[kept < num_prompt])
        positions.append(tuple(heads[head] for head in sorted(heads)))
    return KeptTokens(
        report=report,
        pages=np.asarray(trace["pages"], dtype=np.int64),
        kept_by=np.asarray(trace["kept_by"][:num_prompt], dtype=np.int64),
        is_vision=is_vision,
        positions=tuple(positions),
    )
