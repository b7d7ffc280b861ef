"""The contact sheet shows every clip, and refuses clips that do not belong together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from clips import make_clip
from matplotlib.image import imread
from numpy.typing import NDArray

from vllm_h3_quant.fidelity.contact_sheet import save_contact_sheet


def plain(colour: tuple[int, int, int], frames: int = 10) -> NDArray[np.uint8]:
    return np.broadcast_to(np.array(colour, dtype=np.uint8), (frames, 16, 16, 3))


def share(picture: NDArray[np.float32], colour: tuple[int, int, int]) -> float:
    return float((abs(picture[..., :3] * 255 - colour) < 2).all(axis=-1).mean())


def test_every_clip_gets_the_same_area(tmp_path: Path) -> None:
    red, blue = (255, 0, 0), (0, 0, 255)
    save_contact_sheet(tmp_path / "grid.png", {"bf16": plain(red), "h3_fp8": plain(blue)}, columns=4)
    picture = imread(tmp_path / "grid.png")
    assert share(picture, red) == pytest.approx(share(picture, blue), rel=0.05)
    assert share(picture, red) > 0.2


@pytest.mark.parametrize(("count", "shown"), [(10, (0, 3, 6, 9)), (2, (0, 1))])
def test_columns_run_evenly_from_the_first_frame_to_the_last(
    tmp_path: Path, count: int, shown: tuple[int, ...]
) -> None:
    levels = np.linspace(10, 220, count).astype(np.uint8)
    clip = np.broadcast_to(levels[:, None, None, None], (count, 16, 16, 3))
    save_contact_sheet(tmp_path / "grid.png", {"bf16": clip}, columns=4)
    picture = imread(tmp_path / "grid.png")
    visible = tuple(i for i, level in enumerate(levels.tolist()) if share(picture, (level, level, level)) > 0.03)
    assert visible == shown


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ({}, 8, "at least one clip"),
        ({"a": plain((0, 0, 0))}, 0, "at least one column, got 0"),
        ({"a": plain((0, 0, 0), 3), "b": plain((0, 0, 0), 4)}, 8, "share one shape"),
        ({"a": plain((0, 0, 0), 0)}, 8, "needs frames"),
    ],
)
def test_sheets_without_sense_are_refused(
    tmp_path: Path, rows: dict[str, NDArray[np.uint8]], columns: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        save_contact_sheet(tmp_path / "grid.png", rows, columns)
    assert not list(tmp_path.iterdir())


def test_no_display_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "TkAgg")
    save_contact_sheet(tmp_path / "grid.png", {"bf16": make_clip().frames})
    assert imread(tmp_path / "grid.png").ndim == 3
