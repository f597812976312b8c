"""What analyses and recognisers found in a model, kept until the next edit: several passes and steps of one ask for the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import onnx_ir as ir

__all__ = ["drop_kept", "kept"]

_KEY = "graphsurgery.analysis.kept"
_Found = TypeVar("_Found")


def kept(model: ir.Model, key: Hashable, find: Callable[[], _Found]) -> _Found:
    """What ``find`` gives, asked once until the model is edited.

    Args:
        model: the model.
        key: names what is found: by whom, and in what.
        find: finds it in the model as it is.
    """
    held = model.meta.setdefault(_KEY, {})
    if key not in held:
        held[key] = find()
    return held[key]  # type: ignore[no-any-return]


def drop_kept(model: ir.Model) -> None:
    """Forget everything that is kept: the model has been edited."""
    model.meta.pop(_KEY, None)
