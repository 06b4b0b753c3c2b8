"""A long session over HTTP: state bytes and process memory while it reads hundreds of thousands of tokens.

Starts `fednl-runtime serve` and streams text through one session in turns of prompt and answer. RssAnon
is read from the server process after each turn; drift compares the median of the last tenth with the
median of the tenth after warm-up. The last line printed is a JSON object. Linux only.
"""

from __future__ import annotations

import json
import re
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
import httpx

WARM_UP = 0.2
"""Share of the tokens after which memory is compared."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


def rss_anon(pid: int) -> int:
    """Bytes of anonymous memory of a process."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match, "the kernel reports RssAnon"
    return 1024 * int(match[1])


def wait_until_healthy(url: str, seconds: float = 30) -> None:
    """Return when the server answers; raise TimeoutError if it does not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise TimeoutError(f"{url} did not answer within {seconds} s")


def drift(samples: list[int]) -> float:
    """Change of memory in percent, from the tenth after warm-up to the last tenth."""
    tenth = max(1, len(samples) // 10)
    start = int(WARM_UP * len(samples))
    before = statistics.median(samples[start : start + tenth])
    return 100 * (statistics.median(samples[-tenth:]) / before - 1)


@click.command()
@click.argument("text", type=click.Path(exists=True, path_type=Path))
@click.option("--tokens", default=200_000, show_default=True, help="Tokens to read at least.")
@click.option("--characters", default=4000, show_default=True, help="Characters of text a turn.")
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="[default: the shipped model]")
def main(text: Path, tokens: int, characters: int, model: Path | None) -> None:
    """Stream TEXT (a plain file, repeated as needed) through one session of a real server."""
    content, port = text.read_text(), free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).with_name("fednl-runtime")), "serve", "--in-memory", "--port", str(port)]
    server = subprocess.Popen([*command, *([str(model)] if model else [])], stderr=subprocess.DEVNULL)
    try:
        wait_until_healthy(url)
        memory, state_bytes, seen, offset, start = [], set(), 0, 0, time.monotonic()
        with httpx.Client(base_url=url, timeout=120) as client:
            while seen < tokens:
                prompt = content[offset : offset + characters]
                offset = (offset + characters) % max(1, len(content) - characters)
                body = {"model": "hope", "prompt": prompt, "max_tokens": 16, "session_id": "soak"}
                session = client.post("/v1/completions", json=body).raise_for_status().json()["session"]
                seen = session["tokens_seen"]
                state_bytes.add(session["state_bytes"])
                memory.append(rss_anon(server.pid))
        report = {
            "tokens": seen,
            "turns": len(memory),
            "seconds": round(time.monotonic() - start, 1),
            "state_bytes": sorted(state_bytes),
            "rss_anon_bytes": [memory[i * (len(memory) - 1) // 10] for i in range(11)],
            "rss_anon_drift_percent": drift(memory),
        }
    finally:
        server.terminate()
        server.wait(30)
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
