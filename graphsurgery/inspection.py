"""What a file is and what each pass would do with it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.contracts import read_contracts
from graphsurgery.model_io import load, source_of
from graphsurgery.pass_base import count_nodes
from graphsurgery.patterns.interface import find_attention_mask, find_position_ids, find_token_input
from graphsurgery.patterns.matcher import index_of
from graphsurgery.patterns.roles import find_size_roles
from graphsurgery.pipeline import provenance
from graphsurgery.registry import pass_names
from graphsurgery.site_report import SCHEMA
from graphsurgery.trial import try_passes

if TYPE_CHECKING:
    import os

    import onnx_ir as ir
    from rich.console import Console

    from graphsurgery.picture.parts import Picture
    from graphsurgery.site_report import PassReport

__all__ = ["Inspection", "ValueInfo", "inspect_model"]


@dataclasses.dataclass(frozen=True)
class ValueInfo:
    """An input or output: name, element type, sizes as declared, and what it is where that is known."""

    name: str
    dtype: str
    shape: tuple[str, ...] | None
    role: str


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What a file is.

    Attributes:
        path: the .onnx file.
        ir_version: as declared.
        opsets: version of each imported domain.
        inputs: in order; those with a default are left out.
        outputs: in order.
        roles: the sizes of the inputs by role (batch, seq, past, total, context), as ``bind-dims`` takes them.
        operators: how often each operator occurs in the main graph and its subgraphs, most frequent first.
        functions: identifiers of local functions.
        nodes: number of nodes, functions included.
        weights: number of initializers and their bytes, external ones included.
        data_files: size in bytes of each data file; None where it is missing.
        problems: what is wrong with the data files.
        runs: the pipelines that made the file, oldest first.
        contracts: what the file promises about its outputs.
        passes: what each pass would do with its default options.
        unusable: passes that cannot run on this model, and why.
        picture: operators, masks and experts for a person to look at, where it was asked for.
    """

    path: str
    ir_version: int | None
    opsets: dict[str, int]
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    roles: dict[str, tuple[str, ...]]
    operators: dict[str, int]
    functions: tuple[str, ...]
    nodes: int
    weights: tuple[int, int]
    data_files: dict[str, int | None]
    problems: tuple[str, ...]
    runs: tuple[dict[str, Any], ...]
    contracts: tuple[dict[str, Any], ...]
    passes: tuple[PassReport, ...]
    unusable: dict[str, str]
    picture: Picture | None = None

    def to_json(self) -> str:
        """The inspection as JSON text (see docs/reports.md for the schema)."""
        data = {"schema": SCHEMA} | dataclasses.asdict(self)
        for item in data["passes"]:
            del item["seconds"]
        return json.dumps(data, indent=2) + "\n"

    def to_html(self) -> str:
        """The inspection as one page for a person (:mod:`graphsurgery.html_report`)."""
        from graphsurgery.html_report import inspect_page

        return inspect_page(self)

    def render(self, console: Console, *, verbose: bool = False) -> None:
        """Print it for a person."""
        from rich.table import Table

        opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in self.opsets.items())
        count, size = self.weights
        lines = [
            self.path,
            (
                f"IR version {self.ir_version}, opsets {opsets}; {self.nodes} nodes, {len(self.functions)} functions; "
                f"{count} initializers, {size / 2**20:.1f} MiB"
            ),
        ]
        lines += [
            f"data file {name}: {'missing' if found is None else f'{found} bytes'}"
            for name, found in self.data_files.items()
        ]
        lines += [f"warning: {problem}" for problem in self.problems]
        lines += [f"made by graphsurgery {run['version']}: {', '.join(run['passes'])}" for run in self.runs]
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("", "name", "type", "shape", "role"):
            table.add_column(column, overflow="fold")
        shown = [("in", item) for item in self.inputs] + [("out", item) for item in self.outputs]
        for kind, item in shown:
            shape = "?" if item.shape is None else f"[{', '.join(item.shape)}]"
            table.add_row(kind, item.name, item.dtype, shape, item.role)
        console.print(table)
        if self.roles:
            roles = ", ".join(f"{role} {' '.join(sizes)}" for role, sizes in self.roles.items())
            console.print(f"sizes: {roles}", highlight=False, markup=False, soft_wrap=True)
        top = list(self.operators.items())[: None if verbose else 12]
        operators = ", ".join(f"{count} {name}" for name, count in top)
        console.print(f"operators: {operators}", highlight=False, markup=False, soft_wrap=True)
        sites = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("pass", "site", "would be", "what and why"):
            sites.add_column(column, overflow="fold")
        for report in self.passes:
            if not report.sites:
                sites.add_row(report.name, "-", "skipped", "no site of this kind was found")
            for site in report.sites:
                sites.add_row(report.name, site.id, site.status, site.reason)
        for name, reason in self.unusable.items():
            sites.add_row(name, "-", "refused", reason)
        console.print(sites)


def inspect_model(path: str | os.PathLike[str], *, file: str | None = None, picture: bool = False) -> Inspection:
    """Look at a model file or directory; nothing is written and no external data is read.

    Args:
        path: an .onnx file or a model directory.
        file: the model file in a directory.
        picture: add operators, masks and experts for a person to look at.

    Raises:
        InputRefusedError: the input cannot be used.
    """
    model = load(path, file=file)
    source = source_of(model)
    assert source is not None
    operators = index_of(model).operators()
    ranked = sorted(operators.items(), key=lambda item: (-item[1], item[0]))
    tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    about = Inspection(
        path=str(source.path),
        ir_version=model.ir_version,
        opsets=dict(model.opset_imports),
        inputs=_inputs(model),
        outputs=tuple(_info(value, "") for value in model.graph.outputs),
        roles=find_size_roles(model, shapes_of(model)).named(),
        operators={f"{domain}::{name}" if domain else name: count for (domain, name), count in ranked},
        functions=tuple(f"{function.domain}::{function.name}" for function in model.functions.values()),
        nodes=count_nodes(model),
        weights=(len(tensors), sum(tensor.nbytes for tensor in tensors)),
        data_files={item.location: item.size for item in source.data_files},
        problems=tuple(problem.message for problem in source.problems),
        runs=tuple(provenance(model)),
        contracts=tuple(dataclasses.asdict(contract) for contract in read_contracts(model)),
        passes=(),
        unusable={},
    )
    # Only now: what is told of the file is told of it as it was read.
    trial = try_passes(model, pass_names(), lambda: load(path, file=file))
    painted = None
    if picture:
        from graphsurgery.picture.painter import paint

        painted = paint(model, trial.passes)
    return dataclasses.replace(about, passes=trial.passes, unusable=trial.unusable, picture=painted)


def _inputs(model: ir.Model) -> tuple[ValueInfo, ...]:
    shapes = shapes_of(model)
    tokens = find_token_input(model, shapes)
    roles: dict[ir.Value, str] = {}
    if tokens is not None:
        roles[tokens.value] = "tokens [S]" if tokens.batch is None else "tokens [B, S]"
    for finder, role in ((find_attention_mask, "padding mask [B, T]"), (find_position_ids, "positions")):
        found = finder(model, shapes)
        if found is not None:
            roles.setdefault(found, role)
    return tuple(_info(value, roles.get(value, "")) for value in model.graph.inputs if not value.is_initializer())


def _info(value: ir.Value, role: str) -> ValueInfo:
    shape = None
    if value.shape is not None:
        shape = tuple(str(size) if isinstance(size, int) else str(size.value or "?") for size in value.shape)
    return ValueInfo(value.name or "", value.dtype.name if value.dtype is not None else "?", shape, role)
