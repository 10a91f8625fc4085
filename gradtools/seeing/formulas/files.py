"""A formula as text, as LaTeX to include and as Markdown, by the suffix of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradtools.seeing.formulas.derivation import Formula
    from gradtools.seeing.pictures.saving import Forms


def gathered(formula: Formula) -> str:
    """The formula's parts below each other, as one LaTeX ``gathered`` environment."""
    return "\\begin{gathered}\n" + formula.latex() + "\n\\end{gathered}"


def _remarks(formula: Formula) -> str:
    """What LaTeX's own lines do not say: what they need, and how they were compared."""
    return f"% needs the packages amsmath and amssymb\n% {formula.check}\n"


FORMS: Forms = {
    ".txt": lambda formula: f"{formula}\n",
    ".tex": lambda formula: f"{_remarks(formula)}\\[\n{gathered(formula)}\n\\]\n",
    ".md": lambda formula: f"$$\n{gathered(formula)}\n$$\n",
}
