"""One device's part in the federation, contact by contact: send, fetch and try rules, train."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

import fednl_runtime
from fednl_runtime.crash import crash_point
from fednl_runtime.errors import FednlError, RulesError
from fednl_runtime.fed_sync.device.client import Answer, ContactError, Endpoint, bad_answer, number
from fednl_runtime.fed_sync.device.folder import Device, Enrolment, Invitation, joined
from fednl_runtime.fed_sync.device.live_rules import LiveRules, VersionedRules
from fednl_runtime.fed_sync.device.local_training import LocalModel, Terms, Train, make_update, train_locally
from fednl_runtime.fed_sync.device.outbox import Upload
from fednl_runtime.fed_sync.device.pull import Expected, fetch_manifest, fetch_rules
from fednl_runtime.fed_sync.device.trial import LEAST_TOKENS, MARGIN, judge
from fednl_runtime.fed_sync.manifest import Manifest
from fednl_runtime.fed_sync.update import MEDIA_TYPE, Schema, new_update_id
from fednl_runtime.fed_sync.validate import HEADER_BYTES
from fednl_runtime.rule_training import RuleSettings
from fednl_runtime.rules import schema_hash
from fednl_runtime.state import Tensors

log = logging.getLogger("fednl_runtime.sync")

NOT_THE_UPDATE = ("revoked", "bad_signature", "clock_skew", "unknown_population", "paused", "digest_mismatch")
"""Refusals that say nothing of the update that was sent: it is kept."""
HOPELESS = ("agent_too_old", "wrong_schema")
"""Why a device cannot take part before somebody upgrades it."""


@dataclasses.dataclass(frozen=True)
class SyncSettings:
    """What the device's owner sets. Sizes in tokens and bytes."""

    training: RuleSettings = dataclasses.field(
        default_factory=lambda: RuleSettings(steps=200, minutes=30, cpu_share=0.25)
    )
    least_tokens: int = 4096
    """Recent text below which nothing is trained."""
    most_tokens: int = 65536
    """Of the recent text, the end that is trained on."""
    encoding: str = "int8"
    clip_norm: float = math.inf
    """Largest norm of a difference that leaves, whatever the endpoint allows."""
    sigma: float = 0.0
    """Least noise on each number of a difference, whatever the endpoint asks for."""
    margin: float = MARGIN
    bytes_per_day: int = 16 << 20


class Exchange:
    """The requests of one contact: the clock is repaired at most once, and what the endpoint asks for is noted."""

    def __init__(self, device: Device, endpoint: Endpoint, clock: Callable[[], float]) -> None:
        self._device, self._endpoint, self._clock = device, endpoint, clock
        self._repaired = False
        self.next_sync: tuple[float, float] | None = None

    def ask(self, method: str, path: str, body: bytes | None = None, **options: Any) -> Answer:
        """As `Endpoint.ask`; a signature refused for its time is made once more by the endpoint's clock."""
        answer = self._once(method, path, body, **options)
        if answer.status != 401 or self._repaired or answer.date is None or answer.error().code != "clock_skew":
            return answer
        self._repaired = True
        self._device.notes.set(clock_offset=answer.date - self._clock())
        return self._once(method, path, body, **options)

    def _once(self, method: str, path: str, body: bytes | None, **options: Any) -> Answer:
        before = self._endpoint.up, self._endpoint.down
        try:
            answer = self._endpoint.ask(method, path, body, **options)
        finally:
            up, down = self._endpoint.up - before[0], self._endpoint.down - before[1]
            self._device.notes.spend(self._clock(), up, down)
        self.next_sync = answer.next_sync or self.next_sync
        return answer


class Participant:
    """A device that takes part; one thread at a time may use it."""

    def __init__(
        self,
        device: Device,
        invitation: Invitation,
        model: LocalModel,
        use_rules: Callable[[Tensors], None],
        clock: Callable[[], float],
        settings: SyncSettings | None = None,
        train: Train | None = None,
        request_s: float = 60.0,
    ) -> None:
        """`use_rules` is told of every switch: the rules from now on, {} for the model's own.

        Raises:
            SyncError: the device is not enrolled and has no token, or is enrolled elsewhere.
        """
        self.device, self.invitation, self.model = device, invitation, model
        self.settings = settings or SyncSettings()
        self._use_rules, self._clock = use_rules, clock
        self._train = train or train_locally(self.settings.training)
        self.schema = Schema(model.shapes, schema_hash(model.shapes, model.fingerprint))
        self._rules = LiveRules(device.folder, model.shapes, model.fingerprint)
        self._endpoint = Endpoint(invitation.url, device.key, self.now, request_s)
        invitation.check(device)
        self.live = self._rules.live()
        """The version in use, None for the model's own rules."""
        if self.live is not None:
            use_rules(self.live.rules.tensors)
        if self.version != device.notes.get("seen", 0):  # files were damaged: ask as if nothing had been fetched
            device.notes.set(etag=None)

    def now(self) -> float:
        """The time by the endpoint's clock, as far as it was needed to know it."""
        return self._clock() + float(self.device.notes.get("clock_offset", 0.0))

    @property
    def version(self) -> int:
        """The version in use, 0 for the model's own rules."""
        return 0 if self.live is None else self.live.version

    def contact(self, stopped: Callable[[], bool]) -> tuple[float, float] | None:
        """Everything that is to be done now; the seconds between which the endpoint wants to be asked again.

        Training ends early once `stopped` says so. Raises FednlError, ContactError among them.
        """
        exchange = Exchange(self.device, self._endpoint, self._clock)
        enrolment = joined(self.device, self.invitation, exchange.ask)
        path = f"/v1/populations/{enrolment.population}"
        self._send(exchange, path)
        self._pull(exchange, enrolment)
        self._watch()
        if self._ready():
            terms = self._check_in(exchange, path)
            if terms is not None and self._learn(terms, stopped):
                self._send(exchange, path)
        return exchange.next_sync

    def _ready(self) -> bool:
        """Whether there is something to train: rules in use that were not trained yet, and enough text for them.

        Only then is the endpoint asked for its terms; a contact with nothing to do is one request.
        """
        if self.live is None or self.device.outbox.made_for(self.version):
            return False
        text = self.device.recent.read()
        enough = len(text.tokens) >= self.settings.least_tokens
        return enough and self.device.notes.get("tried") != [self.version, text.last]

    def _send(self, exchange: Exchange, path: str) -> None:
        """Send the updates that wait, one after the other, until each is accepted or refused for good."""
        while (upload := self.device.outbox.next()) is not None:
            self.device.outbox.mark_sent(upload.id)
            answer = exchange.ask("PUT", f"{path}/updates/{upload.id}", upload.body, content_type=f"{MEDIA_TYPE}; v=1")
            if answer.status in (200, 201):
                if answer.json().get("update_id") != upload.id:
                    raise bad_answer("is about another update")
                crash_point("agent_after_answer")
                self.device.outbox.settle(upload.id, "accepted")
                continue
            error = answer.error()
            if error.trouble != "permanent" or error.code.startswith("http_") or error.code in NOT_THE_UPDATE:
                raise error
            log.warning("an update was refused: %s", error.code)
            self.device.outbox.settle(upload.id, "refused", error.code)

    def _pull(self, exchange: Exchange, enrolment: Enrolment) -> None:
        """Fetch the newest rules, if they are new, and switch to them, if they are fit."""
        notes = self.device.notes
        expected = Expected(
            population=enrolment.population,
            schema=self.schema.hash,
            least_version=max(notes.get("seen", 0), self.version),
            manifest_keys=enrolment.manifest_keys,
            max_bytes=4 * self.schema.size + HEADER_BYTES,
            agent_version=fednl_runtime.__version__,
            now=self.now(),
        )
        found = fetch_manifest(exchange.ask, expected, notes.get("etag"))
        if found is None:
            return
        manifest, etag = found
        notes.set(seen=manifest.version)
        if manifest.version != self.version and manifest.version != notes.get("refused"):
            self._try(manifest, fetch_rules(exchange.ask, manifest))
        notes.set(etag=etag)

    def _try(self, manifest: Manifest, data: bytes) -> None:
        try:
            candidate = self._rules.propose(data)
            if candidate.version != manifest.version:
                raise RulesError(f"The file is of version {candidate.version}.")
            with self.model.opened() as opened:
                text = self.device.recent.read()
                verdict = judge(
                    opened.backend, candidate.rules.tensors, _tensors(self.live), text.tokens, self.settings.margin
                )
            if not verdict.fits:
                raise RulesError(f"Here {verdict.reason}.")
            self._use_rules(candidate.rules.tensors)
        except FednlError as error:
            self._refuse(manifest.version, str(error))
            return
        self._rules.switch()
        self.live = candidate
        self.device.notes.set(probation={"version": candidate.version, "after": text.last}, refused=None)
        log.info("rules of version %d are live: %s", candidate.version, verdict.reason)

    def _refuse(self, version: int, why: str) -> None:
        log.warning("rules of version %d are not used: %s", version, why)
        self.device.notes.set(refused=version, refused_because=why)

    def _watch(self) -> None:
        """Compare rules that went live lately with those before them on text read since; go back if they are worse."""
        probation = self.device.notes.get("probation")
        if probation is None or self.live is None or probation["version"] != self.live.version:
            return
        text = self.device.recent.read(probation["after"])
        if len(text.tokens) < 2 * LEAST_TOKENS:
            return
        with self.model.opened() as opened:
            before = _tensors(self._rules.previous())
            verdict = judge(opened.backend, self.live.rules.tensors, before, text.tokens, self.settings.margin)
        if not verdict.fits:
            self._refuse(self.live.version, f"Here {verdict.reason}.")
            self.live = self._rules.roll_back()
            self._use_rules(_tensors(self.live))
        self.device.notes.set(probation=None)

    def _check_in(self, exchange: Exchange, path: str) -> Terms | None:
        """What the endpoint asks of an update to the rules in use; None if it wants none."""
        about = {"base_version": self.version, "schema": self.schema.hash, "agent_version": fednl_runtime.__version__}
        answer = exchange.ask("POST", f"{path}/check-in", json.dumps(about).encode())
        if answer.status != 200:
            raise answer.error()
        fields = answer.json()
        reason = fields.get("reason")
        self.device.notes.set(reason=None if reason is None else str(reason)[:64])
        if reason in HOPELESS:
            raise ContactError(str(reason), f"The endpoint takes nothing from this device: {reason}.", "permanent")
        if fields.get("participate") is not True:
            return None
        return Terms(
            clip_norm=min(number(fields, "clip_norm", 1e-9, 1e9), self.settings.clip_norm),
            sigma=max(number(fields, "sigma", 0, 1e9), self.settings.sigma),
            max_tokens=int(number(fields, "max_tokens", 1, 1e15)),
        )

    def _learn(self, terms: Terms, stopped: Callable[[], bool]) -> bool:
        """Train the rules in use on recent text and put the difference into the outbox; whether there is one."""
        base, outbox, notes = self.live, self.device.outbox, self.device.notes
        assert base is not None, "who is ready has rules"
        mark = outbox.mark()
        text = self.device.recent.read()
        with self.model.opened() as opened:
            if opened.gradients is None:
                raise RulesError("The model has no gradient graph beside it, so its rules cannot be trained.")
            learnt = self._train(opened, base.rules, text.tokens[-self.settings.most_tokens :], stopped)
        notes.set(tried=[base.version, text.last])
        if learnt is None:
            return False
        notes.set(learnt={"before": learnt.before, "after": learnt.after, "tokens": learnt.num_tokens})
        rng = np.random.default_rng(secrets.randbits(128))
        update, encoded = make_update(
            learnt, base.rules, base.version, outbox.residual(self.schema.hash), terms, fednl_runtime.__version__,
            self.settings.encoding, rng,
        )  # fmt: skip
        now = self.now()
        upload = Upload(new_update_id(now), base.version, update.num_tokens, encoded.body, now)
        return outbox.put(upload, self.schema.hash, encoded.residual, text.sessions, mark)


def _tensors(rules: VersionedRules | None) -> Tensors:
    """Rules by name; none are the model's own."""
    return {} if rules is None else rules.rules.tensors
