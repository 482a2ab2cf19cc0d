# SPDX-License-Identifier: Apache-2.0
"""What a server tells another one about a prompt that it has computed and cut.

It travels in `kv_transfer_params` of the response, which routers copy into the next request. The
blocks themselves are read by vLLM's connector: a header, the region, the tail, as in

    [ header | f_0 ... f_{k-1} | tail_0 ... ]

A server that does not know the key computes the prompt itself: the connector's own
`do_remote_prefill` is false, because it would read the blocks as if they were the whole prompt's.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from vllm.v1.request import Request

KEY = "kv_eviction_handover"
"""Name among `kv_transfer_params`."""

VERSION = 1
"""Of this message and of the header."""

_MOST_TOKENS = 4096
"""Of an answer that a message may carry."""

MOST_BLOCKS = 1 << 24
"""Of a pool."""


class HandoverError(ValueError):
    """A message is not one of ours, or not for this request."""


@dataclass(frozen=True)
class Region:
    """A prompt's cache after its cut."""

    at: int
    """Tokens that are computed."""
    num_planned: int
    """Blocks of its region that were planned; with a guard an upper bound."""
    num_retained: int
    """k, blocks of its region."""
    num_replaced: int
    """t, full blocks of the prompt."""
    num_header: int
    """Blocks of its header."""
    nonce: tuple[int, ...]
    """What the header begins with, int32. Blocks that were reused since begin with something
    else."""


@dataclass(frozen=True)
class Handover:
    """A prompt that goes from one server to another."""

    settings: str
    """Digest of the sender's settings and versions."""
    num_ranks: int
    """Tensor-parallel ranks of the sender."""
    method: str
    prompt: str
    """Digest of the prompt, see `digest_of`."""
    tokens: tuple[int, ...]
    """The answer so far. It was computed over the whole prompt."""
    num_cached: int
    """Prompt tokens that the sender has not computed, for the answer's usage."""
    region: Region | None
    """None if the answer ended before its cut, so that nothing has to travel."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def parse(cls, value: Any) -> Handover:
        """Read a message, which a client may have forged.

        Raises:
            HandoverError: if a field is missing, unknown or impossible.
        """
        fields = dict(_mapping(value))
        if fields.pop("version", None) != VERSION:
            raise HandoverError(f"version {VERSION} is expected")
        region = fields.pop("region", None)
        try:
            message = cls(**fields, region=None if region is None else Region(**_mapping(region)))
        except TypeError as error:
            raise HandoverError(str(error)) from None
        _check(message)
        # JSON has no tuples.
        tokens, region = tuple(message.tokens), message.region
        if region is not None:
            region = Region(**{**vars(region), "nonce": tuple(region.nonce)})
        return cls(**{**vars(message), "tokens": tokens, "region": region})


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise HandoverError("an object is expected")
    return value


def _check(message: Handover) -> None:
    texts = (message.settings, message.method, message.prompt)
    if not all(isinstance(text, str) for text in texts):
        raise HandoverError("settings, method and prompt are texts")
    _check_counts(message.tokens, 0, (1 << 31) - 1)
    _check_counts([message.num_ranks], 1, 1 << 16)
    _check_counts([message.num_cached], 0, (1 << 31) - 1)
    if not 1 <= len(message.tokens) <= _MOST_TOKENS:
        raise HandoverError(f"{len(message.tokens)} tokens of an answer")
    region = message.region
    if region is None:
        return
    _check_counts(region.nonce, -(1 << 31), (1 << 31) - 1)
    counts = (region.at, region.num_planned, region.num_retained)
    _check_counts((*counts, region.num_replaced, region.num_header), 1, MOST_BLOCKS)
    if len(region.nonce) != NONCE_INTS or not (
        region.num_retained <= region.num_planned <= region.num_replaced <= region.at
    ):
        raise HandoverError("a region of impossible sizes")


def _check_counts(values: Any, least: int, most: int) -> None:
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_list or not all(
        isinstance(n, int) and not isinstance(n, bool) and least <= n <= most for n in values
    ):
        raise HandoverError(f"whole numbers from {least} to {most} are expected")


def digest_of(request: Request) -> str:
    """Return a text that two requests share if they have the same prompt, images and adapter."""
    tokens = np.asarray(request.prompt_token_ids, dtype=np.int64)
    digest = hashlib.sha256(tokens.tobytes())
    if request.lora_request is not None:
        digest.update(f"{request.lora_request.lora_name};".encode())
    for feature in request.mm_features:
        place = feature.mm_position
        digest.update(f"{feature.identifier} {place.offset} {place.length};".encode())
    return digest.hexdigest()[:32]


# -- the header, which each rank writes for its own heads ---------------------------------------

NONCE_INTS = 4
"""Numbers in a nonce. The first token of the block's next owner overwrites the first of them, in
each of the page formats."""


def new_nonce() -> tuple[int, ...]:
    """Return a nonce."""
    return tuple(secrets.randbits(32) - (1 << 31) for _ in range(NONCE_INTS))


def header_fields(num_token_blocks: int, num_replaced: int, num_pairs: int) -> tuple[int, ...]:
    """Return the numbers of a header that follow its nonce."""
    return VERSION, num_token_blocks, num_replaced, num_pairs


def num_header_ints(
    num_pairs: int, num_token_blocks: int, block_size: int, keeps_positions: bool
) -> int:
    """Return the numbers of a header, int32: nonce, fields, offsets, positions.

    Args:
        num_pairs: (layer, KV head) pairs of a rank.
        keeps_positions: whether the positions of the region's tokens follow, for later cuts.
    """
    num_positions = num_token_blocks * num_pairs * block_size if keeps_positions else 0
    return NONCE_INTS + len(header_fields(0, 0, 0)) + num_pairs + 1 + num_positions
