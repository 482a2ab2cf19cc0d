# SPDX-License-Identifier: Apache-2.0
"""`make inspector`: serve the demonstration's model with the inspector, until Ctrl-C.

Writes a page and a question about it below `build/demo`, and prints how to open them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time

from demo import reading, run
from demo.asking import command_line, inspector_question
from demo.pages import make_page
from measure.serving import ServingError, log_errors, serving
from reader.assemble import load_vocabulary
from reader.tasks import PageQuestion

QUESTION = reading.SAMPLE.with_name("question.json")
LOG = QUESTION.with_name("inspector.log")
BUDGET = 0.1
SMALL_METHOD = "aircache"
"""Method with which the small model's first page stays readable at this budget."""


def prepare(small: bool = False) -> list[str]:
    """Write the question and its page, and return the arguments of `vllm` that serve its model."""
    folder = None if small else run.page_model()
    QUESTION.parent.mkdir(parents=True, exist_ok=True)
    if folder:
        example = PageQuestion(reading.TASK, 0).example(load_vocabulary(folder))
        page, question, start = example.pages[0], example.question.strip(), example.asked.start
        arguments, method = reading.serve_arguments(folder, None), reading.RECOMMENDED
    else:
        sample = make_page("test", 0)
        page, question, start = sample.image, sample.questions[0].text, ""
        arguments, method = run.serve_arguments(None), SMALL_METHOD
    page = page.quantize(16)  # smaller, so that the inspector's links can hold it
    page.save(reading.SAMPLE)
    record = inspector_question(
        page, question, method=method, budget=BUDGET, max_tokens=reading.MAX_TOKENS, start=start
    )
    QUESTION.write_text(json.dumps(record))
    return arguments


def main() -> int:
    """Write the question, serve until Ctrl-C, and return the exit status."""
    parser = argparse.ArgumentParser(description="Serve a model with the inspector.")
    parser.add_argument("--small", action="store_true", help="the small model in demo/model")
    arguments = prepare(parser.parse_args().small)
    os.environ["VLLM_PLUGINS"] = "tgvkv"
    print(
        f"{command_line(arguments, {'VLLM_PLUGINS': 'tgvkv'})}\n"
        f"Starting takes half a minute or more; its log is {reading.shown(LOG)}.",
        flush=True,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the server ends, too
    try:
        with serving(arguments, LOG) as server:
            print(
                f'\nOpen {server.url}/kv-eviction/ in a browser, choose "Open a saved file", '
                f"take {reading.shown(QUESTION)}, and press Ask.\nCtrl-C ends the server.",
                flush=True,
            )
            while server.is_alive():
                time.sleep(1)
        print(f"\nThe server ended; {log_errors(LOG)}", file=sys.stderr)
        return 1
    except ServingError as error:
        print(f"\nThe inspector failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
