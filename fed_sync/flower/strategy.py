"""A Flower strategy whose rounds are the fleet's own: replies are updates to take in, not arrays to average."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fednl_runtime.fed_sync.fleet import rounds
from fednl_runtime.fed_sync.fleet.population import Fleet
from fednl_runtime.fed_sync.flower.letters import Answered, letter, version_in
from fednl_runtime.fed_sync.flower.reception import news, take, terms

log = logging.getLogger("fednl_runtime.flower")

POLL_S = 1.0


class RulesStrategy(Strategy):
    """Asks every node for its next update, takes what comes in as HTTP uploads are, and brings back the new rules.

    A bad reply is dropped and counted under its code; none stops a round. When a round closes and what it publishes is
    for the fleet's policy to say, whichever way its updates came. `start` needs no arrays: give it an empty record.
    """

    def __init__(self, fleet: Fleet, nodes: int = 1, wait_s: float = 60.0) -> None:
        """A round begins with `nodes` nodes, or after `wait_s` seconds with those that are there."""
        self._fleet, self._nodes, self._wait_s = fleet, nodes, wait_s
        self._answers: dict[int, dict[str, Answered]] = {}
        """By node, what became of the upload in its last reply."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A letter to each node that asks for an update, with rules to train and the terms of it."""
        common = news(self._fleet) | terms(self._fleet)
        return [self._letter(common, node, MessageType.TRAIN) for node in self._present(grid)]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take every reply in; the metrics count them by outcome, and name the version that is current then."""
        counts: collections.Counter[str] = collections.Counter()
        for reply in replies:
            outcome, self._answers[reply.metadata.src_node_id] = take(self._fleet, reply)
            log.info("node %d: %s", reply.metadata.src_node_id, outcome)
            counts[outcome] += 1
        rounds.tick_safely(self._fleet)
        return None, MetricRecord({"version": self._current(), **counts})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """A letter to each node that replied: what became of its update, and the rules as they are now."""
        common = news(self._fleet)
        return [self._letter(common, node, MessageType.EVALUATE) for node in self._answers]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """How many devices use the current version: each tries rules on its own text before it does."""
        versions = [version_in(reply) for reply in replies if not reply.has_error()]
        return MetricRecord({"devices": len(versions), "current": versions.count(self._current())})

    def summary(self) -> None:
        """Log what is served."""
        log.info("population %s at version %d", self._fleet.population, self._current())

    def _letter(self, common: dict[str, Answered], node: int, kind: str) -> Message:
        return Message(letter(common | self._answers.get(node, {})), node, kind)

    def _present(self, grid: Grid) -> list[int]:
        """The nodes that are there; waiting for more ends, so that a dead one keeps no round from beginning."""
        deadline = time.monotonic() + self._wait_s
        while len(nodes := sorted(grid.get_node_ids())) < self._nodes and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._answers = {node: answers for node, answers in self._answers.items() if node in nodes}
        return nodes

    def _current(self) -> int:
        with self._fleet.repository.read() as records:
            return records.population(self._fleet.population).current
