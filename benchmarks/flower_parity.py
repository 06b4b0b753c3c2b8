"""Flower against HTTP: two SuperNodes train for real over a SuperLink, then the same updates go to an endpoint."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import uvicorn

from fednl_runtime.fed_sync.device.client import Endpoint
from fednl_runtime.fed_sync.device.folder import Device, Invitation, joined
from fednl_runtime.fed_sync.fleet import intake
from fednl_runtime.fed_sync.fleet.endpoint import create_app
from fednl_runtime.fed_sync.fleet.policy import Policy
from fednl_runtime.fed_sync.fleet.population import Fleet, found
from fednl_runtime.fed_sync.signing import public_text
from fednl_runtime.fed_sync.update import MEDIA_TYPE
from fednl_runtime.model_file import default_model_path
from fednl_runtime.onnx_backend import load
from fednl_runtime.server_api.commands.aggregator import fleet_at, model_rules
from fednl_runtime.session import SessionKey
from fednl_runtime.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(sys.executable).parent
TEXTS = (
    "".join(f"pump {i % 5} reports {40 + 7 * i % 13} kPa and a flow of {3 + 5 * i % 11} litres.\n" for i in range(150)),
    "".join(f"door {i % 3} opened by badge {900 + 11 * i % 17} after {10 + 7 * i % 50} seconds.\n" for i in range(150)),
)
"""What the two devices have read lately: regular, so that a few steps of training always help."""
TRAINING = "least-tokens=1024 steps={steps} cpu-share=1.0"


@dataclasses.dataclass(frozen=True)
class Upload:
    """An update that the fleet accepted."""

    device: Device
    id: str
    target: int
    body: bytes


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def endpoint(fleet: Fleet) -> Iterator[str]:
    """The address of the HTTP endpoint of a fleet."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(create_app(fleet), port=port, log_level="critical", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def new_fleet(folder: Path) -> Fleet:
    """A population of the shipped model's rules; a round closes with an update of each device."""
    fleet = fleet_at(folder, None, "default")
    found(fleet, model_rules(None), Policy(goal=len(TEXTS), minimum=len(TEXTS)))
    return fleet


def new_devices(folder: Path, fleet: Fleet) -> list[Device]:
    """Devices with text to train on, enrolled over HTTP."""
    backend = load(default_model_path(), 1)
    tokenizer = Tokenizer(backend.tokenizer_json, backend.config.vocab_size)
    devices = []
    with endpoint(fleet) as url:
        for number, text in enumerate(TEXTS):
            device = Device(folder / f"device{number}", tokenizer.end_of_text)
            device.record(SessionKey("", "log"), tuple(tokenizer.encode(text)[:2000]))
            ask = Endpoint(url, device.key, time.time).ask
            joined(device, Invitation(url, "default", intake.new_token(fleet)), ask)
            devices.append(device)
    return devices


@contextlib.contextmanager
def started(name: str, *options: str, folder: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """A program of Flower's and what it starts, ended at the end; the path of its log."""
    log = folder / f"{len(list(folder.glob('*.log')))}-{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [PROGRAMS / name, *options], env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield log
    finally:
        process.terminate()  # a SuperLink ends its SuperExec, which is in a group of its own
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def play_by_flower(folder: Path, state: Path, rounds: int, steps: int) -> str:
    """Run a SuperLink, a SuperNode for each device and the app; what `flwr run` printed."""
    home = folder / "flwr"
    home.mkdir()
    port = free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    quiet = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    environment = {**os.environ, **quiet, "OMP_NUM_THREADS": "1", "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    start = functools.partial(started, folder=folder, environment=environment)
    with contextlib.ExitStack() as stack:
        link = ("--insecure", "--host", "127.0.0.1", "--port", str(port), "--disable-runtime-dependency-installation")
        stack.enter_context(start("flower-superlink", *link))
        for number in range(len(TEXTS)):
            device = f'device="{folder / f"device{number}"}" {TRAINING.format(steps=steps)}'
            own = ("--host", "127.0.0.1", "--port", str(free_port()), "--node-config", device)
            stack.enter_context(start("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", *own))
        settings = f'state-dir="{state}" num-server-rounds={rounds} nodes={len(TEXTS)}'
        command = [PROGRAMS / "flwr", "run", ROOT / "deploy/flower", "here", "--stream", "-c", settings]
        return run_when_up(command, environment)


def run_when_up(command: list[str | Path], environment: Mapping[str, str], seconds: float = 60.0) -> str:
    """What a command prints that may fail until a server is up."""
    deadline = time.monotonic() + seconds
    while True:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode == 0 or time.monotonic() > deadline:
            return done.stdout + done.stderr
        time.sleep(1)


def uploads_of(fleet: Fleet, devices: list[Device]) -> dict[int, list[Upload]]:
    """The updates that a fleet accepted, by the version that they are in."""
    found: dict[int, list[Upload]] = defaultdict(list)
    for device in devices:
        for fate in device.outbox.fates(100):
            with fleet.repository.read() as records:
                update = records.update(str(fate["id"]))
            if update is not None:
                found[update.target].append(Upload(device, update.id, update.target, fleet.blobs.get(update.sha256)))
    return found


def play_by_http(fleet: Fleet, devices: list[Device], uploads: Mapping[int, list[Upload]]) -> None:
    """Send the same updates to the endpoint of another fleet, version by version."""
    with endpoint(fleet) as url:
        callers = {device.folder: Endpoint(url, device.key, time.time) for device in devices}
        for device in devices:
            about = {"token": intake.new_token(fleet), "public_key": public_text(device.key.public_key())}
            answer = callers[device.folder].ask("POST", "/v1/devices", json.dumps(about).encode())
            assert answer.status == 201, answer
        for target in sorted(uploads):
            for upload in reversed(uploads[target]):
                path = f"/v1/populations/default/updates/{upload.id}"
                answer = callers[upload.device.folder].ask("PUT", path, upload.body, content_type=f"{MEDIA_TYPE}; v=1")
                assert answer.status == 201, answer


def digests(fleet: Fleet) -> dict[int, str]:
    """SHA-256 of the rules of each published version."""
    with fleet.repository.read() as records:
        return {row.version: row.sha256 for row in reversed(records.versions("default")) if row.state == "published"}


def measure(folder: Path, rounds: int, steps: int) -> dict[str, object]:
    """Play both ways in a folder; the digests, and how long the Flower run took."""
    flower, http = new_fleet(folder / "flower"), new_fleet(folder / "http")
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(contextlib.closing(device)) for device in new_devices(folder, flower)]
        begun = time.monotonic()
        output = play_by_flower(folder, folder / "flower", rounds, steps)
        seconds = time.monotonic() - begun
        play_by_http(http, devices, uploads := uploads_of(flower, devices))
        by_flower, by_http = digests(flower), digests(http)
        if len(by_flower) != rounds + 1:
            print(output, *(path.read_text(errors="replace") for path in sorted(folder.glob("*.log"))), file=sys.stderr)
        return {
            "rounds": len(by_flower) - 1,
            "updates": sum(map(len, uploads.values())),
            "flower": by_flower,
            "http": by_http,
            "same": by_flower == by_http and len(by_flower) == rounds + 1,
            "seen": [device.notes.get("seen") for device in devices],
            "seconds": round(seconds, 1),
        }


def main() -> None:
    """Print the digests both ways as one JSON object; exit 1 unless they are the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="training steps of a device in each round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.rounds, options.steps)
    print(json.dumps(found))
    sys.exit(0 if found["same"] else 1)


if __name__ == "__main__":
    main()
