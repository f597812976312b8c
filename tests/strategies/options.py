"""Options of passes, drawn from the types of their fields."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

if TYPE_CHECKING:
    from graphsurgery.pass_base import Pass

_TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["last_token_indices", "a,b", "[0]", "x y", "S=4096,P=0", "'", "{", "true", "7"]),
)


def field_types(kind: type[Pass]) -> dict[str, Any]:
    """The types of a pass's options."""
    found = {}
    for field in dataclasses.fields(kind):
        owner = next(item for item in kind.__mro__ if field.name in vars(item).get("__annotations__", {}))
        # Literal, int, str and the like: nothing that only a checker knows.
        found[field.name] = eval(str(field.type), {**vars(typing), **vars(sys.modules[owner.__module__])})
    return found


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Values that are mostly valid for a field of this type."""
    if annotation is int:
        return st.integers(1, 64)
    if annotation is float:
        # Two NaN are never equal, so an outcome that holds one could not be compared.
        return st.floats(allow_nan=False)
    if annotation is str:
        return _TEXTS
    if typing.get_origin(annotation) is tuple:
        return st.lists(_TEXTS, max_size=3).map(tuple)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        # Nothing is not a value that text or TOML could hold: it is the option left out.
        return st.one_of([values_of(item) for item in typing.get_args(annotation) if item is not type(None)])
    return st.from_type(annotation)


def options_of(kind: type[Pass]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of a pass's options, mostly valid."""
    return st.fixed_dictionaries({}, optional={name: values_of(kind_) for name, kind_ in field_types(kind).items()})


def any_value() -> st.SearchStrategy[Any]:
    """A value of any kind that TOML and the command line can both hold, valid or not."""
    scalars = st.one_of(st.booleans(), st.integers(-3, 70), st.floats(allow_nan=False, width=32), _TEXTS)
    return st.one_of(scalars, st.lists(_TEXTS, max_size=3))
