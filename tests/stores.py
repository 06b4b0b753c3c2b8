"""A store of made-up memories: what turns leave, without turns."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
from models import TINY, random_state
from turns import bits

from fednl_runtime.history import Mark
from fednl_runtime.records import Update
from fednl_runtime.session import Session, SessionKey
from fednl_runtime.state import MemoryState
from fednl_runtime.state_file import StateFormat
from fednl_runtime.store import SessionStore
from fednl_runtime.vault import StoreLimits

FORM = StateFormat(TINY, "model", "tokenizer")
KEY, OTHER = SessionKey("owner", "name"), SessionKey("owner", "other")
EMPTY = bits(Session(KEY, MemoryState.zeros(TINY)))


def limited(folder: Path | None, files: int, versions: int = 8) -> SessionStore:
    """A store with room for so many memories."""
    room = files * FORM.max_bytes
    return SessionStore(FORM, StoreLimits(resident_bytes=room, stored_bytes=room, versions=versions), folder)


def began(store: SessionStore, key: SessionKey = KEY) -> Session:
    """What a turn begins with."""
    record = store.find(key)
    return store.load(record, record.head)


def learnt(base: Session, seed: int | None = None) -> Session:
    """What a made-up turn on `base` ends with; another one for each version."""
    seed = 100 * base.version + len(base.id or "") if seed is None else seed
    state = random_state(TINY, seed=seed, position=base.tokens_seen + 5)
    tensors = {name: tensor.astype(np.float32) for name, tensor in state.tensors.items()}
    logits = np.random.default_rng(seed).normal(size=TINY.vocab_size).astype(np.float32)
    after = MemoryState(tensors, state.position)
    return dataclasses.replace(base, state=after, version=base.version + 1, logits=logits, tail=b"\xe2")


def commit(store: SessionStore, after: Session) -> str:
    """Commit what a turn ended with; return its digest."""
    version, now = after.version, time.time()
    mark = Mark(version, version, version - 1, version - 1, after.tokens_seen, tokens=5, length=5, created=now)
    store.commit(after, mark, Update(version, "turn", now, tokens=5))
    return bits(after)


def write(store: SessionStore, key: SessionKey = KEY, turns: int = 1) -> list[str]:
    """Digests of the memories of some turns."""
    return [commit(store, learnt(began(store, key))) for _ in range(turns)]


def head(store: SessionStore, key: SessionKey = KEY) -> str:
    """The digest of a session's committed memory."""
    record = store.get(key)
    return bits(store.load(record, record.head))


def files(store: SessionStore) -> int:
    """How many state files there are."""
    return len(store._vault.files.names())
