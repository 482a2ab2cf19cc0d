# SPDX-License-Identifier: Apache-2.0
"""`make demo`: serve a model with eviction and ask it about pages it never saw.

Starts `vllm serve`, sends PNG pages with questions through the OpenAI client, and prints the
answers with the full cache next to those with parts of it, and the memory saved. In a terminal, the
server then waits for a browser until Ctrl-C: it has the inspector. The exit status is not zero if
anything fails.
"""

from __future__ import annotations

import argparse
import sys

from demo.asking import exit_status
from demo.reading import demonstrate
from reader.assemble import page_model_folder

NUM_PAGES = 5


def main() -> int:
    """Run the demonstration and return the exit status."""
    parser = argparse.ArgumentParser(description="Serve a model with eviction and ask it.")
    parser.add_argument(
        "--pages", type=int, default=NUM_PAGES, help="one question each (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.pages < 1:
        parser.error(f"--pages must be at least 1, got {options.pages}")
    return exit_status(
        "The demonstration",
        lambda: demonstrate(page_model_folder(), options.pages),
    )


if __name__ == "__main__":
    sys.exit(main())
