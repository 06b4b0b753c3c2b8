"""The endpoint as a device meets it: signed, idempotent, in one shape, and closed to everybody else."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from engines import until
from fleets import Caller, device_key, fleet_of, rules_now
from updates import GOOD, HOSTILE, RULES, SCHEMA, body_of, one_hot, update_of

from fednl_runtime.fed_sync.fleet import intake, rounds
from fednl_runtime.fed_sync.fleet.endpoint import ROUTES, create_app
from fednl_runtime.fed_sync.fleet.population import Fleet
from fednl_runtime.fed_sync.fleet.problems import STATUSES
from fednl_runtime.fed_sync.manifest import open_manifest
from fednl_runtime.fed_sync.signing import public_key, public_text, sign_request, sign_text
from fednl_runtime.fed_sync.update import MEDIA_TYPE, new_update_id
from fednl_runtime.server_api.commands.serve import listen

PAGE = (Path(__file__).parents[2] / "docs/federation.md").read_text()
ADMIN = {"authorization": "Bearer secret"}


@contextlib.contextmanager
def serving(fleet: Fleet, admin_token: str | None = "secret", **options: Any) -> Iterator[str]:
    """The address of an endpoint around a fleet."""
    app = create_app(fleet, admin_token, **options)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none", timeout_graceful_shutdown=1))
    with listen("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(name="fleet", scope="module")
def fleet_fixture(tmp_path_factory):
    with fleet_of(tmp_path_factory.mktemp("fleet"), goal=1000, sync_s=60.0) as fleet:
        yield fleet


@pytest.fixture(name="url", scope="module")
def url_fixture(fleet):
    with serving(fleet) as url:
        yield url


NUMBERS = iter(range(1, 10_000))


@pytest.fixture(name="device")
def device_fixture(fleet, url):
    with Caller(url, next(NUMBERS), fleet.clock) as caller:
        assert caller.enrol(intake.new_token(fleet)).status_code == 201
        yield caller


@pytest.fixture(name="liar", scope="module")
def liar_fixture(fleet, url):
    """A device that only sends what is refused, so that one serves many tests."""
    with Caller(url, next(NUMBERS), fleet.clock) as caller:
        assert caller.enrol(intake.new_token(fleet)).status_code == 201
        yield caller


def code_of(answer: httpx.Response) -> str:
    """The code of a problem, whose shape is checked."""
    body = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert {"type", "title", "status", "code", "detail", "next_sync"} <= set(body)
    assert body["status"] == answer.status_code == STATUSES[body["code"]]
    assert body["detail"].endswith(".")
    return body["code"]


def new_id(caller: Caller) -> str:
    return new_update_id(caller.clock())


PATHS = [
    (method, re.sub(r"\{(\w+)}", lambda m: {"population": "p", "version": "1"}.get(m[1], m[1]), path))
    for method, path, _ in ROUTES
]


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_every_route_but_health_needs_a_key_and_every_answer_says_when_to_come_again(url, method, path):
    answer = httpx.request(
        method, url + path, headers={"content-type": "application/json"}, content=b'{"token": "x", "public_key": "x"}'
    )
    assert answer.status_code == (200 if path == "/health" else 422 if path == "/v1/devices" else 401)
    assert re.fullmatch(r"60, 120", answer.headers["next-sync"])
    assert answer.json()["next_sync"] == {"min_s": 60, "max_s": 120}


def test_a_route_that_is_none_is_a_problem_too(url):
    assert code_of(httpx.get(url + "/v1/nothing")) == "not_found"
    assert code_of(httpx.delete(url + "/health")) == "method_not_allowed"
    assert code_of(httpx.post(url + "/v1/admin/populations/p/dance", headers=ADMIN)) == "not_found"


def test_enrolment_needs_the_token_and_the_key_it_names(fleet, url):
    token, clock = intake.new_token(fleet), fleet.clock
    with Caller(url, next(NUMBERS), clock) as caller, Caller(url, next(NUMBERS), clock) as second:
        check_enrolment(fleet, caller, second, token)


def check_enrolment(fleet: Fleet, caller: Caller, second: Caller, token: str) -> None:
    other = public_text(device_key(9_999_999).public_key())
    assert code_of(caller.json("POST", "/v1/devices", token=token, public_key=other)) == "bad_signature"
    first, again = caller.enrol(token), caller.enrol(token)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["device_id"] == again.json()["device_id"]
    assert first.json()["manifest_key"] == public_text(fleet.key.public_key())
    assert code_of(second.enrol(token)) == "bad_token"


def test_an_upload_is_accepted_once_and_its_fate_can_be_asked(device):
    update_id = new_id(device)
    first, again = device.put(update_id, GOOD), device.put(update_id, GOOD)
    assert (first.status_code, again.status_code) == (201, 200)
    assert (first.json()["duplicate"], again.json()["duplicate"]) == (False, True)
    told = device.get(f"updates/{update_id}").json()
    assert {**told, "duplicate": True} == again.json()
    assert code_of(device.get(f"updates/{new_id(device)}")) == "unknown_update"


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_body_is_refused_with_its_code(liar, what):
    code, body = HOSTILE[what]
    update_id = new_id(liar)
    assert code_of(liar.put(update_id, body)) == code
    assert liar.get(f"updates/{update_id}").json()["code"] == code


def test_after_all_hostile_bodies_a_good_one_is_accepted(liar):
    assert liar.put(new_id(liar), GOOD).status_code == 201


def test_what_is_wrong_around_a_body_has_codes_of_its_own(device, url):
    limit = 4 * SCHEMA.size + (1 << 16)
    assert code_of(device.put(new_id(device), bytes(limit + 1))) == "too_large"
    assert code_of(device.put(new_id(device), GOOD, "application/x-pickle")) == "unsupported_media_type"
    assert code_of(device.put("not-an-id", GOOD)) == "bad_update_id"
    assert code_of(device.put(new_update_id(1e9), GOOD)) == "update_id_expired"
    stale = device.put(new_id(device), body_of(update_of(base_version=7)))
    assert (code_of(stale), stale.json()["current_version"]) == ("unknown_base", 1)
    device.population = "q"
    assert code_of(device.put(new_id(device), GOOD)) == "unknown_population"


def test_a_body_without_a_stated_length_is_read_up_to_the_limit(device):
    parts = iter([bytes(1 << 16)] * 4)
    path = device.path(f"updates/{new_id(device)}")
    request = device.http.build_request("PUT", path, content=parts, headers={"content-type": MEDIA_TYPE})
    sign_request(request, device.key, GOOD, device.clock())
    assert request.headers["transfer-encoding"] == "chunked"
    assert code_of(device.http.send(request)) == "too_large"


def test_a_body_other_than_the_signed_one_is_refused(device):
    path = device.path(f"updates/{new_id(device)}")
    request = device.http.build_request("PUT", path, content=body_of(one_hot(1)), headers={"content-type": MEDIA_TYPE})
    sign_request(request, device.key, body_of(one_hot(2)), device.clock())
    assert code_of(device.http.send(request)) == "digest_mismatch"


def test_a_wrong_clock_is_told_and_the_date_helps(device):
    update_id, now = new_id(device), device.clock
    device.clock = lambda: now() - 86_400 * 365 * 10
    answer = device.put(update_id, GOOD)
    assert code_of(answer) == "clock_skew"
    assert answer.headers["date"]


def test_a_replayed_request_has_no_effect(device):
    body, path = body_of(one_hot(3)), device.path(f"updates/{new_id(device)}")
    request = device.http.build_request("PUT", path, content=body, headers={"content-type": MEDIA_TYPE})
    sign_request(request, device.key, body, device.clock())
    answers = [device.http.send(request).json() for _ in range(3)]
    assert [answer["duplicate"] for answer in answers] == [False, True, True]


def test_the_rules_come_with_a_manifest_a_digest_and_an_etag(fleet, device):
    first = device.get("rules/current")
    manifest = open_manifest(first.text, [public_key(public_text(fleet.key.public_key()))])
    rules = device.get(f"rules/{manifest.version}")
    digest = hashlib.sha256(rules.content)
    assert (digest.hexdigest(), len(rules.content)) == (manifest.sha256, manifest.size)
    assert rules.headers["etag"] == f'"{manifest.sha256}"'
    assert rules.headers["repr-digest"] == f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"
    assert "immutable" in rules.headers["cache-control"]
    for path, answer in (("rules/current", first), (f"rules/{manifest.version}", rules)):
        for tag in (answer.headers["etag"], f'"x", W/{answer.headers["etag"]}'):
            known = device.get(path, if_none_match=tag)
            assert (known.status_code, known.content) == (304, b"")
        assert device.get(path, if_none_match='"x"').status_code == 200


@pytest.mark.parametrize("version", ["0", "2", "999999999", "9" * 40, "-1", "x", "1.0"])
def test_rules_that_were_never_published_are_not_there(liar, version):
    assert code_of(liar.get(f"rules/{version}")) == "unknown_version"


def test_a_check_in_and_the_rounds_are_told(device):
    told = device.json("POST", device.path("check-in"), base_version=1, schema=RULES.schema_hash, agent_version="0.1.0")
    assert told.json()["participate"] is True
    assert device.get("rounds").json()["open"]["target"] == 2


@pytest.mark.parametrize(
    ("body", "kind", "code"),
    [
        (b"{}", "application/json", "malformed"),
        (b"[]", "application/json", "malformed"),
        (b"null", "application/json", "malformed"),
        (b"{" * 9000, "application/json", "malformed"),
        (b"\xff", "application/json", "malformed"),
        (b'{"base_version": true, "schema": "", "agent_version": ""}', "application/json", "malformed"),
        (b'{"base_version": 1e400, "schema": "", "agent_version": ""}', "application/json", "malformed"),
        (b'{"base_version": 1, "schema": "", "agent_version": "", "city": ""}', "application/json", "malformed"),
        (b"{}", "text/plain", "unsupported_media_type"),
        (b" " * 20_000, "application/json", "too_large"),
    ],
)
def test_json_that_is_not_the_message_is_refused(liar, body, kind, code):
    assert code_of(liar.call("POST", liar.path("check-in"), body, content_type=kind)) == code


def test_a_key_is_changed_over_http_and_the_old_one_no_longer_opens(fleet, device):
    device_id = intake.device_of(fleet, hashlib.sha256(device.key.public_key().public_bytes_raw()).hexdigest()[:32]).id
    new = device_key(next(NUMBERS))
    text = public_text(new.public_key())
    proof = sign_text(intake.rotation_text(device_id, text), new)
    fields = {"public_key": text, "proof": proof}
    assert device.json("PUT", "/v1/devices/self/key", **fields).json()["device_id"] == device_id
    assert code_of(device.get("rounds")) == "bad_signature"
    device.key = new
    assert device.json("PUT", "/v1/devices/self/key", **fields).status_code == 200
    assert device.get("rounds").status_code == 200


def test_an_operator_sees_and_steers(tmp_path):
    with (
        fleet_of(tmp_path) as fleet,
        serving(fleet) as url,
        httpx.Client(base_url=url, headers=ADMIN) as admin,
        Caller(url, 1, fleet.clock) as caller,
    ):
        device_id = caller.enrol(intake.new_token(fleet)).json()["device_id"]
        caller.put(new_id(caller), body_of(one_hot(0)))
        assert admin.post("/v1/admin/populations/p/pause").json()["paused"] is True
        assert code_of(caller.put(new_id(caller), body_of(one_hot(1)))) == "paused"
        assert admin.post("/v1/admin/populations/p/resume").json()["paused"] is False
        assert admin.post("/v1/admin/populations/p/publish").json()["current_version"] == 2
        rollback = admin.post("/v1/admin/populations/p/rollback", json={"to": 1})
        assert rollback.json()["current_version"] == 3
        assert code_of(caller.get("rules/2")) == "withdrawn"
        assert code_of(admin.post("/v1/admin/populations/p/release", json={"version": 2})) == "not_quarantined"
        metrics = admin.get("/metrics").text
        assert "fednl_fleet_current_version 3.0" in metrics
        assert 'fednl_fleet_updates{status="counted"} 1.0' in metrics
        assert 'fednl_fleet_refusals_total{code="paused"} 1.0' in metrics
        assert device_id not in metrics
        admin.post(f"/v1/admin/devices/{device_id}/revoke")
        assert code_of(caller.get("rounds")) == "revoked"
        assert code_of(admin.post("/v1/admin/devices/nobody/revoke")) == "unknown_device"
        caller.http.close()


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic secret", "Bearer secrét"])
def test_another_admin_token_is_refused(url, header):
    assert (
        code_of(httpx.get(url + "/metrics", headers={"authorization": header.encode("latin-1")})) == "bad_admin_token"
    )


def test_without_an_admin_token_nobody_is_the_operator(tmp_path):
    with fleet_of(tmp_path) as fleet, serving(fleet, None) as url:
        assert code_of(httpx.get(url + "/metrics", headers={"authorization": "Bearer x"})) == "bad_admin_token"


def test_behind_a_proxy_the_public_address_is_the_signed_one(tmp_path):
    with fleet_of(tmp_path) as fleet, serving(fleet, public_url="https://fleet.example") as url:
        caller = Caller(url, 1, fleet.clock)
        assert code_of(caller.enrol(intake.new_token(fleet))) == "bad_signature"
        caller.http.close()
        caller.http = httpx.Client(base_url="https://fleet.example", transport=Proxy(url))
        assert caller.enrol(intake.new_token(fleet)).status_code == 201
        caller.http.close()


class Proxy(httpx.BaseTransport):
    """Passes requests on to another address, as a proxy that ends TLS does."""

    def __init__(self, url: str) -> None:
        self._url = httpx.URL(url)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url.copy_with(scheme="http", host=self._url.host, port=self._url.port)
        headers = {**request.headers, "host": self._url.netloc.decode()}
        answer = httpx.request(request.method, url, headers=headers, content=request.read())
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)


def test_a_deadline_is_seen_by_the_running_endpoint(tmp_path):
    with fleet_of(tmp_path, deadline_s=50.0) as fleet, serving(fleet) as url:
        caller = Caller(url, 1, fleet.clock)
        caller.enrol(intake.new_token(fleet))
        caller.put(new_id(caller), body_of(one_hot(0)))
        fleet.clock.now += 51
        until(lambda: caller.get("rounds").json()["current_version"] == 2)
        caller.http.close()


def test_a_database_that_is_gone_is_told_and_nothing_inside_is_shown(tmp_path):
    with fleet_of(tmp_path) as fleet, serving(fleet) as url:
        caller = Caller(url, 1, fleet.clock)
        caller.enrol(intake.new_token(fleet))
        fleet.repository.close()
        (tmp_path / "fleet.db").rename(tmp_path / "gone")
        answer = caller.get("rounds")
        assert code_of(answer) == "unavailable"
        assert "sqlite" not in answer.text
        assert answer.headers["retry-after"] == "600"
        caller.http.close()


def test_many_devices_at_once_are_all_counted(tmp_path):
    with fleet_of(tmp_path, goal=12) as fleet, serving(fleet) as url:
        tokens = [intake.new_token(fleet) for _ in range(12)]

        def take_part(number: int) -> None:
            caller = Caller(url, number + 1, fleet.clock)
            caller.enrol(tokens[number])
            assert caller.put(new_id(caller), body_of(one_hot(number, 0.12))).status_code == 201
            caller.http.close()

        threads = [threading.Thread(target=take_part, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        moved = rules_now(fleet, 2) - rules_now(fleet, 1)
        assert moved[:12] == pytest.approx([0.01] * 12, abs=1e-6)
        assert rounds.tick(fleet) is None


def test_the_page_lists_every_route_and_every_code():
    listed = re.findall(r"^\| `([A-Z]+ /[^`]*)` \|", PAGE, re.MULTILINE)
    routes = {
        f"{m} {p}".replace("{population}", "{p}").replace("{update_id}", "{id}").replace("{device_id}", "{device}")
        for m, p, _ in ROUTES
    }
    assert set(listed) == routes
    rows = re.findall(r"^\| (\d{3}) \| (.*?) \|", PAGE, re.MULTILINE)
    codes = {code: int(status) for status, cell in rows for code in re.findall(r"`(\w+)`", cell)}
    assert codes == dict(STATUSES)
