"""Entry points: declared, cheap, and wired to functions that exist."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

from vllm_h3_quant import plugin


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("vllm_omni.platform_plugins", {"h3_quant", "h3_quant_cpu"}),
        ("vllm.platform_plugins", {"h3_quant_cpu"}),
        ("vllm_omni.general_plugins", {"h3_quant"}),
    ],
)
def test_entry_points_load(group: str, names: set[str]) -> None:
    ours = {e.name: e for e in importlib.metadata.entry_points(group=group) if e.value.startswith("vllm_h3_quant.")}
    assert set(ours) == names
    for entry in ours.values():
        assert callable(entry.load())


def test_importing_the_plugin_brings_neither_torch_nor_vllm() -> None:
    code = "import sys, vllm_h3_quant.plugin; print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'vllm'}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_registering_touches_neither_loader_nor_attention() -> None:
    """Other models start as if the package were not installed; the attention layer is patched when it comes."""
    code = (
        "import sys; from vllm_h3_quant.plugin import register_general; register_general();"
        "layer = 'vllm_omni.diffusion.attention.layer';"
        "print([m for m in ('vllm_omni.diffusion.model_loader.diffusers_loader', 'vllm_h3_quant.methods', layer)"
        " if m in sys.modules]);"
        "from vllm_omni.diffusion.attention.layer import Attention;"
        "print(Attention._init_kv_cache_quantization.__wrapped__.__globals__['__name__'] == layer)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_H3_QUANT_REPORT"}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, env=environment
    )
    assert found.stdout.splitlines()[-2:] == ["[]", "True"]


def test_registering_twice_is_registering_once() -> None:
    from vllm_omni.quantization import factory

    plugin.register()
    once = (factory._build_single, factory._is_per_component_dict, factory._build_component_config)
    plugin.register()
    assert once == (factory._build_single, factory._is_per_component_dict, factory._build_component_config)


class TestPlatformChoice:
    """The CPU platform where it is asked for or nothing else is there; never beside an accelerator."""

    @pytest.fixture(autouse=True)
    def no_target(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)

    def probes(self, monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
        import vllm.platforms
        import vllm_omni.platforms

        monkeypatch.setattr(vllm.platforms, "builtin_platform_plugins", {"cuda": lambda: found})
        monkeypatch.setattr(vllm_omni.platforms, "builtin_omni_platform_plugins", {"cuda": lambda: found})

    def test_beside_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.probes(monkeypatch, "CudaPlatform")
        assert plugin.cpu_omni_platform() is None
        assert plugin.cpu_platform() is None

    def test_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.probes(monkeypatch, None)
        assert plugin.cpu_omni_platform() == "vllm_h3_quant.platforms.cpu.CpuOmniPlatform"
        assert plugin.cpu_platform() == "vllm.platforms.cpu.CpuPlatform"

    def test_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.probes(monkeypatch, "CudaPlatform")
        monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
        assert plugin.cpu_omni_platform() == "vllm_h3_quant.platforms.cpu.CpuOmniPlatform"
        assert plugin.cpu_platform() is None  # vLLM takes its own CPU platform then
