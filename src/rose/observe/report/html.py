"""HTML elements of the report. Every text passes through ``escape``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from rose.observe.report.style import CSS
from rose.observe.summary import Row


def page(title: str, parts: Sequence[str], *, css: str = CSS) -> str:
    """Return a whole page with its style inside; empty parts are left out."""
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{css}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def heading(title: str, subtitle: str, *, anchor: str = "") -> str:
    """Return the heading of a page or of one of its chapters; ``anchor`` is what ``links`` points to."""
    place = f' id="{escape(anchor, quote=True)}"' if anchor else ""
    return f'<h1{place}>{escape(title)}</h1><p class="subtitle">{escape(subtitle)}</p>'


def links(targets: Mapping[str, str]) -> str:
    """Return links to the page's chapters, texts by anchor."""
    items = [f'<a href="#{escape(anchor, quote=True)}">{escape(text)}</a>' for anchor, text in targets.items()]
    return f"<p>{' · '.join(items)}</p>"


def verdict(label: str, text: str, *, is_good: bool) -> str:
    """Return the line that says whether the run counts."""
    kind = "verdict" if is_good else "verdict invalid"
    return f'<div class="{kind}"><b>{escape(label)}</b><span>{escape(text)}</span></div>'


def card(label: str, value: str, detail: str, *, is_good: bool | None = None) -> str:
    """Return one key figure; ``is_good`` colours it."""
    judgement = {None: "value", True: "value good", False: "value bad"}[is_good]
    return (
        f'<div class="card"><div class="label">{escape(label)}</div><div class="{judgement}">{escape(value)}</div>'
        f'<div class="detail">{escape(detail)}</div></div>'
    )


def section(title: str, *parts: str) -> str:
    """Return a section, or nothing when all its parts are empty."""
    body = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def paragraph(text: str) -> str:
    """Return a paragraph."""
    return f"<p>{escape(text)}</p>"


def figure(figures: Mapping[str, str], name: str, *, alt: str, caption: str) -> str:
    """Return a drawn figure with the text that stands for it and its caption; nothing when it was not drawn."""
    if name not in figures:
        return ""
    return (
        f'<figure><div role="img" aria-label="{escape(alt, quote=True)}">{figures[name]}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def table(heads: Sequence[str], rows: Sequence[Row], *, strong: int) -> str:
    """Return a table whose column ``strong`` stands out."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heads)
    body = "".join(f"<tr>{_cells(row, strong)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(row: Row, strong: int) -> str:
    kinds = [' class="strong"' if index == strong else "" for index in range(len(row))]
    return "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))


def bullets(items: Sequence[str]) -> str:
    """Return a list, or nothing for no items."""
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>" if items else ""


def folded(title: str, *parts: str) -> str:
    """Return parts that a click opens, or nothing when all are empty."""
    body = "".join(parts)
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""
