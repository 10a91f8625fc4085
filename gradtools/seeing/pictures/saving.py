"""What is seen, written to a file in the form that its suffix names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gradtools.errors import GradtoolsError

Forms = Mapping[str, Callable[..., str]]  # by suffix, each of what is seen and the options


def save(seen: Any, forms: Forms, path: str | os.PathLike[str], **view: Any) -> None:
    """Writes something in the form that the suffix of a path names.

    Raises:
        GradtoolsError: the suffix names no form.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in forms:
        raise GradtoolsError(
            f"save: no form is known for the suffix {suffix!r}; expected one of {', '.join(forms)}."
        )
    Path(path).write_text(forms[suffix](seen, **view), encoding="utf-8")
