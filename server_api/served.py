"""What the routes serve, and how they find it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request

from fednl_runtime.engine import Engine
from fednl_runtime.model_file import ModelFile
from fednl_runtime.server_api.answering.chat_template import ChatTemplate
from fednl_runtime.server_api.errors import ModelNotFoundError

if TYPE_CHECKING:
    from fednl_runtime.fed_sync.device.agent import Agent


@dataclasses.dataclass(frozen=True)
class Served:
    """An engine, its model's name, and what clients may know of both."""

    engine: Engine
    model: str
    created: int
    """Seconds since the epoch."""
    keep_alive_s: float = 15.0
    template: ChatTemplate = dataclasses.field(default_factory=ChatTemplate)
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Facts of the model file, under llama.cpp's names where it has them."""
    agent: Agent | None = None
    """What syncs the rules with a fleet, if anything does."""

    @classmethod
    def of(cls, engine: Engine, file: ModelFile, path: Path, agent: Agent | None = None) -> Served:
        """An engine on the model file at `path`. Raises ModelFileError."""
        facts = path.stat()
        meta = {"n_params": file.parameters, "size": facts.st_size, "fingerprint": file.fingerprint}
        return cls(
            engine, file.name, int(facts.st_mtime), template=ChatTemplate.of(file.metadata), meta=meta, agent=agent
        )

    def model_object(self) -> dict[str, Any]:
        """OpenAI's model object, with llama.cpp's meta."""
        config = self.engine.backend.config
        sizes = {"n_vocab": config.vocab_size, "n_embd": config.d_model, "n_layer": config.n_layer}
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "fednl-runtime",
            "meta": {**sizes, "state_bytes": self.engine.state_bytes, **self.meta},
        }

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError unless `name` is left out or the served model's."""
        if name not in (None, self.model):
            raise ModelNotFoundError(f"There is no model {name!r} here; this server has {self.model!r}.")


def served_by(request: Request) -> Served:
    """What the application serves."""
    served: Served = request.app.state.served
    return served


def owner_of(request: Request) -> str:
    """The id of the API key that a request came with, "" on a server without keys."""
    caller = getattr(request.state, "caller", None)
    return "" if caller is None else caller.key_id
