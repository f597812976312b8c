"""What the names of cache inputs and outputs tell: key or value, the layer, and which output follows which input."""

from __future__ import annotations

import re
from typing import Literal

__all__ = ["CacheKind", "cache_key", "is_cache_name", "kind_of_name", "layer_of_name"]

CacheKind = Literal["key", "value", "key-value", "latent", "rope", "conv", "recurrent", "window", "length", "state"]

_CACHE = re.compile(
    r"past|present|cache|retained|(?:^|[._/])kv|_states?\b|[._/]states?\b|conv_state|recurrent|ssm|rwkv"
)
_NOT_CACHE = re.compile(r"hidden_states?|attentions?\b|past_(seq|len)")
_WORD = re.compile(r"[a-z]+|\d+")
_LAYER = re.compile(r"(?:layers?|blocks?|h|past_key_values|present|past|cache)[._/](\d+)(?![0-9a-z])")
_NUMBER = re.compile(r"(?<![0-9a-z])(\d+)(?![0-9a-z])")
_ANY_NUMBER = re.compile(r"(\d+)")
# Words that only tell the direction, or that it is a cache at all.
_DIRECTION = frozenset(
    {
        *("input", "inputs", "output", "outputs", "in", "out", "past", "present", "cache", "caches", "layers", "layer"),
        *("retainedstate", "updated", "update", "new", "next", "prev", "previous", "last", "initial", "init", "cur"),
        *("current", "self", "decoder", "kv"),
    }
)
_KINDS: tuple[tuple[frozenset[str], CacheKind], ...] = (
    (frozenset({"conv", "convolution"}), "conv"),
    (frozenset({"recurrent", "ssm", "delta"}), "recurrent"),
    (frozenset({"window"}), "window"),
    (frozenset({"length", "len", "position", "counter"}), "length"),
    (frozenset({"compressed", "latent"}), "latent"),
    (frozenset({"pe", "rope"}), "rope"),
    (frozenset({"key", "keys", "k"}), "key"),
    (frozenset({"value", "values", "v"}), "value"),
)


def _plain(name: str | None) -> str:
    text = (name or "").lower()
    # The common prefix that names both.
    return re.sub(r"(past_)?key_values?|retainedstate", lambda found: "past" if "key" in found[0] else "", text)


def is_cache_name(name: str | None) -> bool:
    """Whether ``name`` says that a value is kept from call to call."""
    text = (name or "").lower()
    if _NOT_CACHE.search(text) and "cache" not in text:
        return False
    return _CACHE.search(text) is not None


def kind_of_name(name: str | None) -> CacheKind | None:
    """``key`` or ``value`` and so on as the words of ``name`` say; None where they do not."""
    words = set(_WORD.findall(_plain(name)))
    return next((kind for wanted, kind in _KINDS if wanted & words), None)


def layer_of_name(name: str | None) -> int | None:
    """The number of the layer that ``name`` tells; None where it holds no number."""
    text = (name or "").lower()
    for pattern in (_LAYER, _NUMBER, _ANY_NUMBER):
        found = pattern.search(text)
        if found:
            return int(found[1])
    return None


def cache_key(name: str | None) -> tuple[str, ...]:
    """What an input and the output that takes its place have in common: their words without those of direction."""
    return tuple(word for word in _WORD.findall(_plain(name)) if word not in _DIRECTION)
