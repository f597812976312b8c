"""One region: both pieces run on the same data, and what they give is compared."""

from __future__ import annotations

import dataclasses
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphsurgery.equivalence.comparing import Comparison, compare, tolerance
from graphsurgery.equivalence.drawing import Draw
from graphsurgery.equivalence.pairing import apply_contracts
from graphsurgery.equivalence.regions.region_report import RegionReport
from graphsurgery.equivalence.regions.sides import CALLED_KEY, reads
from graphsurgery.equivalence.regions.standalone import standalone, widened
from graphsurgery.equivalence.running import RunError, Session
from graphsurgery.errors import CannotCheckError
from graphsurgery.pipeline import provenance
from graphsurgery.rewrite import PASS_KEY, SITE_KEY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from graphsurgery.equivalence.feeds import Array, Feed
    from graphsurgery.equivalence.regions.cutting import Piece, Region
    from graphsurgery.equivalence.regions.numbering import Matching
    from graphsurgery.equivalence.regions.sides import Side
    from graphsurgery.equivalence.regions.sources import Sources
    from graphsurgery.equivalence.roles import Signature
    from graphsurgery.equivalence.running import Settings

__all__ = ["Checker", "Found", "fed_shapes"]


@dataclasses.dataclass(frozen=True)
class Found:
    """What came of one region.

    Attributes:
        report: for the user.
        other_shape: the two values have different shapes, so that they are no counterparts.
        vacuous: the value held nothing that could differ: zeros only, or no number at all.
    """

    report: RegionReport
    other_shape: bool = False
    vacuous: bool = False


def fed_shapes(feed: Feed, signature: Signature) -> dict[str, tuple[int, ...]]:
    """Shape of each input in a feed; drawn arrays are not made for it."""
    if isinstance(feed.build, Draw):
        return {spec.name: feed.build.shape(spec) for spec in signature.inputs}
    return {name: array.shape for name, array in feed.build().items()}


class Checker:
    """Runs regions.

    Args:
        signature: what graph inputs are fed.
        feeds: sizes and arrays.
        sources: what weights hold.
        settings: how sessions are opened.
        seed: what is drawn from.
        budget: bytes of memory that may be used.
    """

    def __init__(
        self,
        signature: Signature,
        feeds: Sequence[Feed],
        sources: Sources,
        settings: Settings,
        seed: int,
        budget: int,
    ) -> None:
        self._signature, self._feeds, self._sources = signature, feeds, sources
        self._settings, self._seed, self._budget = settings, seed, budget

    def check(self, region: Region, matching: Matching, alike: Sequence[Region]) -> Found:
        """Run ``region``, which stands for the regions ``alike``."""
        report = _blank(region, alike)
        try:
            with tempfile.TemporaryDirectory(prefix="graphsurgery-region-") as folder:
                return self._run(region, matching, report, Path(folder))
        except CannotCheckError as error:
            return Found(dataclasses.replace(report, status="unchecked", problem=str(error).rstrip(".")))
        finally:
            self._sources.forget()

    def _run(self, region: Region, matching: Matching, report: RegionReport, folder: Path) -> Found:
        pieces = (region.reference, region.rewritten)
        self._fits(pieces)
        self._sources.take(matching, region.rewritten.weights)
        numbers = list(range(len(self._feeds)))
        fed = {number: self._arrays(number, pieces, matching) for number in numbers}
        results: list[dict[int, Any]] = []
        failures: list[dict[int, str]] = []
        for place, piece in enumerate(pieces):
            outputs, failed = self._results(piece, fed, numbers, reference=place == 0, folder=folder)
            results.append(outputs)
            failures.append(failed)
            numbers = [number for number in numbers if number in outputs]
            if not numbers and place == 0:
                raise CannotCheckError(f"the reference runs on no feed: {next(iter(failed.values()))}")
        worst: Comparison | None = None
        feed = ""
        vacuous = True
        for number in sorted(results[0]):
            expected = results[0][number]
            if number in failures[1]:
                problem = f"cannot run: {failures[1][number]}"
                found = Comparison(np.inf, 0.0, str(getattr(expected, "dtype", "")), None, problem)
            else:
                found = self._compared(region, expected, results[1][number], number)
            vacuous &= _says_nothing(expected)
            if worst is None or _rank(found) > _rank(worst):
                worst, feed = found, self._feeds[number].name
        assert worst is not None
        wrong = worst.problem is not None
        other_shape = wrong and not region.obligation.contracts and "has shape" in (worst.problem or "")
        done = dataclasses.replace(
            report,
            status="different" if wrong else "equal",
            feeds=len(results[0]),
            error=worst.error,
            tolerance=worst.tolerance,
            dtype=worst.dtype,
            feed=feed,
            index=worst.index,
            problem=worst.problem,
        )
        return Found(done, other_shape, vacuous)

    def _fits(self, pieces: tuple[Piece, Piece]) -> None:
        weights = [(value, place == 0) for place, piece in enumerate(pieces) for value in piece.weights]
        need = 3 * self._sources.nbytes(weights)
        if need > self._budget:
            raise CannotCheckError(
                f"its weights need about {need / 1e9:.1f} GB of memory and {self._budget / 1e9:.1f} GB may be used"
            )

    def _results(
        self, piece: Piece, fed: dict[int, dict[str, Array]], numbers: list[int], *, reference: bool, folder: Path
    ) -> tuple[dict[int, Any], dict[int, str]]:
        outputs: dict[int, Any] = {}
        failed: dict[int, str] = {}

        def array(value: ir.Value) -> Array:
            return self._sources.array(value, reference=reference)

        made = standalone(piece, array, twin=True, folder=folder)
        prefix = "a:" if reference else "b:"
        with Session(made.model, self._settings) as session:
            for number in numbers:
                arrays = {name: fed[number][prefix + name] for name in made.names}
                try:
                    got = session.run({**arrays, **made.weights})[made.result]
                    outputs[number] = np.asarray(got) if isinstance(got, np.generic) else got
                except RunError as error:
                    failed[number] = str(error)
        return outputs, failed

    def _arrays(self, number: int, pieces: tuple[Piece, Piece], matching: Matching) -> dict[str, Array]:
        """What both pieces are fed, by ``a:`` or ``b:`` and the name of the value there."""
        feed = self._feeds[number]
        wanted = {side.inputs[value.name or ""] for side, value in _inputs(pieces)}
        if isinstance(feed.build, Draw):
            given = {spec.name: feed.build.array(spec) for spec in self._signature.inputs if spec.name in wanted}
        else:
            given = feed.build()
        found: dict[str, Array] = {}
        cuts: dict[int, Array] = {}
        for prefix, piece in zip(("a:", "b:"), pieces, strict=True):
            for value in piece.inputs:
                found[f"{prefix}{value.name}"] = widened(given[piece.side.inputs[value.name or ""]])
            for value, name in piece.cuts:
                if name not in cuts:
                    cuts[name] = self._drawn(matching.values[name], pieces[0].side, number)
                found[f"{prefix}{value.name}"] = cuts[name]
            for value in piece.shaped:
                sizes = piece.side.sizes(value)
                assert sizes is not None
                kind = piece.side.dtype(value) or ir.DataType.FLOAT
                found[f"{prefix}{value.name}"] = widened(np.zeros(sizes[number], kind.numpy()))
        return found

    def _drawn(self, value: ir.Value, side: Side, number: int) -> Array:
        sizes = side.sizes(value)
        assert sizes is not None
        shape = sizes[number]
        generator = np.random.default_rng([self._seed, number, zlib.crc32((value.name or "").encode())])
        dtype = side.dtype(value) or ir.DataType.FLOAT
        node = value.producer()
        if not side.is_float(value) and node is not None:
            return _chosen(node, side, number, shape, generator).astype(dtype.numpy())
        return widened(generator.standard_normal(shape, dtype=np.float32).astype(dtype.numpy()))

    def _compared(self, region: Region, expected: Any, got: Any, number: int) -> Comparison:
        contracts = region.obligation.contracts
        if contracts:
            try:
                expected = apply_contracts(contracts, expected, self._feeds[number].build())
            except (ValueError, IndexError) as error:
                return Comparison(np.inf, 0.0, str(expected.dtype), None, f"breaks its contract: {error}")
        limit = 0.0
        if isinstance(expected, np.ndarray):
            limit = tolerance(expected.dtype, half=self._signature.half, optimized=False)
        elif isinstance(expected, list) and expected and isinstance(expected[0], np.ndarray):
            limit = tolerance(expected[0].dtype, half=self._signature.half, optimized=False)
        return compare(expected, got, limit)


def _inputs(pieces: tuple[Piece, Piece]) -> Iterable[tuple[Side, ir.Value]]:
    for piece in pieces:
        for value in piece.inputs:
            yield piece.side, value


def _chosen(node: ir.Node, side: Side, number: int, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Distinct numbers in the range of the axis that ``node`` chooses from."""
    read = side.sizes(reads(node)[0])
    assert read is not None
    attribute = node.attributes.get("axis")
    axis = attribute.as_int() if attribute is not None else (-1 if node.op_type == "TopK" else 0)
    size = read[number][axis]
    if node.op_type != "TopK":
        return generator.integers(0, max(1, size), shape)
    order = np.argsort(generator.random(read[number]), axis=axis)
    return np.take(order, range(shape[axis]), axis=axis)


def _says_nothing(value: Any) -> bool:
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or not value.size:
        return isinstance(value, np.ndarray) and not value.size
    wide = value.astype(np.float32, copy=False)
    finite = wide[np.isfinite(wide)]
    return not finite.size or not finite.any()


def _rank(found: Comparison) -> tuple[bool, float]:
    return found.problem is not None, found.error / found.tolerance if found.tolerance else found.error


def _ran(side: Side) -> tuple[str, ...]:
    """All passes that made a model, as its metadata tells."""
    specs = [spec for run in provenance(side.model) for spec in run["passes"]]
    return tuple(dict.fromkeys(spec.partition("{")[0] for spec in specs))


def _blank(region: Region, alike: Sequence[Region]) -> RegionReport:
    # The last nodes are nearest to the value.
    told = [node.metadata_props for node in reversed(region.rewritten.nodes)]
    made = dict.fromkeys(
        (item[key], item[SITE_KEY])
        for key in (PASS_KEY, CALLED_KEY)
        for item in told
        if key in item and SITE_KEY in item
    )
    cuts = region.reference.cuts
    return RegionReport(
        reference=region.obligation.reference.name or "",
        rewritten=region.obligation.rewritten.name or "",
        reader=region.obligation.reader,
        passes=tuple(name for name, _ in made) or _ran(region.rewritten.side),
        sites=tuple(site for _, site in made),
        status="unchecked",
        alike=len(alike),
        nodes=(len(region.reference.nodes), len(region.rewritten.nodes)),
        cuts=len(cuts),
        feeds=0,
        error=0.0,
        tolerance=0.0,
        dtype="",
        feed="",
        index=None,
        problem=None,
    )
