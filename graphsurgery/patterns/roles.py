"""Which sizes of a decoder's inputs are the batch, the query length, the past, the keys and the slots of a cache.

Exporters call them what they like (``s70``, ``sequence_length``, ``past_sequence_length + 1``) and several names may
stand for one role: sliding layers often have a past of their own. A :class:`SizeRoles` says which axis of which input
has which role, so that sizes can be given by role. Alphabet: B batch, S query length, P past, T = P + S keys, N slots of
a fixed-size cache.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, TypeAlias

from graphsurgery.analysis.dims import Expr, free_names
from graphsurgery.patterns.interface import FLOATS, fed_inputs, find_token_input
from graphsurgery.patterns.kv_cache import find_caches

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes
    from graphsurgery.patterns.interface import TokenInput
    from graphsurgery.patterns.kv_cache import CacheSite

__all__ = ["ROLES", "SizeRole", "SizeRoles", "SizedAxis", "find_size_roles"]

SizeRole: TypeAlias = Literal["batch", "seq", "past", "total", "context"]

ROLES: tuple[SizeRole, ...] = ("batch", "seq", "past", "total", "context")
"""B, S, P, T and N, in this order."""


@dataclasses.dataclass(frozen=True)
class SizedAxis:
    """One axis of one input that has a role.

    Attributes:
        role: what it counts.
        input: the graph input.
        axis: which axis of it.
        size: its size: a number, a name, an expression such as ``past + seq``. (Of the past of a model without caches:
            what the width of the mask is more than S.)
    """

    role: SizeRole
    input: ir.Value
    axis: int
    size: Dim


@dataclasses.dataclass(frozen=True)
class SizeRoles:
    """The axes that have a role, in the order of roles and inputs."""

    axes: tuple[SizedAxis, ...]

    def of(self, role: SizeRole) -> tuple[SizedAxis, ...]:
        """The axes of ``role``."""
        return tuple(axis for axis in self.axes if axis.role == role)

    def sizes(self, role: SizeRole) -> tuple[Dim, ...]:
        """The different sizes that ``role`` has: more than one where the exporter gave it several names."""
        return tuple(dict.fromkeys(axis.size for axis in self.of(role)))

    def role_of(self, name: str) -> SizeRole | None:
        """The role of the symbolic size ``name``; None where it has none of its own."""
        for axis in self.axes:
            if isinstance(axis.size, Expr) and axis.size.atom is not None and free_names(axis.size) == {name}:
                return axis.role
        return None

    def named(self) -> dict[str, tuple[str, ...]]:
        """Each role that the model has, with its sizes as text."""
        listed = {role: tuple(map(size_text, self.sizes(role))) for role in ROLES}
        return {role: sizes for role, sizes in listed.items() if sizes}


def size_text(size: Dim) -> str:
    """A size for people: one without a name is ``?``."""
    return "?" if any(name.startswith("?") for name in free_names(size)) else str(size)


def find_size_roles(model: ir.Model, shapes: Shapes) -> SizeRoles:
    """The roles of the sizes of the inputs of ``model``; time is linear in its nodes.

    Read from the token input, the positions, the masks and the caches. A size that is 1 where others are symbolic (a
    mask for all rows) has no role, nor have caches of another sequence (an encoder's).
    """
    tokens = find_token_input(model, shapes)
    if tokens is None:
        return SizeRoles(())
    caches = [site for site in find_caches(model, shapes) if site.input is not None and not site.cross]
    found = [*_of_tokens(tokens), *_of_caches(caches, shapes)]
    slots = {axis.size for axis in found if axis.role == "context"}
    known = {axis.input for axis in found}
    for value in fed_inputs(model):
        if value not in known:
            found += _of_other(value, tokens, slots, shapes)
    found += _implied_past(found, tokens)
    order = {value: number for number, value in enumerate(model.graph.inputs)}
    found.sort(key=lambda axis: (ROLES.index(axis.role), order[axis.input], axis.axis))
    return SizeRoles(tuple(found))


def _of_tokens(tokens: TokenInput) -> Iterator[SizedAxis]:
    if tokens.batch is not None and tokens.batch_axis is not None:
        yield SizedAxis("batch", tokens.value, tokens.batch_axis, tokens.batch)
    yield SizedAxis("seq", tokens.value, tokens.sequence_axis, tokens.length)


def _of_caches(caches: list[CacheSite], shapes: Shapes) -> Iterator[SizedAxis]:
    for site in caches:
        assert site.input is not None
        shape = shapes.shape(site.input)
        if shape is None or len(shape) < 3:
            continue
        # By custom rows come first; a cache of another rank may hold something else there, such as B*G.
        if site.axis != 0 and (len(shape) == 4 or (isinstance(shape[0], Expr) and shape[0].atom is not None)):
            yield SizedAxis("batch", site.input, 0, shape[0])
        if site.axis is None or site.form == "passthrough":
            continue
        after = shapes.dim(site.output, site.axis)
        grows = site.form in ("concat", "fused") and after != shape[site.axis]
        yield SizedAxis("past" if grows else "context", site.input, site.axis, shape[site.axis])


def _implied_past(found: list[SizedAxis], tokens: TokenInput) -> Iterator[SizedAxis]:
    """The past of a model without caches, where its mask names one: ``past + seq`` columns for ``seq`` tokens."""
    if any(axis.role == "past" for axis in found):
        return
    for axis in found:
        before = axis.size - tokens.length if axis.role == "total" else 0
        if isinstance(before, Expr) and before.atom is not None and not size_text(before).startswith("?"):
            yield SizedAxis("past", axis.input, axis.axis, before)
            return


def _of_other(value: ir.Value, tokens: TokenInput, slots: set[Dim], shapes: Shapes) -> Iterator[SizedAxis]:
    """Masks, positions, and what has a value for each row or token, by name and rank."""
    shape, name = shapes.shape(value), (value.name or "").lower()
    if not shape or any(word in name for word in ("encoder", "cross", "image", "pixel", "vis")):
        return
    roles: dict[int, SizeRole] = {}
    rank = len(shape)
    if "mask" in name and rank in (2, 3, 4) and ("att" in name or "causal" in name or name == "mask"):
        roles[0] = "batch"
        if rank > 2:
            roles[rank - 2] = "seq"
        if shape[-1] in slots:
            roles[rank - 1] = "context"
        elif shape[-1] != tokens.length:
            roles[rank - 1] = "total"
        else:
            roles[rank - 1] = "seq"
    elif value.dtype in FLOATS:
        return
    elif "position" in name and tokens.batch is None:
        # Of a packed stream: a number for each token, or one for each patch and direction.
        roles[0 if rank == 2 and shape[0] != 1 and shape[1] != tokens.length else rank - 1] = "seq"
    elif "position" in name and rank <= 3:
        roles[rank - 1] = "seq"
        if rank > 1:
            roles[rank - 2] = "batch"
    elif "token_type" in name and rank == 2:
        roles.update({0: "batch", 1: "seq"})
    elif rank == 1 and "cu_" not in name and any(word in name for word in ("beam_idx", "seqlens", "batch")):
        roles[0] = "batch"
    for axis, role in roles.items():
        if shape[axis] != 1 or role == "total":
            yield SizedAxis(role, value, axis, shape[axis])
