"""What a device runs, and what is said where it does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_h3_quant.attention import device
from vllm_h3_quant.attention.device import Choice, choice_for
from vllm_h3_quant.config.schema import Method
from vllm_h3_quant.engine.quant_config import build
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.kernels.attention import select


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    choice_for.cache_clear()
    yield
    choice_for.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(device, "device_capability", lambda: capability)
    monkeypatch.setattr(device, "device_name", lambda: "some GPU")


def test_the_cpu_runs_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_capability", lambda: None)
    assert choice_for("fp8", Method.FP8) == Choice("fp8", select("fp8", None).name)
    assert choice_for("int8", Method.INT8) == Choice("int8", select("int8", None).name)


@pytest.mark.parametrize(("method", "kind"), [(Method.FP8, "fp8"), (Method.INT8, "int8")])
def test_auto_matches_the_linears_and_says_why(monkeypatch: pytest.MonkeyPatch, method: Method, kind: str) -> None:
    pretend(monkeypatch, (9, 0))
    chosen = choice_for("auto", method)
    assert chosen.kind == kind
    assert chosen.kernel == select(kind, (9, 0)).name
    assert "the fastest within" in chosen.why


def test_auto_beside_fp8_takes_int8_where_fp8_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (8, 9))
    chosen = choice_for("auto", Method.FP8)
    assert chosen.kind == "int8"
    assert "needs sm_90" in chosen.why


def test_auto_may_keep_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (7, 5))
    chosen = choice_for("auto", Method.INT8)
    assert chosen.kind is None
    assert chosen.why


@pytest.mark.parametrize(
    ("capability", "reason"), [((8, 0), "needs sm_90"), ((8, 9), "needs sm_90"), ((12, 0), "not built for sm_100")]
)
def test_fp8_beside_hopper_is_refused_with_what_runs(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], reason: str
) -> None:
    pretend(monkeypatch, capability)
    with pytest.raises(H3QuantError) as caught:
        build("h3_int8", {"attention": "fp8"}, where="component 'transformer'")
    message = str(caught.value)
    assert message.startswith("component 'transformer': attention='fp8' cannot run on some GPU (sm_")
    assert message.endswith("use attention='int8' instead")
    assert reason in message
    assert "\n" not in message


def test_where_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (7, 5))
    with pytest.raises(H3QuantError, match="use attention='none' instead"):
        choice_for("int8", Method.INT8)
