"""Writes graphs and formulas to files, in the format of the file's suffix."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradtools.errors import GradtoolsError

Forms = Mapping[str, Callable[..., str]]  # maps suffixes to functions of an object and options


def save(seen: Any, forms: Forms, path: str | os.PathLike[str], **view: Any) -> None:
    """Writes an object in the format of the path's suffix.

    Raises:
        GradtoolsError: The suffix is unknown.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in forms:
        raise GradtoolsError(
            f"save: the suffix {suffix!r} is unknown; expected one of {', '.join(forms)}."
        )
    Path(path).write_text(forms[suffix](seen, **view), encoding="utf-8")
