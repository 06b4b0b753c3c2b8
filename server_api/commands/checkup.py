"""What a machine must have to serve from it, looked at piece by piece."""

from __future__ import annotations

import dataclasses
import datetime
import os
import shutil
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
from cryptography import x509

from fednl_runtime.errors import FednlError
from fednl_runtime.server_api.entrance.security import load_keys

COPY_BYTES = 64 << 20
LEAST_DISK_BYTES = 256 << 20
"""Free bytes below which sessions will soon fail to be stored."""
SOON = datetime.timedelta(days=14)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One piece: whether it is `ok`, and in a sentence what was found and what to do about it."""

    name: str
    ok: bool
    says: str


def attempt(name: str, look: Callable[[], str], *errors: type[Exception]) -> Finding:
    """The finding of a look that says what it found, or raises one of `errors` with a sentence for what is wrong."""
    try:
        return Finding(name, True, look())
    except Exception as error:
        if not isinstance(error, (FednlError, *errors)):
            raise
        return Finding(name, False, str(error))


def threads() -> Finding:
    """How many cores the process may use, of how many the machine has."""
    from fednl_runtime.onnx_backend import CGROUP_QUOTA, default_threads

    quota = CGROUP_QUOTA.read_text().strip() if CGROUP_QUOTA.exists() else "none"
    return Finding("threads", True, f"{default_threads()} of {os.cpu_count()} cores (cgroup quota: {quota})")


def bandwidth() -> Finding:
    """Bytes that one thread copies a second, read and written: what bounds tokens a second."""
    source = np.ones(COPY_BYTES // 8)
    target, times = np.empty_like(source), []
    for _ in range(7):
        begin = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begin)
    rate = 2 * COPY_BYTES / statistics.median(times) / 1e9
    return Finding("memory bandwidth", True, f"{rate:.1f} GB/s copied by one thread")


def model(path: Path) -> Finding:
    """Whether onnxruntime here can run a model file."""

    def look() -> str:
        from fednl_runtime.onnx_backend import load
        from fednl_runtime.state import MemoryState

        backend = load(path, threads=1)
        stream = backend.open(MemoryState.zeros(backend.config))
        logits = stream.feed(np.zeros((1, 1), np.int64), np.ones((1, 2), np.float32))
        assert np.isfinite(logits).all(), "a model's first logits are finite"
        return f"onnxruntime {version('onnxruntime')} has every operator of {path.name} and runs it"

    return attempt("model", look)


def state_dir(folder: Path) -> Finding:
    """Whether sessions can be kept in a folder, by nobody else to be read."""
    found = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    if not found.is_dir() or not os.access(found, os.W_OK | os.X_OK):
        return Finding("state folder", False, f"{found} cannot be written to; choose another with --state-dir.")
    if found == folder and folder.stat().st_mode & 0o077:
        return Finding("state folder", False, f"{folder} is open to others; run: chmod 700 {folder}")
    free = shutil.disk_usage(found).free
    says = f"{folder}, {free / 1e9:.1f} GB free"
    if free < LEAST_DISK_BYTES:
        return Finding("state folder", False, f"{says}: sessions will soon not be stored. Make room.")
    return Finding("state folder", True, says)


def key_file(file: Path) -> Finding:
    """Whether a file of API keys can be used."""
    return attempt("key file", lambda: f"{len(load_keys(file))} keys in {file}")


def certificate(file: Path, now: datetime.datetime) -> Finding:
    """Whether a certificate is valid, and for how long."""
    try:
        found = x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        return Finding("certificate", False, f"{file} is no certificate that can be read: {error}")
    until = found.not_valid_after_utc
    if not found.not_valid_before_utc <= now < until:
        return Finding("certificate", False, f"{file} is not valid today; it ends at {until:%Y-%m-%d}.")
    if until - now < SOON:
        return Finding("certificate", False, f"{file} ends at {until:%Y-%m-%d}; renew it.")
    return Finding("certificate", True, f"valid until {until:%Y-%m-%d}")
