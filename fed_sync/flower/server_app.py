"""The fleet's side of a Flower run: opens the state folder of an aggregator and plays rounds on it."""

from __future__ import annotations

from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fednl_runtime.fed_sync.fleet.blobs import DiskBlobs
from fednl_runtime.fed_sync.fleet.population import Fleet
from fednl_runtime.fed_sync.fleet.repository import Repository
from fednl_runtime.fed_sync.flower.strategy import RulesStrategy
from fednl_runtime.fed_sync.signing import key_file


def play(grid: Grid, context: Context) -> None:
    """Play rounds on the population that the run's configuration names; deploy/flower/pyproject.toml lists its keys.

    The state folder is the one of `aggregator serve`, which may run beside it. Raises DatabaseError, Refusal.
    """
    config = context.run_config
    folder = Path(str(config["state-dir"]))
    repository = Repository(str(config["database"]) or f"sqlite:///{folder / 'fleet.db'}")
    fleet = Fleet(str(config["population"]), repository, DiskBlobs(folder / "blobs"), key_file(folder / "signing.key"))
    try:
        strategy = RulesStrategy(fleet, int(config["nodes"]), float(config["wait-s"]))
        strategy.start(grid, ArrayRecord(), int(config["num-server-rounds"]), float(config["reply-s"]))
    finally:
        repository.close()


app = ServerApp()
app.main()(play)
