"""Every command in the README and the docs exists, and the cheap ones run."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from engines import write_tiny_model

from fednl_runtime.config import HopeConfig
from fednl_runtime.server_api import app
from fednl_runtime.server_api.cli import cli
from fednl_runtime.server_api.commands.serve import serve
from fednl_runtime.state import state_bytes

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
CHEAP = ("version", "info", "complete", "chat")
PROGRAM = Path(sys.executable).with_name("fednl-runtime")
"""The console script next to this interpreter."""

MODELS = sorted((ROOT / "runtime/models").glob("*.onnx"))
PORT = next(option.default for option in serve.params if option.name == "port")
ROUTES = [route.path for routes in app.ROUTES for route in routes.router.routes]


def commands(pages: list[Path] = PAGES) -> list[str]:
    """Each command of each `sh` block, continuation lines joined, `a && b` split."""
    found = []
    for page in pages:
        for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found += [part.strip() for line in lines if line.strip() for part in line.split(" && ")]
    return list(dict.fromkeys(found))


def words_of(command: str) -> list[str]:
    """The words of a command without the variables set in front of it."""
    words = shlex.split(command, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    return words


def calls_of(program: str, pages: list[Path] = PAGES) -> list[list[str]]:
    return [words for command in commands(pages) if (words := words_of(command)) and words[0] == program]


def text_id(value: object) -> str:
    return shlex.join(value) if isinstance(value, list) else str(value)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command with nothing to read on its standard input."""
    return subprocess.run([PROGRAM, *arguments], input="", capture_output=True, text=True, timeout=120)


@functools.cache
def help_of(*path: str) -> str:
    result = run(*path, "--help")
    assert result.returncode == 0, result.stderr
    return result.stdout


def path_of(words: list[str]) -> list[str]:
    """The command that is called, with the part of it where it is a group."""
    if words[1].startswith("-"):
        return []
    command = cli.get_command(click.Context(cli), words[1])
    return words[1:3] if isinstance(command, click.Group) else words[1:2]


def test_only_known_programs_are_documented():
    known = {"pip", "pytest", "mypy", "fednl-runtime", "curl", "docker", ".ci/run", "python"}
    known |= {"flower-superlink", "flower-supernode", "flwr"}  # tests/fed_sync/test_flower.py knows their options
    assert {words[0] for command in commands() if (words := words_of(command))} <= known


@pytest.mark.parametrize("words", calls_of("fednl-runtime"), ids=text_id)
def test_a_documented_subcommand_has_help_that_names_its_options(words):
    options = [word.partition("=")[0] for word in words[1:] if word.startswith("--")]
    text = help_of(*path_of(words))
    assert [option for option in options if option not in text] == []


@pytest.mark.parametrize("words", calls_of("python"), ids=text_id)
def test_a_documented_benchmark_has_help_that_names_its_options(words):
    assert words[1].startswith("benchmarks/")
    parts = words[1:2] if "@click.group" not in (ROOT / words[1]).read_text() else words[1:3]
    result = subprocess.run([sys.executable, *parts, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert [option for option in options if option not in result.stdout] == []


@pytest.mark.parametrize("words", [words for words in calls_of("fednl-runtime") if words[1] in CHEAP], ids=text_id)
def test_a_cheap_command_runs(words):
    if words[1] != "version" and not MODELS:
        pytest.skip("no model is shipped")
    result = run(*words[1:])
    assert result.returncode == 0, result.stderr


@pytest.fixture(name="port", scope="module")
def port_fixture(tmp_path_factory):
    """The port of a server on a tiny model."""
    model = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.onnx")
    command = [PROGRAM, "serve", str(model), "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        yield next(found[1] for line in server.stderr if (found := re.search(r"127\.0\.0\.1:(\d+)", line)))
        server.terminate()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_curl_examples_of_a_page_work_one_after_the_other(page, port):
    for words in calls_of("curl", [page]):
        here = [word.replace(f":{PORT}/", f":{port}/") for word in words]
        result = subprocess.run([*here, "-sS", "--fail-with-body"], capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("words", calls_of("curl"), ids=text_id)
def test_a_curl_example_calls_a_route_of_this_server_with_json(words):
    (url,) = [word for word in words if word.startswith("http")]
    server = f"http://127.0.0.1:{PORT}"
    assert url.startswith(f"{server}/")
    patterns = [re.sub(r"\{[^}]*}", "[^/]+", route) for route in (*ROUTES, "/health")]
    assert any(re.fullmatch(pattern, url.removeprefix(server)) for pattern in patterns)
    bodies = [value for option, value in itertools.pairwise(words) if option == "-d" and not value.startswith("@")]
    assert all(isinstance(json.loads(body), dict) for body in bodies)


@pytest.mark.parametrize("words", calls_of("pip"), ids=text_id)
def test_a_pip_line_installs_this_project_with_extras_it_has(words):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    target = re.fullmatch(r"\.(?:\[(.*)])?", words[-1])
    assert target, f"{words[-1]} is not a clone of this project, and nothing else is published"
    assert set((target[1] or "").split(",")) - {""} <= set(project["optional-dependencies"])


def test_the_image_and_its_documentation_use_the_port_of_the_server():
    exposed = re.findall(r"^EXPOSE (\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    published = [value for words in calls_of("docker") for flag, value in itertools.pairwise(words) if flag == "-p"]
    assert exposed == [str(PORT)]
    assert published == [f"{PORT}:{PORT}"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_files_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_the_readme_leads_to_every_page(page):
    assert f"(docs/{page.name})" in (ROOT / "README.md").read_text()


def test_ci_script_is_there_to_be_run():
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_the_memory_table_holds_the_bytes_of_the_default_shape():
    config = HopeConfig(vocab_size=4096)
    cache = 2 * 4 * config.n_layer * config.d_model  # a key and a value of fp32 per layer
    rows = re.findall(
        r"^\| ([\d,]+) \| ([\d,]+) bytes \| ([\d,]+) bytes \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 3
    for row in rows:
        tokens, session, baseline = (int(number.replace(",", "")) for number in row)
        assert (session, baseline) == (state_bytes(config), tokens * cache)
    assert f"first {state_bytes(config) // cache} tokens" in (ROOT / "README.md").read_text()
