"""The specialisations file: for which sizes a compiler is to build a model, as efficient-transformers writes it.

::

    {"specializations": [
        {"name": "Prefill", "symbols": {"batch_size": "1", "seq_len": "128", "ctx_len": "4096"}},
        {"name": "Decode", "symbols": {"batch_size": "1", "seq_len": "1", "ctx_len": "4096"}}]}

Symbols are those of the model's inputs, each with a number as text, in the order of the roles batch, tokens, past,
total, context, bound. What a user says is sizes by role (``batch``, ``seq``, ``past``, ``total``, ``ctx``, ``bound``) or
by symbol. ``bound`` is C, the slots that attention reads of a cache of a fixed size, where an input's length says it: all
of the context where it is not told. Alphabet: B batch, S query length, P past, T = P + S keys, N slots of a fixed-size cache.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from typing import TYPE_CHECKING

from graphsurgery.analysis.dim_equations import DimSolver, Equation
from graphsurgery.analysis.dims import Expr, evaluate, free_names, symbol
from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.contracts import read_context_bound
from graphsurgery.errors import UsageError
from graphsurgery.pass_base import unknown_name
from graphsurgery.patterns.roles import ROLES, find_size_roles

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import onnx_ir as ir

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes
    from graphsurgery.patterns.roles import SizeRole, SizeRoles

__all__ = ["Binding", "Specialization", "bind_specializations", "parse_specializations", "specializations_text"]

_ALIASES: Mapping[str, SizeRole] = {
    "batch": "batch",
    "seq": "seq",
    "past": "past",
    "total": "total",
    "ctx": "context",
    "context": "context",
}
_TEXT = re.compile(r"(?:(?P<name>[A-Za-z][\w-]*):)?(?P<sizes>.+)", re.DOTALL)
_SIZE = re.compile(r"\s*(?P<what>[^=,]*[^=,\s])\s*=\s*(?P<numbers>\d+(?:/\d+)*)\s*")
_BOUND = ("bound", "ccl")
"""What C is called, beside the name of its symbol."""


@dataclasses.dataclass(frozen=True)
class Specialization:
    """What a user says of one specialisation.

    Attributes:
        name: as the file calls it (``Prefill``).
        sizes: numbers by role or symbol, in the order in which they were given.
        said: the words, for messages.
    """

    name: str
    sizes: Mapping[str, int]
    said: str


@dataclasses.dataclass(frozen=True)
class Binding:
    """A number for each symbol of the model's inputs."""

    name: str
    symbols: Mapping[str, int]


def parse_specializations(texts: Iterable[str]) -> list[Specialization]:
    """Read ``NAME:ROLE=SIZE,...``; without a name it stands for a prefill and a decode, which has ``seq=1``.

    Several sizes, ``ROLE=SIZE/SIZE``, stand for as many specialisations.

    Raises:
        UsageError: a text is not of that form, a size is told twice, or two have one name and sizes.

    Example:
        >>> [(item.name, dict(item.sizes)) for item in parse_specializations(["seq=128,ctx=4096"])]
        [('Prefill', {'seq': 128, 'ctx': 4096}), ('Decode', {'seq': 1, 'ctx': 4096})]
    """
    found: list[Specialization] = []
    for text in texts:
        match = _TEXT.fullmatch(text)
        listed = _sizes(text, match["sizes"] if match else "")
        name = match["name"] if match else None
        if name is not None:
            found += [Specialization(name[0].upper() + name[1:], sizes, text) for sizes in listed]
        else:
            found += [Specialization("Prefill", sizes, text) for sizes in listed]
            once = {tuple({**sizes, "seq": 1}.items()): None for sizes in listed}
            found += [Specialization("Decode", dict(sizes), text) for sizes in once]
    for position, item in enumerate(found):
        if any(item.name == other.name and item.sizes == other.sizes for other in found[:position]):
            raise UsageError(
                f"--specialize {item.said!r}: {item.name} with these sizes is there already; leave it out."
            )
    return found


def _sizes(text: str, given: str) -> list[dict[str, int]]:
    sizes: dict[str, list[int]] = {}
    for part in given.split(","):
        match = _SIZE.fullmatch(part)
        if match is None:
            raise UsageError(
                f"--specialize {text!r} is not of the form NAME:ROLE=SIZE,...: e.g. prefill:seq=128,ctx=4096."
            )
        if match["what"] in sizes:
            raise UsageError(f"--specialize {text!r} gives {match['what']} twice; keep one.")
        sizes[match["what"]] = [int(number) for number in match["numbers"].split("/")]
    return [dict(zip(sizes, numbers, strict=True)) for numbers in itertools.product(*sizes.values())]


def bind_specializations(model: ir.Model, wanted: Sequence[Specialization]) -> list[Binding]:
    """Numbers for the symbols of ``model``, for each specialisation.

    A batch that is not told is 1, and a bound that is not told the whole context. Of a model whose caches grow, ``ctx`` is the whole length T: what is not told of P
    follows from it. A symbol that is told by its own name goes before its role.

    Raises:
        UsageError: a role or symbol is not there, sizes contradict each other, or a symbol is left without a number.
    """
    shapes = shapes_of(model)
    symbols = _symbols(model, shapes)
    if not symbols:
        raise UsageError("--specializations: no input of the result has a symbolic size; leave it out.")
    roles = find_size_roles(model, shapes)
    bounds = _bounds(model, shapes)
    return [_bind(item, roles, symbols, bounds) for item in wanted]


def _bounds(model: ir.Model, shapes: Shapes) -> frozenset[str]:
    """The symbols that are C: the length of an input that only tells its length."""
    recorded = read_context_bound(model)
    found: set[str] = set()
    for value in model.graph.inputs:
        shape = shapes.shape(value) or ()
        named = re.fullmatch(r"comp_ctx_len(gth)?s?|compute_context_len(gth)?s?", value.name or "") is not None
        if len(shape) == 1 and (named or (recorded is not None and value.name == recorded.input)):
            found |= free_names(shape[0])
    return frozenset(found)


def _symbols(model: ir.Model, shapes: Shapes) -> dict[str, str]:
    """Every symbol of the inputs, and where it stands first."""
    found: dict[str, str] = {}
    for value in model.graph.inputs:
        if value.is_initializer():
            continue
        for axis, size in enumerate(shapes.shape(value) or ()):
            for name in sorted(free_names(size)):
                found.setdefault(name, f"axis {axis} of input {value.name!r}")
    unnamed = next((place for name, place in found.items() if name.startswith("?")), None)
    if unnamed is not None:
        raise UsageError(
            f"--specializations: {unnamed} has no name that a number could be given to: name it at export."
        )
    return found


def _bind(
    item: Specialization, roles: SizeRoles, symbols: Mapping[str, str], bounds: frozenset[str] = frozenset()
) -> Binding:
    solver = DimSolver()
    told = {name: number for name, number in item.sizes.items() if name in symbols}
    by_role: dict[SizeRole, int] = {}
    for name, number in item.sizes.items():
        if name in symbols:
            continue
        if name in _BOUND and bounds:
            told |= dict.fromkeys(bounds, number)
            continue
        role = _ALIASES.get(name)
        if role is None:
            raise unknown_name(
                f"role or symbol in --specialize {item.said!r}",
                name,
                [*_ALIASES, *(_BOUND[:1] if bounds else ()), *symbols],
            )
        by_role[role] = number
    solver.add(Equation(symbol(name), number, f"{name}={number}") for name, number in told.items())
    _add_roles(solver, item, roles, by_role, told)
    _add_bounds(solver, item, roles, bounds)
    left = [name for name in symbols if name not in solver.numbers]
    if left:
        listed = ", ".join(f"{name} ({symbols[name]})" for name in left)
        add = roles.role_of(left[0]) or left[0]
        raise UsageError(f"--specialize {item.said!r} leaves {item.name} without a size for {listed}: add {add}=SIZE.")
    order = {name: number for number, name in enumerate(_by_role(roles))}
    ordered = sorted(symbols, key=lambda name: order.get(name, len(order)))
    return Binding(item.name, {name: solver.numbers[name] for name in ordered})


def _add_bounds(solver: DimSolver, item: Specialization, roles: SizeRoles, bounds: frozenset[str]) -> None:
    """A bound that is not told is the context; one that is told is no more than that."""
    known = (
        evaluate(size, solver.numbers) for size in roles.sizes("context") if free_names(size) <= set(solver.numbers)
    )
    sizes = [size for size in known if size is not None]
    context = max(sizes, default=None)
    for name in sorted(bounds) if context is not None else ():
        assert context is not None
        bound = solver.numbers.get(name)
        if bound is None:
            solver.add([Equation(symbol(name), context, f"context={context}")])
        elif not 1 <= bound <= context:
            text = f"its bound of {bound} is not between 1 and its context of {context}"
            raise UsageError(f"--specialize {item.said!r}: {item.name} cannot be: {text}.")


def _by_role(roles: SizeRoles) -> list[str]:
    """Symbols that are a role by themselves, in the order of roles."""
    sizes = (size for role in ROLES for size in roles.sizes(role))
    return list(dict.fromkeys(name for size in sizes if _is_symbol(size) for name in free_names(size)))


def _is_symbol(size: Dim) -> bool:
    return isinstance(size, Expr) and size.atom is not None


def _add_roles(
    solver: DimSolver, item: Specialization, roles: SizeRoles, given: Mapping[SizeRole, int], told: Mapping[str, int]
) -> None:
    """Say what the roles say; sizes that were told by their own name are passed over."""
    known = {role for role in ROLES if roles.of(role)}
    numbers = dict(given)
    if "context" in numbers and ("past" in known or "context" not in known):
        # Of caches that grow the context is all keys: those before this call, and its own.
        numbers.setdefault("total", numbers["context"])
    if "total" in numbers and "seq" in numbers and "past" in known:
        past = numbers["total"] - numbers["seq"]
        if past < 0:
            text = f"its context of {numbers['total']} is shorter than its {numbers['seq']} tokens"
            raise UsageError(f"--specialize {item.said!r}: {item.name} cannot be: {text}.")
        numbers.setdefault("past", past)
    if "past" in numbers and "seq" in numbers:
        numbers.setdefault("total", numbers["past"] + numbers["seq"])
    if "batch" in known:
        numbers.setdefault("batch", 1)
    for role in given:
        if role not in known and not (role in ("total", "context") and "past" in known):
            has = ", ".join(f"{name} ({', '.join(sizes)})" for name, sizes in roles.named().items()) or "none"
            raise UsageError(f"--specialize {item.said!r}: no size of the inputs is the {role}; its roles are {has}.")
    for role, number in numbers.items():
        for axis in {axis.size: axis for axis in reversed(roles.of(role))}.values():
            if not (_is_symbol(axis.size) and free_names(axis.size) <= set(told)):
                place = f"axis {axis.axis} of input {axis.input.name!r}"
                solver.add([Equation(axis.size, number, f"{role}={number}", place)])


def specializations_text(bindings: Sequence[Binding]) -> str:
    """The file as JSON text."""
    data = [
        {"name": item.name, "symbols": {name: str(number) for name, number in item.symbols.items()}}
        for item in bindings
    ]
    return json.dumps({"specializations": data}, indent=4) + "\n"
