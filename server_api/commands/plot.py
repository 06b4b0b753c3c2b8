"""Pictures for people: the curves of `eval`."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING

from fednl_runtime.errors import RequestError

if TYPE_CHECKING:
    from fednl_runtime.evaluate import Arm

COLOURS = {"on": "#0b6e4f", "reset": "#b23a48", "frozen": "#8d99ae"}


SUFFIXES = (".png", ".svg", ".pdf")


def require_drawing(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before minutes are spent on its numbers. Raises RequestError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError("Pictures need matplotlib: pip install 'fednl-runtime[plots]'.")
    if path.suffix.lower() not in SUFFIXES or not path.absolute().parent.is_dir():
        raise RequestError(f"Cannot draw to {path}. Name a .png, .svg or .pdf in a folder that exists.")


def draw_curves(results: list[tuple[str, int, dict[str, Arm]]], path: Path) -> None:
    """One panel a file: nats a token against position, for each arm. Raises RequestError if it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(4, len(results))
    rows = math.ceil(len(results) / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.6 * columns, 2.4 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(results) :]:
        axis.remove()
    for axis, (name, _, arms) in zip(axes.flat, results, strict=False):
        for arm, result in arms.items():
            thousands = [i + 0.5 for i in range(len(result.bins))]
            axis.plot(thousands, result.bins, label=arm, color=COLOURS[arm], linewidth=1.4)
        change = 100 * (arms["on"].nats_per_token / arms["reset"].nats_per_token - 1)
        axis.set_title(f"{name.split('.')[0]}  ({change:+.1f} %)", fontsize=9)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(fontsize=7, frameon=False)
    figure.supxlabel("thousand tokens read", fontsize=9)
    figure.supylabel("nats a token", fontsize=9)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise RequestError(f"Cannot draw to {path} ({error}). Name another file.") from error
    finally:
        pyplot.close(figure)
