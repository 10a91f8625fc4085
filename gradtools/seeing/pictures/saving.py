"""Writes graphs and formulas to files, in the format of the file's suffix."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradtools.errors import GradtoolsError

Forms = Mapping[str, Callable[..., str]]  # by suffix; called with the object and its options


def save(seen: Any, forms: Forms, path: str | os.PathLike[str], **view: Any) -> None:
    """Writes an object in the format of the path's suffix.

    Raises:
        GradtoolsError: the suffix is unknown.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in forms:
        raise GradtoolsError(
            f"save: no form is known for the suffix {suffix!r}; expected one of {', '.join(forms)}."
        )
    Path(path).write_text(forms[suffix](seen, **view), encoding="utf-8")
