"""What two models promise to their callers: names, order, element types and shapes of inputs and outputs.

Symbols of dims are names, and names of dims do not count: two interfaces are equal when one renaming of symbols, one to
one, turns all shapes of A into those of B. ``logits [B, S, V]`` against ``[B, N, V]`` differs wherever ``S`` is the
length of an input too.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, TypeAlias

import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Interface", "InterfaceChange", "Port", "compare_interfaces", "ports"]

Role: TypeAlias = Literal["input", "output"]
Dim: TypeAlias = int | str | None


@dataclasses.dataclass(frozen=True)
class Port:
    """An input or output; ``dims`` is None where the rank is unknown, a dim None where it has no name."""

    name: str
    dtype: str
    dims: tuple[Dim, ...] | None
    default: bool = False

    @property
    def shape(self) -> str:
        """``[B, S, 64]``."""
        return "?" if self.dims is None else f"[{', '.join('?' if dim is None else str(dim) for dim in self.dims)}]"


@dataclasses.dataclass(frozen=True)
class InterfaceChange:
    """One difference of the interfaces.

    Attributes:
        role: ``input`` or ``output``.
        what: ``added``, ``removed``, ``renamed``, ``dtype``, ``shape``, ``default`` (an input that need not be fed) or
            ``order``.
        name: in A; in B for what was added; empty for ``order``.
        before: the value in A, or empty.
        after: the value in B, or empty.
    """

    role: Role
    what: Literal["added", "removed", "renamed", "dtype", "shape", "default", "order"]
    name: str
    before: str = ""
    after: str = ""

    def __str__(self) -> str:
        if self.what == "added":
            return f"{self.role} {self.name} added: {self.after}"
        if self.what == "removed":
            return f"{self.role} {self.name} removed: {self.before}"
        if self.what == "order":
            return f"order of {self.role}s: {self.before} -> {self.after}"
        what = "" if self.what == "renamed" else f" {self.what}"
        return f"{self.role} {self.name}{what}: {self.before} -> {self.after}"


@dataclasses.dataclass(frozen=True)
class Interface:
    """What compares.

    Attributes:
        changes: every difference.
        inputs: name in B of each input of A that has a counterpart.
        outputs: the same of the outputs.
        symbols: symbols of dims that have another name in B.
    """

    changes: tuple[InterfaceChange, ...]
    inputs: dict[str, str]
    outputs: dict[str, str]
    symbols: tuple[tuple[str, str], ...]


def ports(values: Iterable[ir.Value]) -> list[Port]:
    """The inputs or outputs of a graph."""
    return [_port(value) for value in values]


def _port(value: ir.Value) -> Port:
    dims = None
    if value.shape is not None:
        dims = tuple(size if isinstance(size, int) else size.value for size in value.shape)
    if isinstance(value.type, ir.TensorType) or value.type is None:
        dtype = value.dtype.name if value.dtype is not None else "?"
    else:
        dtype = str(value.type)
    return Port(value.name or "", dtype, dims, value.is_initializer())


def compare_interfaces(
    inputs: tuple[Sequence[Port], Sequence[Port]], outputs: tuple[Sequence[Port], Sequence[Port]]
) -> Interface:
    """Compare the inputs and the outputs of A and B."""
    changes: list[InterfaceChange] = []
    pairs: list[tuple[Role, Port, Port]] = []
    sides: tuple[tuple[Role, tuple[Sequence[Port], Sequence[Port]]], ...] = (("input", inputs), ("output", outputs))
    for role, (ours, theirs) in sides:
        matched = _matched(ours, theirs)
        changes += _unmatched(role, ours, theirs, matched)
        pairs += [(role, a, b) for a, b in matched]
    changes += [InterfaceChange(role, "renamed", a.name, a.name, b.name) for role, a, b in pairs if a.name != b.name]
    symbols = _Symbols(pairs)
    for number, (role, a, b) in enumerate(pairs):
        if a.dtype != b.dtype:
            changes.append(InterfaceChange(role, "dtype", a.name, a.dtype, b.dtype))
        if not symbols.agree(number, a, b):
            changes.append(InterfaceChange(role, "shape", a.name, a.shape, b.shape))
        if a.default != b.default:
            words = ("must be fed", "has a default")
            changes.append(InterfaceChange(role, "default", a.name, words[a.default], words[b.default]))
    named = {role: {a.name: b.name for each, a, b in pairs if each == role} for role in ("input", "output")}
    return Interface(tuple(changes), named["input"], named["output"], symbols.renamed())


def _matched(ours: Sequence[Port], theirs: Sequence[Port]) -> list[tuple[Port, Port]]:
    """Pairs of one name, and of the others those of one type at one position."""
    by_name = {port.name: port for port in theirs}
    names = {port.name for port in ours}
    found = []
    for position, port in enumerate(ours):
        same = by_name.get(port.name)
        if same is None and position < len(theirs) and theirs[position].name not in names:
            other = theirs[position]
            rank = None if port.dims is None else len(port.dims)
            other_rank = None if other.dims is None else len(other.dims)
            same = other if (port.dtype, rank) == (other.dtype, other_rank) else None
        if same is not None:
            found.append((port, same))
    return found


def _unmatched(
    role: Role, ours: Sequence[Port], theirs: Sequence[Port], matched: list[tuple[Port, Port]]
) -> list[InterfaceChange]:
    kept = {a.name for a, _ in matched}
    taken = {b.name: number for number, (_, b) in enumerate(matched)}
    changes = [
        InterfaceChange(role, "removed", port.name, before=f"{port.dtype} {port.shape}")
        for port in ours
        if port.name not in kept
    ]
    changes += [
        InterfaceChange(role, "added", port.name, after=f"{port.dtype} {port.shape}")
        for port in theirs
        if port.name not in taken
    ]
    order = [taken[port.name] for port in theirs if port.name in taken]
    if order != sorted(order):
        before = ", ".join(b.name for _, b in matched)
        after = ", ".join(matched[number][1].name for number in order)
        changes.append(InterfaceChange(role, "order", "", before, after))
    return changes


class _Symbols:
    """The renaming of symbols, found greedily: names that stay come first."""

    def __init__(self, pairs: Sequence[tuple[Role, Port, Port]]) -> None:
        self._forth: dict[Dim, Dim] = {}
        self._back: dict[Dim, Dim] = {}
        for _, a, b in pairs:
            if a.dims is not None and b.dims is not None and len(a.dims) == len(b.dims):
                for ours, theirs in zip(a.dims, b.dims, strict=True):
                    if isinstance(ours, str) and ours == theirs:
                        self._forth[ours] = self._back[ours] = ours

    def agree(self, number: int, a: Port, b: Port) -> bool:
        """Whether the shapes are equal under the renaming so far, which grows."""
        if a.dims is None or b.dims is None:
            return a.dims is b.dims
        if len(a.dims) != len(b.dims):
            return False
        # A dim without a name is a symbol of its own.
        ours = [f"?{number}.{axis}" if dim is None else dim for axis, dim in enumerate(a.dims)]
        theirs = [f"?{number}.{axis}" if dim is None else dim for axis, dim in enumerate(b.dims)]
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(one, int) or isinstance(other, int):
                if one != other:
                    return False
            elif self._forth.get(one, other) != other or self._back.get(other, one) != one:
                return False
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(one, str):
                self._forth[one], self._back[other] = other, one
        return True

    def renamed(self) -> tuple[tuple[str, str], ...]:
        """Symbols with another name in B; those without a name are written ``?``."""
        found = []
        for one, other in self._forth.items():
            shown = tuple("?" if str(name).startswith("?") else str(name) for name in (one, other))
            if shown[0] != shown[1]:
                found.append((shown[0], shown[1]))
        return tuple(found)
