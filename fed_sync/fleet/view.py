"""What operators and devices may see of a population's rounds."""

from __future__ import annotations

from typing import Any

from fednl_runtime.fed_sync.fleet.policy import Policy
from fednl_runtime.fed_sync.fleet.population import Fleet
from fednl_runtime.fed_sync.fleet.tables import Version

SHOWN = ("version", "prev_version", "state", "sha256", "size", "members", "rule", "epsilon", "rollback_of", "reason")


def rounds(fleet: Fleet, limit: int = 20) -> dict[str, Any]:
    """The open round and the newest versions, newest first."""
    with fleet.repository.read() as records:
        population = records.population(fleet.population)
        pending, versions = len(records.pending(fleet.population)), records.versions(fleet.population, limit)
    policy = Policy.from_json(population.policy)
    return {
        "open": {
            "target": population.target,
            "pending": pending,
            "goal": policy.goal,
            "minimum": policy.minimum,
            "opened": int(population.opened),
            "deadline": int(population.deadline),
            "extensions": population.extensions,
            "paused": population.paused,
        },
        "current_version": population.current,
        "versions": [_shown(version) for version in versions],
    }


def _shown(version: Version) -> dict[str, Any]:
    return {**{name: getattr(version, name) for name in SHOWN}, "created": int(version.created)}


def status(fleet: Fleet) -> dict[str, Any]:
    """Counters of a population."""
    with fleet.repository.read() as records:
        population = records.population(fleet.population)
        versions = records.versions(fleet.population, 1)
        devices, updates = records.count_devices(fleet.population), records.count_updates(fleet.population)
        refusals = records.count_refusals(fleet.population)
    return {
        "population": population.name,
        "schema": population.schema,
        "current_version": population.current,
        "target": population.target,
        "pending": updates.get("pending", 0),
        "deadline": int(population.deadline),
        "extensions": population.extensions,
        "paused": population.paused is not None,
        "paused_because": population.paused,
        "devices": devices,
        "epsilon": versions[0].epsilon,
        "updates": dict(updates),
        "refusals": dict(refusals),
    }
