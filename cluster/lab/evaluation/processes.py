"""Processes that share an evaluation's work."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from cluster.errors import SightlineError

T = TypeVar("T")
R = TypeVar("R")


def start_pool(jobs: int, start: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """A pool of ``jobs`` processes, each begun with ``start(*arguments, threads)``: its share of the cores."""
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    # Not fork: torch has threads by now.
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=spawn, initializer=start, initargs=(*arguments, threads))


def run_tasks(pool: ProcessPoolExecutor, work: Callable[[T], R], tasks: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Tasks with what ``work`` made of them, as they get done.

    Raises:
        SightlineError: a process of the pool died.
    """
    try:
        futures = {pool.submit(work, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise SightlineError(
            "a process of the evaluation ended without a word, most likely for want of memory; "
            "run it again with fewer --jobs: it goes on where it was"
        ) from None
