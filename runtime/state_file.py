"""A session version as bytes: safetensors with a header that is checked whole before anything is used."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from fednl_runtime.config import HopeConfig
from fednl_runtime.errors import StateError
from fednl_runtime.history import Mark
from fednl_runtime.session import Session, SessionKey
from fednl_runtime.state import Array, MemoryState, Tensors, check_state, state_bytes, state_shapes

FORMAT = 1
HEADER_BYTES = 1 << 16
"""Room for the header in the largest file that is read."""
FIELDS = {"format", "fingerprint", "tokenizer", "position", "tail", "mark", "checksum"}


@dataclasses.dataclass(frozen=True)
class StateFormat:
    """What the state files of one model have in common.

    `fingerprint` is the model's, `tokenizer` its tokenizer's: a memory means nothing to another model.
    """

    config: HopeConfig
    fingerprint: str
    tokenizer: str

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest file this model writes."""
        return state_bytes(self.config) + 4 * self.config.vocab_size + HEADER_BYTES

    def encode(self, session: Session, mark: Mark) -> bytes:
        """The file of a version."""
        tensors: Tensors = {name: np.ascontiguousarray(t) for name, t in session.state.tensors.items()}
        if session.logits is not None:
            tensors["logits"] = np.ascontiguousarray(session.logits[None], np.float32)
        header = {
            "format": str(FORMAT),
            "fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer,
            "position": str(session.tokens_seen),
            "tail": session.tail.hex(),
            "mark": json.dumps(dataclasses.asdict(mark)),
        }
        return safetensors.numpy.save(tensors, {**header, "checksum": checksum(header, tensors)})

    def decode(self, data: bytes, key: SessionKey) -> tuple[Session, Mark]:
        """The version that a file holds.

        Raises:
            StateError: the file is damaged, or belongs to another model, tokenizer or newer runtime.
        """
        if len(data) > self.max_bytes:
            raise StateError(f"The state file has {len(data)} bytes; this model's have at most {self.max_bytes}.")
        header, tensors = parse(data)
        if not header.get("format", "").isdecimal():
            raise StateError("This is not a session's state file.")
        if int(header["format"]) > FORMAT:
            raise StateError("The state file has a newer format. Upgrade with `pip install -U fednl-runtime`.")
        if set(header) != FIELDS or header.pop("checksum") != checksum(header, tensors):
            raise StateError("The state file is damaged: its checksum does not fit. Use another snapshot.")
        if header["fingerprint"] != self.fingerprint:
            raise StateError("The state file belongs to another model. Serve the model that it was made with.")
        if header["tokenizer"] != self.tokenizer:
            raise StateError("The state file belongs to another tokenizer. Serve the model that it was made with.")
        try:
            return self._session(header, tensors, key)
        except (ValueError, TypeError, KeyError) as error:
            raise StateError(f"The state file's header is damaged ({error}). Use another snapshot.") from error

    def _session(self, header: Mapping[str, str], tensors: Tensors, key: SessionKey) -> tuple[Session, Mark]:
        mark = Mark.from_json(header["mark"])
        logits = tensors.pop("logits", None)
        if logits is not None and logits.shape != (1, self.config.vocab_size):
            raise ValueError(f"logits are {logits.shape}")
        check_state(tensors, state_shapes(self.config))
        for name, tensor in (*tensors.items(), ("logits", logits)):
            check_tensor(name, tensor)
        position = int(header["position"])
        if position < 0 or position != mark.tokens_seen:
            raise ValueError(f"position is {position}")
        state = MemoryState(tensors, np.array([position], np.int64))
        tail = bytes.fromhex(header["tail"])
        return Session(key, state, mark.version, None if logits is None else logits[0], tail), mark


def check_tensor(name: str, tensor: Array | None) -> None:
    """Raise ValueError unless `tensor` is one finite row of float32."""
    if tensor is None:
        return
    if tensor.dtype != np.float32 or len(tensor) != 1:
        raise ValueError(f"{name} is {tensor.dtype} with {len(tensor)} rows")
    if not np.isfinite(tensor).all():
        raise ValueError(f"{name} is not finite")


def parse(data: bytes) -> tuple[dict[str, str], Tensors]:
    """Header and tensors of a safetensors file, checked for form alone. Raises StateError."""
    try:
        tensors = safetensors.numpy.load(data)
        size = int.from_bytes(data[:8], "little")
        header: Any = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    except (SafetensorError, ValueError, KeyError, OverflowError, TypeError) as error:
        raise StateError(f"The state file is damaged or cut short ({error}). Use another snapshot.") from error
    return dict(header), tensors


def checksum(header: Mapping[str, str], tensors: Mapping[str, Array]) -> str:
    """SHA-256 of header fields, tensor names, types, shapes and bytes."""
    total = hashlib.sha256(json.dumps(dict(header), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
        total.update(np.ascontiguousarray(tensor).tobytes())
    return total.hexdigest()
