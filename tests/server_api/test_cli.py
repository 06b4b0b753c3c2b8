"""Laws of the command line: streams, exit codes, and a server process with real clients."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx
import openai
import pytest
from click.testing import CliRunner
from engines import write_tiny_model
from timing import load_factor, within

import fednl_runtime
from fednl_runtime import errors
from fednl_runtime.server_api.cli import COMMANDS, LazyGroup, cli
from fednl_runtime.server_api.commands.banner import human, url
from fednl_runtime.server_api.commands.local import size
from fednl_runtime.server_api.commands.serve import listen

COMMAND = [sys.executable, "-c", "from fednl_runtime.server_api.cli import main; main()"]


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.onnx")


def invoke(*args: str, **options: Any) -> Any:
    """The result of a command in this process."""
    return CliRunner().invoke(cli, args, **options)


@contextlib.contextmanager
def server(model: Path, *args: str, env: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its address."""
    command = [*COMMAND, "serve", str(model), "--port", "0", "--threads", "1", *args]
    env = os.environ | (env or {})
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process, read_address(process)
        finally:
            if process.poll() is None:
                process.kill()


def read_address(process: subprocess.Popen[str]) -> str:
    """The address that the banner tells."""
    assert process.stderr
    for line in process.stderr:
        if found := re.search(r"curl -N (http://\S+)/v1/completions", line):
            return found[1]
    raise AssertionError("the server stopped before it told its address")


def test_the_first_token_comes_within_three_seconds_of_the_launch(model: Path) -> None:
    with contextlib.ExitStack() as stack, within(3):
        _, address = stack.enter_context(server(model))
        client = stack.enter_context(openai.OpenAI(base_url=f"{address}/v1", api_key="x"))
        next(iter(client.completions.create(model="tiny", prompt="hello", stream=True)))


def test_a_served_model_file_learns_in_a_session(model: Path) -> None:
    with server(model) as (_, address), openai.OpenAI(base_url=f"{address}/v1", api_key="x") as client:
        text = "the other day the other day "

        def surprise(session_id: str) -> Any:
            answer = client.completions.create(
                model="tiny", prompt=text * 5, max_tokens=0, extra_body={"session_id": session_id}
            )
            return answer.model_extra["session"]

        first = surprise("a")
        assert [surprise("a")["version"] for _ in range(3)] == [2, 3, 4]
        assert surprise("a")["surprise"] < first["surprise"]
        assert surprise("b")["surprise"] == pytest.approx(first["surprise"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0)])
def test_a_server_that_is_told_to_stop_exits_cleanly(model: Path, number: int, code: int) -> None:
    with server(model) as (process, address):
        httpx.post(f"{address}/v1/completions", json={"prompt": "a"})
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (code, "")
        assert "Traceback" not in err


def test_an_answer_does_not_wait_for_a_delayed_acknowledgement(model: Path) -> None:
    with server(model) as (_, address), httpx.Client(base_url=address) as http_client:
        times = []
        for _ in range(30):  # at the start of a connection the kernel may acknowledge at once
            begin = time.monotonic()
            http_client.get("/health")
            times.append(time.monotonic() - begin)
        assert min(times[-10:]) < 0.03  # a delay of 40 ms would be in each of them


def test_a_server_with_a_key_asks_for_it(model: Path) -> None:
    with server(model, env={"FEDNL_API_KEY": "secret"}) as (_, address):
        assert httpx.get(f"{address}/v1/models").status_code == 401
        key = {"authorization": "Bearer secret"}
        assert httpx.get(f"{address}/v1/models", headers=key).json()["data"][0]["id"] == "tiny"


def test_a_key_of_blanks_is_no_key_and_the_line_end_of_a_key_file_is_no_part_of_it(model: Path) -> None:
    assert invoke("serve", str(model), "--host", "0.0.0.0", env={"FEDNL_API_KEY": " \n"}).exit_code == 2
    with server(model, env={"FEDNL_API_KEY": "schlüssel\n"}) as (_, address):
        key = {"authorization": "Bearer schlüssel".encode()}
        assert httpx.get(f"{address}/v1/models", headers=key).status_code == 200


def test_a_session_limit_from_the_command_line_holds(model: Path) -> None:
    with server(model, "--in-memory", "--versions", "1", "--session-memory", "100K") as (_, address):
        codes = [
            httpx.post(f"{address}/v1/completions", json={"prompt": "a", "session_id": s}).status_code for s in "aab"
        ]
        assert codes == [200, 200, 429]


def test_a_public_address_without_a_key_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDNL_API_KEY", raising=False)
    result = invoke("serve", str(model), "--host", "0.0.0.0")
    assert result.exit_code == 2
    assert "set FEDNL_API_KEY" in result.stderr


def test_a_port_in_use_is_one_sentence_and_exit_code_1(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = invoke("serve", str(model), "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 1
    assert re.fullmatch(
        r"Error: Cannot listen on 127\.0\.0\.1 port \d+: Address already in use. Try another --port.\n", result.stderr
    )


def test_options_come_from_the_environment_too(model: Path) -> None:
    env = {"FEDNL_COMPLETE_MODEL": str(model), "FEDNL_COMPLETE_MAX_TOKENS": "3", "FEDNL_COMPLETE_JSON": "1"}
    result = invoke("complete", "hello", env=env)
    assert json.loads(result.stdout)["completion_tokens"] == 3


def test_every_option_of_every_command_has_the_variable_of_its_flag() -> None:
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command
        for option in command.params:
            if isinstance(option, click.Option):
                flags = [flag.lstrip("-").replace("-", "_").upper() for flag in option.opts]
                assert option.envvar in [f"FEDNL_{name.upper()}_{flag}" for flag in flags]


def test_complete_prints_the_text_alone_on_stdout(model: Path) -> None:
    options = ["--model", str(model), "--temperature", "0", "--max-tokens", "6"]
    whole = json.loads(invoke("complete", "hello", *options, "--json").stdout)
    result = invoke("complete", "hello", *options)
    assert result.stdout == whole["text"] + "\n"
    assert result.stderr.startswith("3 tokens read, 6 generated, surprise ")
    assert invoke("complete", "-", *options, input="hello").stdout == result.stdout


def test_the_same_seed_completes_the_same(model: Path) -> None:
    texts = {invoke("complete", "a", "--model", str(model), "--seed", "3").stdout for _ in range(2)}
    assert len(texts) == 1


@pytest.mark.parametrize("args", [["complete", "-"], ["chat"]])
def test_input_that_is_not_utf_8_is_read_with_replacement_characters(args: list[str], model: Path) -> None:
    command = [*COMMAND, *args, "--model", str(model), "--max-tokens", "2", "--threads", "1"]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    result = subprocess.run(command, input=b"a\xff\xfe\n", capture_output=True, env=env)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["nonsense"], 2),
        (["serve", "--port", "70000"], 2),
        (["train", ".", "--seed", "-1"], 2),
        (["train", ".", "--seed", str(2**63)], 2),
        (["train", ".", "--hours", "-1"], 2),
        (["serve", "--session-memory", "much"], 2),
        (["complete", "a", "--temperature", "9"], 2),
        (["complete", "a", "--model", "missing.onnx"], 3),
        (["serve", "missing.onnx"], 3),
    ],
)
def test_failures_are_one_sentence_and_an_exit_code(args: list[str], code: int) -> None:
    result = invoke(*args)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.splitlines()[-1].startswith("Error: ")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), 1),
        (errors.ModelFileError("x"), 3),
        (errors.VerificationError("x"), 4),
        (KeyboardInterrupt(), 130),
        (FileNotFoundError(2, "No such file or directory", "there/m.onnx"), 1),
        (OSError(28, "No space left on device"), 1),
    ],
)
def test_exit_codes_follow_the_table(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(LazyGroup, "get_command", lambda *_: fail)
    result = invoke("fail")
    assert result.exit_code == code
    assert isinstance(result.exception, SystemExit), "not a traceback"


@pytest.mark.parametrize(
    ("args", "library"), [(["verify"], "onnx"), (["export", "m.safetensors"], "onnx"), (["train", "."], "torch")]
)
def test_a_command_whose_extra_is_not_installed_says_how_to_install_it(args: list[str], library: str) -> None:
    hidden = f"import sys; sys.modules[{library!r}] = None; {COMMAND[-1]}"
    result = subprocess.run([sys.executable, "-c", hidden, *args], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"Error: This needs {library}: pip install 'fednl-runtime[export]'.\n"


def test_every_command_exists_and_has_help() -> None:
    for name in COMMANDS:
        result = invoke(name, "--help")
        assert result.exit_code == 0, name
        assert result.stdout.startswith("Usage:")


def test_help_comes_within_half_a_second() -> None:
    def timed() -> float:
        begin = time.monotonic()
        subprocess.run([*COMMAND, "--help"], check=True, capture_output=True)
        return time.monotonic() - begin

    assert min(timed() for _ in range(3)) < 0.5 * load_factor()


def test_version_tells_what_is_installed() -> None:
    assert invoke("--version").stdout == f"fednl-runtime {fednl_runtime.__version__}\n"
    assert json.loads(invoke("version", "--json").stdout)["fednl-runtime"] == fednl_runtime.__version__
    assert invoke("version").stdout.startswith(f"fednl-runtime {fednl_runtime.__version__}\n")


@pytest.mark.parametrize(("text", "number"), [("10", 10), ("64K", 65536), ("512m", 512 << 20), ("8G", 8 << 30)])
def test_sizes_are_read_with_their_units(text: str, number: int) -> None:
    assert size(text) == number


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5G", "1T"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        size(text)


@pytest.mark.parametrize(
    ("number", "text"), [(5, "5"), (5_300_000, "5.3 M"), (1_234, "1.23 k"), (2.5e9, "2.5 G"), (999_950, "1e+03 k")]
)
def test_numbers_are_written_for_people(number: float, text: str) -> None:
    assert human(number) == text


def test_ipv6_addresses_are_bracketed() -> None:
    assert url(("::1", 80, 0, 0)) == "http://[::1]:80"
    assert url(("127.0.0.1", 80)) == "http://127.0.0.1:80"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "..", "a" * 300])
def test_listening_on_a_name_that_does_not_exist_is_refused(host: str) -> None:
    with pytest.raises(click.ClickException, match="Cannot listen"):
        listen(host, 0)
