"""Pictures for people: the curves of `eval`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from fednl_runtime.errors import RequestError

if TYPE_CHECKING:
    from fednl_runtime.evaluate import Arm

COLOURS = {"on": "#0b6e4f", "reset": "#b23a48", "frozen": "#8d99ae"}


def draw_curves(results: list[tuple[str, int, dict[str, Arm]]], path: Path) -> None:
    """One panel a file: nats a token against position, for each arm.

    Raises:
        RequestError: matplotlib is missing, or the file type is not one it can write.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RequestError("Pictures need matplotlib: pip install 'fednl-runtime[plots]'.") from error
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
    except (ValueError, OSError) as error:
        raise RequestError(f"Cannot draw to {path} ({error}). Use .png, .svg or .pdf.") from error
    finally:
        pyplot.close(figure)
