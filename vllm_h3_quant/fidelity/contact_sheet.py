"""One picture of several clips: rows are clips, columns are frames at even distances."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

_CELL_INCHES = 1.6
_LABEL_INCHES = 1.4
_TITLE_INCHES = 0.4


def save_contact_sheet(path: Path, rows: Mapping[str, NDArray[np.uint8]], columns: int = 8) -> None:
    """Save a PNG with one labelled row a clip; frame numbers stand above each column.

    Args:
        path: the PNG.
        rows: label to frames, uint8 ``(F, H, W, 3)``; every clip has as many frames of the same size.
        columns: frames shown, at most F of them; the first and the last always are.

    Raises:
        ValueError: no row, an empty clip, clips whose shapes differ, or fewer than one column.
    """
    if not rows:
        raise ValueError("a contact sheet needs at least one clip")
    if columns < 1:
        raise ValueError(f"a contact sheet needs at least one column, got {columns}")
    shapes = {label: frames.shape for label, frames in rows.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"clips on a contact sheet must share one shape, got {shapes}")
    count, height, width, _ = next(iter(shapes.values()))
    if not count:
        raise ValueError(f"a contact sheet needs frames, got {shapes}")
    shown = np.linspace(0, count - 1, min(columns, count)).round().astype(int)

    cell_height = _CELL_INCHES * height / width
    size = (_LABEL_INCHES + _CELL_INCHES * len(shown), _TITLE_INCHES + cell_height * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(rows), len(shown), squeeze=False)
    for axes_row, (label, frames) in zip(grid, rows.items(), strict=True):
        axes_row[0].set_ylabel(label, rotation=0, ha="right", va="center")
        for axes, index in zip(axes_row, shown, strict=True):
            axes.imshow(frames[index], interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
    for axes, index in zip(grid[0], shown, strict=True):
        axes.set_title(f"frame {index}", fontsize="small")
    FigureCanvasAgg(figure).print_png(str(path))
