"""Which component of the pipeline gets which configuration.

Upstream's own component mapping matches names by prefix without a boundary, keeps silent about
names that match nothing, needs at least one value that is not a string, and reports the weakest
component's compute capability. Here a name is a component or a dotted child of one, unknown names
are refused, strings are enough, and the strictest capability counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm_omni.quantization import ComponentQuantizationConfig, build_quant_config

from vllm_h3_quant.config.components import DEFAULT, Part, parse_parts
from vllm_h3_quant.engine import load_session
from vllm_h3_quant.engine.quant_config import H3QuantConfig, build_options

WHERE = "quantization config"


class H3ComponentConfig(ComponentQuantizationConfig):
    """Configurations by component name."""

    def resolve(self, prefix: str) -> QuantizationConfig | None:
        """The configuration of a component, or of a layer by its dotted name."""
        return self.component_configs.get(prefix.split(".", 1)[0], self.default_config)

    def configs(self) -> Iterable[QuantizationConfig]:
        """Every configuration once."""
        unique = {id(c): c for c in (*self.component_configs.values(), self.default_config) if c is not None}
        return unique.values()

    def get_min_capability(self) -> int:
        return max((config.get_min_capability() for config in self.configs()), default=0)

    @property
    def is_checkpoint_quantized(self) -> bool:
        """Read by vLLM-Omni: whether every quantized component's weights are stored as codes."""
        found = [getattr(config, "is_checkpoint_quantized", False) for config in self.configs()]
        return bool(found) and all(found)

    def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM-Omni right before it builds the model in a worker."""
        load_session.prepare(config for config in self.configs() if isinstance(config, H3QuantConfig))


def build_components(spec: Mapping[str, Any]) -> H3ComponentConfig:
    """Configurations from ``{component: name | mapping | None}``.

    Raises:
        H3QuantError: see :func:`~vllm_h3_quant.config.components.parse_parts` and :func:`build_options`.
    """
    built = {part.key: _build(part) for part in parse_parts(spec, where=WHERE)}
    default = built.pop(DEFAULT, None)
    return H3ComponentConfig(built, default)


def _build(part: Part) -> QuantizationConfig | None:
    if part.options is not None:
        return build_options(part.options, part.name, where=part.where)
    return None if part.other is None else build_quant_config(dict(part.other))
