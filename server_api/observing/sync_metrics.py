"""Metrics of the sync agent, read from its status when somebody looks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fednl_runtime.errors import FednlError

if TYPE_CHECKING:
    from fednl_runtime.fed_sync.device.agent import Agent


class SyncCollector(Collector):
    """What the agent's status says, as gauges; nothing if its database cannot be read."""

    def __init__(self, agent: Agent, prefix: str) -> None:
        """Names begin with `prefix`."""
        self._agent, self._prefix = agent, prefix

    def collect(self) -> Iterable[Metric]:
        """The metrics as they are now."""
        try:
            status = self._agent.status()
        except FednlError:
            return
        yield self._gauge("rules_version", "Version of the rules in use, 0 for the model's own.", status["version"])
        yield self._gauge("failures", "Contacts with the endpoint that failed in a row.", status["failures"])
        success = status["last_success"] or 0
        yield self._gauge("last_success_timestamp_seconds", "When a contact last succeeded.", success)
        yield self._gauge("clock_offset_seconds", "The endpoint's clock less this one.", status["clock_offset_s"])
        yield self._gauge("recent_tokens", "Tokens of text kept to train on.", status["recent_tokens"])
        updates = GaugeMetricFamily(f"{self._prefix}_sync_updates", "Updates remembered.", labels=["state"])
        for state in ("pending", "sent", "accepted", "refused"):
            updates.add_metric([state], status["outbox"][state])
        yield updates
        traffic = GaugeMetricFamily(
            f"{self._prefix}_sync_bytes_today", "Bytes on the link today.", labels=["direction"]
        )
        for direction, amount in status["bytes_today"].items():
            traffic.add_metric([direction], amount)
        yield traffic

    def _gauge(self, name: str, help_: str, value: float) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}_sync_{name}", help_, value)
