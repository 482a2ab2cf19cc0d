# SPDX-License-Identifier: Apache-2.0
"""`make inspector`: serve the demonstration's model with the inspector, until Ctrl-C.

Writes a page and a question about it below `build/demo`, and prints how to open them.
"""

from __future__ import annotations

import argparse
import signal
import sys

from demo import reading, run
from demo.asking import PLUGINS, QUESTION, command_line, let_inspect, shown
from measure.serving import ServingError, serving
from reader.assemble import load_vocabulary
from reader.tasks import PageQuestion

LOG = QUESTION.with_name("inspector.log")


def prepare(small: bool = False) -> list[str]:
    """Write the question and its page, and return the arguments of `vllm` that serve its model."""
    folder = None if small else run.page_model()
    if folder is None:
        run.save_sample()
        return run.serve_arguments(None)
    reading.save(PageQuestion(reading.TASK, 0).example(load_vocabulary(folder)))
    return reading.serve_arguments(folder, None)


def main() -> int:
    """Write the question, serve until Ctrl-C, and return the exit status."""
    parser = argparse.ArgumentParser(description="Serve a model with the inspector.")
    parser.add_argument("--small", action="store_true", help="the small model in demo/model")
    arguments = prepare(parser.parse_args().small)
    print(
        f"{command_line(arguments)}\n"
        f"Starting takes half a minute or more; its log is {shown(LOG)}.",
        flush=True,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the server ends, too
    try:
        with serving(arguments, LOG, environment=PLUGINS) as server:
            let_inspect(server)
    except ServingError as error:
        print(f"\nThe inspector failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped; the server has ended.", file=sys.stderr)
        return run.INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
