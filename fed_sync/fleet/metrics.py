"""What Prometheus sees of a fleet: counts from the database, so that they outlive the process."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fednl_runtime.fed_sync.fleet.population import Fleet
from fednl_runtime.fed_sync.fleet.view import status


class FleetCollector(Collector):
    """Reads the state of a population at each scrape; names no device."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not need the database."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment."""
        seen = status(self._fleet)
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"fednl_fleet_{name}", text, float(seen[name] or 0))
        updates = GaugeMetricFamily(
            "fednl_fleet_updates", "Accepted updates kept, by what became of them.", labels=["status"]
        )
        refusals = CounterMetricFamily("fednl_fleet_refusals", "Uploads refused, by code.", labels=["code"])
        for family, counts in ((updates, seen["updates"]), (refusals, seen["refusals"])):
            for label, count in sorted(counts.items()):
                family.add_metric([label], count)
            yield family


GAUGES = {
    "current_version": "The newest published version.",
    "pending": "Updates in the open round.",
    "deadline": "When the open round closes, in seconds since 1970.",
    "extensions": "How often the open round passed its deadline with too few updates.",
    "devices": "Active devices.",
    "paused": "1 while no updates are taken.",
    "epsilon": "Privacy spent so far.",
}


class Traffic:
    """A registry with the fleet's collector and the requests of this process."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(FleetCollector(fleet))
        labels = ("route", "status")
        self._requests = Counter("fednl_fleet_requests", "Requests answered.", labels, registry=self.registry)
        self._seconds = Histogram("fednl_fleet_request_seconds", "Time to answer.", ("route",), registry=self.registry)

    def note(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
