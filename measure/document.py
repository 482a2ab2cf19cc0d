# SPDX-License-Identifier: Apache-2.0
"""A report as a list of blocks, written as Markdown and as one self-contained HTML file."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; margin-top: 2rem; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em; }
pre { background: #f4f4f4; padding: 0.8rem; overflow-x: auto; }
figure { margin: 1rem 0; }
figure svg { width: 100%; height: auto; }
figcaption { color: #555; font-size: 0.9rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { border-bottom: 1px solid #ddd; padding: 0.3rem 0.7rem; text-align: right; }
th:first-child, td:first-child, .words th, .words td { text-align: left; }
th { vertical-align: bottom; }
"""


@dataclass(frozen=True)
class Heading:
    """A heading of level 1 to 6."""

    text: str
    level: int = 2

    def markdown(self) -> str:
        return f"{'#' * self.level} {self.text}"

    def html(self, folder: Path) -> str:
        return f"<h{self.level}>{_inline(self.text)}</h{self.level}>"


@dataclass(frozen=True)
class Text:
    """A paragraph with `code`, **bold** and links."""

    text: str

    def markdown(self) -> str:
        return self.text

    def html(self, folder: Path) -> str:
        return f"<p>{_inline(self.text)}</p>"


@dataclass(frozen=True)
class Items:
    """A bulleted list."""

    items: Sequence[str]

    def markdown(self) -> str:
        return "\n".join(f"- {item}" for item in self.items)

    def html(self, folder: Path) -> str:
        return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in self.items) + "</ul>"


@dataclass(frozen=True)
class Code:
    """A block of code."""

    text: str

    def markdown(self) -> str:
        return "\n".join(f"    {line}" for line in self.text.splitlines())

    def html(self, folder: Path) -> str:
        return f"<pre>{html.escape(self.text)}</pre>"


@dataclass(frozen=True)
class Table:
    """A table of cells that are formatted already."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False
    """Align all columns to the left; otherwise all but the first hold numbers."""

    def markdown(self) -> str:
        marks = [":--", *([":--" if self.words else "--:"] * (len(self.header) - 1))]
        lines = [self.header, marks, *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def html(self, folder: Path) -> str:
        head = "".join(f"<th>{_inline(cell)}</th>" for cell in self.header)
        rows = "".join(
            "<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        kind = "table words" if self.words else "table"
        return (
            f'<div class="{kind}"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )


@dataclass(frozen=True)
class Plot:
    """An SVG file in the report's folder."""

    file: str
    caption: str

    def markdown(self) -> str:
        return f"![{self.caption}]({self.file})"

    def html(self, folder: Path) -> str:
        svg = (folder / self.file).read_text(encoding="utf-8")
        caption = html.escape(self.caption)
        svg = svg.replace("<svg", f'<svg role="img" aria-label="{caption}"', 1)
        return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"


Block: TypeAlias = "Heading | Text | Items | Code | Table | Plot"


def percent(share: float) -> str:
    """Return a share as reports write it, with three digits."""
    return f"{100 * share:.3g} %"


def markdown(blocks: Sequence[Block]) -> str:
    """Return blocks as Markdown, without a newline at the end."""
    return "\n\n".join(block.markdown() for block in blocks)


def write_markdown(blocks: Sequence[Block], folder: Path) -> None:
    """Write `README.md`."""
    (folder / "README.md").write_text(markdown(blocks) + "\n", encoding="utf-8")


def write(blocks: Sequence[Block], folder: Path) -> None:
    """Write `README.md` and `report.html`; the plots' SVG files must be in `folder` already."""
    write_markdown(blocks, folder)
    title = next(block.text for block in blocks if isinstance(block, Heading))
    body = "\n".join(block.html(folder) for block in blocks)
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )
    (folder / "report.html").write_text(page, encoding="utf-8")


def _inline(text: str) -> str:
    text = html.escape(text, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', text)
