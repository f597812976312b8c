"""What polynomials over sizes allow to prove: bounds, and division without remainder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.analysis._expr import Dim, Expr, normal

if TYPE_CHECKING:
    from graphsurgery.analysis._expr import Bound, Monomial


def bounds(dim: Dim) -> Bound:
    """Provable (lower, upper) bounds of ``dim``; None where nothing is known."""
    if isinstance(dim, int):
        return dim, dim
    low: int | None = 0
    high: int | None = 0
    for monomial, coefficient in dim.terms:
        term_low, term_high = _monomial_bounds(monomial)
        if coefficient < 0:
            term_low, term_high = term_high, term_low
        low = None if low is None or term_low is None else low + coefficient * term_low
        high = None if high is None or term_high is None else high + coefficient * term_high
    return low, high


def _monomial_bounds(monomial: Monomial) -> Bound:
    if len(monomial) == 1:
        return monomial[0].low, monomial[0].high
    low, high = 1, 1
    open_above = False
    for atom in monomial:
        if atom.low is None or atom.low < 0:
            return None, None
        low *= atom.low
        open_above = open_above or atom.high is None
        high *= atom.high or 0
    return low, None if open_above else high


def exact_div(dividend: Dim, divisor: Dim) -> Dim | None:
    """The polynomial q with ``q * divisor == dividend``, or None where there is none.

    Whoever divides by a size has ruled out that it is 0: then the result is the quotient.
    """
    if isinstance(divisor, int):
        if divisor == 0:
            return None
        if isinstance(dividend, int):
            return dividend // divisor if dividend % divisor == 0 else None
        if any(coefficient % divisor for _, coefficient in dividend.terms):
            return None
        return Expr(tuple((monomial, coefficient // divisor) for monomial, coefficient in dividend.terms))
    quotient: Dim = 0
    rest: Dim = dividend
    lead, lead_coefficient = divisor.terms[0]
    # Each step removes the leading term of what is left, so the number of steps is bounded by the terms there can be.
    for _ in range(64):
        if isinstance(rest, int):
            return quotient if rest == 0 else None
        monomial, coefficient = rest.terms[0]
        factor = _remove_factors(monomial, lead)
        if factor is None or coefficient % lead_coefficient:
            return None
        step = normal({factor: coefficient // lead_coefficient})
        quotient = quotient + step
        rest = rest - step * divisor
    return None


def _remove_factors(monomial: Monomial, factors: Monomial) -> Monomial | None:
    left = list(monomial)
    for atom in factors:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)
