"""The page's table of sizes is what the benchmark finds on the shipped model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from updates import SCHEMA, update_of

from fednl_runtime.fed_sync.update import ENCODINGS, encode

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/federation.md").read_text()


@pytest.mark.skipif(not (ROOT / "runtime/models/hope.onnx").exists(), reason="no model is shipped")
def test_the_table_of_sizes_holds_the_figures_of_the_benchmark():
    command = [sys.executable, ROOT / "benchmarks/update_size.py"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    smaller = found["times_smaller_than"]
    for encoding in ENCODINGS:
        figures = [f"{found[encoding]:,}", smaller["all_weights"][encoding], smaller["lora_8"][encoding]]
        end = " | ".join(str(figure) for figure in figures)
        assert re.search(rf"^\| `{encoding}` \| .* \| {re.escape(end)} \|$", PAGE, re.MULTILINE), end
    assert all(f"{found[name]:,}" in PAGE for name in ("rules", "all_weights", "lora_8"))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_bytes_of_an_upload_do_not_depend_on_its_numbers(encoding):
    updates = [update_of(), update_of(seed=1), update_of(delta=SCHEMA.tensors(np.zeros(SCHEMA.size)))]
    assert len({len(encode(update, SCHEMA, encoding).body) for update in updates}) == 1
