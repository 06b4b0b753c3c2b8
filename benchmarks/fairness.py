"""Whether one long prompt starves others: gaps between tokens of busy sessions with and without it, over HTTP.

Starts `fednl-runtime serve` with a slot more than there are busy sessions. Each of these streams answers without
end, in which every token is a letter, so that each can be seen. In rounds they run for a while undisturbed; then
the long prompt arrives, and gaps are noted until its first token or `--limit`. The bar: the 99th percentile of
gaps with the prompt is at most three times that without. The last line printed is a JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx

BAR = 3.0
TEXT = "The keeper of the lighthouse wrote down {n} ships that day, and {m} of them had come from the north. "
ANSWER = 4096
"""Tokens of one answer of a busy session; the next one follows at once."""


class Crowd:
    """Busy sessions, and when each of their tokens came."""

    def __init__(self, client: httpx.AsyncClient, bias: dict[str, float]) -> None:
        self._client, self._bias = client, bias
        self.gaps: list[tuple[float, float]] = []
        """When a token came, and how long after the one before it in its answer."""

    async def talk(self, number: int) -> None:
        """Stream answers in a session of its own until cancelled."""
        while True:
            body = self.body(f"Session {number} begins. ", ANSWER, f"busy-{number}")
            before = None
            async for now in tokens(self._client, body):
                if before is not None:
                    self.gaps.append((now, now - before))
                before = now

    def body(self, prompt: str, max_tokens: int, session: str) -> dict[str, Any]:
        """A request whose answer is letters."""
        fields = {"prompt": prompt, "max_tokens": max_tokens, "session_id": session}
        return {**fields, "stream": True, "logit_bias": self._bias}

    async def first_token(self, prompt: str, session: str) -> float:
        """Seconds until the first token of the answer to a prompt."""
        began = time.perf_counter()
        async for now in tokens(self._client, self.body(prompt, 1, session)):
            return now - began
        raise AssertionError("an answer has a token")

    def between(self, start: float, end: float) -> list[float]:
        """The gaps that ended within a span of time."""
        return [gap for when, gap in self.gaps if start <= when < end]


async def tokens(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    """When each token of a streamed answer came."""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                yield time.perf_counter()


async def letters(client: httpx.AsyncClient) -> dict[str, float]:
    """A logit bias with which nothing but letters is chosen."""
    found = {}
    for letter in string.ascii_lowercase:
        ids = (await client.post("/tokenize", json={"content": letter})).json()["tokens"]
        found |= {str(ids[0]): 100.0} if len(ids) == 1 else {}
    return found


async def prompt_of(client: httpx.AsyncClient, length: int) -> str:
    """A text of about so many tokens."""
    text = "".join(TEXT.format(n=7 * i % 89, m=i % 7) for i in range(200))
    count = len((await client.post("/tokenize", json={"content": text})).json()["tokens"])
    return (text * (length // count + 1))[: len(text) * length // count]


def quantiles(gaps: list[float]) -> dict[str, float]:
    """Median, 99th percentile and the largest, in milliseconds."""
    cuts = statistics.quantiles(gaps, n=100, method="inclusive")
    return {"p50": 1000 * cuts[49], "p99": 1000 * cuts[98], "max": 1000 * max(gaps), "gaps": len(gaps)}


async def one_round(crowd: Crowd, prompt: str, seconds: float, limit: float) -> tuple[list[float], list[float], Any]:
    """Gaps without and with the long prompt, and how long its first token took, None if longer than the limit."""
    start = time.perf_counter()
    await asyncio.sleep(seconds)
    arrived, first = time.perf_counter(), None
    with contextlib.suppress(TimeoutError):
        first = await asyncio.wait_for(crowd.first_token(prompt, f"long-{arrived}"), limit)
    return crowd.between(start, arrived), crowd.between(arrived, time.perf_counter()), first


async def measure(url: str, sessions: int, length: int, rounds: int, seconds: float, limit: float) -> dict[str, Any]:
    """Run the rounds against a server."""
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        crowd, prompt = Crowd(client, await letters(client)), await prompt_of(client, length)
        with contextlib.suppress(TimeoutError):
            alone = None
            alone = await asyncio.wait_for(crowd.first_token(prompt, "alone"), limit)
        talkers = [asyncio.create_task(crowd.talk(number)) for number in range(sessions)]
        while len(crowd.gaps) < 20 * sessions:  # all of them are under way
            await asyncio.sleep(0.1)
        found = [await one_round(crowd, prompt, seconds, limit) for _ in range(rounds)]
        failed = [talker.exception() for talker in talkers if talker.done()]
        for talker in talkers:
            talker.cancel()
        await asyncio.gather(*talkers, return_exceptions=True)
    assert not failed, failed
    without, with_prompt = ([gap for r in found for gap in r[part]] for part in (0, 1))
    shares = [quantiles(r[1])["p99"] / quantiles(r[0])["p99"] for r in found]
    return {
        "prompt_tokens": length,
        "first_token_alone_s": alone,
        "first_token_s": [r[2] for r in found],
        "gap_ms": quantiles(without),
        "gap_with_prompt_ms": quantiles(with_prompt),
        "p99_ratio": quantiles(with_prompt)["p99"] / quantiles(without)["p99"],
        "p99_ratio_of_rounds": shares,
    }


@contextlib.contextmanager
def server(model: Path | None, sessions: int, threads: int) -> Iterator[str]:
    """The address of a server of its own."""
    program = [str(Path(sys.executable).with_name("fednl-runtime")), "serve", *([str(model)] if model else [])]
    options = ["--port", "0", "--slots", str(sessions + 1), "--threads", str(threads), "--in-memory"]
    with tempfile.TemporaryFile("w+") as log:
        command = [*program, *options, "--log-format", "json"]
        with subprocess.Popen(command, stderr=log, text=True) as process:
            try:
                while not (found := re.search(r'"url": "([^"]+)"', said(log))):
                    assert process.poll() is None, said(log)
                    time.sleep(0.05)
                yield found[1]
            finally:
                process.terminate()


def said(log: Any) -> str:
    """What is in a log so far."""
    log.seek(0)
    text: str = log.read()
    return text


@click.command()
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="[default: the shipped model]")
@click.option("--sessions", default=8, show_default=True, help="Busy sessions.")
@click.option("--prompt", "length", default=32768, show_default=True, help="Tokens of the long prompt, about.")
@click.option("--rounds", default=2, show_default=True)
@click.option("--seconds", default=10.0, show_default=True, help="Undisturbed seconds a round.")
@click.option("--limit", default=60.0, show_default=True, help="Seconds that a long prompt is waited for.")
@click.option("--threads", default=1, show_default=True, help="Threads of the server's model.")
def main(
    model: Path | None, sessions: int, length: int, rounds: int, seconds: float, limit: float, threads: int
) -> None:
    """Let a long prompt arrive beside busy sessions; exit code 1 if the bar was missed."""
    with server(model, sessions, threads) as url:
        report = asyncio.run(measure(url, sessions, length, rounds, seconds, limit))
    click.echo(json.dumps({"model": model.name if model else "shipped", "sessions": sessions, **report}))
    if report["p99_ratio"] > BAR:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
