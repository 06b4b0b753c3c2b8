"""A real server at several times its capacity: statuses, latencies, memory, lost commits and cross-talk.

Starts `fednl-runtime serve` with few slots and sends it a mixture: completions with and without sessions
and streams, clients that leave or read slowly, malformed and oversized bodies, wrong routes. Everything that
is answered must be a documented status in the documented shape; every committed turn must be in its
session's version at the end; an answer that echoes its prompt must hold its own canary and no other.
RssAnon is read each half second; drift compares the median of the last fifth with that of the second.
The last line printed is a JSON object. Linux only.
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import httpx

from fednl_runtime.server_api.errors import CODES, INTERNAL, STATUSES

SLOTS, QUEUE = 4, 12
KNOWN = {(s.status, s.code) for s in (*STATUSES.values(), INTERNAL)} | {
    (status, code) for status, code in CODES.items()
}
SAMPLE_S = 0.5


def rss_anon(pid: int) -> int:
    """Bytes of anonymous memory of a process."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match, "the kernel reports RssAnon"
    return 1024 * int(match[1])


def drift(samples: list[int]) -> float:
    """Change of memory in percent, from the second fifth to the last."""
    fifth = max(1, len(samples) // 5)
    return 100 * (statistics.median(samples[-fifth:]) / statistics.median(samples[fifth : 2 * fifth]) - 1)


def quantiles(times: list[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    ordered = sorted(times) or [0.0]
    return {f"p{q}": round(1000 * ordered[min(len(ordered) - 1, len(ordered) * q // 100)], 1) for q in (50, 99)}


class Load:
    """The clients, and what they saw."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self._client, self._rng = client, random.Random(seed)
        self.statuses: collections.Counter[str] = collections.Counter()
        self.times: dict[str, list[float]] = collections.defaultdict(list)
        self.committed: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []

    async def worker(self, number: int, requests: asyncio.Queue[int]) -> None:
        """Send requests until none are left."""
        kinds: list[tuple[Callable[[int, int], Awaitable[None]], int]] = [
            (self.completion, 45),
            (self.stream, 20),
            (self.leaver, 10),
            (self.slow_reader, 5),
            (self.malformed, 15),
            (self.stray, 5),
        ]
        while not requests.empty():
            index = requests.get_nowait()
            (kind,) = self._rng.choices([k for k, _ in kinds], [w for _, w in kinds])
            try:
                await kind(number, index)
            except httpx.TransportError as error:
                self.statuses[type(error).__name__] += 1

    def body(self, number: int, index: int, **fields: Any) -> dict[str, Any]:
        """A completion request that echoes a canary; half of them teach the worker's session."""
        session = {"session_id": f"w{number}"} if index % 2 else {}
        return {"prompt": f"canary-{index}-end " * 3, "max_tokens": 4, "echo": True, **session, **fields}

    async def completion(self, number: int, index: int) -> None:
        """An ordinary request."""
        begin = time.perf_counter()
        response = await self._client.post("/v1/completions", json=self.body(number, index))
        self.note(response, begin)
        if response.status_code == 200:
            answer = response.json()
            self.check_echo(index, answer["choices"][0]["text"])
            self.note_commit(answer["session"])

    async def stream(self, number: int, index: int, pause_s: float = 0) -> None:
        """A stream that is read to its end."""
        begin = time.perf_counter()
        body = self.body(number, index, stream=True)
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                self.note(response, begin)
                return
            text = ""
            async for line in response.aiter_lines():
                await asyncio.sleep(pause_s)
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        self.statuses[f"200, then {chunk['error']['code']}"] += 1
                        return
                    text += chunk["choices"][0]["text"]
                    self.note_commit(chunk.get("session") or {})
            self.note(response, begin)
            self.check_echo(index, text)

    async def slow_reader(self, number: int, index: int) -> None:
        """A stream whose client takes its time."""
        await self.stream(number, index, pause_s=0.2)

    async def leaver(self, number: int, index: int) -> None:
        """A client that leaves a session of its own after a moment."""
        body = self.body(number, index, stream=index % 3 > 0, session_id=f"left{number}", max_tokens=64)
        try:
            await asyncio.wait_for(self._client.post("/v1/completions", json=body), self._rng.uniform(0.001, 0.3))
            self.statuses["answered before it left"] += 1
        except TimeoutError:
            self.statuses["left"] += 1

    async def malformed(self, number: int, index: int) -> None:
        """A body that cannot be served."""
        content, kind = self._rng.choice(
            [
                (b"{", "application/json"),
                (b"\xff\xfe", "application/json"),
                (b'{"prompt": 1e400}', "application/json"),
                (b'{"max_tokens": -1}', "application/json"),
                (b'{"nonsense": 1}', "application/json"),
                (b"[" * 3000, "application/json"),
                (b'{"prompt": "a"}', "text/plain"),
                (b'{"prompt": "' + b"a" * (5 << 20) + b'"}', "application/json"),
            ]
        )
        begin = time.perf_counter()
        headers = {"content-type": kind}
        self.note(await self._client.post("/v1/completions", content=content, headers=headers), begin)

    async def stray(self, number: int, index: int) -> None:
        """A request to where there is nothing."""
        method, path = self._rng.choice([("GET", "/v1/nothing"), ("PUT", "/v1/models"), ("GET", "/v1/sessions/none")])
        begin = time.perf_counter()
        self.note(await self._client.request(method, path), begin)

    def note(self, response: httpx.Response, begin: float) -> None:
        """Count an answer and its time; one that is not documented is a fault."""
        code = None
        if response.status_code != 200:
            error = response.json().get("error", {})
            code = error.get("code")
            if list(error) != ["message", "type", "param", "code"] or (response.status_code, code) not in KNOWN:
                self.faults.append(f"{response.status_code}: {response.text[:200]}")
        self.statuses[f"{response.status_code} {code or ''}".strip()] += 1
        self.times["answered" if response.status_code == 200 else "refused"].append(time.perf_counter() - begin)

    def note_commit(self, session: dict[str, Any]) -> None:
        """Count a turn that its session has learnt."""
        if session.get("learned"):
            self.committed[session["id"]] += 1

    def check_echo(self, index: int, text: str) -> None:
        """An answer holds the canary of its own request and no other."""
        if set(re.findall(r"canary-(\d+)-end", text)) != {str(index)}:
            self.faults.append(f"the answer to {index} is {text[:200]!r}")


async def attack(url: str, requests: int, workers: int, seed: int, pid: int) -> dict[str, Any]:
    """Send everything; return what was seen."""
    queue: asyncio.Queue[int] = asyncio.Queue()
    for index in range(requests):
        queue.put_nowait(index)
    memory: list[int] = []

    async def sample() -> None:
        while True:
            memory.append(rss_anon(pid))
            await asyncio.sleep(SAMPLE_S)

    limits = httpx.Limits(max_connections=workers, max_keepalive_connections=workers)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        load, begin, sampler = Load(client, seed), time.perf_counter(), asyncio.create_task(sample())
        await asyncio.gather(*(load.worker(number, queue) for number in range(workers)))
        seconds = time.perf_counter() - begin
        sampler.cancel()
        lost = {}
        for session, turns in load.committed.items():
            version = (await client.get(f"/v1/sessions/{session}")).json()["version"]
            if version != turns:
                lost[session] = [turns, version]
        metrics = (await client.get("/metrics")).text
    waiting = re.search(r"^fednl_runtime_requests_waiting (\S+)", metrics, re.MULTILINE)
    return {
        "requests": requests,
        "clients": workers,
        "capacity": SLOTS + QUEUE,
        "seconds": round(seconds, 1),
        "statuses": dict(sorted(load.statuses.items())),
        "server_errors_other_than_503": sum(n for s, n in load.statuses.items() if re.match(r"5(?!03)", s)),
        "latency_ms": {name: quantiles(times) for name, times in sorted(load.times.items())},
        "turns_committed": sum(load.committed.values()),
        "sessions_whose_version_differs": lost,
        "faults": load.faults[:10],
        "waiting_at_the_end": waiting and float(waiting[1]),
        "rss_anon_bytes": [memory[i * (len(memory) - 1) // 10] for i in range(11)],
        "rss_anon_drift_percent": round(drift(memory), 2),
    }


@click.command()
@click.option("--requests", default=10_000, show_default=True, help="Requests to send.")
@click.option("--times", default=4, show_default=True, help="Clients, in multiples of slots and queue.")
@click.option("--seed", default=0, show_default=True, help="Seed of the mixture.")
@click.option("--model", type=click.Path(exists=True), help="[default: the shipped model]")
def main(requests: int, times: int, seed: int, model: str | None) -> None:
    """Overload a server of its own and print what became of it; exit code 1 if a bar was missed."""
    program = [str(Path(sys.executable).with_name("fednl-runtime")), "serve", *([model] if model else [])]
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+") as log:
        options = ["--port", "0", "--slots", str(SLOTS), "--queue", str(QUEUE)]
        options += ["--session-memory", "64M", "--log-format", "json"]
        command = [*program, *options, "--state-dir", f"{folder}/state"]
        with subprocess.Popen(command, stderr=log, text=True) as server:
            try:
                while not (found := re.search(r'"url": "([^"]+)"', (Path(folder) / "log").read_text())):
                    time.sleep(0.05)
                report = asyncio.run(attack(found[1], requests, times * (SLOTS + QUEUE), seed, server.pid))
            finally:
                server.terminate()
            report["exit_code"] = server.wait(60)
        report["log_lines"] = len((Path(folder) / "log").read_text().splitlines())
    click.echo(json.dumps(report))
    held = not (report["server_errors_other_than_503"] or report["faults"] or report["sessions_whose_version_differs"])
    if not held or abs(report["rss_anon_drift_percent"]) >= 2:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
