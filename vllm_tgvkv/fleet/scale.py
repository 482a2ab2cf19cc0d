# SPDX-License-Identifier: Apache-2.0
"""Parts that replicas share: what ten, a hundred and a thousand of them put on each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

SIZES = (10, 100, 1000)
"""Replicas."""

SECONDS_PER_PIXEL = 2e-8
"""Of a core, to decode a JPEG and to run the image processor. Measured: 4.5 + 16.5 ms for 2**20
pixels with transformers' `Qwen2VLImageProcessor`, on one thread of an AMD EPYC."""
BYTES_PER_PIXEL = 0.25
"""Of a JPEG. Assumed; measured for a noisy page at quality 85."""
NUM_SERIES = 560
"""Time series of one server after its first request, 135 of them the plugin's. Measured with
vLLM 0.32 and a tiny model; longer contexts have a few more buckets."""
FAILURES_PER_GPU_DAY = 419 / (16_384 * 54)
"""Published: unexpected interruptions while Llama 3 was trained (arXiv 2407.21783)."""


VIEW_SECONDS = 1.0
"""Assumed: between two readings of the replicas' queues by the load balancer."""
LINK_GIGABITS = 100.0
"""Assumed: network of a load balancer, in 10^9 bits per second."""
CORES = 16.0
"""Assumed: CPU cores for each GPU."""
MOST_SERIES = 2e6
"""Assumed: time series that one Prometheus server holds."""


@dataclass(frozen=True)
class Burden:
    """A figure for each of `SIZES`, and the number of replicas that one shared part can carry."""

    name: str
    values: tuple[str, ...]
    enough: float | None = None
    """None if no bound is known."""
    way_out: str = ""


def burdens(rate: float, spare: float, pixels: float | None, num_gpus: int) -> Iterator[Burden]:
    """Yield what replicas put on the parts that they share.

    Args:
        rate: requests per second of a replica.
        spare: requests that it could hold besides.
        pixels: of the images of a mean request; None if the model's configuration has no size.
        num_gpus: of a replica.
    """
    yield Burden("requests per second", _each(rate))
    if pixels:
        gigabits = rate * pixels * BYTES_PER_PIXEL * 4 / 3 * 8 / 1e9
        way_out = "several balancers, or addresses of images in place of base64"
        enough = LINK_GIGABITS / gigabits
        yield Burden("Gb/s of images, in base64", _each(gigabits), enough, way_out)
        cores = rate * pixels * SECONDS_PER_PIXEL
        way_out = f"{cores:.1f} cores for each replica: prepare images on other machines"
        short = 0.0 if cores > CORES * num_gpus else math.inf
        yield Burden("CPU cores that prepare images", _each(cores), short, way_out)
    view = rate * VIEW_SECONDS
    way_out = "the balancer counts its own requests, or compares two replicas drawn at random"
    yield Burden("requests between two views of queues", _each(view), spare / view, way_out)
    way_out = "a Prometheus server for each part of the fleet"
    enough = MOST_SERIES / NUM_SERIES
    yield Burden("time series in Prometheus", _each(NUM_SERIES), enough, way_out)
    found = tuple(f"{100 / size:g} %" for size in SIZES)
    yield Burden("follow-ups sent to their prefix", found)
    days = 1 / (FAILURES_PER_GPU_DAY * num_gpus)
    yield Burden("days between failures of a GPU", tuple(f"{days / n:,.1f}" for n in SIZES))


def _each(per_replica: float) -> tuple[str, ...]:
    totals = [per_replica * size for size in SIZES]
    return tuple(f"{total:,.0f}" if total >= 10 else f"{total:,.2g}" for total in totals)
