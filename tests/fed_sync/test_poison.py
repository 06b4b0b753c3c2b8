"""A minority that lies never stops a round and moves what is published at most by a bound that can be told before."""

from __future__ import annotations

import numpy as np
import pytest
from fleets import fleet_of, join_all, rules_now, send
from updates import HOSTILE, RULES, SCHEMA, update_of

from fednl_runtime.fed_sync.aggregate import Rule, clip, norm
from fednl_runtime.fed_sync.errors import Refusal
from fednl_runtime.fed_sync.fleet import rounds
from fednl_runtime.fed_sync.update import new_update_id

HONEST, LIARS, C = 7, 2, 1.0
BASE = SCHEMA.vector(RULES.tensors)


def honest(number: int) -> np.ndarray:
    """What an honest device found: about one direction, of norm below the clip norm."""
    centre = np.random.default_rng(99).standard_normal(SCHEMA.size)
    own = np.random.default_rng(number).standard_normal(SCHEMA.size)
    return (centre + 0.3 * own) / (2 * np.sqrt(SCHEMA.size))


ATTACKS = {
    "flipped": lambda i: -honest(i),
    "flipped and as long as is allowed": lambda i: -9.9 * C * honest(i) / norm(honest(i)),
    "one number only": lambda i: 9.9 * C * (np.arange(SCHEMA.size) == 3),
    "noise": lambda i: np.random.default_rng(i + 1000).standard_normal(SCHEMA.size),
    "all the same": lambda i: np.full(SCHEMA.size, 9.0 / np.sqrt(SCHEMA.size)),
}


def published(folder, rule: Rule, attack) -> np.ndarray:
    """The step that a round of honest devices and liars publishes."""
    with fleet_of(folder, goal=HONEST + LIARS, minimum=rule.least, rule=rule, clip_norm=C) as fleet:
        for number, device in enumerate(join_all(fleet, HONEST + LIARS)):
            vector, tokens = (honest(number), 1000) if number < HONEST else (attack(number), 10_000_000)
            send(fleet, device, update_of(delta=SCHEMA.tensors(vector), num_tokens=tokens))
        return rules_now(fleet, 2) - BASE


@pytest.mark.parametrize("attack", ATTACKS)
def test_liars_move_the_mean_at_most_by_twice_the_clip_norm_times_their_share(tmp_path, attack):
    """With equal honest weights w, liars are capped at 2 w: their share is s = 4 w / (4 w + 7 w).

    The published step is (1 - s) h + s l, with h the honest mean and |h|, |l| <= C, so it is at most
    s |l - h| <= 2 C s away from h, whatever the liars say.
    """
    share = 2 * LIARS / (2 * LIARS + HONEST)
    honest_mean = np.mean([clip(honest(i), C) for i in range(HONEST)], axis=0)
    assert norm(published(tmp_path, Rule(), ATTACKS[attack]) - honest_mean) <= 2 * C * share + 1e-6


@pytest.mark.parametrize("kind", ["trimmed_mean", "median"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_liars_move_coordinate_rules_nowhere_outside_what_honest_devices_say(tmp_path, kind, attack):
    """Of each coordinate's sorted numbers the two least and the two largest are dropped (the median drops more).

    What is left at either end is no further out than some honest number, because at most two are lies.
    """
    step = published(tmp_path, Rule(kind, LIARS), ATTACKS[attack])
    said = np.array([honest(i) for i in range(HONEST)])
    assert (step >= said.min(axis=0) - 1e-6).all()
    assert (step <= said.max(axis=0) + 1e-6).all()


@pytest.mark.parametrize("attack", ["flipped and as long as is allowed", "one number only", "noise", "all the same"])
def test_krum_leaves_out_liars_that_are_far_from_the_honest(tmp_path, attack):
    """Honest members are within d of each other; a liar further than d from all has the larger score."""
    step = published(tmp_path, Rule("multi_krum", LIARS), ATTACKS[attack])
    said = np.array([honest(i) for i in range(HONEST)])
    assert (step >= said.min(axis=0) - 1e-6).all()
    assert (step <= said.max(axis=0) + 1e-6).all()


def test_refused_replayed_and_stale_updates_change_not_one_bit(tmp_path):
    """The round with every kind of refusal in between publishes the very bytes of the round without."""
    digests, ids = set(), [new_update_id(1.8e9) for _ in range(3 * HONEST)]
    for poisoned in (False, True):
        folder = tmp_path / str(poisoned)
        folder.mkdir()
        with fleet_of(folder, goal=HONEST, staleness=0) as fleet:
            devices = join_all(fleet, HONEST + LIARS)
            for version in (1, 2, 3):
                for number in range(HONEST):
                    if poisoned:
                        annoy(fleet, devices[HONEST + number % LIARS], version)
                    update = update_of(delta=SCHEMA.tensors(honest(number)), base_version=version)
                    name = ids[(version - 1) * HONEST + number]
                    send(fleet, devices[number], update, name)
                    if poisoned and number < HONEST - 1:
                        assert send(fleet, devices[number], update, name).duplicate
            with fleet.repository.read() as records:
                digests.add(records.version("p", 4).sha256)
            assert rounds.tick(fleet) is None
    assert len(digests) == 1


def annoy(fleet, liar, version: int) -> None:
    """Everything that is refused, from one device."""
    huge = update_of(size=1e6, base_version=version)
    nan = SCHEMA.tensors(np.full(SCHEMA.size, np.nan))
    from fednl_runtime.fed_sync.tensors import pack

    bodies = [pack(nan, update_of(base_version=version).facts()), *(body for _, body in HOSTILE.values())]
    for update in [huge, update_of(base_version=version - 1), update_of(base_version=version + 1), *bodies]:
        with pytest.raises(Refusal):
            send(fleet, liar, update)
