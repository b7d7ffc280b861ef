"""Every test here runs the engine: marked, and limited in time."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_process import Generated, command, generate, run
from runs import FP8, INT8, RUNS

HERE = Path(__file__).parent

EXPORTS = (FP8, INT8, "h3_int8_full")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="module")
def exhaustive(request: pytest.FixtureRequest) -> bool:
    """Whether tests of this file run that are marked so, and engines are started for them."""
    return any(item.path == request.path and item.get_closest_marker("exhaustive") for item in request.session.items)


@pytest.fixture(scope="session")
def clips(tiny_h3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Generated]:
    """One clip for each of :data:`RUNS`, each from an engine of its own."""
    return generate(tiny_h3, tmp_path_factory.mktemp("clips"), RUNS, timeout=500)


@pytest.fixture(scope="session")
def exports(tiny_h3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model exported by method, one of them by the command."""
    from vllm_h3_quant.export.config import parse_request
    from vllm_h3_quant.export.run import export

    folder = tmp_path_factory.mktemp("exports")
    run([command("vllm-h3-quant"), "export", str(tiny_h3), str(folder / FP8), "--method", FP8])
    for method in EXPORTS:
        if method != FP8:
            export(tiny_h3, folder / method, parse_request(method, where="test"))
    return {method: folder / method for method in EXPORTS}
