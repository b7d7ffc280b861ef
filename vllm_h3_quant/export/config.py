"""What an export was asked to be, and the ``quantization_config`` that tells the engine what it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_h3_quant.config.components import TEXT_ENCODER, TRANSFORMER
from vllm_h3_quant.config.schema import EXPORT_FORMAT, NO_ATTENTION, H3QuantOptions, parse
from vllm_h3_quant.errors import H3QuantError, unknown
from vllm_h3_quant.export.source import COMPONENTS
from vllm_h3_quant.methods.scope import UNREACHED_COMPONENTS, matches, without_match

DEFAULT = "default"


@dataclass(frozen=True)
class Given:
    """One configuration and the components that get it.

    Attributes:
        options: as an exported model is served with them, ``checkpoint`` included.
        components: their names.
        where: where it was given, for errors.
    """

    options: H3QuantOptions
    components: tuple[str, ...]
    where: str

    def check_entries(self, names: Iterable[str]) -> None:
        """Refuse an entry of ``ignored_layers`` that matches none of the quantizable linears ``names``.

        Raises:
            H3QuantError: with the nearest that would match.
        """
        found = list(names)
        for entry in self.options.ignored_layers:
            if not any(matches(name, entry) for name in found):
                raise H3QuantError(f"{self.where}: {without_match(entry, found)}")


@dataclass(frozen=True)
class Request:
    """What is exported how; a component that nothing was given for is copied."""

    given: tuple[Given, ...]

    def options(self, component: str) -> H3QuantOptions | None:
        """The configuration of a component."""
        return next((given.options for given in self.given if component in given.components), None)

    def quantization_config(self) -> dict[str, Any]:
        """What stands in ``transformer/config.json``: a method with its keys, or a configuration by component."""
        found = {component: self.options(component) for component in COMPONENTS}
        options = found[TRANSFORMER]
        if options is not None and options == found[TEXT_ENCODER]:
            return {"quant_method": options.method.value, **_keys(options)}
        return {
            component: None if options is None else {"method": options.method.value, **_keys(options)}
            for component, options in found.items()
        }


def parse_request(spec: str | Mapping[str, Any], *, where: str) -> Request:
    """The request in a method's name, a mapping with ``method``, or a mapping by component, as the engine takes them.

    Raises:
        H3QuantError: an unknown component, method or key, a bad value, or nothing to quantize.
    """
    if not isinstance(spec, str | Mapping):
        raise H3QuantError(f"{where}: {spec!r} is no method's name and no mapping")
    if isinstance(spec, str) or "method" in spec or "quant_method" in spec:
        return Request((Given(_options(spec, where), COMPONENTS, where),))
    for component, value in spec.items():
        if component in UNREACHED_COMPONENTS and value is not None:
            raise H3QuantError(f"{where}: {component!r} cannot be quantized ({UNREACHED_COMPONENTS[component]})")
        if component not in (*COMPONENTS, DEFAULT, *UNREACHED_COMPONENTS):
            raise unknown("component", component, (*COMPONENTS, DEFAULT), where=where)
    given = []
    for key in (*COMPONENTS, DEFAULT):
        components = (key,) if key in COMPONENTS else tuple(name for name in COMPONENTS if name not in spec)
        if spec.get(key) is not None and components:
            told = f"{where}, component {key!r}"
            given.append(Given(_options(spec[key], told), components, told))
    for one in given:
        if one.options.attention != NO_ATTENTION and TRANSFORMER not in one.components:
            raise H3QuantError(
                f"{one.where}: attention={one.options.attention!r} is for {TRANSFORMER!r} alone; write"
                f" {one.options.method.value!r} or attention={NO_ATTENTION!r}"
            )
    if not given:
        raise H3QuantError(f"{where}: names no method, so there is nothing to quantize")
    return Request(tuple(given))


def _options(value: Any, where: str) -> H3QuantOptions:
    if isinstance(value, str):
        value = {"method": value}
    if not isinstance(value, Mapping):
        raise H3QuantError(f"{where}: {value!r} is no method's name, no mapping with 'method', and not null")
    keys = dict(value)
    method = keys.pop("method" if "method" in keys else "quant_method", None)
    if not isinstance(method, str):
        raise H3QuantError(f"{where}: {dict(value)!r} names no method")
    if "checkpoint" in keys:
        raise H3QuantError(f"{where}: checkpoint={keys['checkpoint']!r} is what an export writes; leave it out")
    return parse(method, keys, where=where).model_copy(update={"checkpoint": EXPORT_FORMAT})


def _keys(options: H3QuantOptions) -> dict[str, Any]:
    """The keys in which ``options`` differ from their method's, in JSON's types."""
    plain = parse(options.method.value, where=options.method.value).model_dump(mode="json")
    return {key: value for key, value in options.model_dump(mode="json").items() if value != plain[key]}
