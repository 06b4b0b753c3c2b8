"""Sessions that have outlived their time are deleted while the server runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fednl_runtime.errors import FednlError
from fednl_runtime.server_api.errors import log
from fednl_runtime.store import SessionStore

SWEEP_S = 60.0
"""Seconds between two sweeps."""


@contextlib.asynccontextmanager
async def sweeping(store: SessionStore, every_s: float = SWEEP_S) -> AsyncIterator[None]:
    """Sweep `store` now and every so many seconds for as long as the block runs; a sweep that fails is logged."""

    async def sweep() -> None:
        while True:
            try:
                await asyncio.to_thread(store.sweep)
            except FednlError as error:
                log.warning("expired sessions could not be deleted: %s", error)
            await asyncio.sleep(every_s)

    task = asyncio.create_task(sweep())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
