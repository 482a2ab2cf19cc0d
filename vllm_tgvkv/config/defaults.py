# SPDX-License-Identifier: Apache-2.0
"""Policy and budget of requests that set neither; they may change while the server runs.

`defaults_file` names a YAML or JSON file that may set `policy` and `budget`, such as
`{policy: snapkv, budget: 0.2}`. Every process that reads requests (API servers and engines) checks
the file before each request, so they agree without talking to each other. A field that the file
leaves out, or a missing file, means the value that the server was started with. The file is written
by `/kv-eviction/defaults` or by anything else, such as a mounted ConfigMap.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from vllm.logger import init_logger

from vllm_tgvkv.config.server import PARSE_ERRORS, EvictionConfig, check_method, check_methods
from vllm_tgvkv.shared.budget import Budget
from vllm_tgvkv.shared.errors import EvictionConfigError, choose, quoted

logger = init_logger("vllm.tgvkv")

_FIELDS = ("policy", "budget")


class Defaults:
    """The server's settings, updated from `defaults_file` before each request."""

    def __init__(self, config: EvictionConfig) -> None:
        self.config = config
        """Settings that the server was started with."""
        self._current = config
        self._version: tuple[int, ...] | None = None
        """Time, inode and size of the file that was read last."""

    def current(self) -> EvictionConfig:
        """Return the settings for the next request, reading the file again if it has changed.

        An invalid file is logged once and changes nothing.
        """
        if self.config.defaults_file is None:
            return self.config
        path = Path(self.config.defaults_file)
        try:
            found = path.stat()
            version = (found.st_mtime_ns, found.st_ino, found.st_size)
        except OSError:
            version = None
        if version == self._version:
            return self._current
        self._version = version
        try:
            self._current = self.config if version is None else self.apply(_read(path), str(path))
        except EvictionConfigError as error:
            logger.warning("KV eviction keeps its defaults: %s", error)
        return self._current

    def apply(self, values: Mapping[str, Any], source: str) -> EvictionConfig:
        """Return the settings that the server was started with, with another `policy` or `budget`.

        Raises:
            EvictionConfigError: naming `source`, the field, its value and what it may be.
        """
        if unknown := sorted(quoted(key, str) for key in values if key not in _FIELDS):
            raise EvictionConfigError(
                f"{source} has unknown {', '.join(unknown)}: "
                f"{choose(unknown[0], _FIELDS, 'known are')}"
            )
        changed = self.config
        if "budget" in values:
            budget = Budget.parse(values["budget"], f"budget of {source}")
            changed = dataclasses.replace(changed, budget=budget)
        policy = values.get("policy", changed.policy)
        budget, defer = changed.first_eviction(policy)
        policy = check_method(changed, policy, budget, defer, f"policy of {source}")
        changed = dataclasses.replace(changed, policy=policy)
        check_methods(changed)
        return changed

    def write(self, values: Mapping[str, Any], keep: bool = False) -> EvictionConfig:
        """Check values and replace the file by them atomically; returns the new settings.

        With `keep`, what the file sets and `values` leave out stays. Writers take turns, also those
        of other processes.

        Raises:
            EvictionConfigError: as `apply` does, or if the file cannot be read.
            OSError: if the file cannot be written.
        """
        assert self.config.defaults_file is not None
        path = Path(self.config.defaults_file)
        # A file of its own, because the other one is replaced.
        with path.with_name(f".{path.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if keep and path.exists():
                values = {**_read(path), **values}
            self.apply(values, "the request")
            # In the same folder: a rename is atomic only within one file system.
            descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    json.dump(dict(values), file)
                os.replace(scratch, path)
            except BaseException:
                Path(scratch).unlink(missing_ok=True)
                raise
        return self.current()


def _read(path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, *PARSE_ERRORS) as error:
        raise EvictionConfigError(f"{path} cannot be read ({error})") from error
    if values is None:  # an empty file
        return {}
    if not isinstance(values, Mapping):
        raise EvictionConfigError(
            f"{path} holds {quoted(values)}: give a mapping such as {{policy: snapkv, budget: 0.2}}"
        )
    return values
