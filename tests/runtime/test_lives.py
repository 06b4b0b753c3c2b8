"""Whatever is done to sessions, their memory is that of a plain model which rereads the tokens."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from engines import CONFIG, TOKENIZER, NumpyBackend, committed
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from turns import bits, say, tokens_of

from fednl_runtime.engine import Engine, EngineLimits
from fednl_runtime.errors import SessionExistsError, SessionNotFoundError, SnapshotNotFoundError
from fednl_runtime.reference import run
from fednl_runtime.session import Session, SessionKey
from fednl_runtime.state import MemoryState
from fednl_runtime.text import unfinished
from fednl_runtime.vault import StoreLimits

VERSIONS = 3
LIMITS = EngineLimits(store=StoreLimits(versions=VERSIONS, resident_bytes=1))
BACKEND = NumpyBackend()
TEXTS = st.sampled_from(["the", "€", "hello other", "a", "the end of it"])
NAMES = st.sampled_from(["a", "b", "c"])
TARGETS = st.integers(0, 12) | st.sampled_from(["one", "two"])


@functools.cache
def reread(tokens: tuple[int, ...]) -> str:
    """The digest of the memory that has read these tokens in one go."""
    zeros = MemoryState.zeros(CONFIG)
    if not tokens:
        return bits(Session(None, zeros))
    logits, state = run(BACKEND.params, CONFIG, np.array([tokens], np.int64), zeros, np.ones((1, 2), np.float32))
    return bits(Session(None, state, logits=logits[0, -1], tail=unfinished(TOKENIZER.decode_bytes(tokens))))


@dataclasses.dataclass(frozen=True)
class Version:
    """A version in the plain model: the tokens that its memory has read, and whether there is a memory at all."""

    number: int
    tokens: tuple[int, ...] = ()
    parent: int = 0
    anchor: int = 0
    fresh: bool = False
    name: str | None = None


START = Version(0, fresh=True)


class Lives(RuleBasedStateMachine):
    """An engine on a folder, and the lists of versions that its sessions ought to have."""

    @initialize()
    def begin(self) -> None:
        """An empty folder."""
        self.folder = Path(tempfile.mkdtemp())
        self.engine = Engine(BACKEND, TOKENIZER, LIMITS, folder=self.folder)
        self.sessions: dict[str, list[Version]] = {}

    def teardown(self) -> None:
        """Nothing stays."""
        self.engine.shutdown()
        shutil.rmtree(self.folder)

    def head(self, name: str) -> Version:
        """The head of a session."""
        return [START, *self.sessions.get(name, [])][-1]

    def add(self, name: str, tokens: tuple[int, ...], parent: int, anchor: int, fresh: bool = False) -> None:
        """A version that follows the head; the oldest may go."""
        version = Version(self.head(name).number + 1, tokens, parent, anchor, fresh)
        self.keep(name, [*self.sessions.get(name, []), version])

    def keep(self, name: str, versions: list[Version]) -> None:
        """The last versions, the named ones and where the conversation began."""
        last = versions[-VERSIONS:]
        anchor = versions[-1].anchor if versions else None
        self.sessions[name] = [v for v in versions if v in last or v.name is not None or v.number == anchor]

    def find(self, name: str, to: int | str) -> Version | None:
        """A version by number or name, None if it is not kept."""
        if to == 0:
            return START
        return next((v for v in self.sessions[name] if to in (v.number, v.name)), None)

    def expected(self, name: str, to: Version) -> None:
        """Go on with the memory of a version."""
        anchor = to.anchor if to.number else self.head(name).number + 1
        self.add(name, to.tokens, to.parent, anchor, to.fresh)

    @rule(name=NAMES, text=TEXTS, answer=st.integers(0, 2))
    def turn(self, name: str, text: str, answer: int) -> None:
        """A turn reads a text and answers."""
        head = self.head(name)
        BACKEND.calls.clear()
        events, report = say(self.engine, text, session_id=name, max_tokens=answer)
        read = (*TOKENIZER.encode(text), *tokens_of(events))
        assert sum(count for _, count in BACKEND.calls) == len(read)
        assert report.version == head.number + 1
        self.add(name, head.tokens + read, head.number, head.number)

    @rule(name=NAMES, text=TEXTS, learn=st.sampled_from([False, "dry_run"]))
    def look(self, name: str, text: str, learn: bool | str) -> None:
        """A turn that keeps nothing."""
        say(self.engine, text, session_id=name, learn=learn)

    @precondition(lambda self: self.sessions)
    @rule(name=NAMES, to=TARGETS)
    def rollback(self, name: str, to: int | str) -> None:
        """Go back to a version by number or name."""
        key = SessionKey("", name)
        if name not in self.sessions:
            with pytest.raises(SessionNotFoundError):
                self.engine.sessions.rollback(key, to)
        elif (found := self.find(name, to)) is None:
            with pytest.raises(SnapshotNotFoundError):
                self.engine.sessions.rollback(key, to)
        else:
            self.engine.sessions.rollback(key, to)
            self.expected(name, found)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        """Go back before the last turns."""
        name, turns = data.draw(st.sampled_from(sorted(self.sessions))), data.draw(st.integers(1, 3))
        found: Version | None = self.head(name)
        for _ in range(turns):
            if found is not None:
                found = None if found.fresh and not found.parent else self.find(name, found.parent)
        if found is None:
            with pytest.raises(SnapshotNotFoundError):
                self.engine.sessions.rollback(SessionKey("", name), turns=turns)
        else:
            self.engine.sessions.rollback(SessionKey("", name), turns=turns)
            self.expected(name, found)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        """Go on with an empty memory."""
        name = data.draw(st.sampled_from(sorted(self.sessions)))
        self.engine.sessions.reset(SessionKey("", name))
        number = self.head(name).number
        self.add(name, (), number, number + 1, fresh=True)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), other=NAMES, to=st.none() | TARGETS)
    def fork(self, data: st.DataObject, other: str, to: int | str | None) -> None:
        """A second session with all up to a version."""
        name = data.draw(st.sampled_from(sorted(self.sessions)))
        found = self.head(name) if to is None else self.find(name, to)
        if found is None or other in self.sessions:
            with pytest.raises((SnapshotNotFoundError, SessionExistsError)):
                self.engine.sessions.fork(SessionKey("", name), other, to)
        else:
            self.engine.sessions.fork(SessionKey("", name), other, to)
            self.sessions[other] = [v for v in self.sessions[name] if v.number <= found.number]

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), other=NAMES)
    def carry(self, data: st.DataObject, other: str) -> None:
        """Export a session and import it under another name."""
        name = data.draw(st.sampled_from(sorted(self.sessions)))
        file = self.engine.sessions.export(SessionKey("", name))
        if other in self.sessions:
            with pytest.raises(SessionExistsError):
                self.engine.sessions.import_(SessionKey("", other), file)
        else:
            self.engine.sessions.import_(SessionKey("", other), file)
            self.sessions[other] = [Version(1, self.head(name).tokens, 0, 1)]

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), label=st.sampled_from(["one", "two"]))
    def snapshot(self, data: st.DataObject, label: str) -> None:
        """Name the head, or take the name from whatever has it."""
        name = data.draw(st.sampled_from(sorted(self.sessions)))
        key, versions = SessionKey("", name), self.sessions[name]
        if any(version.name == label for version in versions):
            self.engine.sessions.drop_snapshot(key, label)
            self.keep(name, [dataclasses.replace(v, name=None) if v.name == label else v for v in versions])
        elif versions[-1].name is not None:
            with pytest.raises(SessionExistsError):
                self.engine.sessions.snapshot(key, label)
        else:
            self.engine.sessions.snapshot(key, label)
            self.sessions[name] = [*versions[:-1], dataclasses.replace(self.head(name), name=label)]

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """Forget a session."""
        name = data.draw(st.sampled_from(sorted(self.sessions)))
        self.engine.sessions.delete(SessionKey("", name))
        del self.sessions[name]

    @rule()
    def restart(self) -> None:
        """Another process takes the folder."""
        self.engine.shutdown()
        self.engine = Engine(BACKEND, TOKENIZER, LIMITS, folder=self.folder)

    @invariant()
    def memories_are_those_of_the_tokens(self) -> None:
        """Every head, bit for bit, and every version there is to go back to."""
        store = self.engine.sessions
        assert {record.key.id for record in store.page("")} == set(self.sessions)
        for name, versions in self.sessions.items():
            record = store.get(SessionKey("", name))
            told = [(m.version, m.tokens_seen, m.parent, m.anchor, m.name) for m in record.marks]
            assert told == [(v.number, len(v.tokens), v.parent, v.anchor, v.name) for v in versions]
            assert bits(committed(self.engine, name)) == reread(self.head(name).tokens)
        kept = {store._vault.files.name(*content) for content in store._vault.records.contents()}
        assert set(store._vault.files.names()) == kept
        assert store._vault.records.counts() == (len(self.sessions), len(kept))


TestLives = Lives.TestCase
TestLives.settings = settings(settings.get_profile("patient"), max_examples=25, stateful_step_count=25)
