"""Checksums of tensors ("figures"): exact ones, and sums that tolerate rounding."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import left_to_python

Tensor = torch.Tensor
Figures = tuple[Any, ...]
left_to_python(__name__)

_BLOCK = 1 << 18  # entries that are summed at a time


def is_readable(x: Tensor) -> bool:
    """Whether the values can be read: a plain, strided tensor on a real device."""
    plain = type(x) in (Tensor, torch.nn.Parameter)
    known = plain and x.layout is torch.strided and x.device.type != "meta" and not x.is_quantized
    return known and not (upstream.is_wrapped(x) or upstream.is_legacy_batched(x))


def figures(x: Tensor, sample: int | None = None) -> Figures:
    """Shape, dtype, and for each entry of the first axis the sums of moduli, weighted and plain.

    The weights are all different. An entry of the first axis is an example, so that a difference
    in a single example is detected.
    """
    aval = (x.shape, x.dtype)
    if not is_readable(x) or not x.numel():
        return aval
    with torch.no_grad():
        x = x.resolve_conj().resolve_neg()
        x = torch.view_as_real(x) if x.is_complex() else x
        rows = x.reshape(len(x) if x.ndim > 1 else 1, -1)
        if sample is not None and x.numel() > sample:
            rows = rows.reshape(1, -1)[:, :: x.numel() // sample]
        width = min(rows.shape[1], _BLOCK)
        weights = torch.arange(width, device=x.device, dtype=_wide(x))
        weights = torch.cos(weights * 1.618033988749895)
        totals = []
        for some in rows.split(max(1, _BLOCK // width)):
            parts = [_sums(part, weights) for part in some.split(width, 1)]
            totals.append(sum(parts[1:], parts[0]))
        total = torch.cat(totals, 1)
        # On an accelerator it stays there, without synchronization, until it is compared.
        return *aval, total.numpy().copy() if total.device.type == "cpu" else total


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.device.type != "mps" else torch.float32


def _sums(part: Tensor, weights: Tensor) -> Tensor:
    """For each row the sums of the moduli, of the weighted entries, and of the entries."""
    wide = part.to(_wide(part))
    if part.dtype == torch.float64:
        wide = wide * 2.0**-64  # so that sums do not overflow
    wide = wide.nan_to_num(nan=1.25, posinf=1.5, neginf=-1.75)
    return torch.stack([wide.abs().sum(1), wide @ weights[: wide.shape[1]], wide.sum(1)])


def differences_of(old: list[Figures], new: list[Figures]) -> list[bool | Tensor]:
    if len(old) != len(new):
        return [True]
    return [differ(a, b) for a, b in zip(old, new, strict=True)]


def differ(a: Figures, b: Figures) -> bool | Tensor:
    """Whether two figures differ by more than rounding: on an accelerator as a tensor there."""
    if len(a) != len(b):
        return False  # one of them could not be read, as under vmap
    if a[:2] != b[:2] or len(a) == 2 or isinstance(a[2], int):
        return bool(a != b)
    dtype = a[1]
    inexact = dtype.is_floating_point or dtype.is_complex
    slack = torch.finfo(dtype).eps ** (2 / 3) if inexact else 0.0
    if isinstance(a[2], Tensor):
        return (a[2] - b[2]).abs().le(slack * torch.maximum(a[2][0], b[2][0])).all().logical_not()
    return not (np.abs(a[2] - b[2]) <= slack * np.maximum(a[2][0], b[2][0])).all()


def checksum(x: Tensor) -> Figures:
    """Shape, dtype and a checksum of all bits."""
    if not is_readable(x) or not x.numel():
        return x.shape, x.dtype
    plain = x.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return x.shape, x.dtype, zlib.crc32(plain.view(torch.uint8).numpy().tobytes())
