"""What the server says when it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fednl_runtime
from fednl_runtime.engine import Engine
from fednl_runtime.model_file import ModelFile
from fednl_runtime.server_api.state_dir import described


def human(number: float, unit: str = "") -> str:
    """A number in thousands, millions or billions: 5.3 M, 1.2 MB."""
    for prefix in ("", "k", "M"):
        if number < 1000:
            return f"{number:.3g} {prefix}{unit}".rstrip()
        number /= 1000
    return f"{number:.3g} G{unit}"


def url(address: tuple[Any, ...]) -> str:
    """The http URL of a socket address."""
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def banner(
    model: ModelFile, engine: Engine, address: tuple[Any, ...], needs_key: bool, folder: Path | None = None
) -> str:
    """Model, memory, address and a command to try, as text of several lines."""
    key = "\n  -H 'authorization: Bearer '\"$FEDNL_API_KEY\" \\" if needs_key else ""
    return f"""FedNL Runtime {fednl_runtime.__version__}
  model    {model.name}, {human(model.parameters)} parameters, {model.fingerprint[:12]}
  memory   {human(engine.state_bytes, "B")} a session, the same after any number of tokens
  sessions {described(folder)}
  address  {url(address)}/v1 ({"with the key in FEDNL_API_KEY" if needs_key else "this machine only, no key"})

Try it:
curl -N {url(address)}/v1/completions -H 'content-type: application/json' \\{key}
  -d '{{"prompt": "Once upon a time", "session_id": "me", "stream": true, "max_tokens": 64}}'
"""
