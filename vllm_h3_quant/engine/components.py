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

from vllm_h3_quant.config import names
from vllm_h3_quant.config.schema import NO_ATTENTION
from vllm_h3_quant.engine import load_session
from vllm_h3_quant.engine.quant_config import H3QuantConfig, build
from vllm_h3_quant.errors import H3QuantError, unknown
from vllm_h3_quant.methods.scope import TEXT_ENCODER, TRANSFORMER, UNREACHED_COMPONENTS

QUANTIZABLE: tuple[str, ...] = (TRANSFORMER, TEXT_ENCODER)
DEFAULT = "default"

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
        H3QuantError: unknown component, a component that cannot be quantized, or 8-bit attention in a
            configuration that does not reach the transformer.
    """
    configs: dict[str, QuantizationConfig | None] = {}
    default = None
    for component, value in spec.items():
        where = f"{WHERE}, component {component!r}"
        if component in UNREACHED_COMPONENTS and value is not None:
            raise H3QuantError(
                f"{where}: cannot be quantized ({UNREACHED_COMPONENTS[component]}); set it to null or quantize"
                f" {' or '.join(QUANTIZABLE)}"
            )
        if component not in (*QUANTIZABLE, DEFAULT, *UNREACHED_COMPONENTS):
            raise unknown("component", component, (*QUANTIZABLE, DEFAULT), where=WHERE)
        config = _build_one(value, where)
        if component == DEFAULT:
            default = config
        else:
            configs[component] = config
    built = H3ComponentConfig(configs, default)
    for component, config in {**configs, DEFAULT: default}.items():
        if isinstance(config, H3QuantConfig) and config is not built.resolve(TRANSFORMER):
            _refuse_attention(config, component)
    return built


def _refuse_attention(config: H3QuantConfig, component: str) -> None:
    options = config.options
    if options.attention != NO_ATTENTION:
        raise H3QuantError(
            f"{config.where}: attention={options.attention!r} is for the layers of {TRANSFORMER!r}, which"
            f" {component!r} does not reach here; write {options.method.value!r} or attention={NO_ATTENTION!r}"
        )


def _build_one(value: object, where: str) -> QuantizationConfig | None:
    if value is None:
        return None
    method = names.method_of(value)
    if method is None:
        raise H3QuantError(f"{where}: {value!r} is not a method name, a mapping with 'method', or null")
    if not names.looks_ours(method):
        return build_quant_config(value)
    options = dict(value) if isinstance(value, Mapping) else {}
    # Only one of the two: a second one is then an unknown key.
    options.pop("method" if "method" in options else "quant_method", None)
    return build(method, options, where=where)
