"""Thousands of sessions made, used and deleted over HTTP: what they leave in files, rows and memory.

Starts `fednl-runtime serve` on an empty folder. Each session has two turns; some are forked, named and
rolled back; the oldest is deleted when more than `--alive` are there, and all at the end. RssAnon, files
and bytes are read along the way and compared with those after the first tenth, when as many sessions
had been deleted again. The last line printed is a JSON object. Linux only.
"""

from __future__ import annotations

import collections
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import httpx
from soak import free_port, rss_anon, wait_until_healthy

TABLES = ("session", "mark", "receipt", "provenance", "deletion")


def use(client: httpx.Client, name: str, number: int, seconds: dict[str, list[float]]) -> None:
    """Two turns of a new session, and now and then a fork, a snapshot and a step back."""
    for turn in range(2):
        body = {"model": "hope", "prompt": f"{name} says {number * turn}. ", "max_tokens": 4, "session_id": name}
        timed(
            seconds["turn"], client, "POST", "/v1/completions", json=body, headers={"idempotency-key": f"{name}{turn}"}
        )
    if number % 10 == 0:
        timed(seconds["fork"], client, "POST", f"/v1/sessions/{name}/fork", json={"id": f"{name}-fork"})
        timed(seconds["snapshot"], client, "POST", f"/v1/sessions/{name}/snapshots", json={"name": "first"})
        timed(seconds["rollback"], client, "POST", f"/v1/sessions/{name}/rollback")
        timed(seconds["delete"], client, "DELETE", f"/v1/sessions/{name}-fork")


def timed(seconds: list[float], client: httpx.Client, *call: Any, **fields: Any) -> None:
    """Make a call that has to succeed, and note how long it took."""
    began = time.perf_counter()
    client.request(*call, **fields).raise_for_status()
    seconds.append(time.perf_counter() - began)


def files(folder: Path) -> tuple[int, int]:
    """Number of files below a folder, and their bytes; one may be deleted while it is looked at."""
    sizes = []
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else None)
        except FileNotFoundError:
            continue
    known = [size for size in sizes if size is not None]
    return len(known), sum(known)


def rows(folder: Path) -> dict[str, int]:
    """Rows of each table of the database below a folder."""
    (path,) = folder.rglob("sessions.db")
    db = sqlite3.connect(path)
    found = {table: db.execute(f"select count(*) from {table}").fetchone()[0] for table in TABLES}
    db.close()
    return found


def live(client: httpx.Client, pid: int, folder: Path, sessions: int, alive: int, report: dict[str, Any]) -> None:
    """Make, use and delete so many sessions; note what there is whenever all of them were deleted."""
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    names: collections.deque[str] = collections.deque()
    samples = report["samples"] = []
    for number in range(sessions):
        names.append(f"soak-{number}")
        use(client, names[-1], number, seconds)
        last = (number + 1) % max(1, sessions // 10) == 0
        while len(names) > (0 if last else alive):
            timed(seconds["delete"], client, "DELETE", f"/v1/sessions/{names.popleft()}")
        if last:
            found, size = files(folder)
            samples.append({"sessions": number + 1, "rss_anon": rss_anon(pid), "files": found, "bytes": size})
            click.echo(json.dumps(samples[-1]), err=True)
    report["median_ms"] = {name: round(1000 * statistics.median(times), 2) for name, times in sorted(seconds.items())}
    report["calls"] = {name: len(times) for name, times in sorted(seconds.items())}


@click.command()
@click.option("--sessions", default=10_000, show_default=True, help="Sessions to make and delete.")
@click.option("--alive", default=50, show_default=True, help="Sessions that are there at a time.")
@click.option(
    "--session-memory",
    default="16M",
    show_default=True,
    help="As of `serve`: few sessions fit, others are read from disk.",
)
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="[default: the shipped model]")
def main(sessions: int, alive: int, session_memory: str, model: Path | None) -> None:
    """Make, use and delete sessions on a real server."""
    port, started = free_port(), time.monotonic()
    report: dict[str, Any] = {"sessions": sessions, "alive": alive}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [str(Path(sys.executable).with_name("fednl-runtime")), "serve", *([str(model)] if model else [])]
        command += ["--port", str(port), "--state-dir", name, "--session-memory", session_memory]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until_healthy(url := f"http://127.0.0.1:{port}")
            with httpx.Client(base_url=url, timeout=120) as client:
                report["at_start"] = dict(zip(("files", "bytes"), files(folder), strict=True))
                live(client, server.pid, folder, sessions, alive, report)
        finally:
            server.terminate()
            server.wait(60)
        report["at_end"] = dict(zip(("files", "bytes"), files(folder), strict=True)) | {"rows": rows(folder)}
    first, last = report["samples"][0], report["samples"][-1]
    report["rss_anon_drift_percent"] = round(100 * (last["rss_anon"] / first["rss_anon"] - 1), 3)
    report["seconds"] = round(time.monotonic() - started, 1)
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
