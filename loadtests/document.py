# SPDX-License-Identifier: Apache-2.0
"""A report as a list of blocks, written as Markdown and as one HTML file that needs no other."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    text: str
    level: int = 2

    def markdown(self) -> str:
        return f"{'#' * self.level} {self.text}"

    def html(self, folder: Path) -> str:
        return f"<h{self.level}>{_inline(self.text)}</h{self.level}>"


@dataclass(frozen=True)
class Text:
    """A paragraph; `code`, **bold** and links are kept."""

    text: str

    def markdown(self) -> str:
        return self.text

    def html(self, folder: Path) -> str:
        return f"<p>{_inline(self.text)}</p>"


@dataclass(frozen=True)
class Items:
    """A list."""

    items: Sequence[str]

    def markdown(self) -> str:
        return "\n".join(f"- {item}" for item in self.items)

    def html(self, folder: Path) -> str:
        return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in self.items) + "</ul>"


@dataclass(frozen=True)
class Code:
    text: str

    def markdown(self) -> str:
        return "\n".join(f"    {line}" for line in self.text.splitlines())

    def html(self, folder: Path) -> str:
        return f"<pre>{html.escape(self.text)}</pre>"


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False
    """Whether all columns hold words, not only the first."""

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


Block = Heading | Text | Items | Code | Table | Plot


def write(blocks: Sequence[Block], folder: Path) -> None:
    """Write `README.md` and `report.html`; the SVG files of the plots lie in `folder` already."""
    markdown = "\n\n".join(block.markdown() for block in blocks)
    (folder / "README.md").write_text(markdown + "\n", encoding="utf-8")
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
