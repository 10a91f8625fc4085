"""Runs the same test cases in several PyTorch processes and collects the results.

The processes are forked from one server that has imported PyTorch, so the import, which takes
seconds, happens once for all test modules of a worker.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_IMPORTED = ("gradtools.torch", "torch.distributed.fsdp", "torch.nn.parallel", "pytest")

Case = Callable[..., Any]
_groups: list[Any] = []


def keep_process_groups() -> None:
    """Keep every default process group alive until the process ends.

    The destructor of a Gloo group joins the group's threads while it holds the GIL, and a thread
    may wait for the GIL to free the tensors of the last collective (pytorch/pytorch#56297). About
    one in 2,000 calls of ``destroy_process_group`` right after a collective did not return.
    """
    init = dist.init_process_group

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        _groups.append(dist.group.WORLD)

    dist.init_process_group = init_process_group


def found_in_processes(
    case: Case, cases: Iterable[Any], world: int, folder: Path, seconds: float, last: bool = False
) -> list[dict[Any, Any]]:
    """Return the results of `case(rank, world, name)` for each name in each of `world` processes.

    If a case raises an error, its result is the traceback. Processes that hang are terminated, and
    their remaining results are missing. With `last`, a process stops after a case that raises an
    error, because the other processes wait for it.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.set_forkserver_preload(list(_IMPORTED))
    args = case, [*cases], world, str(folder), last
    context = mp.start_processes(work, args, world, join=False, start_method="forkserver")
    until = time.monotonic() + seconds
    with contextlib.suppress(mp.ProcessExitedException, mp.ProcessRaisedException):
        while time.monotonic() < until and not context.join(timeout=0.2):
            pass
    for process in context.processes:
        if process.is_alive():
            process.kill()
        process.join()
    paths = [folder / f"{rank}.pt" for rank in range(world)]
    return [torch.load(p, weights_only=False) if p.exists() else {} for p in paths]


def work(
    rank: int, case: Case, cases: list[Any], world: int, folder: str, last: bool = False
) -> None:
    """Run all cases in this process and store the results in a file in `folder`."""
    torch.set_num_threads(1)
    keep_process_groups()
    init = f"file://{folder}/init"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    found: dict[Any, Any] = {}
    for name in cases:
        try:
            found[name] = case(rank, world, name)
        except Exception:
            found[name] = traceback.format_exc()
            if last:
                break
        finally:
            torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
