"""Every pass by name, imported only when it is used.

The passes of this package are listed here; other packages add theirs through the entry-point group
``graphsurgery.passes`` (name = ``module:Class``). A name that is listed here cannot be taken over.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from graphsurgery.errors import UsageError
from graphsurgery.specs import PassSpec, parse_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphsurgery.pass_base import Pass

__all__ = ["ENTRY_POINT_GROUP", "make_pass", "pass_names", "pass_type"]

ENTRY_POINT_GROUP = "graphsurgery.passes"

_PASSES: Mapping[str, str] = {
    "prune-last-token": "graphsurgery.passes.prune_last_token:PruneLastToken",
    "tidy": "graphsurgery.passes.tidy:Tidy",
}


def _targets() -> dict[str, str]:
    targets = {point.name: point.value for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    targets.update(_PASSES)
    return targets


def pass_names() -> list[str]:
    """The names of all passes: this package's own first, then those of other packages."""
    return [*_PASSES, *sorted(set(_targets()) - set(_PASSES))]


def pass_type(name: str) -> type[Pass]:
    """The class of the pass called ``name``.

    Raises:
        UsageError: there is no such pass, or the package that registered it cannot be imported.
    """
    from graphsurgery.pass_base import Pass, unknown_name

    target = _targets().get(name)
    if target is None:
        raise unknown_name("pass", name, pass_names())
    module_name, _, class_name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"Pass {name!r} is registered as {target!r}, which cannot be imported: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, Pass)):
        raise UsageError(f"Pass {name!r} is registered as {target!r}, which is not a graphsurgery.Pass.")
    return found


def make_pass(spec: str | PassSpec | Mapping[str, Any]) -> Pass:
    """A pass from its spec: text, a parsed spec, or a table of a recipe (``{"name": ..., option: value}``).

    Raises:
        UsageError: the spec cannot be read, or names a pass, option or value that does not exist.
    """
    if isinstance(spec, str):
        spec = parse_spec(spec)
    if isinstance(spec, PassSpec):
        return pass_type(spec.name).from_options(dict(spec.options))
    options = dict(spec)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise UsageError(f'A [[pass]] table of a recipe needs name = "..."; got {dict(spec)!r}.')
    return pass_type(name).from_options(options)
