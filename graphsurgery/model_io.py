"""Weight-free loading and atomic saving of ONNX models.

``load`` never reads an external tensor, so that a model of 100 GB, or one whose data file is absent, costs as much as
its graph. ``save`` shares the data file of the input, or copies or repacks it, and puts the .onnx in place by one rename;
``stage`` is ``save`` in two steps, so that the temporary file can be verified before it takes its name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphsurgery.errors import InputRefusedError, UsageError
from graphsurgery.garbage import paused_gc
from graphsurgery.model_files import graph_extras
from graphsurgery.model_files.declared_types import DeclaredTypes
from graphsurgery.model_files.directories import CONFIG_NAME, find_model
from graphsurgery.model_files.locations import data_file, find_problems
from graphsurgery.model_files.output import default_output
from graphsurgery.model_files.placement import WeightsMode, need_of
from graphsurgery.model_files.proto_audit import audit
from graphsurgery.model_files.reading import read_model_proto
from graphsurgery.model_files.saving import SaveResult, Staged, save, stage
from graphsurgery.model_files.scopes import refuse_broken_scopes
from graphsurgery.model_files.serialising import root_cause
from graphsurgery.model_files.signatures import refuse_wrong_signatures
from graphsurgery.model_files.soundness import refuse_unsound
from graphsurgery.model_files.source import DataFile, DataProblem, Source, attach_source, source_of
from graphsurgery.model_files.survey import survey

if TYPE_CHECKING:
    import onnx

    from graphsurgery.model_files.locations import Need
    from graphsurgery.model_files.proto_audit import Audit

__all__ = [
    "DataFile",
    "DataProblem",
    "SaveResult",
    "Source",
    "Staged",
    "WeightsMode",
    "default_output",
    "load",
    "reserved_names",
    "save",
    "source_of",
    "stage",
]


def load(path: str | os.PathLike[str], *, file: str | None = None) -> ir.Model:
    """Load a model without reading any of its external data.

    Where it came from, and what is wrong with its data files, is told by :func:`source_of`. Data files may be absent or
    too short.

    Args:
        path: an .onnx file, or a model directory: the decoder that its genai_config.json names, else its only .onnx
            file with logits.
        file: the file to take in a directory, relative to it.

    Returns:
        The model; its external tensors are references.

    Raises:
        InputRefusedError: the file is missing, unreadable, not an ONNX model, or holds what cannot be kept; or an
            external location is absolute or leaves the model's directory.
        UsageError: ``file`` is not in the directory, or ``path`` is not a directory.
    """
    given = Path(path)
    if given.is_dir():
        root, model_path = given, find_model(given, file)
    elif file is not None:
        raise UsageError(f"--file {file!r} chooses within a directory, and {given} is not one: leave it out.")
    else:
        root, model_path = given.parent, given
    with paused_gc():
        proto = read_model_proto(model_path)
        found = audit(proto, model_path)
        refuse_broken_scopes(proto, model_path, nested=len(found.graphs) > 1)
        declared = DeclaredTypes(proto, found.types)
        model = _deserialise(proto, model_path)
        declared.give_to(model)
        refuse_unsound(model, model_path)
        refuse_wrong_signatures(model, model_path)
        tensors = _attach_extras(model, proto, found)
    attach_source(model, _source(model_path.absolute(), root.absolute(), tensors))
    return model


def reserved_names(model: ir.Model) -> frozenset[str]:
    """Names that the file of ``model`` gives to values that do not exist: new values must not take them."""
    return graph_extras.orphan_names(model)


def _deserialise(proto: onnx.ModelProto, path: Path) -> ir.Model:
    try:
        return ir.serde.deserialize_model(proto)
    except Exception as error:
        # Whatever a damaged file makes onnx-ir raise, the file is at fault.
        message = f"{path} is not a valid ONNX model ({root_cause(error)}): export it again."
        raise InputRefusedError(message) from error


def _attach_extras(model: ir.Model, proto: onnx.ModelProto, found: Audit) -> list[ir.ExternalTensor]:
    """Give the external tensors their directory and keep what the IR lost; the tensors, in order."""
    # Most models have one graph and their weights in its initializers: no second walk over the nodes.
    walked = survey(model) if found.nested_external or len(found.graphs) > 1 else None
    if walked is not None:
        tensors = [slot.tensor for slot in walked.external]
    else:
        values = (value.const_value for value in model.graph.initializers.values())
        tensors = [tensor for tensor in values if isinstance(tensor, ir.ExternalTensor)]
    base = str(found.path.absolute().parent)
    for tensor in tensors:
        tensor.base_dir = base
    graph_extras.external_extras(tensors, found)
    graph_extras.capture(model, proto, found, walked)
    return tensors


def _source(path: Path, root: Path, tensors: list[ir.ExternalTensor]) -> Source:
    directory = path.parent
    needs: dict[str, list[Need]] = {}
    for tensor in tensors:
        needs.setdefault(os.fspath(tensor.location), []).append(need_of(tensor))
    files = tuple(data_file(directory, location) for location in needs)
    config = root / CONFIG_NAME
    return Source(path, directory, root, files, find_problems(files, needs, path), config if config.is_file() else None)
