"""Makes torchvision's Python code importable with any build of PyTorch.

PyPI's torchvision is compiled for PyTorch with CUDA. Its compiled library cannot be loaded without
CUDA, and `import torchvision` requires two operators that this library declares. If the library
cannot be loaded, this module declares the operators. No test calls these operators.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

OPERATORS = ("nms", "qnms")
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[object] = []  # a Library object removes its operators when it is deleted


class _BeforeItsImport:
    """An import finder that finds no module, but runs a hook at the first import of torchvision."""

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
