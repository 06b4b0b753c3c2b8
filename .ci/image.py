"""Run the steps of a Dockerfile in fresh virtual environments, then start and check what it serves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FORBIDDEN = ("torch", "onnx", "triton", "transformers", "pytest")
KEY = "ci-key"
KEPT = ("HOME", "LANG", "SSL_CERT_FILE")


@dataclass
class Stage:
    """One FROM of the file: a folder that stands for / and a fresh environment that stands for its Python."""

    root: Path
    workdir: str = "/"
    user: str = "root"
    healthcheck: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    port: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    volumes: list[str] = field(default_factory=list)

    def path(self, inside: str) -> Path:
        """Where a path of the image lies on this machine."""
        return self.root / (Path(self.workdir) / inside).relative_to("/")

    def run(self, command: list[str]) -> list[str]:
        """The command with its program looked up in the stage's own environment."""
        return [str(self.root / "venv/bin" / command[0]), *command[1:]]

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k in KEPT or k.startswith("PIP_")}
        set_here = {k: str(self.path(v)) if v.startswith("/") else v for k, v in self.variables.items()}
        return kept | set_here | {"PATH": f"{self.root}/venv/bin:/usr/bin:/bin"}


def instructions(text: str) -> list[tuple[str, str]]:
    """(name, arguments) of each instruction, comments dropped and continuations joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def copy(stages: dict[str, Stage], stage: Stage, arguments: str) -> None:
    """COPY [--from=STAGE] [--chown=UID:GID] SOURCE... TARGET, from the current folder when no stage is named."""
    words = shlex.split(arguments)
    options = dict(word.removeprefix("--").split("=") for word in words if word.startswith("--"))
    *sources, target = [word for word in words if not word.startswith("--")]
    if unknown := options.keys() - {"from", "chown"}:
        raise SystemExit(f"COPY --{min(unknown)}: not known to this script; teach it before using it.")
    origin = stages[options["from"]].path if "from" in options else Path
    for source in map(origin, sources):
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, stage.path(target), dirs_exist_ok=True, ignore=ignore)
        else:
            stage.path(target).mkdir(parents=True, exist_ok=True)
            shutil.copy(source, stage.path(target))
    if "chown" in options and os.getuid() == 0:
        os.chown(stage.path(target), *map(int, options["chown"].split(":")))


def build(dockerfile: Path, folder: Path) -> Stage:
    """The last stage of the file, with every step done."""
    stages: dict[str, Stage] = {}
    stage = Stage(folder)
    for name, arguments in instructions(dockerfile.read_text()):
        print(f"{name} {arguments}", flush=True)
        match name:
            case "FROM":
                image, _, alias = arguments.partition(" AS ")
                python = re.fullmatch(r"python:(3\.\d+)-slim", image)
                if not python:
                    raise SystemExit(f"FROM {image}: this script stands in for python:3.x-slim only.")
                stage = stages[alias] = Stage(folder / f"stage{len(stages)}")
                subprocess.run([f"python{python[1]}", "-m", "venv", stage.root / "venv"], check=True)
            case "WORKDIR":
                stage.workdir = arguments
                stage.path(".").mkdir(parents=True, exist_ok=True)
            case "COPY":
                copy(stages, stage, arguments)
            case "RUN":
                if re.search(r"(^|[\s='\"])/", arguments):
                    raise SystemExit(f"RUN {arguments}: an absolute path would touch this machine; use WORKDIR.")
                step = ["bash", "-euc", arguments]
                subprocess.run(
                    step, cwd=stage.path("."), env=stage.environment(), check=True, stdout=subprocess.DEVNULL
                )
            case "USER":
                stage.user = arguments
            case "ENV":
                variable, _, value = arguments.partition("=")
                stage.variables[variable] = value
            case "VOLUME":
                stage.volumes.append(arguments)
            case "EXPOSE":
                stage.port = arguments
            case "HEALTHCHECK":
                stage.healthcheck = json.loads(arguments.partition("CMD ")[2])
            case "ENTRYPOINT":
                stage.entrypoint = json.loads(arguments)
            case "CMD":
                stage.command = json.loads(arguments)
            case _:
                raise SystemExit(f"{name}: not known to this script; teach it before using it.")
    return stage


def check_contents(stage: Stage) -> None:
    """The serving image runs as nobody in particular and holds nothing it does not serve with."""
    if stage.user.partition(":")[0] in ("root", "0"):
        raise SystemExit("The image runs as root; set USER.")
    listing = subprocess.run(
        stage.run(["pip", "list", "--format=json"]), env=stage.environment(), check=True, capture_output=True, text=True
    )
    names = {package["name"] for package in json.loads(listing.stdout)}
    if heavy := sorted(names & set(FORBIDDEN)):
        raise SystemExit(f"The image holds {', '.join(heavy)}.")
    for volume in stage.volumes:
        owner = stage.path(volume).stat().st_uid
        if os.getuid() == 0 and str(owner) != stage.user.partition(":")[0]:
            raise SystemExit(f"{volume} belongs to user {owner}; the image runs as {stage.user} and must write there.")
    print(f"{len(names)} packages, none of {', '.join(FORBIDDEN)}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(stage: Stage) -> Iterator[str]:
    """The address of the service; at the end it must stop cleanly."""
    port = str(free_port())
    serve = stage.run([*stage.entrypoint, *stage.command, "--port", port])
    health = stage.run([word.replace(stage.port, port) for word in stage.healthcheck])
    env = stage.environment() | {"FEDNL_API_KEY": KEY}
    with subprocess.Popen(serve, cwd=stage.path("."), env=env) as server:
        try:
            deadline = time.monotonic() + 60
            while subprocess.run(health, env=env, capture_output=True).returncode:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("The server did not become healthy.")
                time.sleep(0.2)
            print("healthy")
            yield f"http://127.0.0.1:{port}"
            server.send_signal(signal.SIGTERM)
            if code := server.wait(timeout=40):
                raise SystemExit(f"The server ended with {code} on SIGTERM.")
        finally:
            server.kill()


def ask(url: str, body: object = None) -> dict[str, object]:
    """The JSON object that the service answers."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as response:
        return dict(json.load(response))


def check_refusal(stage: Stage) -> None:
    """Without a key it does not listen to the world, and says why."""
    serve = stage.run([*stage.entrypoint, *stage.command, "--port", str(free_port())])
    env = stage.environment()
    refused = subprocess.run(serve, cwd=stage.path("."), env=env, timeout=60, capture_output=True, text=True)
    if refused.returncode == 0 or "FEDNL_API_KEY" not in refused.stderr:
        raise SystemExit(f"Without FEDNL_API_KEY the server must refuse and say so:\n{refused.stderr}")


def check_service(stage: Stage) -> None:
    """It answers, and what a session learnt is there after a restart, in the image's volume."""
    with running(stage) as address:
        ask(f"{address}/v1/completions", {"prompt": "hello", "max_tokens": 1, "session_id": "ci"})
    with running(stage) as address:
        if not ask(f"{address}/v1/sessions/ci")["tokens_seen"]:
            raise SystemExit("The session was forgotten over a restart.")
    if not any(any(stage.path(volume).iterdir()) for volume in stage.volumes):
        raise SystemExit("The session is kept outside the image's volumes.")
    print("a session outlives a restart")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        stage = build(Path(sys.argv[1]), Path(folder))
        check_contents(stage)
        check_refusal(stage)
        check_service(stage)


if __name__ == "__main__":
    main()
