"""Every pass by name, imported only when it is used.

The passes of this package are listed here; other packages add theirs through the entry-point group
``graphsurgery.passes`` (name = ``module:Class``). A name that is listed here cannot be taken over.
"""

from __future__ import annotations

import importlib.metadata
import inspect
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
    "bind-dims": "graphsurgery.passes.bind_dims:BindDims",
    "bound-context": "graphsurgery.passes.bound_context:BoundContext",
    "block-attention": "graphsurgery.passes.block_attention:BlockAttention",
    "gather-experts": "graphsurgery.passes.gather_experts:GatherExperts",
    "extract-functions": "graphsurgery.passes.extract_functions:ExtractFunctions",
    "inline-functions": "graphsurgery.passes.inline_functions:InlineFunctions",
    "rename-io": "graphsurgery.passes.rename_io:RenameIO",
    "strip-metadata": "graphsurgery.passes.strip_metadata:StripMetadata",
    "tidy": "graphsurgery.passes.tidy:Tidy",
    "weights-from-inputs": "graphsurgery.passes.weights_from_inputs:WeightsFromInputs",
    "weights-to-inputs": "graphsurgery.passes.weights_to_inputs:WeightsToInputs",
}


def _foreign() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


def _entry_point(name: str) -> importlib.metadata.EntryPoint | None:
    # Looking at what is installed takes milliseconds, so only for a name that is not listed here.
    if name in _PASSES:
        return importlib.metadata.EntryPoint(name, _PASSES[name], ENTRY_POINT_GROUP)
    return _foreign().get(name)


def pass_names() -> list[str]:
    """The names of all passes: this package's own first, then those of other packages."""
    return [*_PASSES, *sorted(set(_foreign()) - set(_PASSES))]


def pass_type(name: str) -> type[Pass]:
    """The class of the pass called ``name``.

    Raises:
        UsageError: there is no such pass, or what another package registered is not a pass of that name.
    """
    from graphsurgery.pass_base import Pass, unknown_name

    point = _entry_point(name)
    if point is None:
        raise unknown_name("pass", name, pass_names())
    registered = f"Pass {name!r} is registered as {point.value!r}, which"
    try:
        found = point.load()
    except Exception as error:
        # Whatever a foreign package raises while it is imported, the package is at fault.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{registered} cannot be imported: {reason}.") from error
    if not (isinstance(found, type) and issubclass(found, Pass)) or inspect.isabstract(found):
        raise UsageError(f"{registered} is not a graphsurgery.Pass that defines find and rewrite.")
    if getattr(found, "name", None) != name:
        raise UsageError(f"{registered} calls itself {getattr(found, 'name', None)!r}: the two names must be equal.")
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
