"""Laws of API keys: stored as hashes, refused with a reason, found by their secret alone."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from fednl_runtime.server_api.cli import cli
from fednl_runtime.server_api.entrance.rate import RateLimit
from fednl_runtime.server_api.entrance.scopes import SCOPES
from fednl_runtime.server_api.entrance.security import ANYONE, KeyFileError, KeyRing, key_ring, load_keys, new_key

LINE = 'a = { scopes = ["infer"], sha256 = "' + "0" * 64 + '" }\n'


def test_a_new_key_is_let_in_by_the_line_that_is_printed_with_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["keys", "new", "--name", "laptop", "--scopes", "infer, metrics"])
    secret, line = result.stdout.splitlines()
    file = tmp_path / "keys.toml"
    file.write_text(line)
    caller = key_ring(None, file).caller(secret.encode())
    assert caller is not None
    assert (caller.key_id, caller.scopes) == ("laptop", {"infer", "metrics"})
    assert secret not in line
    assert key_ring(None, file).caller(secret[:-1].encode()) is None
    assert tomllib.loads(line)["laptop"]["scopes"] == ["infer", "metrics"]


def test_two_new_keys_differ_and_json_says_both_halves() -> None:
    made = [json.loads(CliRunner().invoke(cli, ["keys", "new", "--name", "a", "--json"]).stdout) for _ in range(2)]
    assert len({one["key"] for one in made}) == len({one["line"] for one in made}) == 2


def test_keys_are_added_to_a_file_that_only_its_owner_reads_and_no_name_twice(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    for name in ("a", "b"):
        result = CliRunner().invoke(cli, ["keys", "new", "--name", name, "--file", str(file)])
        caller = key_ring(None, file).caller(result.stdout.strip().encode())
        assert caller is not None
        assert caller.key_id == name
    assert file.stat().st_mode & 0o777 == 0o600
    again = CliRunner().invoke(cli, ["keys", "new", "--name", "a", "--file", str(file)])
    assert (again.exit_code, again.stdout) == (1, "")
    assert "already" in again.stderr


def test_the_key_of_the_environment_is_good_for_everything_beside_those_of_a_file(tmp_path: Path) -> None:
    secret, key = new_key("a", ["infer"])
    (tmp_path / "keys").write_text(key.line())
    ring = key_ring("other", tmp_path / "keys")
    callers = ring.caller(secret.encode()), ring.caller(b"other")
    assert [caller and caller.key_id for caller in callers] == ["a", "default"]
    assert callers[1] is not None
    assert callers[1].scopes == set(SCOPES)


def test_without_keys_everybody_is_the_same_caller_and_with_some_nobody_comes_in_without() -> None:
    assert KeyRing().caller(b"") == KeyRing().caller(b"anything") == ANYONE
    assert key_ring("x", None).caller(b"") is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no key"),
        ("a = 1", "must have scopes and sha256"),
        ("not toml", "cannot be read"),
        (LINE + LINE, "cannot be read"),
        (LINE.replace("infer", "everything"), "one or more of the scopes"),
        (LINE.replace('"infer"', ""), "one or more of the scopes"),
        (LINE.replace("0" * 64, "secret"), "64 digits"),
        (LINE.replace("a =", '"a b" =', 1), "no name of a key"),
        (LINE.replace("}", ", key = 1 }"), "must have scopes and sha256"),
    ],
)
def test_a_key_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(KeyFileError, match=reason):
        load_keys(file)


def test_a_key_file_that_everybody_can_write_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(LINE)
    file.chmod(0o666)
    with pytest.raises(KeyFileError, match="chmod go-w"):
        load_keys(file)


def test_a_missing_key_file_and_a_name_taken_by_the_environment_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot be read"):
        load_keys(tmp_path / "none")
    (tmp_path / "keys").write_text(LINE.replace("a =", "default =", 1))
    with pytest.raises(KeyFileError, match="choose another name"):
        key_ring("x", tmp_path / "keys")


def test_a_minute_s_worth_comes_in_at_once_and_then_one_after_the_other() -> None:
    now = [100.0]
    limit = RateLimit(30, lambda: now[0])
    assert [limit.wait_s("a") for _ in range(30)] == [0] * 30
    assert limit.wait_s("a") == pytest.approx(2)
    assert limit.wait_s("b") == 0
    now[0] += 1.5
    assert limit.wait_s("a") == pytest.approx(0.5)
    now[0] += 0.6
    assert limit.wait_s("a") == 0
    now[0] += 1e6
    assert [limit.wait_s("a") > 0 for _ in range(31)] == [False] * 30 + [True]
