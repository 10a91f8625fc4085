"""Writes graphs to files, in the format that the file suffix selects."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradtools.arguments.checks import check_choice
from gradtools.errors import GradtoolsError

Forms = Mapping[str, Callable[..., str]]  # maps a suffix to the function that formats a graph


def save(seen: Any, forms: Forms, path: str | os.PathLike[str], **view: Any) -> None:
    """Writes a graph in the format that the suffix of `path` selects.

    Raises:
        GradtoolsError: The suffix of `path` is not in `forms`, or the format lacks an option.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in forms:
        raise GradtoolsError(
            f"save: the suffix {suffix!r} is unknown; expected one of {', '.join(forms)}."
        )
    options = ("depth", "title", "theme")[: 3 if suffix in (".svg", ".html", ".htm") else 2]
    for name in view:
        check_choice("save", f"an option of a {suffix} file", name, options)
    Path(path).write_text(forms[suffix](seen, **view), encoding="utf-8")
