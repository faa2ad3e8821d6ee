"""Text of comments and descriptions as Markdown."""

import re

_MARKS = str.maketrans({mark: f"\\{mark}" for mark in "\\*[]|"} | {"<": "&lt;", ">": "&gt;"})


def plain(text: str) -> str:
    """The text with nothing in it that would be markup, but for what stands between backticks."""
    pieces = re.split(r"(`[^`]*`)", text)
    pieces[::2] = [piece.translate(_MARKS) for piece in pieces[::2]]
    pieces[1::2] = [code.replace("|", "\\|") for code in pieces[1::2]]
    return "".join(pieces)


def cell(text: str) -> str:
    """As plain, on one line."""
    paragraphs = [" ".join(plain(paragraph).split()) for paragraph in text.strip().split("\n\n")]
    return "<br>".join(paragraphs)


def table(titles: list[str], rows: list[list[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
