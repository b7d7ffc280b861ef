"""What a device cannot do is said before any weight is read, with what it can do instead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from vllm_h3_quant.config.schema import Method
from vllm_h3_quant.engine.quant_config import build, check_upstream
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.methods.device import backend_for, lowest_capability, serves


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    check_upstream()  # imports the engine as on the device that is really here
    backend_for.cache_clear()
    yield
    backend_for.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int] | None) -> None:
    cls = type(current_platform)
    monkeypatch.setattr(cls, "import_kernels", classmethod(lambda c: None))
    monkeypatch.setattr(cls, "is_cpu", lambda self: False)
    monkeypatch.setattr(cls, "is_cuda", lambda self: capability is not None)
    monkeypatch.setattr(
        cls, "get_device_capability", classmethod(lambda c, device_id=0: DeviceCapability(*capability or (9, 4)))
    )
    monkeypatch.setattr(cls, "get_device_name", classmethod(lambda c, device_id=0: name))


@pytest.mark.parametrize(
    ("method", "gpu", "capability", "says"),
    [
        ("h3_fp8", "NVIDIA A100", (8, 0), ["NVIDIA A100", "sm_80", "needs sm_89", "use h3_int8 instead"]),
        ("h3_fp8", "NVIDIA A40", (8, 6), ["NVIDIA A40", "sm_86", "use h3_int8 instead"]),
        ("h3_int8", "Tesla T4", (7, 5), ["Tesla T4", "sm_75", "needs sm_80", "no method of this package"]),
    ],
)
def test_refused_at_configuration(
    monkeypatch: pytest.MonkeyPatch, method: str, gpu: str, capability: tuple[int, int], says: list[str]
) -> None:
    pretend(monkeypatch, gpu, capability)
    with pytest.raises(H3QuantError) as caught:
        build(method, where="test")
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in says), str(caught.value)


@pytest.mark.parametrize(("method", "capability"), [("h3_fp8", (8, 9)), ("h3_fp8", (9, 0)), ("h3_int8", (12, 0))])
def test_served(monkeypatch: pytest.MonkeyPatch, method: str, capability: tuple[int, int]) -> None:
    pretend(monkeypatch, "some GPU", capability)
    assert build(method, where="test").get_name() == method


@pytest.mark.parametrize(("method", "lowest", "below"), [(Method.FP8, 89, (8, 8)), (Method.INT8, 80, (7, 9))])
def test_minimum_capability_is_the_lowest_that_is_served(method: Method, lowest: int, below: tuple[int, int]) -> None:
    assert lowest_capability(method) == lowest
    assert serves(method, divmod(lowest, 10))
    assert not serves(method, below)


def test_other_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ROCm device reports a capability too, and has another e4m3."""
    pretend(monkeypatch, "AMD Instinct MI300X", None)
    with pytest.raises(H3QuantError, match=r"NVIDIA GPUs .* not on AMD Instinct MI300X"):
        build("h3_fp8", where="test")
