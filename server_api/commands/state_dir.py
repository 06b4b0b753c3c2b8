"""Where a server keeps its sessions: a folder of its own for each model, below one for all of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

NAME = "fednl-runtime"
NAME_LENGTH = 32
"""Digits of a model's fingerprint that name its folder."""


def default_state_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder for what programs keep of a user, as the XDG base directory specification has it."""
    named = environment.get("XDG_STATE_HOME", "")
    base = Path(named) if named.startswith("/") else Path(environment.get("HOME", "~")).expanduser() / ".local/state"
    return base / NAME


def model_folder(state_dir: Path, fingerprint: str) -> Path:
    """The folder of one model's sessions: a memory means nothing to another model."""
    return state_dir / "sessions" / fingerprint[:NAME_LENGTH]


def other_models(folder: Path) -> int:
    """How many other models have sessions next to `folder`."""
    return sum(other != folder and (other / "sessions.db").exists() for other in folder.parent.glob("*"))


def described(folder: Path | None) -> str:
    """In a sentence, what becomes of sessions that are kept in `folder`, or in memory without one."""
    if folder is None:
        return "in memory, forgotten when the server stops"
    others = other_models(folder)
    note = f" ({others} other model{'s' * (others > 1)} left sessions there, kept until served again)" if others else ""
    return f"kept in {folder}{note}"
