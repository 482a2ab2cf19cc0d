# SPDX-License-Identifier: Apache-2.0
"""Draw a text of your own as pages: `python -m reader.draw text.txt pages/`.

Line ends count as spaces. Pages are written as `pages/1.png`, `pages/2.png` and so on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from reader.assemble import MODELS, TOWER, load_vocabulary, page_model_folder
from reader.tasks import draw_pages
from reader.vocabulary import UnknownLetterError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="file with the text")
    parser.add_argument("pages", type=Path, help="folder for the pages")
    parser.add_argument("--seed", default="0", help="decides face, size and colours")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of model folders")
    parser.add_argument("--tower", type=Path, default=TOWER)
    options = parser.parse_args()
    vocabulary = load_vocabulary(page_model_folder(options.models, options.tower), options.tower)
    try:
        indices = vocabulary.split(" ".join(options.text.read_text().split()))
    except UnknownLetterError as error:
        print(error, file=sys.stderr)
        return 1
    options.pages.mkdir(parents=True, exist_ok=True)
    pieces = [vocabulary.texts[index] for index in indices]
    for number, page in enumerate(draw_pages(pieces, options.seed), 1):
        path = options.pages / f"{number}.png"
        page.save(path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
