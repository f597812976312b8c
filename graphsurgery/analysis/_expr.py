"""Symbolic tensor sizes: integer polynomials over named sizes, unknown sizes and a few opaque functions of them.

A :data:`Dim` is an ``int`` or an :class:`Expr`. An ``Expr`` is always in normal form and never equal to an ``int``, so
``==`` is structural equality after normalisation: ``(past + seq) - past == seq``. What polynomials cannot say
(``min``, floor division, the clamping of a slice bound, ...) is an opaque atom with a value that
:meth:`Expr.evaluate` computes. A named size and an unknown size stand for tensor sizes and are never negative; only an
unknown made with ``signed=True`` (an element of a tensor) may be.

The operations that build opaque atoms, with their simplifications, are in :mod:`graphsurgery.analysis.dims`, the public
face of this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, Union

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Dim: TypeAlias = Union[int, "Expr"]
Bound: TypeAlias = tuple[int | None, int | None]

# A product of polynomials with more terms than this stays an opaque ``mul``: expanding it would cost more than it tells.
_MAX_PRODUCT_TERMS = 256


class Atom:
    """An indivisible factor. ``key`` identifies it: equal keys mean the same size.

    Attributes:
        key: unambiguous text, used for ordering and equality.
        low: largest known lower bound, or None.
        high: smallest known upper bound, or None.
        weight: number of atoms inside, itself included.
    """

    __slots__ = ("_hash", "high", "key", "low", "weight")

    def __init__(self, key: str, low: int | None, high: int | None, weight: int = 1) -> None:
        self.key = key
        self.low = low
        self.high = high
        self.weight = weight
        self._hash = hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Atom) and self._hash == other._hash and self.key == other.key


class Symbol(Atom):
    """A size that the file names; never negative, and at least 1 where it is known to be ``positive``.

    The name alone identifies it: what is known of its range is not part of equality.
    """

    __slots__ = ("name",)

    def __init__(self, name: str, *, positive: bool = False) -> None:
        # The terminator keeps a name such as ``a,sb`` from imitating the key of something else.
        super().__init__("s" + name.replace("\0", "\0\0") + "\0", int(positive), None)
        self.name = name

    def __str__(self) -> str:
        return self.name


class Unknown(Atom):
    """A number nobody named, printed ``?7``; bound under that name by ``evaluate`` and ``substitute``."""

    __slots__ = ("name",)

    def __init__(self, number: int, *, signed: bool = False) -> None:
        # A signed number is another than a size of the same number: what is kept of one must not answer for the other.
        super().__init__(f"u{number:09d}{'s' if signed else ''}", None if signed else 0, None)
        self.name = f"?{number}"

    def __str__(self) -> str:
        return self.name


class Call(Atom):
    """An opaque function of sizes; see :data:`OPAQUE_OPS` for their meanings."""

    __slots__ = ("args", "op")

    def __init__(self, op: str, args: tuple[Dim, ...], bound: Bound) -> None:
        weight = 1 + sum(1 if isinstance(arg, int) else arg.weight for arg in args)
        super().__init__(f"z{op}[{','.join(sort_key(arg) for arg in args)}]", bound[0], bound[1], weight)
        self.op = op
        self.args = args

    def __str__(self) -> str:
        return f"{self.op}({', '.join(str(arg) for arg in self.args)})"


Monomial: TypeAlias = tuple[Atom, ...]


class Expr:
    """A normalised polynomial that is not a constant: immutable, hashable.

    Attributes:
        terms: (monomial, coefficient) pairs in a canonical order, higher degrees first; the monomial of the constant
            is empty. Coefficients are never 0.
        weight: number of atoms in all terms, nested ones included: a measure of how unwieldy the expression is.
    """

    __slots__ = ("_hash", "terms", "weight")

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self.terms = terms
        self.weight = sum(atom.weight for monomial, _ in terms for atom in monomial)
        self._hash = hash(terms)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Expr) and self._hash == other._hash and self.terms == other.terms

    @property
    def atom(self) -> Atom | None:
        """The only atom, where the expression is a bare atom."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            return self.terms[0][0][0]
        return None

    def __add__(self, other: Dim) -> Dim:
        if isinstance(other, int):
            return self if other == 0 else _sum_of(self.terms, (((), other),))
        return _sum_of(self.terms, other.terms)

    __radd__ = __add__

    def __neg__(self) -> Expr:
        return Expr(tuple((monomial, -coefficient) for monomial, coefficient in self.terms))

    def __sub__(self, other: Dim) -> Dim:
        return self + -other

    def __rsub__(self, other: Dim) -> Dim:
        return -self + other

    def __mul__(self, other: Dim) -> Dim:
        if isinstance(other, int):
            if other == 0:
                return 0
            if other == 1:
                return self
            return Expr(tuple((monomial, coefficient * other) for monomial, coefficient in self.terms))
        if len(self.terms) * len(other.terms) > _MAX_PRODUCT_TERMS:
            return opaque("mul", *sorted((self, other), key=sort_key))
        sums: dict[Monomial, int] = {}
        for left, left_coefficient in self.terms:
            for right, right_coefficient in other.terms:
                monomial = tuple(sorted(left + right, key=_atom_key)) if left and right else left or right
                sums[monomial] = sums.get(monomial, 0) + left_coefficient * right_coefficient
        return normal(sums)

    __rmul__ = __mul__

    def evaluate(self, bindings: Mapping[str, int]) -> int | None:
        """The number this stands for when names have the values of ``bindings``; None where a name is missing.

        Also None where the expression has no value, such as a division by zero.
        """
        total = 0
        for monomial, coefficient in self.terms:
            term = coefficient
            for atom in monomial:
                number = _evaluate_atom(atom, bindings)
                if number is None:
                    return None
                term *= number
            total += term
        return total

    def symbols(self) -> frozenset[str]:
        """Names of the named sizes inside (unknowns are not named)."""
        return frozenset(name for name in free_names(self) if not name.startswith("?"))

    def substitute(self, mapping: Mapping[str, Dim]) -> Dim:
        """The expression with the named (``seq``) or unknown (``?7``) sizes of ``mapping`` replaced."""
        total: Dim = 0
        for monomial, coefficient in self.terms:
            term: Dim = coefficient
            for atom in monomial:
                term = term * _substitute_atom(atom, mapping)
            total = total + term
        return total

    def __str__(self) -> str:
        parts: list[str] = []
        # Positive terms first: ``seq - min(seq, 1)``.
        for monomial, coefficient in sorted(self.terms, key=lambda term: term[1] < 0):
            factors = [str(atom) for atom in monomial]
            if abs(coefficient) != 1 or not factors:
                factors.insert(0, str(abs(coefficient)))
            sign = "-" if coefficient < 0 else "+"
            parts.append(
                f" {sign} {'*'.join(factors)}" if parts else ("-" if coefficient < 0 else "") + "*".join(factors)
            )
        return "".join(parts)

    def __repr__(self) -> str:
        return f"Expr({str(self)!r})"


def _atom_key(atom: Atom) -> str:
    return atom.key


def _term_key(term: tuple[Monomial, int]) -> tuple[int, tuple[str, ...]]:
    return -len(term[0]), tuple(atom.key for atom in term[0])


def sort_key(dim: Dim) -> str:
    if isinstance(dim, int):
        return f"i{dim}"
    return "+".join(
        f"{coefficient}{''.join('*' + atom.key for atom in monomial)}" for monomial, coefficient in dim.terms
    )


def normal(sums: dict[Monomial, int]) -> Dim:
    """The polynomial with these coefficients."""
    terms = [term for term in sums.items() if term[1]]
    if not terms:
        return 0
    if len(terms) == 1:
        return Expr((terms[0],)) if terms[0][0] else terms[0][1]
    terms.sort(key=_term_key)
    return Expr(tuple(terms))


def _sum_of(left: Iterable[tuple[Monomial, int]], right: Iterable[tuple[Monomial, int]]) -> Dim:
    sums = dict(left)
    for monomial, coefficient in right:
        sums[monomial] = sums.get(monomial, 0) + coefficient
    return normal(sums)


def symbol(name: str, *, positive: bool = False) -> Expr:
    """The size that files call ``name``; ``positive`` where it cannot be 0."""
    return Expr((((Symbol(name, positive=positive),), 1),))


def unknown(number: int, *, signed: bool = False) -> Expr:
    """The anonymous size number ``number``; ``signed`` for an element of a tensor, which may be negative."""
    return Expr((((Unknown(number, signed=signed),), 1),))


def opaque(op: str, *args: Dim, bound: Bound = (None, None)) -> Expr:
    """An opaque application; callers bring commutative arguments into a canonical order and pass provable bounds."""
    return Expr((((Call(op, args, bound),), 1),))


def product(dims: Iterable[Dim]) -> Dim:
    """The product of ``dims``; 1 for none."""
    total: Dim = 1
    for dim in dims:
        total = total * dim
    return total


def total(dims: Iterable[Dim]) -> Dim:
    """The sum of ``dims``; 0 for none. Linear in their terms, which adding them one by one is not."""
    sums: dict[Monomial, int] = {}
    for dim in dims:
        for monomial, coefficient in (((), dim),) if isinstance(dim, int) else dim.terms:
            sums[monomial] = sums.get(monomial, 0) + coefficient
    return normal(sums)


def evaluate(dim: Dim, bindings: Mapping[str, int]) -> int | None:
    """:meth:`Expr.evaluate` that takes ints too."""
    return dim if isinstance(dim, int) else dim.evaluate(bindings)


def substitute(dim: Dim, mapping: Mapping[str, Dim]) -> Dim:
    """:meth:`Expr.substitute` that takes ints too."""
    return dim if isinstance(dim, int) else dim.substitute(mapping)


def free_names(dim: Dim) -> frozenset[str]:
    """Names of the named and (``?7``) unknown sizes inside ``dim``."""
    names: set[str] = set()
    pending: list[Dim] = [dim]
    while pending:
        current = pending.pop()
        if isinstance(current, int):
            continue
        for monomial, _ in current.terms:
            for atom in monomial:
                if isinstance(atom, Symbol | Unknown):
                    names.add(atom.name)
                elif isinstance(atom, Call):
                    pending.extend(atom.args)
    return frozenset(names)


def _evaluate_atom(atom: Atom, bindings: Mapping[str, int]) -> int | None:
    if isinstance(atom, Symbol | Unknown):
        return bindings.get(atom.name)
    assert isinstance(atom, Call)
    numbers: list[int] = []
    for arg in atom.args:
        number = evaluate(arg, bindings)
        if number is None:
            return None
        numbers.append(number)
    return OPAQUE_OPS[atom.op](*numbers)


def _substitute_atom(atom: Atom, mapping: Mapping[str, Dim]) -> Dim:
    if isinstance(atom, Symbol | Unknown) and atom.name in mapping:
        return mapping[atom.name]
    if isinstance(atom, Call):
        args = tuple(substitute(arg, mapping) for arg in atom.args)
        if args != atom.args:
            try:
                return SIMPLIFIERS[atom.op](*args)
            except ZeroDivisionError:
                # There is no such size: it stays unsaid, and has no value.
                atom = Call(atom.op, args, (None, None))
    return Expr((((atom,), 1),))


def _floor_div(a: int, b: int) -> int | None:
    return a // b if b else None


def _trunc_div(a: int, b: int) -> int | None:
    return None if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def _mod(a: int, b: int) -> int | None:
    return a % b if b else None


def _broadcast(*sizes: int) -> int | None:
    wide = {size for size in sizes if size != 1}
    if not wide:
        return 1
    return wide.pop() if len(wide) == 1 else None


def _index(at: int, size: int) -> int:
    return min(max(at + size if at < 0 else at, 0), size)


SIMPLIFIERS: dict[str, Callable[..., Dim]] = {}
"""How to build each opaque op from new arguments; filled by the module that defines the operations."""

OPAQUE_OPS: dict[str, Callable[..., int | None]] = {
    "mul": lambda a, b: a * b,
    "floordiv": _floor_div,
    "truncdiv": _trunc_div,
    "mod": _mod,
    "max": max,
    "min": min,
    "broadcast": _broadcast,
    "index": _index,
    "eq": lambda a, b: int(a == b),
    "less": lambda a, b: int(a < b),
    "where": lambda condition, a, b: a if condition else b,
    "abs": abs,
}
