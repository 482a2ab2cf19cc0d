# SPDX-License-Identifier: Apache-2.0
"""`python -m loadtests.run --profile FILE`: load on served endpoints, stock against evicting.

Drives each arm of a profile with `vllm bench serve`, samples its `/metrics` meanwhile, and writes a
report as Markdown, as a self-contained HTML page, and as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests.load import plan, run_load, served, warm_up
from loadtests.profile import Profile, ProfileError
from loadtests.record import FILE, Record, Run
from loadtests.report import failures, write_report
from measure.arm import Arm
from measure.facts import command_line, versions
from measure.samples import Scraper, drain, scrape
from measure.serving import Server, ServingError

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "build" / "loadtest"
PACKAGES = ("vllm", "vllm-tgvkv", "torch", "transformers")


class LoadTest:
    """One run of a profile, and the record it fills."""

    def __init__(self, profile: Profile, record: Record, logs: Path, output: Path) -> None:
        self.profile = profile
        self.record = record
        self.logs = logs
        self.output = output
        self._started = time.monotonic()

    def run(self) -> None:
        """Load the arms one after the other.

        Raises:
            ServingError: if a server or `vllm bench serve` fails, or the pools differ.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        for name, arm in self.profile.servers.items():
            busy = os.getloadavg()[0]
            print(f"{name}: starting", file=sys.stderr, flush=True)
            with served(self.profile, arm, self.logs / f"{_file_name(name)}.log") as server:
                self.record.arms[name] = {
                    "pool": self._pool(name, server),
                    "command": server.command,
                    "extra_body": dict(arm.extra_body),
                    "start_seconds": server.start_seconds and round(server.start_seconds, 1),
                    "machine_load_before": round(busy, 2),
                }
                warm_up(self.profile, arm, server)
                self._load(arm, server)

    def _load(self, arm: Arm, server: Server) -> None:
        profile, ready, loads = self.profile, time.monotonic(), plan(self.profile)
        for number, load in enumerate(loads, 1):
            label = f"{load.workload} {load.rate:g}/s"
            print(
                f"{arm.name}: load {number} of {len(loads)}, {load.requests} requests, {label}",
                file=sys.stderr,
                flush=True,
            )
            folder = self.logs / _file_name(arm.name) / _file_name(label)
            with Scraper(server, profile.scrape_seconds) as scraper:
                bench = run_load(profile, arm, server, load, folder)
            if not scraper.samples:
                raise ServingError(f"{server.url}/metrics did not answer once during {label}")
            drained = drain(server, profile.drain_seconds)
            run = Run.of(arm.name, load, bench, scraper.samples, drained, ready)
            self.record.runs.append(run)
            # Written after each load, so that a later failure does not lose it.
            self.record.facts["seconds"] = round(time.monotonic() - self._started)
            self.record.write(self.output)

    def _pool(self, name: str, server: Server) -> tuple[int, int] | None:
        """Return the server's pool; raise if the arms before had another."""
        pool = scrape(server).pool
        for other, its in self.record.arms.items():
            if its["pool"] != pool:
                raise ServingError(
                    f"arm {name} has {_words(pool)}, but {other} {_words(its['pool'])}; start both "
                    "with the same --num-gpu-blocks-override and --block-size"
                )
        return pool


def _words(pool: Sequence[int] | None) -> str:
    return "an unknown pool" if pool is None else f"{pool[0]} blocks of {pool[1]} tokens"


def _file_name(label: str) -> str:
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in label)


def facts(module: str, given: Sequence[str], note: str) -> dict[str, Any]:
    """Return how the record was made, for the reader of the report."""
    return {
        "command": command_line(module, given),
        "date": datetime.date.today().isoformat(),
        "versions": versions(PACKAGES),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "note": note,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a load test and return the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m loadtests.run", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--profile", type=Path, help="a profile, as in loadtests/profiles")
    add_arguments(parser, source)
    parser.add_argument(
        "--output", type=Path, help="folder of the report (default: build/loadtest/NAME)"
    )
    options = parser.parse_args(given)
    status, folder = 0, options.report_only
    if folder is not None:
        if not (folder / FILE).exists():
            parser.error(f"--report-only {folder}: holds no {FILE}")
        record, output = Record.read(folder), options.output or folder
    else:
        try:
            profile = Profile.read(options.profile)
        except ProfileError as error:
            parser.error(f"--profile {error}")
        name = _file_name(profile.name)
        output = options.output or OUTPUT / name
        record = Record(profile.model_dump(), facts("loadtests.run", given, options.note))
        try:
            LoadTest(profile, record, OUTPUT / name / "logs", output).run()
        except (ServingError, OSError, KeyboardInterrupt) as error:
            status = 130 if isinstance(error, KeyboardInterrupt) else 1
            said = "was interrupted" if status == 130 else f"failed: {error}"
            print(f"\nThe load test {said}", file=sys.stderr)
            if record.runs:
                print(
                    f"{len(record.runs)} loads are in {output / FILE}; "
                    f"--report-only {output} writes a report of them.",
                    file=sys.stderr,
                )
            return status
    write_report(record, output)
    print(f"Written: {output / 'README.md'} and {output / 'report.html'}")
    for failure in failures(record):
        status = 1
        print(f"FAILED: {failure}", file=sys.stderr)
    return status


def add_arguments(parser: argparse.ArgumentParser, source: Any) -> None:
    """Add the arguments that load tests and soaks have in common."""
    source.add_argument(
        "--report-only", type=Path, metavar="FOLDER", help=f"rewrite the report of its {FILE}"
    )
    parser.add_argument("--note", default="", help="text for the report, such as what else ran")


if __name__ == "__main__":
    sys.exit(main())
