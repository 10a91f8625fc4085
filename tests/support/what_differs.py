"""The table of docs/what-differs.md: derivatives at kinks and ties, measured in both frameworks.

`python -m tests.support.what_differs` writes it anew; a test compares.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.kinks import conventions

PAGE = Path(__file__).parents[2] / "docs" / "what-differs.md"
START, END = "<!-- measured: written by tests/support/what_differs.py -->\n", "<!-- end -->"


def table() -> str:
    """The lines of the page; what differs comes first."""
    text = lambda values: "" if values is None else ", ".join(f"{v:.4g}" for v in values)
    rows = sorted(conventions(), key=lambda row: not row.differs)
    lines = []
    for row in rows:
        cells = [row.name.replace("|", r"\|"), *map(text, (*row.at(1), *row.at(2)))]
        lines.append(f"| {' | '.join([*cells, 'yes' if row.differs else ''])} |")
    head = "| function and point | PyTorch | JAX | PyTorch, twice | JAX, twice | differs |"
    return "\n".join([head, "|---|---|---|---|---|---|", *lines, ""])


def written(page: str) -> str:
    """The page with the table as it is now."""
    head, rest = page.split(START)
    return head + START + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
