"""Where a test may kill this process, to prove that nothing committed is lost."""

from __future__ import annotations

import os
import signal

VARIABLE = "FEDNL_CRASH_AT"


def crash_point(name: str) -> None:
    """Kill this process as by `kill -9` if the environment asks for it here: as "name", or "name:3" for the third time.

    The count of times still to go is kept in the variable itself.
    """
    point, _, times = os.environ.get(VARIABLE, "").partition(":")
    if point != name:
        return
    if int(times or 1) <= 1:
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[VARIABLE] = f"{name}:{int(times) - 1}"
