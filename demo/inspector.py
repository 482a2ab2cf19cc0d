# SPDX-License-Identifier: Apache-2.0
"""`make inspector`: serve the demonstration's model with the inspector, until Ctrl-C.

Writes a page and a question about it, which the inspector fills in, and prints how to open it.
"""

from __future__ import annotations

import argparse
import sys

from demo import reading
from demo.asking import PLUGINS, SAMPLE, command_line, exit_status, let_inspect, shown
from measure.serving import serving
from reader.assemble import load_vocabulary, page_model_folder
from reader.tasks import PageQuestion

LOG = SAMPLE.with_name("inspector.log")


def prepare() -> list[str]:
    """Write the question and its page, and return the arguments of `vllm` that serve its model.

    Raises:
        OSError: if the model's weights are not installed, or the disk is full.
    """
    folder = page_model_folder()
    reading.save(PageQuestion(reading.TASK, 0).example(load_vocabulary(folder)), folder)
    return reading.serve_arguments(folder)


def inspect() -> int:
    """Serve until Ctrl-C.

    Raises:
        ServingError: if the server fails.
    """
    arguments = prepare()
    print(command_line(arguments))
    print(f"Starting takes half a minute or more; its log is {shown(LOG)}.", flush=True)
    with serving(arguments, LOG, environment=PLUGINS) as server:
        let_inspect(server)
    return 0


def main() -> int:
    """Run the inspector and return the exit status."""
    argparse.ArgumentParser(description="Serve a model with the inspector.").parse_args()
    return exit_status("The inspector", inspect)


if __name__ == "__main__":
    sys.exit(main())
