"""What changed between two ONNX models, or between two directories of them, told by structure.

Names do not count, but for those of graph inputs and outputs, and neither does the order of nodes. Weights are compared
by reference: element type, shape, and where the bytes are; data files are never read. Calls of local functions are seen
through, so that a model and the same model with its layers as functions do not differ.

Severity: ``none``; ``minor``: attributes, initializers, operator versions; ``moderate``: nodes and edges; ``major``:
the interface.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.comparison.diff_report import DiffReport, Listing, ModelDiff, Size
from graphsurgery.comparison.differences import find_differences, initializer_changes
from graphsurgery.comparison.interface import compare_interfaces, ports
from graphsurgery.comparison.numbering import Interner, number_cells
from graphsurgery.comparison.outwards import match_views
from graphsurgery.comparison.references import DataFiles, Keys, census
from graphsurgery.comparison.unfolding import unfold
from graphsurgery.errors import UsageError
from graphsurgery.garbage import paused_gc
from graphsurgery.model_files.finding import find_models
from graphsurgery.model_io import load, source_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import TypeAlias

    from graphsurgery.comparison.cells import View
    from graphsurgery.comparison.differences import Differences
    from graphsurgery.comparison.interface import Interface
    from graphsurgery.comparison.references import Census

    Input: TypeAlias = str | os.PathLike[str] | ir.Model

__all__ = ["DiffReport", "ModelDiff", "diff_models"]


def diff_models(a: Input, b: Input) -> DiffReport:
    """Compare two models, or the models of two directories; no external data is read.

    Directories are compared file by file, at any depth: .onnx files of one relative name belong together.

    Args:
        a: an .onnx file, a directory, or a loaded model.
        b: the same kind.

    Raises:
        InputRefusedError: a file cannot be used, or a directory holds no model.
        UsageError: a directory was given with a file.

    Example::

        report = graphsurgery.diff("model.onnx", "model.surgery.onnx")
        print(report.severity, report.models[0].changes())
    """
    if isinstance(a, ir.Model) or isinstance(b, ir.Model):
        one, other = _loaded(a), _loaded(b)
        return DiffReport(_called(a, one), _called(b, other), (_compare("model", "", one, other),))
    ours, theirs = Path(a), Path(b)
    if ours.is_dir() != theirs.is_dir() and ours.exists() and theirs.exists():
        directory, file = (ours, theirs) if ours.is_dir() else (theirs, ours)
        raise UsageError(f"{directory} is a directory and {file} is not: give two files or two directories.")
    if not ours.is_dir():
        return DiffReport(str(a), str(b), (_compare(ours.name, "", load(ours), load(theirs)),))
    return DiffReport(str(a), str(b), tuple(_compare_directories(ours, theirs)))


def _loaded(given: Input) -> ir.Model:
    return given if isinstance(given, ir.Model) else load(given)


def _called(given: Input, model: ir.Model) -> str:
    source = source_of(model)
    return str(source.path) if source is not None else "model" if isinstance(given, ir.Model) else os.fspath(given)


def _compare_directories(a: Path, b: Path) -> Iterator[ModelDiff]:
    ours, theirs = find_models(a), find_models(b)
    for name in sorted({*ours, *theirs}):
        relative = Path(name)
        model = relative.parent.as_posix() if relative.parent.name else a.resolve().name
        if name in ours and name in theirs:
            yield _compare(model, relative.stem, load(ours[name]), load(theirs[name]))
            continue
        side = _Side.of(load(ours.get(name) or theirs[name]), name)
        if name in ours:
            sizes = {key: Size(size, None) for key, size in side.sizes().items()}
            yield ModelDiff(model, relative.stem, "removed", a=side.path, sizes=sizes)
        else:
            sizes = {key: Size(None, size) for key, size in side.sizes().items()}
            yield ModelDiff(model, relative.stem, "added", b=side.path, sizes=sizes)


@dataclasses.dataclass(frozen=True)
class _Side:
    """One of the two models: where it came from, what it holds, and its view."""

    model: ir.Model
    path: str | None
    census: Census
    view: View

    @classmethod
    def of(cls, model: ir.Model, who: str) -> _Side:
        source = source_of(model)
        path = str(source.path) if source is not None else None
        view = unfold(model, path or who)
        counted = census(model)
        counted = dataclasses.replace(counted, tensors=(*counted.tensors, *view.stored))
        return cls(model, path, counted, view)

    def sizes(self) -> dict[str, int | None]:
        contents = (value.const_value for value in self.census.tensors)
        weights = (item.nbytes for item in contents if item is not None and item.dtype != ir.DataType.STRING)
        return {
            "nodes": len(self.view.cells),
            "graph_bytes": Path(self.path).stat().st_size if self.path is not None else None,
            "weight_bytes": sum(weights),
            "stored_nodes": self.census.nodes,
            "initializers": len(self.census.tensors),
        }


def _compare(name: str, submodel: str, a: ir.Model, b: ir.Model) -> ModelDiff:
    # Hundreds of thousands of objects are made, none of them garbage.
    with paused_gc():
        return _compared(name, submodel, _Side.of(a, "model A"), _Side.of(b, "model B"))


def _compared(name: str, submodel: str, a: _Side, b: _Side) -> ModelDiff:
    interface = compare_interfaces(
        (ports(a.model.graph.inputs), ports(b.model.graph.inputs)),
        (ports(a.model.graph.outputs), ports(b.model.graph.outputs)),
    )
    tensors = (a.census.tensors, b.census.tensors)
    files = DataFiles(*tensors)
    keys = (Keys(files, is_b=False), Keys(files, is_b=True))
    intern = Interner()
    back = {theirs: ours for ours, theirs in interface.inputs.items()}
    numbers = (number_cells(a.view, keys[0], intern, {}), number_cells(b.view, keys[1], intern, back))
    matching = match_views((a.view, b.view), numbers, keys, interface.inputs, interface.outputs)
    found = find_differences(matching, keys, interface.outputs)
    given = dict(b.view.outputs)
    affected = tuple(
        output
        for output, value in a.view.outputs
        if output not in interface.outputs
        or numbers[0].of_value[value] != numbers[1].of_value[given[interface.outputs[output]]]
    )
    after = b.sizes()
    sizes = {size: Size(before, after[size]) for size, before in a.sizes().items()}
    functions = _functions(a.model, b.model)
    return ModelDiff(
        name,
        submodel,
        "compared",
        a=a.path,
        b=b.path,
        interface=Listing.of(interface.changes),
        nodes_added=Listing.of(found.added),
        nodes_removed=Listing.of(found.removed),
        rewired=Listing.of(found.rewired),
        attributes=Listing.of(found.attributes),
        redefined=Listing.of(found.redefined),
        initializers=Listing.of(initializer_changes(tensors, keys, found.initializers)),
        affected_outputs=affected,
        operators=_operators(a.view, b.view),
        functions=functions,
        sizes=sizes,
        notes=(*_notes(a.model, b.model, interface, found), *_count_notes(functions, sizes)),
    )


def _operators(a: View, b: View) -> dict[str, tuple[int, int]]:
    ours, theirs = (collections.Counter(cell.op for cell in view.cells) for view in (a, b))
    names = sorted({*ours, *theirs}, key=lambda name: (-max(ours[name], theirs[name]), name))
    return {name: (ours[name], theirs[name]) for name in names}


def _functions(a: ir.Model, b: ir.Model) -> dict[str, tuple[int | None, int | None]]:
    sides = tuple(
        {f"{function.domain}::{function.name}": len(function) for function in model.functions.values()}
        for model in (a, b)
    )
    return {name: (sides[0].get(name), sides[1].get(name)) for name in sorted({*sides[0], *sides[1]})}


def _notes(a: ir.Model, b: ir.Model, interface: Interface, found: Differences) -> Iterator[str]:
    if a.ir_version != b.ir_version:
        yield f"IR version {a.ir_version} -> {b.ir_version}"
    for domain in sorted({*a.opset_imports, *b.opset_imports}):
        versions = (a.opset_imports.get(domain, "not imported"), b.opset_imports.get(domain, "not imported"))
        if versions[0] != versions[1]:
            yield f"operator set {domain or 'ai.onnx'} {versions[0]} -> {versions[1]}"
    if interface.symbols:
        yield f"symbols of dims renamed: {', '.join(f'{one} -> {other}' for one, other in interface.symbols)}"
    yield from _metadata_notes(a.metadata_props, b.metadata_props)
    if found.metadata:
        yield f"metadata differs at {_counted(found.metadata, 'node')}"
    if found.declared:
        yield f"declared type or shape differs at {_counted(found.declared, 'value')}"


def _count_notes(functions: Mapping[str, tuple[int | None, int | None]], sizes: Mapping[str, Size]) -> Iterator[str]:
    for name, counts in functions.items():
        before, after = ("absent" if count is None else _counted(count, "node") for count in counts)
        if before != after:
            yield f"function {name}: {before} -> {after}"
    for size, what in (("stored_nodes", "nodes in the file, functions once"), ("initializers", "initializers")):
        number = sizes[size]
        if number.before != number.after and (functions or size == "initializers"):
            yield f"{what}: {number.before} -> {number.after}"


def _metadata_notes(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    changed = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if changed:
        yield f"metadata of the model: {', '.join(changed)}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
