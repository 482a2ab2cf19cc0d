# SPDX-License-Identifier: Apache-2.0
"""The engines that are compared, each in a separate process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from benchmarks.models import Shape
from benchmarks.remote import Remote


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: its name and the engine arguments that set it apart."""

    name: str
    engine_args: dict[str, Any] = field(default_factory=dict)
    threads: int | None = None
    """Of the model's computations; None: one for each core."""

    @property
    def evicts(self) -> bool:
        return "additional_config" in self.engine_args


class Arms:
    """The running engines of a comparison; a context manager that ends them all."""

    def __init__(
        self, arms: Sequence[Arm], shape: Shape, root: str, deadline: float = float("inf")
    ) -> None:
        """Start the first engine, then the others at once.

        The others find what the first one compiles in torch's cache.

        Raises:
            RemoteError: if one does not start.
            TimeUpError: at the deadline.
        """
        from benchmarks.engine import ArmEngine

        self.engines: dict[str, Remote] = {}
        with contextlib.ExitStack() as stack:
            first, *others = arms
            for group in ([first], others):
                for arm in group:
                    remote = Remote(
                        f"arm {arm.name}",
                        ArmEngine,
                        arm,
                        shape,
                        root,
                        threads=arm.threads,
                        deadline=deadline,
                    )
                    stack.callback(remote.close)
                    self.engines[arm.name] = remote
                for arm in group:
                    self.engines[arm.name].wait_until_built()
            self.facts = {name: engine.ask("describe") for name, engine in self.engines.items()}
            self._closing = stack.pop_all()

    def __getitem__(self, name: str) -> Remote:
        return self.engines[name]

    def __enter__(self) -> Arms:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all engines."""
        self._closing.close()
