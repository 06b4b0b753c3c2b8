"""One token makes one device, one device has one vote, and an update counts once however often it comes."""

from __future__ import annotations

import pytest
from fleets import current, device_key, fleet_of, join, join_all, rules_now, send
from updates import GOOD, RULES, SCHEMA, body_of, one_hot, update_of

from fednl_runtime.fed_sync.errors import Refusal
from fednl_runtime.fed_sync.fleet import intake, rounds, view
from fednl_runtime.fed_sync.fleet.population import Fleet
from fednl_runtime.fed_sync.fleet.tables import Device
from fednl_runtime.fed_sync.signing import key_id, public_text, sign_text
from fednl_runtime.fed_sync.update import new_update_id


def refused(*call: object) -> str:
    function, *arguments = call
    with pytest.raises(Refusal) as refusal:
        function(*arguments)
    return refusal.value.code


def check_in(fleet: Fleet, device: Device, base: int = 1, schema: str = RULES.schema_hash, agent: str = "0.1.0"):
    return intake.check_in(fleet, device, base, schema, agent)


def test_a_token_makes_one_device_and_the_same_key_may_ask_again(tmp_path):
    with fleet_of(tmp_path) as fleet:
        token = intake.new_token(fleet)
        device = intake.enrol(fleet, token, device_key(1).public_key())
        assert intake.enrol(fleet, token, device_key(1).public_key()) == device
        assert refused(intake.enrol, fleet, token, device_key(2).public_key()) == "bad_token"
        assert refused(intake.enrol, fleet, "fednl_guess", device_key(2).public_key()) == "bad_token"


def test_a_token_expires(tmp_path):
    with fleet_of(tmp_path) as fleet:
        token = intake.new_token(fleet, 100.0)
        fleet.clock.now += 101
        assert refused(intake.enrol, fleet, token, device_key(1).public_key()) == "bad_token"


def test_a_key_enrols_once(tmp_path):
    with fleet_of(tmp_path) as fleet:
        join(fleet, 1)
        second = intake.new_token(fleet)
        assert refused(intake.enrol, fleet, second, device_key(1).public_key()) == "bad_token"
        intake.enrol(fleet, second, device_key(2).public_key())


def test_the_database_holds_no_token(tmp_path):
    with fleet_of(tmp_path) as fleet:
        token = intake.new_token(fleet)
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(token.encode() in data for data in files)


def test_a_new_key_replaces_the_old_one_and_needs_proof(tmp_path):
    with fleet_of(tmp_path) as fleet:
        device, other = join_all(fleet, 2)
        new = public_text(device_key(9).public_key())
        proof = sign_text(intake.rotation_text(device.id, new), device_key(9))
        wrong = sign_text(intake.rotation_text(other.id, new), device_key(9))
        assert refused(intake.rotate, fleet, device, new, wrong) == "bad_signature"
        assert refused(intake.rotate, fleet, device, "AAAA", proof) == "bad_key"
        rotated = intake.rotate(fleet, device, new, proof)
        assert intake.rotate(fleet, rotated, new, proof) == rotated
        assert intake.device_of(fleet, key_id(device_key(9).public_key())).id == device.id
        assert refused(intake.device_of, fleet, device.key_id) == "bad_signature"
        theirs = public_text(device_key(1).public_key())
        proof = sign_text(intake.rotation_text(device.id, theirs), device_key(1))
        assert refused(intake.rotate, fleet, device, theirs, proof) == "key_in_use"


def test_a_revoked_device_is_refused_and_its_waiting_update_expires(tmp_path):
    with fleet_of(tmp_path) as fleet:
        device, honest = join_all(fleet, 2)
        send(fleet, device, one_hot(0))
        send(fleet, honest, one_hot(1))
        intake.revoke(fleet, device.id)
        assert refused(intake.device_of, fleet, device.key_id) == "revoked"
        assert rounds.publish_now(fleet).members == 1
        assert refused(intake.revoke, fleet, "dev_nobody") == "unknown_device"


def test_an_update_sent_again_is_the_same_update(tmp_path):
    with fleet_of(tmp_path) as fleet:
        device, body = join(fleet, 1), body_of(one_hot(0))
        update_id = new_update_id(fleet.clock())
        first = send(fleet, device, body, update_id)
        again = send(fleet, device, body, update_id)
        assert (first.duplicate, again.duplicate) == (False, True)
        assert rounds.publish_now(fleet).members == 1
        late = send(fleet, device, body, update_id)
        assert (late.status, late.target, late.duplicate, late.current_version) == ("counted", 2, True, 2)


def test_an_id_belongs_to_one_body_of_one_device(tmp_path):
    with fleet_of(tmp_path) as fleet:
        device, other = join_all(fleet, 2)
        update_id = send(fleet, device, one_hot(0)).update_id
        assert refused(send, fleet, device, one_hot(1), update_id) == "id_reused"
        assert refused(send, fleet, other, one_hot(0), update_id) == "id_reused"
        assert refused(intake.fate, fleet, other, update_id) == "unknown_update"


def test_a_device_has_one_vote_per_base_and_per_round(tmp_path):
    with fleet_of(tmp_path) as fleet:
        device = join(fleet, 1)
        send(fleet, device, one_hot(0))
        assert refused(send, fleet, device, one_hot(1)) == "device_already_contributed"
        rounds.publish_now(fleet)
        assert refused(send, fleet, device, one_hot(1)) == "device_already_contributed"
        send(fleet, device, one_hot(1, base_version=2))
        assert rules_now(fleet)[0] > rules_now(fleet, 1)[0]


def test_an_update_that_was_counted_cannot_be_replayed_under_another_id(tmp_path):
    with fleet_of(tmp_path, staleness=5) as fleet:
        device, body = join(fleet, 1), body_of(one_hot(0))
        send(fleet, device, body)
        rounds.publish_now(fleet)
        assert refused(send, fleet, device, body) == "device_already_contributed"


def test_a_body_of_two_devices_counts_for_both(tmp_path):
    with fleet_of(tmp_path) as fleet:
        for device in join_all(fleet, 2):
            send(fleet, device, GOOD)
        assert rounds.publish_now(fleet).members == 2


def test_the_fate_of_an_update_is_told(tmp_path):
    with fleet_of(tmp_path) as fleet:
        device = join(fleet, 1)
        update_id = send(fleet, device, one_hot(0)).update_id
        assert intake.fate(fleet, device, update_id)[0].status == "pending"
        rounds.publish_now(fleet)
        assert intake.fate(fleet, device, update_id)[0].status == "counted"
        other = new_update_id(fleet.clock())
        assert refused(intake.fate, fleet, device, other) == "unknown_update"
        intake.note_refusal(fleet, device, other, "not_finite")
        assert intake.fate(fleet, device, other) == (None, "not_finite")
        assert refused(intake.fate, fleet, device, "../x") == "bad_update_id"


def test_refusals_are_counted_in_one_row_per_device_and_code(tmp_path):
    with fleet_of(tmp_path) as fleet:
        device = join(fleet, 1)
        for _ in range(5):
            intake.note_refusal(fleet, device, new_update_id(fleet.clock()), "malformed")
        intake.note_refusal(fleet, device, "\0" * 999, "too_large")
        assert view.status(fleet)["refusals"] == {"malformed": 5, "too_large": 1}


def test_an_old_agent_is_told_to_upgrade(tmp_path):
    with fleet_of(tmp_path, min_agent="0.2.0") as fleet:
        device = join(fleet, 1)
        assert refused(send, fleet, device, update_of(agent_version="0.1.9")) == "agent_too_old"
        send(fleet, device, update_of(agent_version="0.10.0"))


def test_a_check_in_tells_what_to_train_and_whether(tmp_path):
    with fleet_of(tmp_path, clip_norm=0.7, sigma=0.01, staleness=0, min_agent="0.1.0") as fleet:
        device, other = join_all(fleet, 2)
        told = check_in(fleet, device)
        assert (told["participate"], told["reason"], told["current_version"], told["target"]) == (True, None, 1, 2)
        assert (told["clip_norm"], told["sigma"], told["deadline"]) == (0.7, 0.01, fleet.clock() + 86_400)
        assert len(body_of(update_of())) <= told["max_bytes"]
        assert check_in(fleet, device, schema="0" * 64)["reason"] == "wrong_schema"
        assert check_in(fleet, device, agent="0.0.9")["reason"] == "agent_too_old"
        assert check_in(fleet, device, agent="latest!")["reason"] == "agent_too_old"
        assert check_in(fleet, device, base=7)["reason"] == "stale_base"
        send(fleet, device, one_hot(0))
        assert check_in(fleet, device)["reason"] == "device_already_contributed"
        assert check_in(fleet, other)["reason"] is None
        rounds.publish_now(fleet)
        assert check_in(fleet, other)["reason"] == "stale_base"
        rounds.pause(fleet)
        assert check_in(fleet, device, base=2)["reason"] == "paused"


def test_a_stale_device_goes_on_after_one_further_request(tmp_path):
    with fleet_of(tmp_path, goal=1, staleness=0) as fleet:
        devices = join_all(fleet, 2)
        for version in (1, 2, 3):
            send(fleet, devices[0], one_hot(0, base_version=version))
        with pytest.raises(Refusal) as stale:
            send(fleet, devices[1], one_hot(1, base_version=1))
        send(fleet, devices[1], one_hot(1, base_version=stale.value.current_version))
        assert current(fleet) == 5


def test_nothing_of_a_refused_update_is_kept(tmp_path):
    with fleet_of(tmp_path) as fleet:
        device = join(fleet, 1)
        before = sorted(name for name, _ in fleet.blobs.names())
        assert refused(send, fleet, device, update_of(num_tokens=0)) == "bad_count"
        assert sorted(name for name, _ in fleet.blobs.names()) == before
        assert view.status(fleet)["updates"] == {}
        assert SCHEMA.size == rules_now(fleet).size
