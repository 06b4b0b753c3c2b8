"""Metrics for Prometheus, in base units; no label names a session, a user or a key."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

import fednl_runtime
from fednl_runtime.engine import Engine
from fednl_runtime.server_api.observing.record import RequestRecord
from fednl_runtime.server_api.observing.sync_metrics import SyncCollector
from fednl_runtime.server_api.served import Served
from fednl_runtime.turn import TurnReport

PREFIX = "fednl_runtime"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
NORMS = (0.01, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
NATS = (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12)


class Meters:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, served: Served) -> None:
        engine = served.engine
        self.registry = CollectorRegistry()
        self._add_requests()
        self._add_turns()
        build = {name: version(name) for name in ("onnxruntime", "numpy")}
        build |= {"version": fednl_runtime.__version__, "python": platform.python_version()}
        Info(f"{PREFIX}_build", "The program.", registry=self.registry).info(build)
        model = {"name": served.model, "fingerprint": str(served.meta.get("fingerprint", ""))}
        Info(f"{PREFIX}_model", "The model.", registry=self.registry).info(model)
        Gauge(f"{PREFIX}_session_state_bytes", "Memory of one session.", registry=self.registry).set(engine.state_bytes)
        self.registry.register(EngineCollector(engine))
        if served.agent is not None:
            self.registry.register(SyncCollector(served.agent, PREFIX))
        ProcessCollector(registry=self.registry)

    def _add_requests(self) -> None:
        self.requests = self._counter("requests", "Requests answered.", "method", "route", "code")
        self.duration = self._histogram("request_duration_seconds", "Whole time of a request.", SECONDS, "route")
        self.rejected = self._counter("requests_rejected", "Requests refused before any work.", "reason")
        self.replays = self._counter("idempotent_replays", "Requests answered from the stored reply.")

    def _add_turns(self) -> None:
        self.queue_wait = self._histogram("queue_wait_seconds", "From a turn's start to its first step's end.", SECONDS)
        self.first_token = self._histogram("time_to_first_token_seconds", "From a turn's start to its token.", SECONDS)
        self.next_token = self._histogram("time_per_output_token_seconds", "Between two tokens.", TOKEN_SECONDS)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts of turns that ended.")
        self.cached_tokens = self._counter("cached_prompt_tokens", "Those of them that the memory had read before.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens of answers of turns that ended.")
        self.cancelled = self._counter("requests_cancelled", "Turns stopped before their end.", "reason")
        self.rolled_back = self._counter("turn_rollbacks", "Turns that left no trace.", "reason")
        self.conflicts = self._counter("session_conflicts", "Turns refused for another on the session.", "kind")
        self.breaches = self._counter("memory_breaches", "Turns whose memory was not fit to keep.")
        self.not_learnt = self._counter("learn_disabled_turns", "Turns that ended and were not to be learnt.")
        self.update_norm = self._histogram("memory_update_norm", "Change of the slow memories by a turn.", NORMS)
        self.surprise = self._histogram("surprise", "Mean surprise of a turn's prompt, in nats a token.", NATS)

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", help_, labels, registry=self.registry)

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", help_, labels, buckets=buckets, registry=self.registry)

    def count_request(self, record: RequestRecord) -> None:
        """Count a request that was answered."""
        self.requests.labels(record.method, record.route, str(record.status)).inc()
        self.duration.labels(record.route).observe(record.seconds)
        if record.rejected:
            self.rejected.labels(record.rejected).inc()

    def count_turn(self, report: TurnReport) -> None:
        """Count a turn that came to its end; one that was answered from the stored reply did nothing."""
        if report.replayed:
            self.replays.inc()
            return
        self.prompt_tokens.inc(report.prompt_tokens)
        self.cached_tokens.inc(report.cached_tokens)
        self.generation_tokens.inc(report.completion_tokens)
        if not report.learned:
            self.not_learnt.inc()
        self.update_norm.observe(report.update_norm)
        if report.surprise is not None:
            self.surprise.observe(report.surprise)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """What the engine and the kernel can be asked when somebody looks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """The metrics as they are now."""
        running, waiting = self._engine.scheduler.load()
        yield _gauge("requests_running", "Turns that run.", running)
        yield _gauge("requests_waiting", "Turns that wait for a slot or for their session.", waiting)
        if (memory := rss_anon_bytes()) is not None:
            yield _gauge("process_rss_anon_bytes", "Anonymous memory of the process.", memory)
        yield from _session_metrics(self._engine.sessions.stats())


def _session_metrics(stats: Mapping[str, float]) -> Iterable[Metric]:
    """The session store's own numbers; one it has not counted yet is 0."""
    number = stats.get
    sessions = GaugeMetricFamily(f"{PREFIX}_sessions", "Sessions, in memory and stored.", labels=["state"])
    sessions.add_metric(["resident"], number("resident_sessions", 0))
    sessions.add_metric(["stored"], number("sessions", 0))
    yield sessions
    yield _gauge("session_versions", "Versions kept of all sessions.", number("versions", 0))
    yield _gauge("sessions_resident_bytes", "Memory of the sessions in memory.", number("resident_bytes", 0))
    restores = CounterMetricFamily(f"{PREFIX}_session_restores", "Versions read from storage.", labels=["result"])
    restores.add_metric(["ok"], number("restores", 0))
    restores.add_metric(["failed"], number("failed_restores", 0))
    yield restores
    persists = SummaryMetricFamily(f"{PREFIX}_session_persist_seconds", "Storing a version.")
    persists.add_metric([], int(number("persists", 0)), number("persist_seconds", 0))
    yield persists
    yield CounterMetricFamily(f"{PREFIX}_session_rollbacks", "Rollbacks asked for.", number("rollbacks", 0))
    yield CounterMetricFamily(f"{PREFIX}_session_forks", "Sessions forked.", number("forks", 0))
    yield CounterMetricFamily(f"{PREFIX}_session_evictions", "Versions put out of memory.", number("evictions", 0))


def _gauge(name: str, help_: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", help_, value)


def rss_anon_bytes() -> int | None:
    """Bytes of anonymous memory of this process; None where the kernel does not say."""
    try:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None
