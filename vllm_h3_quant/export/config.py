"""What an export was asked to be, and the ``quantization_config`` that tells the engine what it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_h3_quant.config.components import COMPONENTS, TEXT_ENCODER, TRANSFORMER, Part, parse_parts
from vllm_h3_quant.config.schema import EXPORT_FORMAT, NAMES, H3QuantOptions, parse
from vllm_h3_quant.errors import H3QuantError
from vllm_h3_quant.methods.scope import matches, without_match


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
    return Request(tuple(_given(part) for part in parse_parts(spec, where=where) if part.name))


def _given(part: Part) -> Given:
    if part.options is None:
        raise H3QuantError(
            f"{part.where}: {part.name!r} is a method of the engine's, which an export does not write; give one of"
            f" {', '.join(NAMES)}, or null"
        )
    if part.options.checkpoint:
        raise H3QuantError(
            f"{part.where}: checkpoint={part.options.checkpoint!r} is what an export writes; leave it out"
        )
    return Given(part.options.model_copy(update={"checkpoint": EXPORT_FORMAT}), part.components, part.where)


def _keys(options: H3QuantOptions) -> dict[str, Any]:
    """The keys in which ``options`` differ from their method's, in JSON's types."""
    plain = parse(options.method.value, where=options.method.value).model_dump(mode="json")
    return {key: value for key, value in options.model_dump(mode="json").items() if value != plain[key]}
