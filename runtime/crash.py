"""Where a test may kill this process, to prove that nothing committed is lost."""

from __future__ import annotations

import os
import signal

VARIABLE = "FEDNL_CRASH_AT"


def crash_point(name: str) -> None:
    """Kill this process as by `kill -9` if the environment asks for it at this point."""
    if os.environ.get(VARIABLE) == name:
        os.kill(os.getpid(), signal.SIGKILL)
