# SPDX-License-Identifier: Apache-2.0
"""The server of one arm of a profile: started here, or found at its URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtests.profile import Profile, ServedArm
from measure import serving
from measure.serving import Server, flags, wait_until_healthy


def serve_arguments(profile: Profile, arm: ServedArm) -> list[str]:
    """Return the arguments of `vllm` that serve a arm, without host and port."""
    arguments = ["serve", profile.model, "--served-model-name", profile.request_model]
    return arguments + flags({**profile.serve, **arm.serve})


@contextmanager
def served(profile: Profile, arm: ServedArm, log: Path) -> Iterator[Server]:
    """Yield the running server of a arm; stop it afterwards if it was started here.

    Raises:
        ServingError: if it is not healthy within `startup_seconds`.
    """
    if arm.url is not None:
        url = arm.url.rstrip("/")
        wait_until_healthy(url, seconds=profile.startup_seconds)
        yield Server(url)
        return
    with serving.serving(
        serve_arguments(profile, arm),
        log,
        environment=profile.environment,
        start_seconds=profile.startup_seconds,
    ) as server:
        yield server
