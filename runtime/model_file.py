"""What is in a model file: configuration, tokenizer, state pairs, rules, fingerprint."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fednl_runtime.config import HopeConfig
from fednl_runtime.errors import ConfigError, ModelFileError
from fednl_runtime.state import state_bytes, state_shapes

FORMAT = 1
"""Highest version of the layout that this runtime reads."""

Shape = tuple[int, ...]
Tensor = tuple[str, tuple[int | str | None, ...]]
"""Element type and shape of a graph input or output; a dimension that varies is not an int."""


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """The description that a model file carries in its own metadata."""

    name: str
    config: HopeConfig
    tokenizer_json: str
    segment: int
    """Calls never cross a multiple of this many tokens of absolute position."""
    parameters: int
    state: dict[str, Shape]
    """Shape of each state tensor of one session, by name."""
    in_place: tuple[str, ...]
    """State tensors whose past and present may share one buffer."""
    rules: dict[str, Shape]
    """Shape of each rule, by the name of its graph input `rule.*`."""
    operators: dict[str, int]
    """Number of nodes by operator."""
    portable: bool
    """Whether only standard ONNX operators are used."""
    min_onnxruntime: str
    fingerprint: str
    """SHA-256 of configuration and weights."""
    metadata: dict[str, str]
    """Everything else that the exporter stored."""

    @property
    def state_bytes(self) -> int:
        """Bytes of one session's state."""
        return state_bytes(self.config)

    @property
    def rules_bytes(self) -> int:
        """Bytes of all rules in fp32."""
        return 4 * sum(_size(shape) for shape in self.rules.values())

    def summary(self) -> dict[str, Any]:
        """What `info` prints, without the tokenizer."""
        c = self.config
        keys = ("name", "segment", "parameters", "operators", "portable", "min_onnxruntime", "fingerprint", "metadata")
        shapes = {"n_layer": c.n_layer, "d_model": c.d_model, "vocab_size": c.vocab_size, "layers": list(c.layers)}
        sizes = {"state_bytes": self.state_bytes, "rules_bytes": self.rules_bytes}
        return {**{key: getattr(self, key) for key in keys}, **shapes, **sizes}


def _size(shape: Shape) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def parse_model(metadata: Mapping[str, str], inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> ModelFile:
    """Read and check a model's metadata against its graph inputs (rules included) and outputs.

    Raises:
        ModelFileError: not one of our models, damaged, or made for a newer runtime.
    """
    if "fednl.format" not in metadata:
        raise ModelFileError("This ONNX file is not a FedNL model. Make one with `fednl-runtime export`.")
    try:
        if int(metadata["fednl.format"]) > FORMAT:
            raise ModelFileError("This model file has a newer format. Upgrade with `pip install -U fednl-runtime`.")
        model = _described({key.removeprefix("fednl."): value for key, value in metadata.items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        raise ModelFileError(f"The model's metadata is damaged ({error}). Export or download it again.") from error
    _check_graph(model, inputs, outputs)
    return model


def _described(text: dict[str, str]) -> ModelFile:
    fields = {key: json.loads(text.pop(key)) for key in ("state", "in_place", "rules", "operators", "portable")}
    config = HopeConfig.from_json(text.pop("config"))
    text.pop("format")
    model = ModelFile(
        name=text.pop("name"),
        config=config,
        tokenizer_json=text.pop("tokenizer"),
        segment=int(text.pop("segment")),
        parameters=int(text.pop("parameters")),
        state={name: tuple(shape) for name, shape in fields["state"].items()},
        in_place=tuple(fields["in_place"]),
        rules={name: tuple(shape) for name, shape in fields["rules"].items()},
        operators=fields["operators"],
        portable=fields["portable"],
        min_onnxruntime=text.pop("min_onnxruntime"),
        fingerprint=text.pop("fingerprint"),
        metadata=text,
    )
    if model.segment < 1 or config.segment % model.segment:
        raise ValueError("segment and configuration differ")
    if not 0 < model.parameters < 1 << 63:
        raise ValueError("parameters is not a number of parameters")
    if model.state != state_shapes(config) or not set(model.in_place) <= set(model.state):
        raise ValueError("state and configuration differ")
    return model


def _check_graph(model: ModelFile, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
    """Raise ModelFileError unless the graph has exactly the tensors that the metadata promise."""
    integers, floats = "tensor(int64)", "tensor(float)"
    wanted: dict[str, Tensor] = {"input_ids": (integers, (None, None)), "position": (integers, (None,))}
    wanted |= {"adapt": (floats, (None, 2)), **{name: (floats, shape) for name, shape in model.rules.items()}}
    wanted |= {f"past.{n}": (floats, (None, *shape)) for n, shape in model.state.items()}
    made: dict[str, Tensor] = {"logits": (floats, (None, None, model.config.vocab_size))}
    made |= {f"present.{n}": (floats, (None, *shape)) for n, shape in model.state.items()}
    for found, expected in ((inputs, wanted), (outputs, made)):
        if differing := sorted(set(expected) ^ set(found)):
            names = ", ".join(differing[:3])
            raise ModelFileError(f"The graph and its metadata differ in tensors ({names}). Export the model again.")
        for name, tensor in expected.items():
            actual = (found[name][0], tuple(d if isinstance(d, int) else None for d in found[name][1]))
            if actual != tensor:
                raise ModelFileError(f"The graph's {name} is {actual}, not {tensor}. Export the model again.")


def default_model_path() -> Path:
    """The model that is shipped with the package.

    Raises:
        ModelFileError: this installation has none.
    """
    path = importlib.resources.files("fednl_runtime.models") / "hope.onnx"
    if not isinstance(path, Path) or not path.is_file():
        raise ModelFileError("No model is shipped with this installation. Name one with --model FILE.onnx.")
    return path


def data_path(model: Path) -> Path:
    """Where the weights of a model file above 2 GB are: `model.onnx` -> `model.onnx.data`."""
    return model.with_name(f"{model.name}.data")


def read_weights(model: Path) -> bytes:
    """The file that holds the weights of a model file: its own, or the one next to it. Raises OSError."""
    data = data_path(model)
    return (data if data.is_file() else model).read_bytes()


def file_bytes(model: Path) -> int:
    """Bytes of a model file, and of the one next to it."""
    data = data_path(model)
    return model.stat().st_size + (data.stat().st_size if data.is_file() else 0)
