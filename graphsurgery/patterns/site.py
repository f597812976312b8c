"""Sites: what recognisers return.

A :class:`Site` names one place in a graph that a pass may rewrite; a :class:`Refusal` is a place that looked like one
and cannot be, with the reason. Both carry what ``sites=`` and ``exclude=`` select by: an id, a layer number, kinds.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import TYPE_CHECKING, TypeVar

from graphsurgery.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Done", "Refusal", "Site", "select", "selects"]

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """One place in a graph.

    Attributes:
        id: unique in a model and stable over runs, as ``inspect`` prints it.
        kinds: what it is, from the general to the special (``attention``, ``sliding``).
        layer: the layer it belongs to, where it belongs to one.
    """

    id: str
    kinds: tuple[str, ...] = ()
    layer: int | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that a selector may name it by."""
        return () if self.layer is None else (self.layer,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal(Site):
    """A place that cannot be rewritten, and why: a whole sentence that names the node or value."""

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done(Site):
    """A place that an earlier run has rewritten, and what tells so."""

    reason: str


S = TypeVar("S", bound=Site)


def select(found: Sequence[S], sites: Iterable[str], exclude: Iterable[str]) -> tuple[list[S], list[S]]:
    """Split what was found into what was asked for and what was not.

    Args:
        found: sites and refusals, in graph order.
        sites: selectors to keep: ids, kinds, layer numbers (``3``) and inclusive ranges (``0-3``); empty keeps all.
        exclude: selectors to leave out, applied after ``sites``.

    Returns:
        The chosen and the others, each in the order of ``found``.

    Raises:
        UsageError: a selector matches nothing in ``found``.
    """
    wanted, unwanted = list(sites), list(exclude)
    for selector in (*wanted, *unwanted):
        if not any(_matches(site, selector) for site in found):
            raise _unmatched(selector, found)
    chosen: list[S] = []
    others: list[S] = []
    for site in found:
        (chosen if selects(site, wanted, unwanted) else others).append(site)
    return chosen, others


def selects(site: Site, sites: Iterable[str], exclude: Iterable[str]) -> bool:
    """Whether the selectors choose ``site``; see :func:`select`."""
    wanted = list(sites)
    keep = not wanted or any(_matches(site, selector) for selector in wanted)
    return keep and not any(_matches(site, selector) for selector in exclude)


def _matches(site: Site, selector: str) -> bool:
    if selector == site.id or selector in site.kinds:
        return True
    wanted = _RANGE.fullmatch(selector)
    if wanted is None:
        return False
    first = int(wanted[1])
    return any(first <= layer <= int(wanted[2] or first) for layer in site.layers)


def _unmatched(selector: str, found: Sequence[Site]) -> UsageError:
    known = sorted({name for site in found for name in (site.id, *site.kinds)})
    close = difflib.get_close_matches(selector, known, n=3) or known[:8]
    hint = f"; the closest are {', '.join(close)}" if close else "; the model has no site of this pass"
    return UsageError(f"Selector {selector!r} matches no site{hint}. Run inspect to list the sites.")
