"""A fleet whose endpoint is dead for an hour: requests a second before, while and after, by the agents' own schedule.

A discrete-event simulation: delays by the agent's own schedule, the pace that the endpoint's `next_sync` asks of such a
fleet, the requests of `Participant.contact`. While the endpoint is dead every agent makes an update, so that each
brings one when it is back. `step` is a fleet with the same doubling and cap, and no jitter.
The last line printed is a JSON object.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from fednl_runtime.fed_sync.device.schedule import Pace, delay_after_failure, delay_after_success

Counts = NDArray[np.int64]
SETTLED_S = 7200
"""Seconds before the outage, in which the fleet takes up its rhythm."""
AFTER_S = 7200
GAP_S = 0.2
"""Seconds between two requests of a contact."""


def without_jitter(pace: Pace, failures: int, rng: random.Random) -> float:
    """The delay of a fleet that doubles and caps, and nothing else."""
    return min(pace.base_s * 2.0 ** min(failures - 1, 32), pace.cap_s)


def with_jitter(pace: Pace, failures: int, rng: random.Random) -> float:
    """The delay of our agents."""
    return delay_after_failure(pace, failures, "transient", None, rng)


def simulate(
    agents: int,
    outage_s: int,
    next_sync: tuple[float, float],
    delay: Callable[[Pace, int, random.Random], float],
    seed: int,
) -> tuple[Counts, NDArray[np.float64]]:
    """Requests in each second, and when each agent was back, in seconds after the endpoint."""
    rng, pace = random.Random(seed), Pace()
    dead, alive = SETTLED_S, SETTLED_S + outage_s
    counts = np.zeros(alive + AFTER_S, np.int64)
    back = np.full(agents, np.inf)
    failures = [0] * agents
    due = [(rng.uniform(0, next_sync[1]), agent) for agent in range(agents)]
    heapq.heapify(due)
    while due and due[0][0] < len(counts) - 10:
        now, agent = heapq.heappop(due)
        if dead <= now < alive:
            failures[agent] += 1
            counts[int(now)] += 1
            heapq.heappush(due, (now + delay(pace, failures[agent], rng), agent))
            continue
        first = now >= alive and back[agent] == np.inf
        if first:
            back[agent] = now - alive
        for request in range(2 if first else 1):  # the update that waited, and the newest manifest
            counts[int(now + GAP_S * request)] += 1
        failures[agent] = 0
        heapq.heappush(due, (now + delay_after_success(pace, next_sync, rng), agent))
    return counts, back


def summary(runs: list[tuple[Counts, NDArray[np.float64]]], outage_s: int) -> dict[str, Any]:
    """Requests a second by phase over all runs, and how long the fleet took to come back."""
    dead, alive = SETTLED_S, SETTLED_S + outage_s
    phases = {"before": (3600, dead), "while": (dead, alive), "after": (alive, alive + AFTER_S - 10)}
    found: dict[str, Any] = {}
    for name, (start, stop) in phases.items():
        rates = np.concatenate([counts[start:stop] for counts, _ in runs])
        found[name] = {
            "mean": round(float(rates.mean()), 2),
            "p99": int(np.percentile(rates, 99)),
            "peak": int(rates.max()),
        }
    back = np.concatenate([times for _, times in runs])
    found["back_s"] = {f"p{q}": round(float(np.percentile(back, q))) for q in (50, 99, 100)}
    return found


def picture(arms: dict[str, list[tuple[Counts, NDArray[np.float64]]]], outage_s: int, path: Path) -> None:
    """Requests a second around the outage, and their distribution after it."""
    import matplotlib.pyplot as plt

    figure, (over_time, distribution) = plt.subplots(1, 2, figsize=(10, 4))
    alive = SETTLED_S + outage_s
    for name, runs in arms.items():
        counts = runs[0][0]
        over_time.plot((np.arange(len(counts)) - alive) / 60, counts, label=name, linewidth=0.6)
        rates = np.concatenate([c[alive:-10] for c, _ in runs])
        distribution.hist(rates, bins=np.arange(rates.max() + 2) - 0.5, histtype="step", density=True, label=name)
    over_time.set(xlabel="minutes after the endpoint is back", ylabel="requests a second", yscale="symlog")
    distribution.set(xlabel="requests a second after recovery", ylabel="share of seconds", yscale="log")
    over_time.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


@click.command(help=__doc__)
@click.option("--agents", default=5000, show_default=True)
@click.option("--outage", default=3600, show_default=True, help="Seconds.")
@click.option("--sync-every", default=600.0, show_default=True, help="Seconds, as the endpoint's option.")
@click.option("--seeds", default=5, show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), help="Picture to write.")
def main(agents: int, outage: int, sync_every: float, seeds: int, plot: Path | None) -> None:
    """Simulate both fleets."""
    least = max(sync_every, agents / 20)
    arms = {
        name: [simulate(agents, outage, (least, 2 * least), delay, seed) for seed in range(seeds)]
        for name, delay in (("agent", with_jitter), ("step", without_jitter))
    }
    if plot:
        picture(arms, outage, plot)
    told = {"agents": agents, "outage_s": outage, "sync_every_s": sync_every, "seeds": seeds}
    click.echo(json.dumps({**told, **{name: summary(runs, outage) for name, runs in arms.items()}}))


if __name__ == "__main__":
    main()
