"""What the masks of a graph leave at a sample length, computed by the graph's own nodes.

Nothing is assumed of a mask: what makes it is cut out of the graph and run on a prompt without padding (or on the sizes
that the file fixes). A mask that cannot be computed so, such as one that the caller feeds, is told with the reason.

Alphabet: B batch, S query length, P past, T = P + S keys.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from graphsurgery.analysis.dims import Expr, evaluate, free_names
from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.analysis.slices import runs_along
from graphsurgery.equivalence.feeds import Sizes, draw_at
from graphsurgery.equivalence.roles import FLOATS, Role
from graphsurgery.equivalence.signature import read_signature
from graphsurgery.patterns.attention.finding import find_attentions
from graphsurgery.patterns.attention.masks import LOW, Mask, find_mask
from graphsurgery.patterns.attention.sites import AttentionSite, FusedAttention
from graphsurgery.patterns.interface import FLOATS as _ACTIVATIONS
from graphsurgery.patterns.matcher import index_of
from graphsurgery.patterns.roles import find_size_roles
from graphsurgery.picture.mask_cone import MaskCone, UnclearMaskError
from graphsurgery.picture.parts import MaskPicture, MaskSample

if TYPE_CHECKING:
    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes
    from graphsurgery.equivalence.drawing import Draw
    from graphsurgery.equivalence.roles import Signature
    from graphsurgery.patterns.site import Site

__all__ = ["CELLS", "LENGTHS", "mask_pictures"]

LENGTHS = (1024, 4096)
"""S of a sample; the second where a sliding mask leaves all of the first."""

CELLS = 32
"""Cells in a row of the picture, at most."""

# Inputs whose values a mask may depend on, and which can be made without knowing what is fed.
_MADE = frozenset(
    {
        *(Role.TOKENS, Role.MASK, Role.POSITIONS, Role.PAST_LENGTH, Role.TOTAL_LENGTH, Role.LAST_KEY, Role.BRANCH),
        *(Role.WINDOW, Role.BOUND, Role.MARKED),
    }
)


def mask_pictures(model: ir.Model) -> tuple[MaskPicture, ...]:
    """What the mask of each attention leaves; attentions that read the same mask are one entry. Reads no data files."""
    shapes = shapes_of(model)
    groups: dict[tuple[ir.Value | None, bool, Dim | None, str], list[Site]] = {}
    for site in find_attentions(model, shapes, index_of(model)):
        mask = _mask_of(site, shapes)
        if isinstance(mask, Mask):
            queries = site.length if isinstance(site, AttentionSite) else None
            groups.setdefault((mask.value, mask.boolean and not mask.attended, queries, ""), []).append(site)
        else:
            groups.setdefault((None, False, None, mask), []).append(site)
    sampler = _Sampler(model, shapes)
    return tuple(_picture(sampler, *key, sites) for key, sites in groups.items())


def _mask_of(site: Site, shapes: Shapes) -> Mask | str:
    if isinstance(site, FusedAttention):
        given = site.node.inputs[3] if site.node.op_type == "Attention" and len(site.node.inputs) > 3 else None
        causal = site.node.attributes.get("is_causal")
        if site.node.domain or given is None or (causal is not None and causal.as_int()):
            return f"the operator {site.operator} masks within itself"
        return Mask((given,), boolean=shapes.dtype(given) == ir.DataType.BOOL)
    if not isinstance(site, AttentionSite):
        return str(getattr(site, "reason", "it cannot be read"))
    if site.body.function is not None:
        return f"it is {site.body.where}"
    wide = [
        item
        for item in site.chain_operands()
        if (size := shapes.dim(item, -1)) is not None and runs_along(size, site.total)
    ]
    found = find_mask(site, wide)
    if isinstance(found, Mask) and len(found.values) > 1:
        return f"several operands mask ({', '.join(repr(value.name) for value in found.values)})"
    return found


def _picture(
    sampler: _Sampler, value: ir.Value | None, inverted: bool, queries: Dim | None, reason: str, sites: list[Site]
) -> MaskPicture:
    kinds = tuple(dict.fromkeys(kind for site in sites for kind in site.kinds))
    sample = None
    if value is not None:
        try:
            sample = sampler.sample(value, queries, inverted=inverted, sliding="sliding" in kinds)
        except UnclearMaskError as error:
            reason = str(error)
    layers = tuple(dict.fromkeys(site.layer for site in sites if site.layer is not None))
    name = None if value is None else value.name
    return MaskPicture(name, tuple(site.id for site in sites), layers, kinds, sample, reason)


class _Sampler:
    """Computes masks of one model."""

    def __init__(self, model: ir.Model, shapes: Shapes) -> None:
        self._model = model
        self._shapes = shapes
        self._signature = _signature(model, shapes)

    def sample(self, value: ir.Value, queries: Dim | None, *, inverted: bool, sliding: bool) -> MaskSample:
        for number, length in enumerate(LENGTHS):
            draw = draw_at(self._signature, Sizes(1, length, 0))
            if draw is None:
                raise UnclearMaskError("the inputs take no prompt of a sample length")
            sizes = draw.sizes
            found, fed = self._compute(value, draw)
            if 0 < found.shape[-1] < sizes.length:
                # A cache of a fixed size that holds no more.
                draw = draw_at(self._signature, Sizes(1, found.shape[-1], 0)) or draw
                sizes = draw.sizes
                found, fed = self._compute(value, draw)
            rows = None if queries is None else evaluate(queries, self._sizes(draw))
            live = _live(found, rows or sizes.length, inverted=inverted)
            everything = int(np.tril(np.ones(live.shape, dtype=np.bool_), live.shape[1] - live.shape[0]).sum())
            more = number + 1 < len(LENGTHS) and sizes.length == length
            if not (sliding and more and int(live.sum()) >= everything):
                break
        return _cells(live, sizes, fed)

    def _compute(self, value: ir.Value, draw: Draw) -> tuple[np.ndarray[Any, Any], tuple[str, ...]]:
        specs = {spec.name: spec for spec in self._signature.inputs}
        cone = MaskCone(self._model, value, self._shapes, self._sizes(draw))
        arrays = {}
        for name in cone.inputs:
            spec = specs.get(name)
            if spec is None or spec.role is Role.MASK_ND:
                raise UnclearMaskError(f"the caller feeds it as input {name!r}")
            array = draw.array(spec)
            if spec.role not in _MADE:
                if spec.elem_type in FLOATS or array.shape[-1:] != (draw.sizes.length,):
                    raise UnclearMaskError(f"it depends on what is fed as {name!r}")
                # Marks of images or segments: the sample is a prompt of text alone.
                array = np.zeros_like(array)
            arrays[name] = array if spec.role is not Role.MARKED else np.zeros_like(array)
        found = _run(cone.model_proto(), arrays)
        if not found.ndim or not found.size:
            raise UnclearMaskError(f"{value.name!r} has no columns")
        return found, cone.inputs

    def _sizes(self, draw: Draw) -> dict[str, int]:
        """Numbers for the named sizes of the inputs, where a feed has them."""
        numbers = draw.sizes.letters()
        found = {name: numbers[letter] for name, letter in self._signature.letters.items() if letter in numbers}
        specs = {spec.name: spec for spec in self._signature.inputs}
        for value in self._model.graph.inputs:
            spec = specs.get(value.name or "")
            dims = self._shapes.shape(value)
            if spec is None or dims is None:
                continue
            for dim, size in zip(dims, draw.shape(spec), strict=False):
                if isinstance(dim, Expr) and dim.atom is not None:
                    for name in free_names(dim):
                        found.setdefault(name, size)
        return found


_LETTERS: dict[str, str] = {"batch": "B", "seq": "S", "past": "P", "total": "T", "context": "N"}


def _signature(model: ir.Model, shapes: Shapes) -> Signature:
    """What the inputs stand for: by their names and sizes, and by the roles of sizes that the recognisers find."""
    # Without its nodes: they may be many, and the recognisers have looked at them.
    hollow = onnx.ModelProto(ir_version=model.ir_version)
    hollow.graph.input.extend(ir.serde.serialize_value(v) for v in model.graph.inputs if not v.is_initializer())
    hollow.graph.output.extend(ir.serde.serialize_value(value) for value in model.graph.outputs)
    signature = read_signature(hollow)
    letters, fixed, caches = dict(signature.letters), dict(signature.fixed), dict[str, Role]()
    for axis in find_size_roles(model, shapes).axes:
        letter = _LETTERS[axis.role]
        if isinstance(axis.size, int):
            fixed.setdefault(letter, axis.size)
        elif axis.size.atom is not None:
            letters.update(dict.fromkeys(free_names(axis.size), letter))
        if letter in "PN" and axis.input.dtype in _ACTIVATIONS:
            caches[axis.input.name or ""] = Role.CACHE if letter == "P" else Role.SLOTS
    inputs = tuple(
        dataclasses.replace(spec, role=caches.get(spec.name, spec.role)) if spec.role is Role.UNKNOWN else spec
        for spec in signature.inputs
    )
    return dataclasses.replace(signature, inputs=inputs, letters=letters, fixed=fixed)


def _run(proto: onnx.ModelProto, arrays: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    from onnx.reference import ReferenceEvaluator

    from graphsurgery.picture.gathering import FAST_OPERATORS

    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            (found,) = ReferenceEvaluator(proto, new_ops=list(FAST_OPERATORS)).run(None, arrays)
    except Exception as error:
        # An operator that the evaluator lacks, sizes that do not go together: whatever it is, there is no picture.
        text = " ".join(str(error).split())
        raise UnclearMaskError(f"it cannot be computed ({text[:120] or type(error).__name__})") from error
    return np.asarray(found)


def _live(mask: np.ndarray[Any, Any], length: int, *, inverted: bool) -> np.ndarray[Any, Any]:
    """Which pairs a mask leaves in any batch row and head, bool ``[S, T]``."""
    if mask.dtype == np.bool_:
        attended = mask != inverted
        # A row without an attended key keeps its meaning only with all of them.
        attended = attended | ~attended.any(axis=-1, keepdims=True)
    else:
        numbers = mask.astype(np.float32)
        with np.errstate(all="ignore"):
            attended = ~(numbers < numbers.max(axis=-1, keepdims=True) + LOW)
    rows = attended.reshape(-1, *attended.shape[-2:]).any(axis=0) if attended.ndim > 1 else attended[None]
    if rows.shape[0] not in (1, length):
        raise UnclearMaskError(f"it has {rows.shape[0]} rows where there are {length} queries")
    return np.broadcast_to(rows, (length, rows.shape[1]))


def _cells(live: np.ndarray[Any, Any], sizes: Sizes, fed: tuple[str, ...]) -> MaskSample:
    length, total = live.shape
    row_step, column_step = -(-length // CELLS), -(-total // CELLS)
    cells, needed = [], []
    for top in range(0, length, row_step):
        band = live[top : top + row_step]
        columns = [band[:, left : left + column_step] for left in range(0, total, column_step)]
        cells.append(tuple(round(float(part.mean()), 4) for part in columns))
        used = np.flatnonzero(band.any(axis=0))
        needed.append((int(used[0]), int(used[-1]) + 1) if used.size else (0, 0))
    return MaskSample(
        length, sizes.past, total, row_step, column_step, tuple(cells), tuple(needed), int(live.sum()), live.size, fed
    )
