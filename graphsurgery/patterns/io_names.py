"""What inputs and outputs of a decoder are called by those who read them: conventions, and names made from templates.

A template may hold ``{layer}``, ``{kind}`` (as the convention spells it) and, for outputs, ``{input}`` (the name that
the input gets).
"""

from __future__ import annotations

import dataclasses
import string
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphsurgery.patterns.kv_cache import CacheKind, CacheSite
    from graphsurgery.patterns.roles import SizeRole

__all__ = ["CONVENTIONS", "Convention", "ConventionName", "fill", "template_fields"]

ConventionName = Literal["retained-state", "genai", "optimum", "transformers"]


@dataclasses.dataclass(frozen=True)
class Convention:
    """Templates of one convention.

    Attributes:
        inputs: of the input of each kind of cache; kinds without a name of their own are left out.
        outputs: of the output.
        cross: of caches of an encoder's sequence: input and output.
        beside: of a decoder's own caches, where the model has both.
        sizes: what symbolic sizes are called, by role; empty where the convention does not care.
    """

    inputs: Mapping[CacheKind, str]
    outputs: Mapping[CacheKind, str]
    cross: tuple[str, str] | None = None
    beside: tuple[str, str] | None = None
    sizes: Mapping[SizeRole, str] = dataclasses.field(default_factory=dict)

    def names(self, site: CacheSite, *, beside_cross: bool) -> tuple[str | None, str | None]:
        """What the input and the output of ``site`` are called; None where the convention has no name."""
        kind = site.kind
        if site.cross:
            templates = self.cross if kind in ("key", "value") else None
        elif beside_cross and self.beside is not None and kind in ("key", "value"):
            templates = self.beside
        else:
            templates = (self.inputs[kind], self.outputs[kind]) if kind in self.inputs else None
        if templates is None:
            return None, None
        given = fill(templates[0], site.layer, kind, "")
        return given, fill(templates[1], site.layer, kind, given)


def fill(template: str, layer: int | None, kind: str, given: str) -> str:
    """The name that a template makes."""
    return template.format(layer=layer, kind=kind, input=given)


def template_fields(template: str) -> frozenset[str]:
    """The fields that ``template`` holds; a brace without its partner, or a field that cannot be filled, is one too."""
    try:
        fields = frozenset(field for _, field, _, _ in string.Formatter().parse(template) if field is not None)
        if fields <= {"layer", "kind", "input"}:
            fill(template, 0, "key", "input")
    except (ValueError, LookupError):
        return frozenset({template})
    return fields


_RETAINED_INPUTS: dict[CacheKind, str] = {
    "key": "past_key.{layer}",
    "value": "past_value.{layer}",
    "latent": "compressed_kv.{layer}",
    "rope": "k_pe.{layer}",
    "conv": "conv_state.{layer}",
    "recurrent": "recurrent_state.{layer}",
    "window": "sliding_window.{layer}",
    "length": "cumulative_length.{layer}",
}
_PAST: dict[CacheKind, str] = {
    "key": "past_key_values.{layer}.key",
    "value": "past_key_values.{layer}.value",
}
_PRESENT: dict[CacheKind, str] = {"key": "present.{layer}.key", "value": "present.{layer}.value"}
_LINEAR: dict[CacheKind, str] = {"conv": "conv_state", "recurrent": "recurrent_state"}
_TRANSFORMERS: dict[CacheKind, str] = {
    "key": "keys",
    "value": "values",
    "conv": "conv_states.0",
    "recurrent": "recurrent_states.0",
    "window": "_sliding_window_tensor",
    "length": "cumulative_length",
}
_LENGTHS: dict[SizeRole, str] = {
    "batch": "batch_size",
    "seq": "sequence_length",
    "past": "past_sequence_length",
    "total": "total_sequence_length",
    "context": "max_sequence_length",
}

CONVENTIONS: Mapping[ConventionName, Convention] = {
    # efficient-transformers: the runtime keeps what is called after an input and "_RetainedState".
    "retained-state": Convention(
        _RETAINED_INPUTS,
        dict.fromkeys(_RETAINED_INPUTS, "{input}_RetainedState"),
        sizes={
            "batch": "batch_size",
            "seq": "seq_len",
            "past": "past_len",
            "total": "total_len",
            "context": "ctx_len",
        },
    ),
    # ONNX Runtime GenAI: the defaults of genai_config.json.
    "genai": Convention(
        _PAST | {kind: f"past_key_values.{{layer}}.{name}" for kind, name in _LINEAR.items()},
        _PRESENT | {kind: f"present.{{layer}}.{name}" for kind, name in _LINEAR.items()},
        sizes=_LENGTHS,
    ),
    "optimum": Convention(
        _PAST,
        _PRESENT,
        cross=("past_key_values.{layer}.encoder.{kind}", "present.{layer}.encoder.{kind}"),
        beside=("past_key_values.{layer}.decoder.{kind}", "present.{layer}.decoder.{kind}"),
        sizes=_LENGTHS,
    ),
    "transformers": Convention(
        {kind: f"input.cache.layers.{{layer}}.{name}" for kind, name in _TRANSFORMERS.items()},
        {kind: f"output.cache.layers.{{layer}}.{name}" for kind, name in _TRANSFORMERS.items()},
    ),
}
