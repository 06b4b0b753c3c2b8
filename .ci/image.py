"""Run the steps of a Dockerfile in fresh virtual environments, then start and check what it serves."""

from __future__ import annotations

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
from dataclasses import dataclass, field
from pathlib import Path

FORBIDDEN = ("torch", "onnx", "triton", "transformers", "pytest")
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

    def path(self, inside: str) -> Path:
        """Where a path of the image lies on this machine."""
        return self.root / (Path(self.workdir) / inside).relative_to("/")

    def run(self, command: list[str]) -> list[str]:
        """The command with its program looked up in the stage's own environment."""
        return [str(self.root / "venv/bin" / command[0]), *command[1:]]

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k in KEPT or k.startswith("PIP_")}
        return kept | {"PATH": f"{self.root}/venv/bin:/usr/bin:/bin"}


def instructions(text: str) -> list[tuple[str, str]]:
    """(name, arguments) of each instruction, comments dropped and continuations joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def copy(stages: dict[str, Stage], stage: Stage, arguments: str) -> None:
    """COPY [--from=STAGE] SOURCE... TARGET, from the current folder when no stage is named."""
    words = shlex.split(arguments)
    options = [word for word in words if word.startswith("--")]
    *sources, target = [word for word in words if not word.startswith("--")]
    for option in options:
        if not option.startswith("--from="):
            raise SystemExit(f"COPY {option}: not known to this script; teach it before using it.")
    origin = stages[options[0].removeprefix("--from=")].path if options else Path
    for source in map(origin, sources):
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, stage.path(target), dirs_exist_ok=True, ignore=ignore)
        else:
            stage.path(target).mkdir(parents=True, exist_ok=True)
            shutil.copy(source, stage.path(target))


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
    print(f"{len(names)} packages, none of {', '.join(FORBIDDEN)}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_service(stage: Stage) -> None:
    """It refuses to listen to the world without a key; with one it becomes healthy and stops cleanly."""
    port = str(free_port())
    serve = stage.run([*stage.entrypoint, *stage.command, "--port", port])
    health = stage.run([word.replace(stage.port, port) for word in stage.healthcheck])
    env = stage.environment()
    refused = subprocess.run(serve, cwd=stage.path("."), env=env, timeout=60, capture_output=True, text=True)
    if refused.returncode == 0 or "FEDNL_API_KEY" not in refused.stderr:
        raise SystemExit(f"Without FEDNL_API_KEY the server must refuse and say so:\n{refused.stderr}")
    with subprocess.Popen(serve, cwd=stage.path("."), env=env | {"FEDNL_API_KEY": "ci-key"}) as server:
        try:
            deadline = time.monotonic() + 60
            while subprocess.run(health, env=env, capture_output=True).returncode:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("The server did not become healthy.")
                time.sleep(0.2)
            print("healthy")
            server.send_signal(signal.SIGTERM)
            if code := server.wait(timeout=40):
                raise SystemExit(f"The server ended with {code} on SIGTERM.")
        finally:
            server.kill()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        stage = build(Path(sys.argv[1]), Path(folder))
        check_contents(stage)
        check_service(stage)


if __name__ == "__main__":
    main()
