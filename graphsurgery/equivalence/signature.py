"""Reading the signature of a language model from its names, types, dims and graph; weights are not looked at.

Alphabet: B batch, S query length, H hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import onnx

from graphsurgery.analysis.input_names import is_image_name
from graphsurgery.contracts import CONTEXT_BOUND_KEY, parse_context_bound
from graphsurgery.equivalence.caches import classify_cache, ring_outputs
from graphsurgery.equivalence.dims import declared_dims
from graphsurgery.equivalence.image_inputs import (
    features,
    image_size,
    order_length,
    with_patch_masks,
    with_patches,
)
from graphsurgery.equivalence.inferring import Inferred
from graphsurgery.equivalence.protos import Scope
from graphsurgery.equivalence.roles import FLOATS, INTEGERS, InputSpec, OutputSpec, Role, Signature, letters_and_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["merge", "read_signature"]

_T = onnx.TensorProto
# Operators that hand ids on unchanged but for layout, or some of them: type to the slots that come out again.
_IDS_THROUGH = dict.fromkeys(
    (
        *("Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Flatten", "Clip"),
        *("Gather", "Slice", "Split", "ReduceMax"),
    ),
    (0,),
) | {"Where": (1, 2)}


def read_signature(proto: onnx.ModelProto) -> Signature:
    """Read the signature of a model; weights are not looked at.

    Raises:
        InputRefusedError: its metadata is not what a pass writes.
    """
    scope, inferred = Scope.of(proto), Inferred(proto)
    stored = {tensor.name for tensor in proto.graph.initializer}
    outputs = tuple(
        OutputSpec(value.name, value.type.tensor_type.elem_type, declared_dims(value)) for value in proto.graph.output
    )
    specs: list[InputSpec] = []
    for value in proto.graph.input:
        if value.name in stored or not value.type.HasField("tensor_type"):
            continue
        spec = InputSpec(
            value.name, value.type.tensor_type.elem_type or _T.FLOAT, declared_dims(value) or (), Role.UNKNOWN
        )
        specs.append(_classify(_anonymous(spec), scope, outputs, inferred))
    specs = _with_encoder(_with_marked(with_patches(_with_sequence(with_patch_masks(specs, scope)))))
    bound = parse_context_bound(next((e.value for e in proto.metadata_props if e.key == CONTEXT_BOUND_KEY), None))
    if bound is not None:
        specs = [dataclasses.replace(spec, role=Role.BOUND) if spec.name == bound.input else spec for spec in specs]
    letters, fixed = letters_and_sizes(specs)
    kinds = {node.op_type for node in proto.graph.node} | {n.op_type for f in proto.functions for n in f.node}
    return Signature(
        tuple(specs),
        outputs,
        letters,
        fixed,
        "GroupQueryAttention" in kinds,
        _computes_in_half(proto),
        ring_outputs(proto),
        _rotations(proto, scope),
        bound is not None or any(spec.role is Role.BOUND for spec in specs),
    )


# Where operators that rotate by position take their table of cosines ``[rows, D/2]``.
_COSINES = {"GroupQueryAttention": 7, "RotaryEmbedding": 2}


def _rotations(proto: onnx.ModelProto, scope: Scope) -> int | None:
    rows: list[int] = []
    for node in proto.graph.node:
        slot = _COSINES.get(node.op_type)
        if slot is None or (node.op_type == "RotaryEmbedding" and node.domain != "com.microsoft"):
            continue
        dims = scope.static_dims(node.input[slot]) if slot < len(node.input) and node.input[slot] else None
        if dims and len(dims) == 2:
            rows.append(dims[0])
    return min(rows, default=None)


def _computes_in_half(proto: onnx.ModelProto) -> bool:
    if any(tensor.data_type == _T.FLOAT16 and tensor.dims for tensor in proto.graph.initializer):
        return True
    values = list(proto.graph.input) + list(proto.graph.output)
    return any(value.type.tensor_type.elem_type == _T.FLOAT16 for value in values)


def _anonymous(spec: InputSpec) -> InputSpec:
    """Give every undeclared dim a symbol of its own."""
    dims = tuple(f"?{spec.name}.{axis}" if dim == "?" else dim for axis, dim in enumerate(spec.dims))
    return dataclasses.replace(spec, dims=dims)


_SCALARS: tuple[tuple[str, Role], ...] = (
    (r"use_cache_branch", Role.BRANCH),
    (r"sliding_window", Role.WINDOW),
    (r"(num_)?logits_to_keep", Role.KEEP),
    (r"total_seq", Role.TOTAL_LENGTH),
    (r"cu_(\w+_)?seq_?lens", Role.BORDERS),
    (r"seqlens_k", Role.LAST_KEY),
    (r"beam_idx|batch_ind(ex|ices)", Role.BEAMS),
    (r"grid_thw", Role.GRID),
    (r"cumulative_length|past_len|past_seq", Role.PAST_LENGTH),
)


def _classify(spec: InputSpec, scope: Scope, outputs: Sequence[OutputSpec], inferred: Inferred) -> InputSpec:
    name, rank = spec.name.lower(), len(spec.dims)
    role = Role.UNKNOWN
    if "mask" in name and rank in (2, 3, 4):
        role = Role.MASK if rank == 2 else Role.MASK_ND
    elif spec.elem_type in INTEGERS or spec.elem_type == _T.BOOL:
        role = next((role for pattern, role in _SCALARS if re.search(pattern, name)), Role.UNKNOWN)
        if role is Role.PAST_LENGTH and rank > 2:
            role = Role.UNKNOWN
        if rank == 1 and re.search(r"comp_ctx_len|compute_context_len", name):
            role = Role.BOUND
        if role is Role.UNKNOWN and rank in (1, 2) and re.search(r"input_ids$|(^|\.)(token_)?ids$|tokens$", name):
            role = Role.TOKENS
        elif role is Role.UNKNOWN and rank in (1, 2, 3) and "position" in name:
            role = Role.POSITIONS
    elif spec.elem_type in FLOATS and re.search(r"inputs_embeds$|^hidden_states$", name) and rank in (2, 3):
        return dataclasses.replace(spec, role=Role.EMBEDS, size=features(spec, scope, inferred))
    elif spec.elem_type in FLOATS and rank >= 4 and is_image_name(name):
        return dataclasses.replace(spec, size=image_size(spec, scope))
    elif spec.elem_type in FLOATS and rank >= 3:
        return classify_cache(spec, scope, outputs, inferred)
    if (
        role is Role.UNKNOWN
        and rank == 1
        and spec.elem_type in INTEGERS
        and (rows := order_length(spec, scope, inferred))
    ):
        return dataclasses.replace(spec, role=Role.ORDER, dims=(rows,))
    limit = _table_rows(spec, scope) if spec.elem_type in INTEGERS and rank else None
    return dataclasses.replace(spec, role=role, limit=limit)


def _table_rows(spec: InputSpec, scope: Scope) -> int | None:
    """Rows of the smallest stored table that the input indexes."""
    rows: list[int] = []
    for where, node, slot in scope.reached(spec.name, _IDS_THROUGH):
        if node.op_type not in {"Gather", "GatherBlockQuantized"} or slot != 1:
            continue
        dims = where.static_dims(node.input[0])
        axis = next((a.i for a in node.attribute if a.name in {"axis", "gather_axis"}), 0)
        if dims:
            rows.append(dims[axis])
    return min(rows, default=None)


def _with_sequence(specs: list[InputSpec]) -> list[InputSpec]:
    """Where no name tells the sequence input: the ids of the largest table, else the first float ``[B, S, H]``.

    Without either, the first float ``[S, H]``, as expert blocks and heads alone take it; patches of an image, which the
    sizes of a grid go with, are not as many as one likes.
    """
    if any(spec.role in (Role.TOKENS, Role.EMBEDS) for spec in specs):
        return specs
    unknown = [spec for spec in specs if spec.role is Role.UNKNOWN]
    ids = [spec for spec in unknown if spec.limit and len(spec.dims) <= 2]
    chosen, role = max(ids, key=lambda spec: spec.limit or 0, default=None), Role.TOKENS
    if chosen is None:
        role = Role.EMBEDS
        floats = [spec for spec in unknown if spec.elem_type in FLOATS and spec.dims and isinstance(spec.dims[-1], int)]
        batches = [spec for spec in floats if len(spec.dims) == 3]
        rows = [spec for spec in floats if len(spec.dims) == 2 and isinstance(spec.dims[0], str)]
        if any(spec.role is Role.GRID for spec in specs):
            rows = []
        chosen = next(iter([*batches, *rows]), None)
    return [dataclasses.replace(spec, role=role) if spec is chosen else spec for spec in specs]


def _with_marked(specs: list[InputSpec]) -> list[InputSpec]:
    """A boolean ``[B, S]`` that is no attention mask says which tokens the float inputs ``[R, H]`` replace."""
    sequence = next((spec for spec in specs if spec.role is Role.EMBEDS), None)
    if sequence is None:
        return specs
    marked = [
        spec
        for spec in specs
        if spec.elem_type == _T.BOOL and spec.dims == sequence.dims[:-1] and "attention" not in spec.name.lower()
    ]
    if len(marked) != 1:
        return specs
    return [
        dataclasses.replace(spec, role=Role.MARKED)
        if spec is marked[0]
        else dataclasses.replace(spec, role=Role.MARKED_ROWS)
        if spec.role is Role.UNKNOWN and spec.elem_type in FLOATS and len(spec.dims) == 2
        else spec
        for spec in specs
    ]


def _with_encoder(specs: list[InputSpec]) -> list[InputSpec]:
    """A mask that is named after an encoder is as long as what that has read, and so are the float ``[B, E, H]`` beside."""
    tokens = {spec.dims[-1] for spec in specs if spec.role is Role.TOKENS}
    tokens |= {spec.dims[-2] for spec in specs if spec.role is Role.EMBEDS and len(spec.dims) > 1}

    def named(spec: InputSpec, axis: int) -> bool:
        return "encoder" in spec.name.lower() and not (isinstance(spec.dims[axis], str) and spec.dims[axis] in tokens)

    masks = {spec.name: spec.dims[1] for spec in specs if spec.role is Role.MASK and named(spec, 1)}

    def role(spec: InputSpec) -> Role:
        if spec.name in masks:
            return Role.ENCODER_MASK
        floats = spec.role in (Role.UNKNOWN, Role.STATE) and spec.elem_type in FLOATS and len(spec.dims) == 3
        if floats and (named(spec, 1) or (isinstance(spec.dims[1], str) and spec.dims[1] in masks.values())):
            return Role.ENCODER_STATES
        return spec.role

    return [dataclasses.replace(spec, role=role(spec)) for spec in specs]


def merge(reference: Signature, rewritten: Signature) -> Signature:
    """The reference's signature narrowed by the sizes that the rewritten model fixes, with the inputs it adds."""
    specs: list[InputSpec] = []
    for spec in reference.inputs:
        other = rewritten.input(spec.name)
        dims = spec.dims
        if other is not None and len(other.dims) == len(dims):
            dims = tuple(
                theirs if isinstance(theirs, int) else ours for ours, theirs in zip(dims, other.dims, strict=True)
            )
        specs.append(dataclasses.replace(spec, dims=dims))
    names = {spec.name for spec in specs}
    specs.extend(spec for spec in rewritten.inputs if spec.name not in names)
    letters, fixed = letters_and_sizes(specs)
    return Signature(
        tuple(specs),
        reference.outputs,
        {**rewritten.letters, **reference.letters, **letters},
        fixed,
        reference.fused_attention or rewritten.fused_attention,
        reference.half or rewritten.half,
        reference.rings,
        min((size for size in (reference.rotations, rewritten.rotations) if size), default=None),
        reference.bounded or rewritten.bounded,
    )
