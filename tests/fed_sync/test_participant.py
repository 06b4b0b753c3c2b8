"""A device and a real endpoint: updates count once; rules go live if they are signed, newer, whole and no worse."""

from __future__ import annotations

import contextlib
import dataclasses
import time

import numpy as np
import pytest
from agents import ANNA, SETTINGS, Phone, TinyModel, endpoint_of, learning, pending, phone_of
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fleets import fleet_of, rules_now
from updates import RULES, SCHEMA

from fednl_runtime.errors import RulesError
from fednl_runtime.fed_sync.device.client import Answer, ContactError
from fednl_runtime.fed_sync.device.folder import Invitation
from fednl_runtime.fed_sync.errors import SyncError
from fednl_runtime.fed_sync.fleet import intake, rounds
from fednl_runtime.fed_sync.fleet.population import add_version, rules_bytes
from fednl_runtime.fed_sync.fleet.tables import Version
from fednl_runtime.fed_sync.manifest import Manifest, sign_manifest
from fednl_runtime.fed_sync.signing import public_text
from fednl_runtime.fed_sync.update import decode
from fednl_runtime.rules import RuleSet


@pytest.fixture(name="fleet")
def fleet_fixture(tmp_path):
    (tmp_path / "fleet").mkdir()
    with fleet_of(tmp_path / "fleet", sync_s=60.0) as fleet:
        yield fleet


@pytest.fixture(name="url")
def url_fixture(fleet):
    with endpoint_of(fleet) as url:
        yield url


@pytest.fixture(name="phone")
def phone_fixture(fleet, url, tmp_path):
    with phone_of(fleet, url, tmp_path / "phone") as phone:
        yield phone


def publish(fleet, level: float) -> int:
    """Publish rules whose b_eta is `level`; their version."""
    fleet.clock.now += 1
    with fleet.repository.write("p") as records:
        population = records.population("p")
        number = population.target
        tensors = {n: np.full_like(v, level) if n == "rule.0.b_eta" else v for n, v in RULES.tensors.items()}
        data = rules_bytes(RuleSet(tensors, RULES.fingerprint), population, number)
        version = Version("p", number, population.current, "published", fleet.blobs.put(data), len(data), None,
                          fleet.clock.now, 0, "initial")  # fmt: skip
        add_version(fleet, records, population, version)
        records.change_population("p", current=number, target=number + 1)
    return number


def test_a_first_contact_enrols_fetches_rules_trains_and_sends(fleet, phone):
    assert phone.contact() == (60, 120)
    assert phone.part.version == 1
    assert phone.used[-1].keys() == RULES.tensors.keys()
    (fate,) = phone.device.outbox.fates()
    assert [fate["id"]] == pending(fleet)
    assert (fate["state"], fate["base_version"], fate["num_tokens"], fate["attempts"]) == ("accepted", 1, 101, 1)


def test_what_arrives_is_what_was_learnt(fleet, url, tmp_path):
    with phone_of(fleet, url, tmp_path / "phone", index=20, train=learning(20, 0.125)) as phone:
        phone.contact()
    fleet.clock.now += 60
    rounds.publish_now(fleet)
    np.testing.assert_array_equal(np.flatnonzero(rules_now(fleet, 2) - rules_now(fleet, 1)), [20])
    assert (rules_now(fleet, 2) - rules_now(fleet, 1))[20] == 0.125


def test_a_second_contact_neither_trains_nor_fetches_again(fleet, phone):
    phone.contact()
    down = phone.device.notes.spent(fleet.clock())[1]
    phone.contact()
    assert len(phone.device.outbox.fates()) == len(pending(fleet)) == 1
    assert phone.device.notes.spent(fleet.clock())[1] - down < 500  # one answer without a body


def test_a_new_version_goes_live_and_is_trained_on(fleet, phone):
    phone.contact()
    rounds.publish_now(fleet)
    fleet.clock.now += 1
    phone.contact()
    assert phone.part.version == 2
    np.testing.assert_allclose(SCHEMA.vector(phone.used[-1]), rules_now(fleet))
    assert [fate["base_version"] for fate in phone.device.outbox.fates()] == [2, 1]


def test_rules_that_raise_surprise_here_are_refused_once_and_later_ones_tried(fleet, phone):
    phone.read(600)
    phone.contact()
    publish(fleet, 0.0)
    phone.contact()
    assert phone.part.version == 1
    assert phone.device.notes.get("refused") == 2
    assert "surprise rises from" in phone.device.notes.get("refused_because")
    used = len(phone.used)
    phone.contact()
    assert len(phone.used) == used
    assert publish(fleet, 0.5) == 3
    phone.contact()
    assert phone.part.version == 3


def test_a_rise_within_the_margin_is_let_in(fleet, url, tmp_path):
    with phone_of(fleet, url, tmp_path / "phone", settings=dataclasses.replace(SETTINGS, margin=0.2)) as phone:
        phone.read(600)
        phone.contact()
        publish(fleet, 0.2)
        phone.contact()
        assert phone.part.version == 2


def test_rules_that_give_numbers_that_are_none_are_refused_without_any_text(fleet, url, tmp_path):
    with phone_of(fleet, url, tmp_path / "phone", text=0) as phone:
        phone.contact()
        for level, why in [(1e38, "output is not finite"), (float("inf"), "numbers that are not finite")]:
            publish(fleet, level)
            phone.contact()
            assert phone.part.version == 1
            assert why in phone.device.notes.get("refused_because")


def test_live_rules_that_prove_worse_on_later_text_are_rolled_back_and_stay_away(fleet, phone):
    phone.contact()
    publish(fleet, 3.0)
    phone.contact()
    assert phone.part.version == 2
    phone.read(2000, token=5)  # a text at which the new rules are worse
    phone.contact()
    assert phone.part.version == 1
    np.testing.assert_array_equal(phone.used[-1]["rule.0.b_eta"], RULES.tensors["rule.0.b_eta"])
    phone.contact()
    assert phone.part.version == 1
    assert phone.device.notes.get("refused") == 2


def test_live_rules_that_hold_on_later_text_leave_probation(fleet, phone):
    phone.contact()
    publish(fleet, 3.0)
    phone.contact()
    phone.read(2000)
    phone.contact()
    assert phone.device.notes.get("probation") is None
    phone.read(5000, token=5)
    phone.contact()
    assert phone.part.version == 2


def test_live_rules_outlive_a_restart_and_damage_goes_back_one_version(fleet, url, phone, tmp_path, caplog):
    phone.contact()
    publish(fleet, 0.5)
    phone.contact()
    phone.close()
    for harm, version in [(None, 2), ("live.safetensors", 1), ("live.safetensors", 0)]:
        if harm:
            (tmp_path / "phone" / harm).write_bytes(b"\0" * 100)
        again = Phone(tmp_path / "phone", url, fleet.clock)
        assert again.part.version == version
        assert len(again.used) == (version > 0)
        again.close()
    mended = Phone(tmp_path / "phone", url, fleet.clock)
    mended.contact()
    assert mended.part.version == 2
    mended.close()
    assert "were rolled back" in caplog.text


def test_rules_of_another_model_in_the_folder_are_not_used(fleet, url, phone, tmp_path):
    phone.contact()
    phone.close()
    model = TinyModel()
    model.fingerprint = "e" * 64
    again = Phone(tmp_path / "phone", url, fleet.clock, model=model)
    assert again.part.version == 0
    again.close()


def test_rules_that_the_engine_refuses_are_not_switched_to(fleet, url, tmp_path):
    with phone_of(fleet, url, tmp_path / "phone") as phone:

        def refuse(rules):
            raise RulesError("These do not fit.")

        phone.part._use_rules = refuse
        phone.contact()
        assert phone.part.version == 0
        assert phone.device.notes.get("refused") == 1


GOOD = {
    "population": "p", "version": 1, "prev_version": 0, "schema": RULES.schema_hash, "sha256": "0" * 64, "size": 10,
    "created": 0, "expires": 2_000_000_000, "min_agent": "0.0.1", "members": 0, "rule": "initial",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"version": 0}, "old_manifest"),
        ({"version": 4}, "old_manifest"),
        ({"expires": 1_700_000_000}, "expired_manifest"),
        ({"population": "q"}, "bad_manifest"),
        ({"schema": "0" * 64}, "bad_manifest"),
        ({"size": 10**9}, "bad_manifest"),
        ({"size": 0}, "bad_manifest"),
        ({"min_agent": "99.0"}, "agent_too_old"),
        ({"key": "another"}, "bad_manifest"),
    ],
)
def test_a_manifest_that_is_not_to_be_followed_changes_nothing(fleet, phone, change, code):
    phone.contact()
    phone.device.notes.set(seen=5)
    change = {"version": 6, **change}
    key = Ed25519PrivateKey.generate() if change.pop("key", None) else fleet.key
    body = sign_manifest(Manifest(**{**GOOD, **change}), key).encode()
    asked = []

    def ask(method, path, *_, **__):
        asked.append(path)
        return Answer(200, {}, body)

    exchange = type("Exchange", (), {"ask": staticmethod(ask)})
    with pytest.raises(ContactError) as error:
        phone.part._pull(exchange, phone.device.enrolment())
    assert error.value.code == code
    assert asked == ["/v1/populations/p/rules/current"]
    assert phone.part.version == 1
    assert phone.device.notes.get("seen") == 5


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff\xfe", b'{"payload": "' + b"A" * 5000 + b'"}', b"[" * 60000])
def test_an_answer_that_is_no_manifest_is_refused(phone, body):
    phone.contact()
    exchange = type("Exchange", (), {"ask": staticmethod(lambda *_, **__: Answer(200, {}, body))})
    with pytest.raises(ContactError, match="manifest"):
        phone.part._pull(exchange, phone.device.enrolment())


def test_rules_other_than_the_manifest_promises_are_not_even_kept(fleet, phone, tmp_path):
    phone.contact()
    publish(fleet, 0.5)
    real = phone.part._endpoint.ask

    def tampered(method, path, *rest, **options):
        answer = real(method, path, *rest, **options)
        body = answer.body[:-1] + b"\1" if path.endswith("/rules/2") else answer.body
        return dataclasses.replace(answer, body=body)

    phone.part._endpoint.ask = tampered
    before = (tmp_path / "phone/candidate.safetensors").exists()
    with pytest.raises(ContactError, match="promises"):
        phone.contact()
    assert phone.part.version == 1
    assert (tmp_path / "phone/candidate.safetensors").exists() == before
    phone.part._endpoint.ask = real
    phone.contact()
    assert phone.part.version == 2


@pytest.mark.parametrize("offset", [-1_000_000_000.0, -3600.0, 3600.0, 300_000_000.0])
def test_a_wrong_clock_is_repaired_by_the_date_header_and_never_enrols_again(tmp_path, offset):
    (tmp_path / "fleet").mkdir()
    with fleet_of(tmp_path / "fleet") as fleet:
        fleet = dataclasses.replace(fleet, clock=time.time)
        with (
            endpoint_of(fleet) as url,
            phone_of(fleet, url, tmp_path / "phone", clock=lambda: time.time() + offset) as phone,
        ):
            phone.contact()
            key, enrolment = phone.device.key, phone.device.enrolment()
            assert abs(phone.device.notes.get("clock_offset") + offset) < 3
            assert phone.device.outbox.counts()["accepted"] == 1
            phone.contact()
            assert phone.device.key is key
            assert phone.device.enrolment() == enrolment


def test_a_key_that_the_endpoint_does_not_know_is_an_auth_error_and_asks_for_no_new_one(fleet, phone):
    phone.contact()
    with fleet.repository.write("p") as records:
        device = records.device(phone.device.enrolment().device_id)
        other = public_text(Ed25519PrivateKey.generate().public_key())
        records.change_device(device.id, key_id="0" * 32, public_key=other)
    before = phone.device.enrolment()
    with pytest.raises(ContactError) as error:
        phone.contact()
    assert (error.value.code, error.value.trouble) == ("bad_signature", "auth")
    assert phone.device.enrolment() == before


def test_a_manifest_key_that_the_owner_names_comes_before_the_one_told_at_enrolment(fleet, url, phone, tmp_path):
    phone.contact()
    phone.close()
    publish(fleet, 0.5)
    other = public_text(Ed25519PrivateKey.generate().public_key())
    for key, version in [(other, 1), (public_text(fleet.key.public_key()), 2)]:
        again = Phone(tmp_path / "phone", url, fleet.clock, invitation=Invitation(url, "p", manifest_key=key))
        with contextlib.suppress(ContactError):
            again.contact()
        assert again.part.version == version
        again.close()


def test_a_revoked_device_keeps_its_rules_and_its_update(fleet, phone):
    phone.contact()
    rounds.publish_now(fleet)
    intake.revoke(fleet, phone.device.enrolment().device_id)
    with pytest.raises(ContactError) as error:
        phone.contact()
    assert (error.value.code, error.value.trouble) == ("revoked", "permanent")
    assert phone.part.version == 1


def test_a_used_token_is_refused_and_the_device_stays_out(fleet, url, tmp_path, phone):
    phone.contact()
    other = Phone(tmp_path / "other", url, fleet.clock, phone.part.invitation.token)
    with pytest.raises(ContactError) as error:
        other.contact()
    assert (error.value.code, other.device.enrolment()) == ("bad_token", None)
    other.close()


def test_a_device_without_enrolment_and_token_is_told_so(url, tmp_path, fleet):
    with pytest.raises(SyncError, match="sync enrol"):
        Phone(tmp_path / "phone", url, fleet.clock)


@pytest.mark.parametrize(
    "url", ["http://example.org", "ftp://localhost", "", "https://", "http://[::1", "https://a?b=c"]
)
def test_an_address_that_is_none_or_not_encrypted_is_refused(tmp_path, fleet, url):
    with pytest.raises(SyncError, match=r"https"):
        Phone(tmp_path / "phone", url, fleet.clock, "token")


def test_an_answer_lost_after_the_commit_counts_once(fleet, phone):
    real = phone.part._endpoint.ask

    def losing(method, path, *rest, **options):
        answer = real(method, path, *rest, **options)
        if method == "PUT":
            phone.part._endpoint.ask = real
            raise ContactError("network", "The answer was lost.")
        return answer

    phone.part._endpoint.ask = losing
    with pytest.raises(ContactError):
        phone.contact()
    assert phone.device.outbox.counts()["sent"] == len(pending(fleet)) == 1
    phone.contact()
    assert phone.device.outbox.counts()["accepted"] == len(pending(fleet)) == 1
    assert phone.device.outbox.fates()[0]["attempts"] == 2


def test_a_stale_update_is_given_up_and_the_device_goes_on_in_the_same_contact(fleet, phone):
    real = phone.part._endpoint.ask

    def unreachable(method, path, *rest, **options):
        if method == "PUT":
            raise ContactError("network", "There is no link.")
        return real(method, path, *rest, **options)

    phone.part._endpoint.ask = unreachable
    with pytest.raises(ContactError):
        phone.contact()
    for _ in range(3):
        publish(fleet, 0.5)
    phone.part._endpoint.ask = real
    phone.contact()
    assert [(f["base_version"], f["state"], f["code"]) for f in phone.device.outbox.fates()] == [
        (4, "accepted", None),
        (1, "refused", "stale_base"),
    ]


def test_a_paused_population_leaves_the_update_with_the_device(fleet, phone):
    real = phone.part._endpoint.ask

    def pausing(method, path, *rest, **options):
        if method == "PUT":
            rounds.pause(fleet)
        return real(method, path, *rest, **options)

    phone.part._endpoint.ask = pausing
    with pytest.raises(ContactError) as error:
        phone.contact()
    assert (error.value.code, error.value.trouble) == ("paused", "transient")
    assert phone.device.outbox.counts()["sent"] == 1
    rounds.resume(fleet)
    phone.part._endpoint.ask = real
    phone.contact()
    assert phone.device.outbox.counts()["accepted"] == 1


def test_a_session_deleted_while_its_text_trains_makes_no_update(fleet, url, tmp_path):
    with phone_of(fleet, url, tmp_path / "phone") as phone:

        def train(*args):
            phone.device.forget(ANNA)
            return learning(0)(*args)

        phone.part._train = train
        phone.contact()
        assert phone.device.outbox.fates() == []
        assert pending(fleet) == []


def test_a_session_deleted_before_its_update_was_sent_takes_the_update_along(fleet, phone):
    real, phone.part._send = phone.part._send, lambda *_: None
    phone.contact()
    assert phone.device.outbox.counts()["pending"] == 1
    phone.device.forget(ANNA)
    phone.part._send = real
    phone.contact()
    assert pending(fleet) == []


def test_too_little_text_or_nothing_learnt_makes_no_update(fleet, url, tmp_path):
    calls = []

    def nothing(*args):
        calls.append(args)

    with phone_of(fleet, url, tmp_path / "phone", train=nothing, text=3) as phone:
        phone.contact()
        assert not calls
        phone.read(50)
        phone.contact()
        phone.contact()
        assert len(calls) == 1
        phone.read(50)
        phone.contact()
        assert len(calls) == 2
    assert pending(fleet) == []


def test_a_model_without_gradient_graph_still_gets_new_rules(fleet, url, tmp_path):
    with phone_of(fleet, url, tmp_path / "phone", model=TinyModel(gradients=None)) as phone:
        with pytest.raises(RulesError, match="gradient graph"):
            phone.contact()
        assert phone.part.version == 1


def test_what_leaves_is_clipped_and_noised_as_the_stricter_of_owner_and_endpoint_say(fleet, url, tmp_path):
    settings = dataclasses.replace(SETTINGS, clip_norm=0.25, sigma=0.001)
    sent = []
    with phone_of(fleet, url, tmp_path / "phone", settings=settings, train=learning(3, 100.0)) as phone:
        real = phone.part._endpoint.ask

        def ask(method, path, body=None, **options):
            sent.extend([body] if method == "PUT" else [])
            return real(method, path, body, **options)

        phone.part._endpoint.ask = ask
        phone.contact()
    update = decode(sent[0], SCHEMA)
    vector = SCHEMA.vector(update.delta)
    assert (update.clip_norm, update.sigma) == (0.25, 0.001)
    assert abs(vector[3] - 0.25) < 0.006
    assert 0.0003 < np.delete(vector, 3).std() < 0.002
