"""A formula written to a file: text, LaTeX to include, Markdown, by the suffix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradtools.errors import GradtoolsError

if TYPE_CHECKING:
    from gradtools.seeing.formula.formula import Formula

SUFFIXES = (".txt", ".tex", ".md")


def rendered(formula: Formula, suffix: str) -> str:
    """The form that a suffix names.

    Raises:
        GradtoolsError: it names none.
    """
    if suffix == ".txt":
        return f"{formula}\n"
    if suffix == ".tex":
        return f"{_remarks(formula)}\\[\n{_gathered(formula)}\n\\]\n"
    if suffix == ".md":
        return f"$$\n{_gathered(formula)}\n$$\n"
    raise GradtoolsError(
        f"save: no form is known for the suffix {suffix!r}; expected one of {', '.join(SUFFIXES)}."
    )


def _gathered(formula: Formula) -> str:
    return "\\begin{gathered}\n" + formula.latex() + "\n\\end{gathered}"


def _remarks(formula: Formula) -> str:
    """What LaTeX's own lines do not say: what they need, and whether they were compared."""
    said = str(formula.check) if formula.check else "not compared with automatic differentiation"
    return f"% needs the packages amsmath and amssymb\n% {said}\n"
