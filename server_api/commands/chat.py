"""The command that talks on the terminal, in sessions that live as long as it does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fednl_runtime.errors import FednlError
from fednl_runtime.server_api.commands.local import FILE, THREADS, local_engine, sampling_options
from fednl_runtime.server_api.commands.prompt import lines, summary, write_answer

if TYPE_CHECKING:
    from fednl_runtime.engine import Engine
    from fednl_runtime.sampling import SamplingParams
    from fednl_runtime.session import SessionKey
    from fednl_runtime.turn import TurnReport

SESSION = "chat"
HELP = """/undo           forget the last turn
/fork NAME      keep a copy as it is now
/use NAME       go on in a copy
/learn on|off   learn from what follows, or leave the memory as it is
/save FILE      write the session to a file, for --session or `sessions import`
/stats          what the session has read and learnt
/quit           end"""


@click.command()
@click.option("--model", type=FILE, help="Model file [default: the shipped model].")
@click.option("--session", "file", type=FILE, help="Go on in a session that was saved to this file.")
@sampling_options(max_tokens=128)
@click.option("--stop", multiple=True, default=["\n"], help="End an answer before this string [default: a new line].")
@THREADS
def chat(model: Path | None, file: Path | None, threads: int | None, **sampling: Any) -> None:
    """Talk in one session that learns from both sides; ends with /quit or the end of input."""
    from fednl_runtime.sampling import SamplingParams

    with local_engine(model, threads) as engine:
        talk = Talk(engine, SamplingParams(**sampling))
        say(talk.begin(file))
        say(f"{HELP}\n")
        for line in lines():
            if line.split() in (["/quit"], ["/exit"]):
                break
            try:
                say(talk.obey(line)) if line.startswith("/") else talk.answer(line)
            except (FednlError, OSError) as error:
                say(str(error))


def say(text: str) -> None:
    """Print what is about the conversation and not of it."""
    click.echo(text, err=True)


@dataclasses.dataclass
class Talk:
    """A conversation: the session it goes on in, and whether that learns."""

    engine: Engine
    params: SamplingParams
    name: str = SESSION
    learn: bool = True
    report: TurnReport | None = None

    @property
    def key(self) -> SessionKey:
        """The session that is talked in."""
        from fednl_runtime.session import SessionKey

        return SessionKey("", self.name)

    def begin(self, file: Path | None) -> str:
        """Begin with an empty memory, or where a saved session ended. Raises StateError, OSError."""
        from fednl_runtime.records import Settings

        if file is None:
            self.engine.sessions.create(self.key, Settings())
            return "A new session, which lives as long as this talk; /save FILE keeps it."
        record = self.engine.sessions.import_(self.key, file.read_bytes())
        return f"Going on in {file}, which has read {self._tokens(record.head.tokens_seen)}."

    def answer(self, line: str) -> None:
        """Read a line and print the answer as it comes."""
        from fednl_runtime.turn import TurnRequest

        tokens = tuple(self.engine.tokenizer.encode(f"{line}\n"))
        self.report = write_answer(self.engine, TurnRequest(tokens, self.params, self.name, self.learn))
        click.echo()

    def obey(self, line: str) -> str:
        """Do what a line that begins with a slash says; return what became of it."""
        match line.split(maxsplit=1):
            case ["/undo"]:
                return f"Back at {self._tokens(self.engine.sessions.rollback(self.key).head.tokens_seen)}."
            case ["/fork", name]:
                return self._fork(name)
            case ["/use", name]:
                return self._use(name)
            case ["/learn", "on" | "off" as switch]:
                self.learn = switch == "on"
                return f"Learning is {switch}."
            case ["/save", path]:
                return self._save(Path(path))
            case ["/stats"]:
                return self._stats()
        return HELP

    def _fork(self, name: str) -> str:
        from fednl_runtime.server_api.answering.turn_of import SESSION_ID

        if not SESSION_ID.fullmatch(name):
            return f"{name!r} is no name; use letters, digits and _.:- only."
        self.engine.sessions.fork(self.key, name)
        return f"Kept a copy {name!r}; /use {name} goes on in it."

    def _use(self, name: str) -> str:
        record = self.engine.sessions.get(self.key._replace(id=name))
        self.name = name
        return f"Going on in {name!r}, which has read {self._tokens(record.head.tokens_seen)}."

    def _save(self, path: Path) -> str:
        data = self.engine.sessions.export(self.key)
        path.write_bytes(data)
        return f"Wrote {path} ({len(data)} bytes)."

    def _stats(self) -> str:
        record, store = self.engine.sessions.find(self.key), self.engine.sessions
        others = [other.key.id for other in store.page("") if other.key != self.key]
        facts = [
            f"session {self.name}: version {record.head.version}, {self._tokens(record.head.tokens_seen)} read, "
            f"{self.engine.state_bytes} bytes, learning is {'on' if self.learn else 'off'}",
            f"last turn: {summary(self.report)}, update norm {self.report.update_norm:.2f}" if self.report else "",
            f"other sessions: {', '.join(others)}" if others else "",
        ]
        return "\n".join(filter(None, facts))

    def _tokens(self, count: int) -> str:
        return f"{count} token{'s' * (count != 1)}"
