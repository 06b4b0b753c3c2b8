"""Sessions outlive the process: restarts, full disks and deletion, against a model that rereads the tokens."""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import TOKENIZER, NumpyBackend, committed, running_engine
from turns import TEXT, contents, head, say, tokens_of

from fednl_runtime.engine import Engine, EngineLimits
from fednl_runtime.errors import StateError, StoreError
from fednl_runtime.onnx_backend import load
from fednl_runtime.records import Settings
from fednl_runtime.sampling import SamplingParams
from fednl_runtime.session import SessionKey
from fednl_runtime.state import Array, MemoryState, Tokens
from fednl_runtime.tokenizer import Tokenizer
from fednl_runtime.turn import Retry, TurnRequest
from fednl_runtime.vault import StoreLimits

KEY = SessionKey("", "a")
MODEL = Path(__file__).parents[2] / "runtime/models/hope.onnx"
TINY_ROOM = EngineLimits(store=StoreLimits(resident_bytes=1))
"""Only one session is ever resident."""


def read(engine: Engine) -> int:
    """Tokens that the backend was given."""
    assert isinstance(engine.backend, NumpyBackend)
    return sum(count for _, count in engine.backend.calls)


def state_files(folder: Path) -> list[Path]:
    return sorted((folder / "states").iterdir())


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writes beyond so many bytes of any file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("empty", [False, True])
def test_a_folder_without_its_database_is_refused_and_loses_nothing(tmp_path: Path, empty: bool) -> None:
    with running_engine(folder=tmp_path) as engine:
        say(engine)
        kept = head(engine)
    database = tmp_path / "sessions.db"
    saved = database.read_bytes()
    database.unlink()
    if empty:
        database.touch()
    with pytest.raises(StoreError, match="Restore it"), running_engine(folder=tmp_path):
        pass
    database.write_bytes(saved)
    with running_engine(folder=tmp_path) as engine:
        assert head(engine) == kept


def test_a_restarted_session_reads_the_new_tokens_alone_and_answers_as_if_never_stopped(tmp_path: Path) -> None:
    with running_engine() as unbroken:
        expected = [(say(unbroken, retry=Retry("d"))[0], head(unbroken)) for _ in range(4)]
    for events, memory in expected:
        with running_engine(folder=tmp_path) as engine:
            again, report = say(engine, retry=Retry("d"))
            assert again == events
            assert head(engine) == memory
            assert read(engine) == len(TOKENIZER.encode(TEXT)) + 3 == report.prompt_tokens + report.completion_tokens
            assert report.persisted


def test_an_evicted_session_goes_on_as_if_it_had_stayed(tmp_path: Path) -> None:
    with running_engine() as roomy, running_engine(TINY_ROOM, folder=tmp_path) as tight:
        for session_id in "abcabcab":
            assert say(tight, session_id=session_id)[0] == say(roomy, session_id=session_id)[0]
            assert head(tight, session_id) == head(roomy, session_id)
        assert tight.sessions.stats()["restores"] > 4
        assert read(tight) == read(roomy)


def test_an_engine_without_a_folder_says_that_nothing_is_persisted() -> None:
    with running_engine() as engine:
        assert not say(engine)[1].persisted


def test_a_tail_and_settings_and_the_log_outlive_a_restart(tmp_path: Path) -> None:
    half = TOKENIZER.encode("€")[:1]
    settings = Settings(frozen=True, metadata={"née": "€"})
    with running_engine(folder=tmp_path) as engine:
        list(engine.turn(TurnRequest(tuple(half), SamplingParams(max_tokens=0), "a", request_id="r1")))
        engine.sessions.configure(KEY, **dataclasses.asdict(settings))
        say(engine)
        record, log = engine.sessions.get(KEY), engine.sessions.updates(KEY)
        tail = committed(engine, "a").tail
    with running_engine(folder=tmp_path) as engine:
        assert (engine.sessions.get(KEY), engine.sessions.updates(KEY)) == (record, log)
        assert committed(engine, "a").tail == tail
        assert [(update.frozen, update.request_id) for update in log] == [(False, "r1"), (True, None)]


def test_a_second_engine_on_the_folder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with running_engine(folder=tmp_path) as engine:
        say(engine)
        with pytest.raises(StoreError, match="Another process"), running_engine(folder=tmp_path):
            pass
        assert say(engine)[1].version == 2


@pytest.mark.parametrize("name", ["sessions.db", "states", "lock"])
def test_an_engine_that_could_not_start_holds_nothing(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError), running_engine(folder=folder):
        pass
    (folder / name).unlink()
    with running_engine(folder=folder) as engine:
        assert say(engine)[1].version == 1


def test_an_exported_session_goes_on_elsewhere_bit_for_bit(tmp_path: Path) -> None:
    with running_engine(folder=tmp_path) as here, running_engine() as there:
        say(here)
        there.sessions.import_(KEY, here.sessions.export(KEY))
        assert say(there)[0] == say(here)[0]
        assert head(there) == head(here)


def test_undo_is_as_if_the_turn_had_never_been_also_after_a_restart(tmp_path: Path) -> None:
    with running_engine(folder=tmp_path) as engine:
        say(engine)
        say(engine, "something else to be undone")
    with running_engine(folder=tmp_path) as engine:
        engine.sessions.rollback(KEY)
        events, report = say(engine, "the end")
    with running_engine() as unbroken:
        say(unbroken)
        assert say(unbroken, "the end")[0] == events
    assert (report.version, report.parent_version) == (4, 3)


@pytest.mark.parametrize("damage", ["missing", "link", "cut", "oversize", "other version", "other session"])
def test_a_damaged_memory_is_refused_and_an_older_version_still_serves(tmp_path: Path, damage: str) -> None:
    with running_engine(folder=tmp_path) as engine:
        say(engine)
        first = head(engine)
        say(engine)
        say(engine, "another session", session_id="b")
        path = tmp_path / "states" / engine.sessions._vault.files.name("", "a", 2)
        other = tmp_path / "states" / engine.sessions._vault.files.name("", "b", 1)
    data = path.read_bytes()
    path.unlink()
    if damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "oversize":
        path.write_bytes(data + bytes(1 << 20))
    elif damage == "other version":
        shutil.copy(tmp_path / "states" / path.name.replace(".2.", ".1."), path)
    elif damage == "other session":
        shutil.copy(other, path)
    with running_engine(folder=tmp_path) as engine:
        for _ in range(2):
            with pytest.raises(StateError):
                say(engine)
        with pytest.raises(StateError):
            engine.sessions.export(KEY)
        assert engine.sessions.get(KEY).head.version == 2
        engine.sessions.rollback(KEY)
        assert head(engine) == first
        assert say(engine)[1].version == 4


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_rolls_the_turn_back_and_the_session_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(error, os.strerror(error))

    with running_engine(folder=tmp_path) as engine, running_engine() as unbroken:
        say(engine)
        before = state_files(tmp_path)
        with monkeypatch.context() as broken:
            broken.setattr(os, call, fail)
            with pytest.raises(StoreError, match="cannot be kept"):
                say(engine)
        assert state_files(tmp_path) == before
        say(unbroken)
        assert say(engine)[0] == say(unbroken)[0]
        assert committed(engine, "a").version == 2


@pytest.mark.parametrize("room", [0, 1000, "all but the database"])
def test_a_full_disk_rolls_the_turn_back_and_the_session_goes_on(tmp_path: Path, room: int | str) -> None:
    with running_engine(folder=tmp_path) as engine:
        for _ in range(3):
            say(engine, retry=Retry("digest"))
        before, memory = contents(tmp_path / "states"), head(engine)
        size = max(path.stat().st_size for path in state_files(tmp_path))
        while (tmp_path / "sessions.db-wal").stat().st_size < 2 * size:
            engine.sessions.configure(KEY, metadata={"note": "x" * 500})
        with file_size_limit(size + 1 if isinstance(room, str) else room), pytest.raises(StoreError):
            say(engine, retry=Retry("digest", "key"))
        assert (contents(tmp_path / "states"), head(engine)) == (before, memory)
        report = say(engine, retry=Retry("digest", "key"))[1]
        assert (report.version, report.replayed) == (4, False)
    with running_engine(folder=tmp_path) as engine:
        assert say(engine)[1].version == 5


@pytest.mark.parametrize("action", ["import", "fork"])
def test_what_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    def fail(*_: Any) -> None:
        raise StoreError("full")

    with running_engine(folder=tmp_path) as engine:
        say(engine)
        say(engine)
        data, before = engine.sessions.export(KEY), contents(tmp_path / "states")
        new = SessionKey("", "b")
        with monkeypatch.context() as broken:
            broken.setattr(engine.sessions._vault.records, "commit", fail)
            with pytest.raises(StoreError, match="full"):
                engine.sessions.fork(KEY, new.id) if action == "fork" else engine.sessions.import_(new, data)
        assert contents(tmp_path / "states") == before


def test_a_file_that_cannot_be_deleted_does_not_undo_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = EngineLimits(store=StoreLimits(versions=2))
    with running_engine(limits, folder=tmp_path) as engine:
        say(engine)
        say(engine)

        def fail(name: str) -> None:
            raise StoreError(f"{name} cannot be deleted")

        with monkeypatch.context() as broken:
            broken.setattr(engine.sessions._vault.files, "delete", fail)
            assert say(engine)[1].version == 3
        memory = head(engine)
        assert len(state_files(tmp_path)) == 3
    with running_engine(limits, folder=tmp_path) as engine:
        assert head(engine) == memory
        assert len(state_files(tmp_path)) == 2


def rows_of(engine: Engine, session_id: str) -> str:
    """Every text that the database has of a session."""
    found: list[str] = []
    for table, columns in (
        ("session", "settings"),
        ("mark", "data"),
        ("receipt", "digest, data"),
        ("provenance", "data"),
    ):
        with engine.sessions._vault.records._read() as db:
            found += [
                "\n".join(row) for row in db.execute(f"select {columns} from {table} where id = ?", (session_id,))
            ]
    return "\n".join(found)


def pieces(text: str, other: str) -> set[bytes]:
    """Pieces of `text` that occur nowhere in `other`."""
    cut = {text[i : i + 50] for i in range(0, len(text), 25)}
    return {piece.encode() for piece in cut if piece not in other and len(piece) == 50}


def test_deleting_leaves_no_byte_of_a_session_in_the_folder(tmp_path: Path) -> None:
    with running_engine(folder=tmp_path) as engine:
        for session_id in ("the-canary", "the-other", "yet-another"):
            key = SessionKey("owner", session_id)
            engine.sessions.create(key, Settings(metadata={"note": f"{session_id} in metadata"}))
            for turn in range(4):
                retry = Retry(f"{session_id} digest {turn}", f"{session_id} key {turn}")
                params = SamplingParams(seed=turn, max_tokens=30, logprobs=5)
                request = TurnRequest(tuple(session_id.encode()), params, session_id, owner="owner", retry=retry)
                list(engine.turn(request))
            engine.sessions.snapshot(key, f"{session_id} snapshot")
            engine.sessions.configure(key, metadata={"note": f"{session_id} changed"})
            engine.sessions.rollback(key)
        told = pieces(rows_of(engine, "the-canary"), rows_of(engine, "the-other") + rows_of(engine, "yet-another"))
        memory = engine.sessions.export(SessionKey("owner", "the-canary"))
        whole = contents(tmp_path)
        assert sum(text in whole for text in told) > 100
        files = len(state_files(tmp_path))
        engine.sessions.delete(SessionKey("owner", "the-canary"))
        left = contents(tmp_path)
        assert [text for text in {*told, b"the-canary", memory[-1000:]} if text in left] == []
        assert b"the-other" in left
        assert len(state_files(tmp_path)) == files * 2 // 3
        assert engine.sessions.stats()["resident_sessions"] == 2


class Counting:
    """A backend, or a stream of it, that counts the tokens it is given."""

    def __init__(self, inner: Any, counts: list[int]) -> None:
        self._inner, self.counts = inner, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, state: MemoryState) -> Counting:
        """A stream that continues from `state`."""
        return Counting(self._inner.open(state), self.counts)

    def feed(self, tokens: Tokens, *args: Any) -> Array:
        """Read tokens."""
        self.counts.append(tokens.size)
        logits: Array = self._inner.feed(tokens, *args)
        return logits


def test_the_shipped_model_goes_on_after_a_restart_from_the_new_tokens_alone() -> None:
    model = load(MODEL, threads=1)
    tokenizer = Tokenizer(model.tokenizer_json)
    prompts = [tuple(tokenizer.encode(text)) for text in ("The old house stood " * 9, "by the river. " * 5)]
    params = SamplingParams(seed=1, max_tokens=9, logprobs=2)

    def turn(engine: Engine, prompt: tuple[int, ...]) -> tuple[list[Any], str]:
        return list(engine.turn(TurnRequest(prompt, params, "a", score_prompt=True)))[:-1], head(engine)

    unbroken = Engine(model, tokenizer)
    expected = [turn(unbroken, prompt) for prompt in prompts]
    unbroken.shutdown()
    with tempfile.TemporaryDirectory() as folder:
        for prompt, told in zip(prompts, expected, strict=True):
            backend = Counting(model, [])
            engine = Engine(backend, tokenizer, folder=Path(folder))
            backend.counts.clear()
            assert turn(engine, prompt) == told
            engine.shutdown()
            assert sum(backend.counts) == len(prompt) + len(tokens_of(told[0]))
