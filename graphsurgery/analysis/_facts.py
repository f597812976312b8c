"""What the shape walk knows of one value, and what a rule sees of one node."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from graphsurgery.analysis.dims import Dim, Expr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import onnx_ir as ir

__all__ = [
    "NOTHING",
    "Call",
    "Fact",
    "Facts",
    "Rule",
    "RuleTable",
    "Shape",
    "ShapeValue",
    "normal_axis",
    "rule_table",
    "static_shape",
]

Shape: TypeAlias = tuple[Dim, ...]

MAX_VALUE_ITEMS = 64
# Below this every whole number is a float32.
_EXACT_FLOATS = 2**24


@dataclasses.dataclass(frozen=True, slots=True)
class ShapeValue:
    """The symbolic contents of a small integer tensor, such as a ``Reshape`` operand.

    Attributes:
        items: the elements in row-major order; booleans are 0 and 1.
        shape: the tensor's own shape: ``()`` for a scalar, ``(n,)`` for a list.
    """

    items: tuple[Dim, ...]
    shape: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Rank of the tensor: 0 for a scalar, 1 for a list."""
        return len(self.shape)

    @property
    def single(self) -> Dim | None:
        """The element, where there is exactly one, whatever the rank."""
        return self.items[0] if len(self.items) == 1 else None

    def ints(self) -> tuple[int, ...] | None:
        """The elements, where all are known numbers."""
        return static_shape(self.items)

    def array(self) -> np.ndarray:
        """An object array of the elements."""
        flat = np.empty(len(self.items), dtype=object)
        flat[:] = self.items
        return flat.reshape(self.shape)

    def __iter__(self) -> Iterator[Dim]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Dim:
        return self.items[index]

    def __str__(self) -> str:
        text = ", ".join(str(item) for item in self.items)
        return text if self.rank == 0 else f"[{text}]"

    @classmethod
    def scalar(cls, item: Dim) -> ShapeValue:
        """A rank-0 value."""
        return cls((item,), ())

    @classmethod
    def listed(cls, items: Iterable[Dim]) -> ShapeValue:
        """A rank-1 value."""
        items = tuple(items)
        return cls(items, (len(items),))

    @classmethod
    def of_array(cls, array: np.ndarray) -> ShapeValue | None:
        """A value of an object or number array; None where it is too large."""
        if array.size > MAX_VALUE_ITEMS:
            return None
        items = tuple(item if isinstance(item, Expr) else int(item) for item in array.reshape(-1).tolist())
        return cls(items, tuple(int(size) for size in array.shape))

    @classmethod
    def of_constant(cls, array: np.ndarray | None) -> ShapeValue | None:
        """A value of a small integer constant, or of a float scalar that is a whole number (the bound of an arange)."""
        if array is None or array.size > MAX_VALUE_ITEMS:
            return None
        if array.dtype.kind in "iub":
            return cls.of_array(array)
        if array.dtype.kind == "f" and array.size == 1:
            number = float(array.reshape(-1)[0])
            if number.is_integer() and abs(number) < _EXACT_FLOATS:
                return cls((int(number),), array.shape)
        return None


class Fact(NamedTuple):
    """What is known of one value: None for what is not.

    Made for every output of every node: a tuple takes a third of the time that a frozen dataclass takes.

    Attributes:
        shape: the sizes of its axes.
        dtype: its element type.
        value: its contents, for small integer tensors.
        element: for a sequence (or optional), what is known of its elements; ``shape``, ``dtype`` and ``value`` are
            None then.
        nothing: there is no such value yet: the element of a sequence that is still empty.
    """

    shape: Shape | None = None
    dtype: ir.DataType | None = None
    value: ShapeValue | None = None
    element: Fact | None = None
    nothing: bool = False


NOTHING = Fact()

Facts: TypeAlias = "Fact | Sequence[Fact] | None"


class Surroundings(Protocol):
    """What a node's rule may ask of the walk it is part of."""

    def fresh(self, *, signed: bool = False) -> Expr:
        """A new anonymous size, or element of a tensor."""

    def contents(self, value: ir.Value) -> ShapeValue | None:
        """Contents of ``value``, with fresh unknowns for those of a small integer tensor nobody knows."""

    def run_graph(self, graph: ir.Graph, inputs: Sequence[Fact]) -> list[Fact]:
        """Walk a body whose formal inputs are described by ``inputs``; the facts of its outputs."""


class Call:
    """One node as its rule sees it: facts of the inputs, resolved attributes, the opset that applies."""

    __slots__ = ("_attributes", "inputs", "node", "version", "walk")

    def __init__(
        self,
        node: ir.Node,
        inputs: list[Fact],
        attributes: Mapping[str, ir.Attr],
        version: int,
        walk: Surroundings,
    ) -> None:
        self.node = node
        self.inputs = inputs
        self.version = version
        self.walk = walk
        self._attributes = attributes

    def has(self, index: int) -> bool:
        """Whether input ``index`` is there (optional inputs may be absent or empty)."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def fact(self, index: int) -> Fact:
        """All that is known of input ``index``."""
        return self.inputs[index] if index < len(self.inputs) else NOTHING

    def shape(self, index: int) -> Shape | None:
        """Shape of input ``index``; None where unknown or absent."""
        return self.inputs[index].shape if index < len(self.inputs) else None

    def dtype(self, index: int) -> ir.DataType | None:
        """Element type of input ``index``."""
        return self.inputs[index].dtype if index < len(self.inputs) else None

    def value(self, index: int) -> ShapeValue | None:
        """Contents of input ``index``, with fresh unknowns where it is a small integer tensor nobody knows."""
        if index >= len(self.inputs):
            return None
        known = self.inputs[index].value
        if known is not None:
            return known
        operand = self.node.inputs[index]
        return None if operand is None else self.walk.contents(operand)

    def fresh(self, *, signed: bool = False) -> Expr:
        """A new anonymous size (or, ``signed``, element)."""
        return self.walk.fresh(signed=signed)

    def fresh_shape(self, rank: int) -> Shape:
        """``rank`` new anonymous sizes."""
        return tuple(self.walk.fresh() for _ in range(rank))

    def attribute(self, name: str) -> Any:
        """The value of an attribute, references to the function call's attributes resolved; None where absent."""
        attribute = self._attributes.get(name)
        return None if attribute is None else attribute.value

    def number(self, name: str, default: int) -> int:
        """An integer attribute."""
        value = self.attribute(name)
        return default if value is None else int(value)

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """A list of integers, or None where the attribute is absent."""
        value = self.attribute(name)
        return None if value is None else tuple(int(item) for item in value)

    def text(self, name: str, default: str) -> str:
        """A string attribute."""
        value = self.attribute(name)
        if isinstance(value, bytes):
            return value.decode("utf-8", errors="replace")
        return default if value is None else str(value)

    def axes(self, index: int) -> tuple[int, ...] | None:
        """Axes given as attribute ``axes`` (older opsets) or as input ``index``; None where neither is known.

        Whether they are given at all is for :meth:`gives_axes`.
        """
        listed = self.numbers("axes")
        if listed is not None:
            return listed
        value = self.value(index) if self.has(index) else None
        return None if value is None else value.ints()

    def gives_axes(self, index: int) -> bool:
        """Whether axes are given, as attribute or as input ``index``."""
        return self.attribute("axes") is not None or self.has(index)


Rule: TypeAlias = "Callable[[Call], Facts]"
RuleTable: TypeAlias = dict[tuple[str, str], Rule]


def normal_axis(axis: int, rank: int) -> int | None:
    """``axis`` counted from the front, or None where it is out of range."""
    if axis < 0:
        axis += rank
    return axis if 0 <= axis < rank else None


def static_shape(shape: Shape | None) -> tuple[int, ...] | None:
    """``shape`` where every size is a known number, else None."""
    if shape is None:
        return None
    known = tuple(size for size in shape if isinstance(size, int))
    return known if len(known) == len(shape) else None


def rule_table(*groups: tuple[str, str, Rule]) -> RuleTable:
    """A table from (domain, op names separated by blanks, rule) rows."""
    return {(domain, name): rule for domain, names, rule in groups for name in names.split()}
