"""Named arrays as one safetensors body: the same arrays give the same bytes, and hostile bytes give one refusal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

from fednl_runtime.fed_sync.errors import Refusal

Array = NDArray[Any]
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I8": "i1", "U8": "u1"}
"""The element types that travel; all others are refused."""

NAMES = {np.dtype(code): name for name, code in DTYPES.items()}


def pack(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """A safetensors body with sorted names and metadata.

    The library's own writer keeps metadata in the order of a hash map with a random seed, so that one set
    of arrays has many digests, and it writes views that are not contiguous wrongly (safetensors#825).
    """
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    start = 0
    for name in order:
        stop = start + arrays[name].nbytes
        header[name] = {
            "dtype": NAMES[arrays[name].dtype],
            "shape": list(arrays[name].shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(arrays[name].tobytes() for name in order)])


def unpack(body: bytes) -> tuple[dict[str, Array], dict[str, str]]:
    """The arrays and the metadata of a safetensors body.

    Raises:
        Refusal: `malformed`, or `wrong_dtype` for element types that no message of ours holds.
    """
    try:
        entries = safetensors.deserialize(body)
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")], object_pairs_hook=_without_duplicates)
    except (safetensors.SafetensorError, ValueError, RecursionError) as error:
        raise Refusal("malformed", f"The body is not a safetensors file ({error}). Encode the update again.") from error
    return {name: _array(name, entry) for name, entry in entries}, header.get("__metadata__", {})


def _array(name: str, entry: Mapping[str, Any]) -> Array:
    if entry["dtype"] not in DTYPES:
        raise Refusal("wrong_dtype", f"{name!r} is {entry['dtype']}; send F32, F16, I8 or the top-k form.")
    dtype = np.dtype(DTYPES[entry["dtype"]])
    if len(entry["data"]) != math.prod(entry["shape"]) * dtype.itemsize:
        raise Refusal("malformed", f"{name!r} holds another number of bytes than its shape says. Encode it again.")
    return np.frombuffer(entry["data"], dtype).reshape(entry["shape"])


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found
