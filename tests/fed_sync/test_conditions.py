"""What keeps an agent still: its owner's word, the hour, the battery, turns that run."""

from __future__ import annotations

import datetime
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednl_runtime.fed_sync.device.conditions import DeviceConditions, QuietHours

NIGHT = QuietHours.parse("22:00-06:30")
NOON = datetime.datetime(2026, 12, 1, 12, 0).timestamp()


@pytest.fixture(name="battery")
def battery_fixture(monkeypatch):
    def set_battery(percent: float, plugged: bool | None) -> None:
        found = SimpleNamespace(percent=percent, power_plugged=plugged)
        monkeypatch.setattr(psutil, "sensors_battery", lambda: found, raising=False)

    return set_battery


@pytest.mark.parametrize(
    ("hours", "moment", "quiet"),
    [
        *[("22:00-06:30", "23:59", True), ("22:00-06:30", "06:29", True), ("22:00-06:30", "06:30", False)],
        *[("09:00-17:00", "09:00", True), ("09:00-17:00", "08:59", False), ("09:00-17:00", "17:00", False)],
    ],
)
def test_quiet_hours_may_go_over_midnight(hours, moment, quiet):
    assert QuietHours.parse(hours).contains(datetime.time.fromisoformat(moment)) is quiet


@given(start=st.times(), end=st.times(), moment=st.times())
def test_any_moment_is_in_the_hours_or_in_those_left(start, end, moment):
    assert start == end or QuietHours(start, end).contains(moment) != QuietHours(end, start).contains(moment)


@pytest.mark.parametrize("text", ["", "22-6 o'clock", "22:00", "25:00-06:00"])
def test_hours_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match=r"isoformat|hour"):
        QuietHours.parse(text)


def test_the_owner_can_say_that_the_link_is_metered():
    assert DeviceConditions(metered=True).hindrance(NOON) == "metered link"


def test_the_night_is_quiet_in_local_time():
    assert DeviceConditions(quiet=NIGHT).hindrance(NOON + 12 * 3600) == "quiet hours"
    assert DeviceConditions(quiet=NIGHT).hindrance(NOON) != "quiet hours"


@pytest.mark.parametrize(
    ("percent", "plugged", "hindrance"),
    [(90, True, None), (90, False, "on battery"), (20, True, "battery low"), (90, None, None)],
)
def test_a_battery_is_spared(battery, percent, plugged, hindrance):
    battery(percent, plugged)
    assert DeviceConditions().hindrance(NOON) == hindrance


def test_on_battery_is_allowed_where_the_owner_says_so(battery):
    battery(90, False)
    assert DeviceConditions(needs_power=False).hindrance(NOON) is None


def test_a_device_without_a_battery_is_on_power(monkeypatch):
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    assert DeviceConditions().hindrance(NOON) is None


def test_running_turns_and_load_come_first(battery, monkeypatch):
    battery(90, True)
    assert DeviceConditions(busy=lambda: True).hindrance(NOON) == "turns are running"
    monkeypatch.setattr(psutil, "getloadavg", lambda: (100.0, 0.0, 0.0))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    assert DeviceConditions(max_load=0.5).hindrance(NOON) == "busy"
    assert DeviceConditions(max_load=30).hindrance(NOON) is None
