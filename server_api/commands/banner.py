"""What the server says when it starts."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import fednl_runtime
from fednl_runtime.engine import Engine
from fednl_runtime.model_file import ModelFile
from fednl_runtime.server_api.commands.state_dir import described


def human(number: float, unit: str = "") -> str:
    """A number in thousands, millions or billions: 5.3 M, 1.2 MB."""
    for prefix in ("", "k", "M"):
        if number < 1000:
            return f"{number:.3g} {prefix}{unit}".rstrip()
        number /= 1000
    return f"{number:.3g} G{unit}"


def url(address: tuple[Any, ...], scheme: str = "http") -> str:
    """The URL of a socket address."""
    host, port = address[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@dataclasses.dataclass(frozen=True)
class Listening:
    """Where and how a server listens, and where it keeps sessions."""

    address: tuple[Any, ...]
    tls: bool
    keys: int
    """Number of keys; 0 lets everybody in."""
    key_in_environment: bool
    folder: Path | None

    @property
    def url(self) -> str:
        """The server's URL, as a client on this machine can use it."""
        host, port = self.address[:2]
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return url((here, port), "https" if self.tls else "http")

    @property
    def access(self) -> str:
        """Who may come in, in words."""
        everywhere = self.address[0] in ("0.0.0.0", "::")
        where = f"all addresses of {socket.gethostname()}" if everywhere else f"{self.address[0]} only"
        keys = {0: "no key", 1: "one key"}.get(self.keys, f"{self.keys} keys")
        return f"{where}, {keys}, {'TLS' if self.tls else 'no TLS'}"

    def facts(self, model: ModelFile) -> dict[str, Any]:
        """The same for a log."""
        place = None if self.folder is None else str(self.folder)
        named = {"model": model.name, "fingerprint": model.fingerprint[:12]}
        return {"url": self.url, **named, "keys": self.keys, "tls": self.tls, "sessions": place}


def banner(model: ModelFile, engine: Engine, listening: Listening) -> str:
    """Model, memory, address and a command to try, as text of several lines."""
    name = "FEDNL_API_KEY" if listening.key_in_environment else "KEY"
    key = f"\n  -H 'authorization: Bearer '\"${name}\" \\" if listening.keys else ""
    return f"""FedNL Runtime {fednl_runtime.__version__}
  model    {model.name}, {human(model.parameters)} parameters, {model.fingerprint[:12]}
  memory   {human(engine.state_bytes, "B")} a session, the same after any number of tokens
  sessions {described(listening.folder)}
  address  {listening.url}/v1 ({listening.access})
  page     {listening.url}/ui

Try it:
curl -N {listening.url}/v1/completions -H 'content-type: application/json' \\{key}
  -d '{{"prompt": "Once upon a time", "session_id": "me", "stream": true, "max_tokens": 64}}'
"""
