"""Building blocks of all reports (facts, tables, charts, texts), rendered as a single HTML page, Markdown and files."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jinja2
from markupsafe import Markup, escape

from cluster.files import write_text, writing
from cluster.lab.report.charts import inline, svg, variables

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

Facts = Sequence[tuple[str, object]]
"""(name, value) pairs."""

_NUMBER = re.compile(r"[-–+≤≥<x]? ?[\d.]|[-–]$|over \d|never$|all of it$|$")


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table of text cells. ``bad``: indices of rows that show a failure."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    bad: frozenset[int] = frozenset()

    @property
    def numeric(self) -> list[bool]:
        return [
            bool(self.rows) and all(_NUMBER.match(row[place]) for row in self.rows) for place in range(len(self.heads))
        ]

    def show(self, screen: Console) -> None:
        """Print to a terminal, unless the table is empty."""
        from rich import box
        from rich.markup import escape
        from rich.table import Table as RichTable

        shown = RichTable(title=self.title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for head, number in zip(self.heads, self.numeric, strict=True):
            shown.add_column(head, justify="right" if number else "left")
        for place, row in enumerate(self.rows):
            shown.add_row(*map(escape, row), style="red" if place in self.bad else None)
        if self.rows:
            screen.print(shown)


class Chip(NamedTuple):
    """A short fact about a section's subject; ``kind``: ``good``, ``bad`` or empty for neutral."""

    text: str
    kind: str = ""


class Card(NamedTuple):
    """A key figure in large print, with a title and an explanation."""

    figure: str
    title: str
    text: str


class Picture(NamedTuple):
    """A JPEG with a caption. ``alt``: description for screen readers."""

    jpeg: bytes
    alt: str
    caption: str

    @property
    def uri(self) -> str:
        return f"data:image/jpeg;base64,{base64.b64encode(self.jpeg).decode()}"


@dataclass(frozen=True, slots=True)
class Section:
    """Part of a page. ``charts``: by file name without suffix. Chips, ``text`` and ``items`` may use Markdown's bold
    and code."""

    title: str = ""
    lead: str = ""
    chips: Sequence[Chip] = ()
    charts: Mapping[str, Figure] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    text: Sequence[str] = ()
    items: Sequence[str] = ()
    facts: Facts = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A report. ``lead``: the main result in one sentence; ``good``: whether it is a success; ``notices``: warnings."""

    title: str
    lead: str = ""
    good: bool = True
    notices: Sequence[str] = ()
    cards: Sequence[Card] = ()
    facts: Facts = ()
    sections: Sequence[Section] = ()

    @property
    def charts(self) -> dict[str, Figure]:
        return {name: figure for section in self.sections for name, figure in section.charts.items()}

    def html(self) -> str:
        """The page as one self-contained HTML document."""
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("cluster.lab.report", ""),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= {"drawn": lambda figure: Markup(inline(figure)), "marked": _inline_markdown}
        return environment.get_template("page.html").render(page=self, variables=variables)

    def markdown(self) -> str:
        """Titles, tables, lists and links to chart files; omits cards, chips, pictures and empty tables."""
        parts = [f"# {self.title}", self.lead, *self.notices, _bullet_list([f"{k}: {v}" for k, v in self.facts])]
        for section in self.sections:
            parts.append(f"## {section.title}" if section.title else "")
            parts += [section.lead, "\n".join(f"![{name}]({name}.svg)" for name in section.charts)]
            for table in section.tables:
                if table.rows:
                    parts += [f"## {table.title}" if table.title else "", markdown_table(table)]
            parts += [*section.text, _bullet_list(section.items)]
        return "\n\n".join(filter(None, parts)) + "\n"


def _inline_markdown(text: str) -> Markup:
    """Markdown's ``**bold**`` and code as HTML; everything else is escaped."""
    bold = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", str(escape(text)))
    return Markup(re.sub("`(.+?)`", r"<code>\1</code>", bold))


def _bullet_list(texts: Sequence[str]) -> str:
    return "\n".join(f"* {text}" for text in texts)


def markdown_table(table: Table) -> str:
    """A table in Markdown, without its title."""
    lines = [table.heads, ["---"] * len(table.heads), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def write_page(page: Page, folder: Path, stem: str, json: str = "") -> Path:
    """Write ``stem`` as ``.html``, ``.md`` and optionally ``.json``, and charts as ``.svg``; returns the HTML's path.
    Raises ``SightlineError``: the folder cannot be written."""
    files = {f"{stem}.html": page.html(), f"{stem}.md": page.markdown()}
    files |= {f"{stem}.json": json + "\n"} if json else {}
    write_files(folder, files | {f"{name}.svg": svg(figure) + "\n" for name, figure in page.charts.items()})
    return folder / f"{stem}.html"


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write a report's files by name, each atomically. Raises ``SightlineError``: the folder cannot be written."""
    with writing(f"the report to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_text(folder / name, text)
