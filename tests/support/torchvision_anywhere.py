"""torchvision beside any build of PyTorch: its models and transforms, which are Python.

PyPI's torchvision is compiled for a PyTorch with CUDA, and does not load beside one without: its
import fails at two operators that its compiled half declares. They are declared in its place, where
that cannot be loaded. No test calls them.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

OPERATORS = ("nms", "qnms")
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[object] = []  # what declares an operator takes it back when it goes


class _BeforeItsImport:
    """A finder that finds nothing: it is asked when torchvision is imported for the first time."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare(importlib.util.find_spec(name))


def _declare(spec: importlib.machinery.ModuleSpec | None) -> None:
    if spec is None or spec.origin is None:
        return
    import torch

    try:
        for compiled in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(compiled)
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in OPERATORS:
            library.define(name + SIGNATURE)
        _kept.append(library)


def install() -> None:
    if "torchvision" not in sys.modules:
        sys.meta_path.insert(0, _BeforeItsImport())
