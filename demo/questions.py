# SPDX-License-Identifier: Apache-2.0
"""Write questions about pages for the judge: `python -m demo.questions FILE --pages 60`.

One line and one PNG each; the server of `make inspector` reads such pages. See docs/judge.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from demo.asking import shown
from demo.reading import TASK
from reader.assemble import load_vocabulary, page_model_folder
from reader.tasks import PageQuestion


def main() -> None:
    """Write as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m demo.questions", description=__doc__)
    parser.add_argument("file", type=Path, help="JSON lines; pages go beside it")
    parser.add_argument("--pages", type=int, default=60, help="one question each")
    options = parser.parse_args()
    vocabulary = load_vocabulary(page_model_folder())
    options.file.parent.mkdir(parents=True, exist_ok=True)
    with options.file.open("w", encoding="utf-8") as file:
        for number in range(options.pages):
            example = PageQuestion(TASK, number).example(vocabulary)
            page = options.file.with_name(f"page{number}.png")
            example.pages[0].save(page)
            line = {
                "prompt": example.question,
                "images": [page.name],
                "answer": example.asked.answer,
                "max_tokens": 32,
            }
            file.write(f"{json.dumps(line)}\n")
    print(f"{shown(options.file)}: {options.pages} questions")


if __name__ == "__main__":
    main()
