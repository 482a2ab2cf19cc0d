# SPDX-License-Identifier: Apache-2.0
"""Policy and budget of requests that name none; they may change while the server runs.

`defaults_file` names a YAML or JSON file that may set `policy` and `budget`, such as
`{policy: snapkv, budget: 0.2}`. Every process that looks at requests - API servers, engines - reads
it before the next request, so all of them agree without talking to each other. Without the file, or
where it leaves a field out, the flags the server was started with count. `PUT
/kv-eviction/defaults` writes the file; so may anything else, such as a mounted ConfigMap.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from vllm.logger import init_logger

from vllm_tgvkv.budget import Budget
from vllm_tgvkv.config import PARSE_ERRORS, EvictionConfig
from vllm_tgvkv.errors import EvictionConfigError, quoted

logger = init_logger("vllm.tgvkv")

_FIELDS = ("policy", "budget")


class Defaults:
    """The settings for the next request: the server's, with what the file says now."""

    def __init__(self, config: EvictionConfig) -> None:
        self.config = config
        """As the server was started."""
        self._current = config
        self._seen: tuple[int, ...] | None = None
        """Of the file that was read last: what tells it from a newer one."""

    def current(self) -> EvictionConfig:
        """The settings; asks the file system whether the file changed, and reads it if so.

        A file with mistakes is logged once and changes nothing.
        """
        if self.config.defaults_file is None:
            return self.config
        path = Path(self.config.defaults_file)
        try:
            found = path.stat()
            seen = (found.st_mtime_ns, found.st_ino, found.st_size)
        except OSError:
            seen = None
        if seen == self._seen:
            return self._current
        self._seen = seen
        try:
            self._current = self.config if seen is None else self.apply(_read(path), str(path))
        except EvictionConfigError as error:
            logger.warning("KV eviction keeps its defaults: %s", error)
        return self._current

    def apply(self, values: Mapping[str, Any], source: str) -> EvictionConfig:
        """The server's settings with the given `policy` and `budget`.

        Raises:
            EvictionConfigError: naming `source`, the field, its value and what it may be.
        """
        if unknown := sorted(quoted(key, str) for key in values if key not in _FIELDS):
            raise EvictionConfigError(
                f"{source} has unknown {', '.join(unknown)}: known are {', '.join(_FIELDS)}"
            )
        budget = self.config.budget
        if "budget" in values:
            budget = Budget.parse(values["budget"], f"budget of {source}")
        policy = values.get("policy", self.config.policy)
        policy = self.config.check_method(policy, budget, f"policy of {source}")
        changed = dataclasses.replace(self.config, policy=policy, budget=budget)
        changed.check_methods()
        return changed

    def write(self, values: Mapping[str, Any]) -> EvictionConfig:
        """Put checked values into the file, in one stroke; the next request has them.

        Raises:
            EvictionConfigError: as `apply`.
            OSError: if the file cannot be written.
        """
        assert self.config.defaults_file is not None
        self.apply(values, "the request")
        path = Path(self.config.defaults_file)
        # Beside the file: only within a file system is a rename one stroke.
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
