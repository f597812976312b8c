"""What weights hold in regions: drawn once for each source, and put through the expressions of both sides.

Of weights in data files nothing is read unless it is asked for: they are random, scaled so that what is computed from
them neither vanishes nor explodes. Weights inside the .onnx are what they are, but for their scale where products read
them: errors in what comes out must not drown in the tolerance, which is relative to 1 at least.
"""

from __future__ import annotations

import math
import os
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphsurgery.equivalence.regions.numbering import weight_record
from graphsurgery.errors import CannotCheckError
from graphsurgery.weights import SourceName, Stack, View, evaluate, parse_record, sources_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from graphsurgery.equivalence.feeds import Array
    from graphsurgery.equivalence.regions.numbering import Matching
    from graphsurgery.equivalence.regions.sides import Side
    from graphsurgery.weights import Part

__all__ = ["Sources", "misplaced", "miswritten"]

_ROUTES = frozenset({"Transpose", "Identity", "Cast", "DequantizeLinear", "Split", "Slice", "Gather", "Squeeze"})
_PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul", "Einsum", "Conv"})
_SMALL = 64
"""Tensors of no more elements are constants and not weights."""


class Sources:
    """Arrays of weights.

    Args:
        reference: the model as exported.
        rewritten: the other.
        seed: what is drawn from.
        real: read the data files in place of drawing.
    """

    def __init__(self, reference: Side, rewritten: Side, seed: int, *, real: bool) -> None:
        self._reference, self._rewritten = reference, rewritten
        self._seed, self._real = seed, real
        self._kept: dict[str, Array] = {}
        self._twins: dict[ir.Value, ir.Value] = {}
        self._rescaled = False

    def take(self, matching: Matching, weights: Iterable[ir.Value]) -> None:
        """Make ready for a region.

        Args:
            matching: which weights of both models hold the same.
            weights: those that the rewritten piece reads.
        """
        self.forget()
        stored = self._reference.model.graph.initializers
        self._twins = {}
        known = True
        for value in weights:
            tensor = value.const_value
            assert tensor is not None
            twin = matching.values.get(matching.rewritten.get(value, -1))
            if twin is not None and stored.get(twin.name or "") is twin:
                self._twins[value] = twin
            elif weight_record(tensor) is None and tensor.size > _SMALL and tensor.dtype.is_floating_point():
                # It was computed from others: they must be what they were then.
                known = False
        self._rescaled = known and not self._real

    def forget(self) -> None:
        """Let go of all arrays."""
        self._kept.clear()

    def array(self, value: ir.Value, *, reference: bool) -> Array:
        """What the initializer ``value`` of one of the models holds.

        Raises:
            CannotCheckError: that cannot be known: it is in a data file, and what it was made of is not recorded.
        """
        tensor = value.const_value
        assert tensor is not None
        record = weight_record(tensor)
        if record is not None:
            expression = parse_record(record)
            return evaluate(expression, {source: self._source(source) for source in sources_of(expression)})
        if not reference and value in self._twins:
            return self.array(self._twins[value], reference=True)
        if not isinstance(tensor, ir.ExternalTensor) and not reference:
            return _contents(tensor)
        if reference or (value.name or "") in self._reference.model.graph.initializers:
            shape = tuple(int(size) for size in tensor.shape.numpy())
            return self._source(SourceName(value.name or "", shape, tensor.dtype))
        if self._real and isinstance(tensor, ir.ExternalTensor) and os.path.isfile(tensor.path):
            return _contents(tensor)
        raise CannotCheckError(
            f"what weight {value.name!r} holds is not known: it has no namesake in {self._reference.path}, and "
            "its metadata does not say what it was made of"
        )

    def nbytes(self, values: Iterable[tuple[ir.Value, bool]]) -> int:
        """Bytes that the arrays of ``values`` (and whether each is the reference's) take, sources once."""
        found: dict[Any, int] = {}
        for value, _ in values:
            tensor = value.const_value
            assert tensor is not None
            record = weight_record(tensor)
            if record is None:
                found[value.name] = max(tensor.nbytes, found.get(value.name, 0))
                continue
            expression = parse_record(record)
            if not isinstance(expression, View):
                found[record] = tensor.nbytes
            for source in sources_of(expression):
                assert isinstance(source, SourceName)
                found[source.name] = math.ceil(math.prod(source.shape) * source.dtype.bitwidth / 8)
        return sum(found.values())

    def _source(self, source: ir.Value | SourceName) -> Array:
        assert isinstance(source, SourceName)
        found = self._kept.get(source.name)
        if found is None:
            found = self._kept[source.name] = self._made(source)
        if found.shape != source.shape:
            raise CannotCheckError(
                f"weight {source.name!r} has shape {list(found.shape)}, and what is made of it says {list(source.shape)}"
            )
        return found

    def _made(self, source: SourceName) -> Array:
        value = self._reference.model.graph.initializers.get(source.name)
        if value is not None and value.const_value is not None:
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor):
                return self._rescale(_contents(tensor), value) if self._rescaled else _contents(tensor)
            if self._real:
                return _real(tensor)
        return self._drawn(source, value)

    @staticmethod
    def _rescale(array: Array, value: ir.Value) -> Array:
        """What a product reads, as large as it would be drawn."""
        if array.size <= _SMALL or array.dtype.kind not in "fV" or not _feeds_product(value):
            return array
        wide = array.astype(np.float32)
        spread = float(wide.std())
        if not np.isfinite(spread) or spread == 0.0:
            return array
        scaled: Array = (wide * np.float32(_scale(array.shape, value) / spread)).astype(array.dtype)
        return scaled

    def _drawn(self, source: SourceName, value: ir.Value | None) -> Array:
        generator = np.random.default_rng([self._seed, zlib.crc32(source.name.encode())])
        dtype = source.dtype.numpy()
        shape = source.shape
        if source.dtype == ir.DataType.BOOL:
            return generator.integers(0, 2, shape).astype(dtype)
        if source.dtype.is_integer():
            bits = source.dtype.bitwidth
            low = 0 if not source.dtype.is_signed() else -(2 ** (min(bits, 32) - 1))
            high = 2 ** min(bits, 31) if not source.dtype.is_signed() else 2 ** (min(bits, 32) - 1)
            return generator.integers(low, high, shape).astype(dtype)
        drawn = generator.standard_normal(shape, dtype=np.float32)
        drawn *= np.float32(_scale(shape, value))
        return drawn.astype(dtype, copy=False)


def _scale(shape: tuple[int, ...], value: ir.Value | None) -> float:
    """1/sqrt(fan-in): of the axis that products sum over, found at what reads the weight."""
    if len(shape) < 2:
        return 1.0
    axis = -2
    turned = False
    while value is not None:
        uses = list(value.uses())
        if not uses:
            break
        node, slot = uses[0].node, uses[0].idx
        if node.op_type == "Gather" and slot == 0 and len(shape) == 2 and value.is_initializer():
            # A table of embeddings.
            return 1.0
        if node.op_type == "Transpose":
            turned = not turned
        if node.op_type == "Gemm":
            transposed = node.attributes.get("transB")
            turned ^= bool(transposed is not None and transposed.as_int())
        if node.op_type not in _ROUTES:
            break
        value = node.outputs[0]
    if turned:
        axis = -1
    return 1.0 / math.sqrt(max(1, shape[axis]))


def _feeds_product(value: ir.Value) -> bool:
    """Whether a weight goes into a product: not a table, a mask or an element-wise factor."""
    pending, seen = [value], {value}
    while pending:
        for use in pending.pop().uses():
            node = use.node
            if node.op_type in _PRODUCTS:
                return True
            output = node.outputs[0]
            if node.op_type in _ROUTES and use.idx == 0 and output not in seen:
                seen.add(output)
                pending += node.outputs
    return False


def _contents(tensor: ir.TensorProtocol) -> Array:
    array: Array = np.asarray(tensor.numpy())
    return array


def _real(tensor: ir.ExternalTensor) -> Array:
    try:
        return _contents(tensor)
    except (OSError, ValueError) as error:
        raise CannotCheckError(f"the data of weight {tensor.name!r} cannot be read: {error}") from error


# ---- where views lie -----------------------------------------------------------------------------------------------


def misplaced(reference: Side, rewritten: Side) -> list[str]:
    """One sentence for each weight whose place in a data file is not that of what it stands for.

    A view must lie as far behind its source as its first element does. Where the source has a place in the same file,
    that is looked at; where the data went elsewhere, views of one source that touch must touch there too.
    """
    found: list[str] = []
    elsewhere: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
    ends: dict[str, int] = {}
    stored = reference.model.graph.initializers
    for value in rewritten.model.graph.initializers.values():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        record = weight_record(tensor)
        placed = _placed(parse_record(record)) if record is not None else (value.name or "", 0, True)
        if placed is None:
            continue
        name, distance, alone = placed
        base = (tensor.offset or 0) - distance
        source = stored.get(name)
        before = source.const_value if source is not None else None
        if isinstance(before, ir.ExternalTensor) and _same_file(before, tensor):
            if (before.offset or 0) != base:
                found.append(
                    f"weight {value.name!r} begins at byte {tensor.offset or 0} of {os.fspath(tensor.location)}, and its "
                    f"elements at byte {(before.offset or 0) + distance}"
                )
            continue
        if alone:
            views = elsewhere.setdefault((os.fspath(tensor.location), name), [])
            views.append((distance, tensor.offset or 0, value.name or ""))
            ends[value.name or ""] = distance + tensor.nbytes
    for (location, name), views in elsewhere.items():
        found += _torn(location, name, sorted(views), ends)
    return found


def _torn(location: str, name: str, views: list[tuple[int, int, str]], ends: Mapping[str, int]) -> Iterator[str]:
    """Views of one source, from first to last, that touch there and lie apart in the file."""
    end, base, before = -1, 0, ""
    for distance, offset, view in views:
        if distance > end:
            # What nobody reads in between need not be in the file.
            base = offset - distance
        elif offset - distance != base:
            yield (
                f"weights {before!r} and {view!r} are made of {name!r} and lie {offset - distance - base} bytes too far apart "
                f"in {location}"
            )
        end, before = max(end, ends[view]), view


def _same_file(one: ir.ExternalTensor, other: ir.ExternalTensor) -> bool:
    return os.path.realpath(one.path) == os.path.realpath(other.path)


def _placed(part: Part) -> tuple[str, int, bool] | None:
    """The source that ``part`` begins in, how many bytes behind its begin, and whether it is a view of that alone."""
    if isinstance(part, Stack):
        # By reference where its parts are neighbours: it begins where the first does.
        first = _placed(part.parts[0]) if part.parts else None
        return None if first is None else (*first[:2], False)
    if isinstance(part, SourceName):
        return part.name, 0, True
    if isinstance(part, View) and isinstance(part.source, SourceName):
        return part.source.name, part.start * part.source.dtype.bitwidth // 8, True
    return None


# ---- what new weights hold -----------------------------------------------------------------------------------------


def miswritten(reference: Side, rewritten: Side, *, real: bool) -> list[str]:
    """One sentence for each new weight whose bytes are not what its expression gives.

    Looked at where the sources are inside the reference, so that their bytes are at hand; and everywhere if ``real``.
    """
    stored = reference.model.graph.initializers
    found = []
    for value in rewritten.model.graph.initializers.values():
        tensor, twin = value.const_value, stored.get(value.name or "")
        assert tensor is not None
        record = weight_record(tensor)
        if record is None:
            before = twin.const_value if twin is not None else None
            moved = before is not None and not isinstance(before, ir.ExternalTensor)
            if not (moved and isinstance(tensor, ir.ExternalTensor)):
                continue
        expression: Part = parse_record(record) if record is not None else _named(value.name or "", tensor)
        arrays = _at_hand(expression, stored, real=real)
        if arrays is None or (isinstance(tensor, ir.ExternalTensor) and not os.path.isfile(tensor.path)):
            continue
        expected = evaluate(expression, arrays)
        if not np.array_equal(_bits(_contents(tensor)), _bits(expected)):
            found.append(f"weight {value.name!r} does not hold what it is to be made of")
    return found


def _named(name: str, tensor: ir.TensorProtocol) -> SourceName:
    return SourceName(name, tuple(int(size) for size in tensor.shape.numpy()), tensor.dtype)


def _at_hand(
    expression: Part, stored: Mapping[str, ir.Value], *, real: bool
) -> dict[ir.Value | SourceName, Array] | None:
    arrays: dict[ir.Value | SourceName, Array] = {}
    for source in sources_of(expression):
        value = stored.get(source.name or "")
        tensor = value.const_value if value is not None else None
        if tensor is None or (isinstance(tensor, ir.ExternalTensor) and not (real and os.path.isfile(tensor.path))):
            return None
        arrays[source] = _contents(tensor)
    return arrays


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
