"""A session store, in memory and in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from stores import FORM

from fednl_runtime.store import SessionStore
from fednl_runtime.vault import StoreLimits


@pytest.fixture(name="folder", params=["memory", "folder"])
def folder_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "sessions" if request.param == "folder" else None


@pytest.fixture(name="store")
def store_fixture(folder: Path | None) -> Iterator[SessionStore]:
    store = SessionStore(FORM, StoreLimits(), folder)
    yield store
    store.close()
