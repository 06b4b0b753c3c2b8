"""Rounds close when they should, publish what they should, and survive operators, restarts and lost files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os

import numpy as np
import pytest
from fleets import Clock, current, fleet_in, fleet_of, join, join_all, play_round, rules_now, send
from updates import RULES, SCHEMA, one_hot, update_of

from fednl_runtime.fed_sync.aggregate import Rule
from fednl_runtime.fed_sync.errors import BlobError, PolicyError, Refusal
from fednl_runtime.fed_sync.fleet import rounds, view
from fednl_runtime.fed_sync.fleet.policy import Policy, agent_version
from fednl_runtime.fed_sync.fleet.population import Fleet, found
from fednl_runtime.fed_sync.manifest import open_manifest
from fednl_runtime.fed_sync.optimize import ServerOptimizer
from fednl_runtime.fed_sync.privacy import CentralPrivacy
from fednl_runtime.fed_sync.update import new_update_id
from fednl_runtime.rules import RuleSet, load_rules

BASE = SCHEMA.vector(RULES.tensors)


def states(fleet: Fleet) -> list[str]:
    with fleet.repository.read() as records:
        return [version.state for version in reversed(records.versions("p"))]


def statuses(fleet: Fleet) -> dict[str, int]:
    return view.status(fleet)["updates"]


def test_a_round_closes_with_the_last_update_of_its_goal_and_publishes_their_mean(tmp_path):
    with fleet_of(tmp_path, goal=3) as fleet:
        devices = join_all(fleet, 3)
        play_round(fleet, devices[:2], 0.3)
        assert current(fleet) == 1
        send(fleet, devices[2], one_hot(2, 0.3))
        assert current(fleet) == 2
        expected = BASE + 0.1 * (np.arange(SCHEMA.size) < 3)
        np.testing.assert_allclose(rules_now(fleet), expected, atol=1e-7)
        assert statuses(fleet) == {"counted": 3}


def test_a_deadline_closes_a_round_with_the_minimum(tmp_path):
    with fleet_of(tmp_path, minimum=2, deadline_s=100.0) as fleet:
        play_round(fleet, join_all(fleet, 2))
        fleet.clock.now += 99
        assert rounds.tick(fleet) is None
        fleet.clock.now += 1
        assert rounds.tick(fleet).members == 2
        assert current(fleet) == 2


def test_a_deadline_with_fewer_updates_keeps_them_and_sets_a_new_one(tmp_path):
    with fleet_of(tmp_path, minimum=2, deadline_s=100.0) as fleet:
        first, second = join_all(fleet, 2)
        send(fleet, first, one_hot(0))
        for passed in (1, 2, 3):
            fleet.clock.now += 100
            assert rounds.tick(fleet) is None
            assert rounds.tick(fleet) is None
            assert view.rounds(fleet)["open"]["extensions"] == passed
        send(fleet, second, one_hot(1))
        fleet.clock.now += 100
        assert rounds.tick(fleet).members == 2


def test_a_round_without_any_update_waits(tmp_path):
    with fleet_of(tmp_path, deadline_s=10.0) as fleet:
        fleet.clock.now += 1000
        assert rounds.tick(fleet) is None
        assert states(fleet) == ["published"]


def test_a_stale_update_counts_less_and_a_too_stale_one_not_at_all(tmp_path):
    with fleet_of(tmp_path, goal=1, staleness=1) as fleet:
        first, second = join_all(fleet, 2)
        send(fleet, first, one_hot(0, 0.5, base_version=1))
        send(fleet, second, one_hot(1, 0.5, base_version=1))
        assert rules_now(fleet)[1] - BASE[1] == pytest.approx(0.5 / math.sqrt(2), abs=1e-6)
        with pytest.raises(Refusal, match="Fetch version 3") as refused:
            send(fleet, join(fleet, 9), one_hot(2, base_version=1))
        assert (refused.value.code, refused.value.current_version) == ("stale_base", 3)


def test_the_file_of_a_version_is_a_rule_set_that_serve_reads(tmp_path):
    with fleet_of(tmp_path, goal=1) as fleet:
        send(fleet, join(fleet, 0), one_hot(3, 0.5))
        with fleet.repository.read() as records:
            version = records.version("p", 2)
        path = tmp_path / "rules.safetensors"
        path.write_bytes(fleet.blobs.get(version.sha256))
        rules, notes = load_rules(path)
        rules.require(RULES.shapes, RULES.fingerprint)
        assert notes == {"population": "p", "version": "2"}
        np.testing.assert_array_equal(SCHEMA.vector(rules.tensors), rules_now(fleet))


def test_manifests_form_a_chain_and_name_the_bytes(tmp_path):
    with fleet_of(tmp_path, goal=1) as fleet:
        device = join(fleet, 0)
        for number in (1, 2, 3):
            send(fleet, device, one_hot(number, base_version=number))
        with fleet.repository.read() as records:
            versions = list(reversed(records.versions("p")))
        for number, version in enumerate(versions, 1):
            manifest = open_manifest(version.manifest, [fleet.key.public_key()])
            data = fleet.blobs.get(manifest.sha256)
            assert (manifest.version, manifest.prev_version) == (number, number - 1)
            assert (manifest.size, manifest.schema) == (len(data), RULES.schema_hash)
            assert manifest.members == (number > 1)


def test_a_manifest_is_signed_anew_before_it_expires(tmp_path):
    with fleet_of(tmp_path, manifest_s=1000.0) as fleet:

        def expires() -> int:
            with fleet.repository.read() as records:
                return open_manifest(records.version("p", 1).manifest, [fleet.key.public_key()]).expires

        first = expires()
        for _ in range(5):
            fleet.clock.now += 499
            rounds.tick(fleet)
            assert expires() > fleet.clock.now
        assert expires() > first


def test_a_step_beyond_the_limit_is_put_into_quarantine_and_the_old_rules_stay(tmp_path):
    with fleet_of(tmp_path, goal=1, max_step_norm=0.5) as fleet:
        device = join(fleet, 0)
        send(fleet, device, one_hot(0, 0.6))
        assert states(fleet) == ["published", "quarantined"]
        assert (current(fleet), statuses(fleet)) == (1, {"quarantined": 1})
        send(fleet, join(fleet, 1), one_hot(1, 0.4))
        assert (current(fleet), states(fleet)[-1]) == (3, "published")
        assert rules_now(fleet)[0] == BASE[0]


def test_an_operator_may_release_what_is_in_quarantine_until_something_else_is_published(tmp_path):
    with fleet_of(tmp_path, goal=1, max_step_norm=0.5) as fleet:
        send(fleet, join(fleet, 0), one_hot(0, 0.6))
        assert rounds.release(fleet, 2).prev_version == 1
        assert rules_now(fleet)[0] == pytest.approx(BASE[0] + 0.6)
        assert states(fleet) == ["published", "released", "published"]
        send(fleet, join(fleet, 1), one_hot(0, 0.6, base_version=3))
        send(fleet, join(fleet, 2), one_hot(0, 0.1, base_version=3))
        for number in (1, 2, 4, 99):
            with pytest.raises(Refusal) as refused:
                rounds.release(fleet, number)
            assert refused.value.code == ("unknown_version" if number == 99 else "not_quarantined")


def test_a_rollback_publishes_the_old_bytes_under_a_new_number_and_drops_what_came_of_the_withdrawn(tmp_path):
    with fleet_of(tmp_path) as fleet:
        devices = join_all(fleet, 4)
        send(fleet, devices[0], one_hot(0, base_version=1))
        rounds.publish_now(fleet)
        send(fleet, devices[1], one_hot(1, base_version=1))
        send(fleet, devices[2], one_hot(2, base_version=2))
        version = rounds.rollback(fleet, 1)
        assert (version.version, version.prev_version, version.rollback_of) == (3, 1, 2)
        np.testing.assert_array_equal(rules_now(fleet), BASE)
        assert states(fleet) == ["published", "withdrawn", "published"]
        assert statuses(fleet) == {"counted": 1, "pending": 1, "expired": 1}
        with pytest.raises(Refusal, match="too old"):
            send(fleet, devices[3], one_hot(3, base_version=2))
        assert rounds.publish_now(fleet).version == 4
        assert rules_now(fleet)[1] > BASE[1]
        assert rules_now(fleet)[2] == BASE[2]


@pytest.mark.parametrize(("to", "code"), [(2, "not_published"), (9, "unknown_version")])
def test_a_rollback_goes_to_an_earlier_published_version_only(tmp_path, to, code):
    with fleet_of(tmp_path, goal=1) as fleet:
        send(fleet, join(fleet, 0), one_hot(0))
        with pytest.raises(Refusal) as refused:
            rounds.rollback(fleet, to)
        assert refused.value.code == code


def test_a_paused_population_takes_nothing_closes_nothing_and_then_goes_on(tmp_path):
    with fleet_of(tmp_path, deadline_s=100.0) as fleet:
        first, second = join_all(fleet, 2)
        send(fleet, first, one_hot(0))
        rounds.pause(fleet)
        fleet.clock.now += 1000
        assert rounds.tick(fleet) is None
        with pytest.raises(Refusal) as refused:
            send(fleet, second, one_hot(1))
        assert refused.value.code == "paused"
        rounds.resume(fleet)
        assert rounds.tick(fleet) is None
        send(fleet, second, one_hot(1))
        fleet.clock.now += 100
        assert rounds.tick(fleet).members == 2


def test_publishing_early_needs_what_the_rule_needs(tmp_path):
    with fleet_of(tmp_path, minimum=3, rule=Rule("median", 1)) as fleet:
        play_round(fleet, join_all(fleet, 2))
        with pytest.raises(Refusal) as refused:
            rounds.publish_now(fleet)
        assert refused.value.code == "too_few_updates"
        send(fleet, join(fleet, 7), one_hot(0))
        assert rounds.publish_now(fleet).members == 3


def test_the_server_optimiser_goes_on_where_it_was_after_a_restart(tmp_path):
    settings = {"goal": 1, "optimizer": ServerOptimizer("momentum", beta1=0.5)}
    for number in (1, 2, 3):
        with fleet_of(tmp_path, **settings) as fleet:
            send(fleet, join(fleet, number), one_hot(0, 0.4, base_version=number))
    with fleet_of(tmp_path, **settings) as fleet:
        assert rules_now(fleet)[0] - BASE[0] == pytest.approx(0.4 * (1 + 1.5 + 1.75), abs=1e-6)


def test_a_round_in_quarantine_leaves_the_optimiser_as_it_was(tmp_path):
    with fleet_of(tmp_path, goal=1, max_step_norm=0.5, optimizer=ServerOptimizer("momentum", beta1=0.5)) as fleet:
        devices = join_all(fleet, 3)
        send(fleet, devices[0], one_hot(0, 0.4))
        send(fleet, devices[1], one_hot(0, 0.9, base_version=2))
        send(fleet, devices[2], one_hot(1, 0.1, base_version=2))
        assert states(fleet)[-2:] == ["quarantined", "published"]
        assert rules_now(fleet)[0] - BASE[0] == pytest.approx(0.4 + 0.2, abs=1e-6)


def test_published_rules_stay_in_their_safe_ranges(tmp_path):
    with fleet_of(tmp_path, goal=1, clip_norm=100.0, max_step_norm=1000.0) as fleet:
        index = next(i for i, name in enumerate(SCHEMA.names) if name == "rule.0.conv")
        start = sum(SCHEMA.lengths[:index])
        send(fleet, join(fleet, 0), one_hot(start, 50.0))
        assert rules_now(fleet)[start] == 8.0


def test_a_lost_file_costs_one_update_and_not_the_round(tmp_path):
    with fleet_of(tmp_path) as fleet:
        devices = join_all(fleet, 2)
        for index, device in enumerate(devices):
            send(fleet, device, one_hot(index))
        with fleet.repository.read() as records:
            gone = records.pending("p")[0]
        path = tmp_path / "blobs" / gone.sha256[:2] / gone.sha256
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert rounds.publish_now(fleet).members == 1
        assert statuses(fleet) == {"counted": 1, "lost": 1}


def test_a_round_that_cannot_be_computed_waits_and_the_upload_is_safe(tmp_path):
    with fleet_of(tmp_path, goal=1) as fleet:
        with fleet.repository.read() as records:
            version = records.version("p", 1)
        path = tmp_path / "blobs" / version.sha256[:2] / version.sha256
        data = path.read_bytes()
        path.unlink()
        device = join(fleet, 0)
        assert send(fleet, device, one_hot(0)).status == "pending"
        with pytest.raises(BlobError):
            rounds.tick(fleet)
        path.write_bytes(data)
        assert rounds.tick(fleet).members == 1


def test_a_mistake_of_ours_in_a_round_leaves_the_upload_safe_and_the_round_open(tmp_path, monkeypatch, caplog):
    with fleet_of(tmp_path, goal=1) as fleet:
        device = join(fleet, 0)
        with monkeypatch.context() as patch:
            patch.setattr(rounds, "aggregate", lambda *_: 1 / 0)
            assert send(fleet, device, one_hot(0)).status == "pending"
        assert "ZeroDivisionError" in caplog.text
        assert rounds.tick(fleet).members == 1


def test_a_budget_that_allows_no_round_is_refused(tmp_path):
    with pytest.raises(PolicyError, match="single round"), fleet_of(tmp_path, privacy=CentralPrivacy(1.0, 0.1)):
        pass


def test_privacy_is_spent_kept_over_restarts_and_ends_the_rounds(tmp_path):
    privacy = CentralPrivacy(4.0, max_epsilon=CentralPrivacy(4.0, 1.0).epsilon(2))
    settings = {"goal": 1, "privacy": privacy, "max_step_norm": 1e6}
    spent = []
    for number in (1, 2, 3):
        with fleet_of(tmp_path, **settings) as fleet:
            if number == 3:
                break
            send(fleet, join(fleet, number), one_hot(0, base_version=number))
            spent.append(view.status(fleet)["epsilon"])
    assert spent == [privacy.epsilon(1), privacy.epsilon(2)]
    with fleet_of(tmp_path, **settings) as fleet:
        device = join(fleet, 3)
        assert send(fleet, device, one_hot(0, base_version=3)).status == "pending"
        assert view.status(fleet)["paused_because"] == "privacy_budget_spent"
        assert current(fleet) == 3
        rounds.resume(fleet)
        with pytest.raises(Refusal) as refused:
            rounds.publish_now(fleet)
        assert refused.value.code == "privacy_budget_spent"


def test_the_noise_of_private_rounds_is_never_the_same(tmp_path):
    seen = set()
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        with fleet_of(tmp_path / str(number), goal=1, privacy=CentralPrivacy(1.0, 100.0), max_step_norm=1e6) as fleet:
            send(fleet, join(fleet, 0), one_hot(0))
            seen.add(rules_now(fleet).tobytes())
    assert len(seen) == 2


@pytest.mark.parametrize("after", [None, CentralPrivacy(2.0, 100.0), CentralPrivacy(4.0, 100.0, 1e-5)])
def test_a_promise_of_privacy_cannot_be_changed_once_noise_was_published(tmp_path, after):
    before = {"goal": 1, "privacy": CentralPrivacy(4.0, 100.0), "max_step_norm": 1e6}
    with fleet_of(tmp_path, **before) as fleet:
        send(fleet, join(fleet, 0), one_hot(0))
    with pytest.raises(PolicyError, match="1 noised rounds"), fleet_of(tmp_path, privacy=after):
        pass
    with fleet_of(tmp_path, **{**before, "privacy": CentralPrivacy(4.0, 200.0)}):
        pass


def test_cleaning_keeps_what_is_needed_and_removes_the_rest(tmp_path):
    with fleet_of(tmp_path, goal=1) as fleet:
        first, second = join_all(fleet, 2)
        body_id = new_update_id(fleet.clock())
        send(fleet, first, one_hot(0), body_id)
        orphan = fleet.blobs.put(b"left by a crash")
        for path in (tmp_path / "blobs").glob("*/*"):
            os.utime(path, (fleet.clock(), fleet.clock()))
        assert rounds.clean(fleet) == 0
        fleet.clock.now += rounds.ORPHAN_S + 1
        assert rounds.clean(fleet) == 1
        with pytest.raises(BlobError):
            fleet.blobs.get(orphan)
        fleet.clock.now += rounds.KEEP_BODIES_S
        assert rounds.clean(fleet) == 1
        rules_now(fleet, 1), rules_now(fleet, 2)
        with fleet.repository.read() as records:
            assert records.update(body_id) is not None
        fleet.clock.now += 61 * 86_400
        rounds.clean(fleet)
        with fleet.repository.read() as records:
            assert records.update(body_id) is None
        with pytest.raises(Refusal) as refused:
            send(fleet, second, one_hot(0), body_id)
        assert refused.value.code == "update_id_expired"


def test_a_fleet_begins_with_rules_of_one_schema_only(tmp_path):
    with pytest.raises(PolicyError, match="first rules"):
        fleet_in(tmp_path, Policy(), rules=None)
    fleet_in(tmp_path, Policy()).repository.close()
    other = RuleSet(RULES.tensors, "e" * 64)
    with pytest.raises(PolicyError, match="another model"):
        fleet_in(tmp_path, Policy(), rules=other)
    fleet_in(tmp_path, Policy(goal=7), rules=None).repository.close()


@pytest.mark.parametrize("name", ["", "UPPER", "a/b", "-a", "a" * 65, "ä"])
def test_a_population_has_a_plain_name(tmp_path, name):
    with fleet_of(tmp_path) as fleet, pytest.raises(PolicyError, match="no name"):
        found(dataclasses.replace(fleet, population=name), RULES, Policy())


@pytest.mark.parametrize(
    "settings",
    [
        {"goal": 0},
        {"minimum": 11},
        {"deadline_s": 0},
        {"clip_norm": math.nan},
        {"sigma": -1.0},
        {"staleness": -1},
        {"absurd": 0.5},
        {"minimum": 4, "rule": Rule("multi_krum", 1)},
        {"rule": Rule("median", 1), "privacy": CentralPrivacy(1.0, 1.0)},
        {"min_agent": "latest"},
    ],
)
def test_a_policy_that_cannot_hold_is_refused(settings):
    with pytest.raises(PolicyError):
        Policy(**settings)


def test_a_policy_survives_its_text():
    policy = Policy(5, 5, rule=Rule("multi_krum", 1), optimizer=ServerOptimizer("adam", 0.1), max_step_norm=2.5)
    private = Policy(privacy=CentralPrivacy(4.0, 8.0))
    assert [Policy.from_json(p.to_json()) for p in (policy, private)] == [policy, private]
    assert json.loads(policy.to_json())["rule"]["kind"] == "multi_krum"


def test_agent_versions_compare_as_numbers():
    assert agent_version("0.10.0") > agent_version("0.9.9+local")


def test_local_noise_widens_the_norm_that_is_allowed(tmp_path):
    assert Policy(clip_norm=3.0, sigma=0.5).norm_bound(64) == 5.0
    with fleet_of(tmp_path, goal=1, clip_norm=0.1, sigma=1.0) as fleet:
        update = update_of(size=1.0)
        send(fleet, join(fleet, 0), update)
        moved = rules_now(fleet) - BASE
        assert np.linalg.norm(moved) > 1.0


def test_the_same_rounds_give_the_same_bytes_whatever_the_order_of_arrival(tmp_path):
    digests = set()
    ids = [new_update_id(Clock()()) for _ in range(5)]
    for turn in range(3):
        (tmp_path / str(turn)).mkdir()
        with fleet_of(tmp_path / str(turn), goal=5) as fleet:
            devices = join_all(fleet, 5)
            for i in np.random.default_rng(turn).permutation(5):
                send(fleet, devices[i], update_of(seed=int(i), num_tokens=int(10 + i)), ids[i])
            with fleet.repository.read() as records:
                digests.add(records.version("p", 2).sha256)
            assert hashlib.sha256(fleet.blobs.get(min(digests))).hexdigest() in digests
    assert len(digests) == 1
