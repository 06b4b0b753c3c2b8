"""A long life of an aggregation endpoint: uploads a second, time to answer, and memory over many rounds.

A real endpoint process on the shipped model's rules, SQLite with every commit on the disk, and devices that take
turns over loopback HTTP. The last line printed is a JSON object.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import httpx
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fednl_runtime.fed_sync.fleet.intake import new_token
from fednl_runtime.fed_sync.signing import public_text, sign_request
from fednl_runtime.fed_sync.update import MEDIA_TYPE, ClientUpdate, Schema, encode, new_update_id
from fednl_runtime.gradient_backend import load_gradients
from fednl_runtime.model_file import default_model_path
from fednl_runtime.server_api.commands.aggregator import fleet_at

PROGRAM = Path(sys.executable).with_name("fednl-runtime")


def call(http: httpx.Client, key: Ed25519PrivateKey, method: str, path: str, body: bytes, kind: str) -> httpx.Response:
    """Send a signed request; anything but success ends the benchmark."""
    request = http.build_request(method, path, content=body, headers={"content-type": kind})
    sign_request(request, key, body, time.time())
    return http.send(request).raise_for_status()


def enrolled(http: httpx.Client, folder: Path, count: int) -> list[Ed25519PrivateKey]:
    """The keys of devices that have joined."""
    fleet = fleet_at(folder, None, "default")
    keys = [Ed25519PrivateKey.generate() for _ in range(count)]
    for key in keys:
        fields = {"token": new_token(fleet), "public_key": public_text(key.public_key())}
        call(http, key, "POST", "/v1/devices", json.dumps(fields).encode(), "application/json")
    fleet.repository.close()
    return keys


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def play(http: httpx.Client, keys: list[Ed25519PrivateKey], rounds: int, pid: int, encoding: str) -> dict[str, object]:
    """All rounds; the last update of each also pays for closing it."""
    defaults = load_gradients(default_model_path(), 1).defaults
    schema, rng = Schema(defaults.shapes, defaults.schema_hash), np.random.default_rng(0)
    uploads, closings, memory = [], [], []
    for version in range(1, rounds + 1):
        for number, key in enumerate(keys):
            delta = schema.tensors(1e-3 * rng.standard_normal(schema.size))
            update = ClientUpdate(schema.hash, version, 1000, 1.0, 0.0, "0.1.0", delta)
            body, path = (
                encode(update, schema, encoding).body,
                f"/v1/populations/default/updates/{new_update_id(time.time())}",
            )
            started = time.perf_counter()
            call(http, key, "PUT", path, body, MEDIA_TYPE)
            (closings if number == len(keys) - 1 else uploads).append(time.perf_counter() - started)
        memory.append(anonymous_bytes(pid))
    cuts = statistics.quantiles(uploads, n=100)
    warm = memory[len(memory) // 5]
    return {
        "updates": len(uploads) + len(closings),
        "encoding": encoding,
        "p50_ms": round(1000 * cuts[49], 1),
        "p99_ms": round(1000 * cuts[98], 1),
        "closing_p50_ms": round(1000 * statistics.median(closings), 1),
        "rss_anon_mb": [round(warm / 1e6, 1), round(memory[-1] / 1e6, 1)],
        "rss_drift": round(memory[-1] / warm - 1, 4),
    }


@click.command()
@click.option("--devices", default=20, show_default=True)
@click.option("--rounds", default=100, show_default=True)
@click.option("--encoding", default="int8", show_default=True)
def main(devices: int, rounds: int, encoding: str) -> None:
    """Play all rounds against a fresh endpoint."""
    with tempfile.TemporaryDirectory() as name:
        command = [PROGRAM, "aggregator", "serve", "--state-dir", name, "--port", "0", "--goal", str(devices)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            url = next(line for line in server.stderr or () if "http://" in line).split()[-1]
            with httpx.Client(base_url=url, timeout=60) as http:
                keys = enrolled(http, Path(name), devices)
                print(json.dumps(play(http, keys, rounds, server.pid, encoding)))
            server.terminate()


if __name__ == "__main__":
    main()
