"""Measuring time and memory on a machine that does other things too: interleaved rounds, medians, spread."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

READ_BYTES = 256 << 20
"""Size of the array that memory bandwidth is measured on, beyond the caches of most machines."""
STATUS = Path("/proc/self/status")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one piece of work over several rounds.

    `median`, `low` and `high` are of wall time; `cpu` is the median of the time that all threads of the
    process spent computing, which another process's load hardly changes.
    """

    median: float
    low: float
    high: float
    cpu: float

    @classmethod
    def of(cls, wall: list[float], cpu: list[float]) -> Timing:
        """Of the seconds of each round."""
        return cls(statistics.median(wall), min(wall), max(wall), statistics.median(cpu))

    def each(self, count: int) -> Timing:
        """Seconds of one of `count` equal parts."""
        return Timing(*(value / count for value in dataclasses.astuple(self)))


def interleaved(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Time every work once a round, one after the other; a first round warms up and is not counted."""
    wall: dict[str, list[float]] = {name: [] for name in works}
    cpu: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            seconds, spent = timed(work)
            if number:
                wall[name].append(seconds)
                cpu[name].append(spent)
    return {name: Timing.of(wall[name], cpu[name]) for name in works}


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


@contextlib.contextmanager
def reads(threads: int, size: int = READ_BYTES) -> Iterator[dict[str, Callable[[], object]]]:
    """Works that read an array of `size` bytes: `read_one` with one thread, `read_all` with `threads` of them."""
    words = np.ones(size // 8, np.uint64)
    pieces = np.array_split(words, threads)
    with ThreadPoolExecutor(threads) as pool:
        yield {"read_one": lambda: read(words), "read_all": lambda: list(pool.map(read, pieces))}


def read(words: npt.NDArray[np.uint64]) -> int:
    """Read an array once; numpy lets other threads run while it does."""
    return int(np.bitwise_or.reduce(words))


def rss_anon() -> int | None:
    """Bytes of anonymous memory of this process, None where the kernel does not say (it is Linux that does)."""
    found = re.search(r"RssAnon:\s+(\d+) kB", STATUS.read_text()) if STATUS.exists() else None
    return 1024 * int(found[1]) if found else None
