"""The gradient graph on onnxruntime: loss, gradients of the rules and next state of one window of tokens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fednl_runtime.config import HopeConfig
from fednl_runtime.errors import ModelFileError, RulesError
from fednl_runtime.model_file import read_weights
from fednl_runtime.onnx_backend import open_session, session_options
from fednl_runtime.rules import WEIGHTS, RuleSet, gradients_path, schema_hash
from fednl_runtime.state import MemoryState, Tensors, Tokens

if TYPE_CHECKING:
    import onnxruntime as ort  # type: ignore[import-untyped]

FORMAT = 1
"""Highest version of the layout that this runtime reads."""


def load_gradients(model: str | Path, threads: int | None = None) -> GradientGraph:
    """The gradient graph next to a model file, `model.onnx` -> `model.rules.onnx`, on the weights of that file.

    Raises:
        RulesError: there is none, it is damaged, or it was made for another model file.
        ModelFileError: the model file cannot be read.
    """
    path = gradients_path(Path(model))
    if not path.is_file():
        raise RulesError(f"There is no gradient graph {path}. Make one with `fednl-runtime export`.")
    try:
        weights = read_weights(Path(model))
    except OSError as error:
        raise ModelFileError(f"{model} cannot be read ({error.strerror}). Check the path.") from error
    options = session_options(threads)
    options.add_external_initializers_from_files_in_memory([WEIGHTS], [weights], [len(weights)])
    try:
        return GradientGraph(open_session(path, options), weights)
    except ModelFileError as error:
        raise RulesError(f"The gradient graph does not fit {model} ({error}). Export both again.") from error


class GradientGraph:
    """A loaded gradient graph; immutable."""

    def __init__(self, session: ort.InferenceSession, weights: bytes) -> None:
        """Wrap a session whose weights are those of the model file `weights`. Raises RulesError."""
        metadata = session.get_modelmeta().custom_metadata_map
        try:
            if int(metadata["fednl.rules_format"]) > FORMAT:
                raise RulesError("The gradient graph has a newer format. Upgrade with `pip install -U fednl-runtime`.")
            if metadata["fednl.model_sha256"] != hashlib.sha256(weights).hexdigest():
                raise RulesError("The gradient graph was made for another model file. Export both again.")
            self.config = HopeConfig.from_json(metadata["fednl.config"])
            self.segment = int(metadata["fednl.segment"])
            shapes = {name: tuple(shape) for name, shape in json.loads(metadata["fednl.rules"]).items()}
            places = json.loads(metadata["fednl.defaults"])
            tensors = {n: _array(weights, places[n], shape) for n, shape in shapes.items()}
            self.defaults = RuleSet(tensors, metadata["fednl.fingerprint"])
            """The rules that the model file holds."""
            same = metadata["fednl.schema"] == schema_hash(shapes, self.defaults.fingerprint)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise RulesError(f"The gradient graph's metadata is damaged ({error}). Export it again.") from error
        if not same:
            raise RulesError("The gradient graph's metadata is damaged: rules and schema differ. Export it again.")
        self._session = session
        self._outputs = [output.name for output in session.get_outputs()]

    def step(self, rules: Tensors, tokens: Tokens, state: MemoryState) -> tuple[float, Tensors, MemoryState]:
        """Mean loss in nats of tokens `[T + 1]` after the first, its gradient by every rule, and the next state.

        T and the state's position are multiples of `segment`; gradients end at the state given (truncated
        back-propagation).
        """
        length = len(tokens) - 1
        assert length > 0
        assert not length % self.segment
        assert not int(state.position[0]) % self.segment
        feeds = {"tokens": tokens[None], "position": state.position, **rules}
        feeds |= {f"past.{name}": value for name, value in state.tensors.items()}
        found = dict(zip(self._outputs, self._session.run(self._outputs, feeds), strict=True))
        gradients = {name: found[f"gradient.{name}"] for name in self.defaults.tensors}
        tensors = {name: found[f"present.{name}"] for name in state.tensors}
        return float(found["loss"]), gradients, MemoryState(tensors, state.position + length)


def _array(data: bytes, place: int, shape: tuple[int, ...]) -> np.ndarray:
    """An owning fp32 array out of a file's bytes."""
    count = int(np.prod(shape))
    return np.frombuffer(data, "<f4", count, place).reshape(shape).astype(np.float32)
