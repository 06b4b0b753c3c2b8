"""What the arms of `peers.py` have in common: what they are made for, what they tell, how tensors are counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any


class AbsentError(Exception):
    """An arm cannot do what it is to be compared in; its words say why."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What an arm is made for: threads, tokens of one timed call, tokens read before, and a folder for model files."""

    threads: int
    tokens: int
    context: int
    folder: Path


@dataclasses.dataclass(frozen=True)
class Arm:
    """A call that reads `tokens` tokens.

    `weight_bytes` are those of the weights that it reads, `memory_bytes` those of the memory that it carries
    along: written anew by every token, but for a `cache`, of which a token only reads what is there.
    """

    call: Callable[[], object]
    tokens: int
    weight_bytes: int
    memory_bytes: int
    parameters: int
    versions: dict[str, str]
    cache: bool = False


def versions_of(*names: str) -> dict[str, str]:
    """Installed versions of packages."""
    return {name: version(name) for name in names}


def count(values: Iterable[Any]) -> int:
    """Numbers in all tensors among some values: tensors, and nests of dataclasses, mappings, lists and layers."""
    return sum(count(parts(v)) if nested(v) else int(v.numel()) if hasattr(v, "numel") else 0 for v in values)


def nested(value: Any) -> bool:
    """Whether a value may hold tensors and is none itself."""
    return not hasattr(value, "data_ptr") or hasattr(value, "items")


def parts(value: Any) -> Iterable[Any]:
    """What a nested value consists of."""
    if hasattr(value, "items"):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return value
    return list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, type) else ()
