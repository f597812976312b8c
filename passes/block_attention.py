"""Split dense attention into query, key and head blocks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import onnx_ir as ir

from graphsurgery.analysis.bodies import bodies_of
from graphsurgery.analysis.shapes import shapes_of
from graphsurgery.analysis.slices import runs_along
from graphsurgery.editing.row_numbers import dim_name
from graphsurgery.editing.spans import legal_blocks
from graphsurgery.errors import UsageError
from graphsurgery.pass_base import Pass
from graphsurgery.passes.blocking.budget import Budget
from graphsurgery.passes.blocking.plan import BlockPlan, keys_blockable, unclear_operand
from graphsurgery.passes.blocking.unfuse import unfuse, why_not_unfused
from graphsurgery.passes.blocking.writer import BlockWriter
from graphsurgery.patterns.attention.finding import find_attentions
from graphsurgery.patterns.attention.masks import Mask, find_mask
from graphsurgery.patterns.attention.sites import AttentionSite, FusedAttention
from graphsurgery.patterns.attention.spelled import SpelledAttention
from graphsurgery.patterns.matcher import index_of
from graphsurgery.patterns.site import Done, Refusal, Site
from graphsurgery.patterns.written import BLOCKS_PASS, is_written, layer_in, written_blocks
from graphsurgery.rewrite import Rewrite
from graphsurgery.site_report import Detail, PassReport, SiteReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from graphsurgery.analysis.dims import Dim
    from graphsurgery.analysis.shapes import Shapes

__all__ = ["BlockAttention"]

T = TypeVar("T")

_LOOP_OPSET = 13
"""The first in which a Loop carries a sequence, here of the blocks that are done."""
_TRIM_OPSET = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockAttention(Pass):
    """Split dense attention into query, key/value and head blocks; every output stays equal within tolerance.

    Each block replays the exporter's own chain (scale, softcap, bias, sink, mask) on slices, so that no tensor of
    S rows and T columns is left. Query and head blocks keep the exporter's softmax; key blocks use a running softmax
    with float32 statistics. Masks are rebuilt per block from their one-dimensional sources.

    Attributes:
        q_blocks: number of query blocks.
        q_block_size: rows of a query block, in place of a number of blocks.
        kv_blocks: number of key blocks.
        kv_block_size: columns of a key block, in place of a number of blocks.
        head_blocks: number of head blocks.
        head_block_size: heads of a head block, in place of a number of blocks.
        headpar_split: lanes with running statistics of their own in each key block, merged once at the end.
        lowering: ``unroll`` writes the blocks out; ``loop`` walks over blocks of a fixed size, whatever the length at
            run time; ``auto`` unrolls where the number of blocks is known and loops otherwise.
        skip: what becomes of keys that the mask leaves to no row of a query block, for masks that are known to be
            zero or low: ``none``; ``trim``: each query block reads only the keys from the first to the last that is
            needed; ``if``: a key block without a needed key is not computed; ``where``: it is computed and
            discarded; ``auto`` trims where there is more than one query block.
        fold_gqa: query heads of a group are folded into rows, so that keys and values are never expanded.
        min_rows: below this many query rows an If takes the unblocked path, whose keys are not expanded either;
            ``auto`` is the block size of a loop, and 0 (no If) where blocks are written out.
        memory_budget: bytes that the scores of one site may take (``256MiB``), in place of numbers and sizes of query
            and key blocks: the largest query blocks that fit are taken, then key blocks where those are not enough.
        assume: the lengths at which the budget is to hold, such as ``'S=4096,P=0,B=1'``.
        mode: ``prefill_q``, ``prefill_kv`` or ``prefill_qkv``: check that the counts which the mode needs are given.
    """

    name: ClassVar[str] = BLOCKS_PASS
    summary: ClassVar[str] = "split attention into query, key and head blocks; keys and values are never expanded"
    reads_bodies: ClassVar[bool] = True
    aliases: ClassVar[Mapping[str, str]] = {"num_q_blocks": "q_blocks", "num_kv_blocks": "kv_blocks"}
    after: ClassVar[frozenset[str]] = frozenset({"prune-last-token", "bind-dims", "bound-context"})

    q_blocks: int = 1
    q_block_size: int | None = None
    kv_blocks: int = 1
    kv_block_size: int | None = None
    head_blocks: int = 1
    head_block_size: int | None = None
    headpar_split: int = 1
    lowering: Literal["auto", "unroll", "loop"] = "auto"
    skip: Literal["auto", "none", "trim", "if", "where"] = "auto"
    fold_gqa: bool = True
    min_rows: int | Literal["auto"] = "auto"
    memory_budget: str | None = None
    assume: str = "S=4096,P=0"
    mode: Literal["prefill_q", "prefill_kv", "prefill_qkv"] | None = None

    def check_options(self) -> None:
        """See :meth:`Pass.check_options`."""
        for field in ("q_blocks", "kv_blocks", "head_blocks", "headpar_split"):
            if getattr(self, field) < 1:
                raise UsageError(f"Option {field}={getattr(self, field)} of pass {self.name} must be 1 or more.")
        for field in ("q", "kv", "head"):
            size, count = getattr(self, f"{field}_block_size"), getattr(self, f"{field}_blocks")
            if size is not None and size < 1:
                raise UsageError(f"Option {field}_block_size={size} of pass {self.name} must be 1 or more.")
            if size is not None and count != 1:
                raise UsageError(f"Give {field}_blocks or {field}_block_size of pass {self.name}, not both.")
        if self.memory_budget is not None:
            given = [name for name in ("q", "kv") if getattr(self, f"{name}_blocks") > 1]
            given += [name for name in ("q", "kv") if getattr(self, f"{name}_block_size") is not None]
            if given or self.mode is not None:
                raise UsageError(
                    f"memory_budget of pass {self.name} chooses the blocks: give no number or size of them."
                )
            Budget.read(self.memory_budget, self.assume)
        if self.min_rows != "auto" and self.min_rows < 0:
            raise UsageError(f"Option min_rows={self.min_rows} of pass {self.name} must be 0 or more.")
        needed = {"prefill_q": ("q",), "prefill_kv": ("kv",), "prefill_qkv": ("q", "kv")}
        for field in needed.get(self.mode or "", ()):
            if getattr(self, f"{field}_blocks") == 1 and getattr(self, f"{field}_block_size") is None:
                raise UsageError(f"mode={self.mode} of pass {self.name} needs {field}_blocks or {field}_block_size.")
        if self.lowering == "loop" and (self.q_blocks > 1 or self.kv_blocks > 1):
            raise UsageError(
                f"lowering=loop of pass {self.name} walks over blocks of a fixed size: give q_block_size or "
                "kv_block_size in place of a number of blocks."
            )

    # ---- find -----------------------------------------------------------------------------------------------------

    def find(self, model: ir.Model) -> Sequence[Site]:
        """See :meth:`Pass.find`."""
        shapes = shapes_of(model)
        found = find_attentions(model, shapes, index_of(model))
        sites = [self._usable(site) if isinstance(site, AttentionSite) else self._fused(site) for site in found]
        return [*sites, *_written(model, shapes, found)]

    def _fused(self, site: FusedAttention | Refusal) -> Site:
        """The site where it is to be written out and blocked, else a refusal."""
        if isinstance(site, Refusal):
            return site
        reason = why_not_unfused(site)
        if reason is None and not isinstance(site, SpelledAttention) and not self._blocks_wanted():
            reason = f"node {site.node.name!r} is one operator, and no blocks are asked for"
        if reason is None:
            return site
        return Refusal(id=site.id, kinds=site.kinds, layer=site.layer, reason=reason)

    def _blocks_wanted(self) -> bool:
        sizes = (self.q_block_size, self.kv_block_size, self.head_block_size)
        counts = self.q_blocks * self.kv_blocks * self.head_blocks * self.headpar_split
        return counts > 1 or any(sizes) or self.memory_budget is not None

    def _usable(self, site: AttentionSite) -> Site:
        """The site, or a refusal where an option cannot be honoured for it."""
        if self.memory_budget is not None:
            return self._within_budget(site).usable(site)
        return self.usable(site)

    def _within_budget(self, site: AttentionSite) -> BlockAttention:
        """The pass with the block sizes that keep ``site`` within the budget; itself where there is none."""
        if self.memory_budget is None:
            return self
        sizes = Budget.read(self.memory_budget, self.assume).blocks(site)
        return dataclasses.replace(
            self, memory_budget=None, q_block_size=sizes.rows, kv_block_size=sizes.columns, lowering="auto"
        )

    def usable(self, site: AttentionSite) -> Site:
        """The site, or a refusal where a block option cannot be honoured for it."""
        if is_written(site.product, self.name):
            return _done(site.id, site.kinds, site.layer)
        reason = self.why_not(site)
        if reason is None:
            return site
        return Refusal(id=site.id, kinds=site.kinds, layer=site.layer, reason=reason)

    def why_not(self, site: AttentionSite) -> str | None:
        """Why the attention cannot be divided; None where it can."""
        opset, view = site.body.opset, site.body.view
        site_rank = view.shape(site.product.outputs[0]) or ()
        plan_needs = _LOOP_OPSET if self._loops(site.length) else 11
        reason = None
        if site.probabilities_read is not None and self._key_blocks_wanted():
            reason = (
                f"its scores or probabilities are also read by {site.probabilities_read}, and key blocks never have them "
                "whole: blocks of queries and heads do"
            )
        elif len(site_rank) == 3 and not (isinstance(site.heads, int) and isinstance(site_rank[-1], int)):
            reason = "batch and heads are on one axis, and the number of heads or features is not known"
        elif opset < plan_needs:
            reason = f"the model imports opset {opset}; blocks need {plan_needs}: convert it first"
        elif (unclear := unclear_operand(site, view, columns=self._key_blocks_wanted())) is not None:
            reason = f"an operand of its chain cannot be cut to blocks: {unclear}"
        elif self._key_blocks_wanted() and (why := keys_blockable(site)) is not None:
            reason = f"its keys cannot be blocked: {why}"
        return reason

    def _key_blocks_wanted(self) -> bool:
        return self.kv_blocks > 1 or self.kv_block_size is not None or self.headpar_split > 1

    def _loops(self, length: Dim) -> bool:
        if self.q_block_size is None or self.lowering == "unroll":
            return False
        return self.lowering == "loop" or not isinstance(length, int)

    def _loops_keys(self, total: Dim) -> bool:
        if self.kv_block_size is None or self.lowering == "unroll":
            return False
        return self.lowering == "loop" or not isinstance(total, int)

    # ---- rewrite --------------------------------------------------------------------------------------------------

    def rewrite(
        self, model: ir.Model, sites: Sequence[AttentionSite | FusedAttention], report: PassReport
    ) -> frozenset[str]:
        """See :meth:`Pass.rewrite`."""
        plans = [(site, *self._within_budget(site).plan(site)) for site in self._written_out(model, sites, report)]
        for places in _by_graph(plans, lambda item: item[0]):
            self._rewrite_graph(model, places, report)
        return frozenset(value.name or "" for value in model.graph.outputs)

    def _rewrite_graph(
        self, model: ir.Model, plans: Sequence[tuple[AttentionSite, BlockPlan, str]], report: PassReport
    ) -> None:
        """Rewrite the sites of one graph."""
        first = plans[0][0]
        view = first.body.view
        rewrite = Rewrite(model, self.name, first.id, scope="block_attention", body=first.body, graph=first.graph)
        writer = BlockWriter(rewrite, view)
        for site, plan, _ in plans:
            rewrite.at_site(site.id, _scope(site))
            replaced = writer.write(site, plan)
            inputs = [site.query, site.key.base, *(item.source.base for item in site.value_products)]
            before, after = [old.name or "" for old, _ in replaced], [new.name or "" for _, new in replaced]
            # Before anything reads the new values: what a block takes may hang on the sizes of the old ones.
            asked = writer.answer_sizes(site)
            for old, new in replaced:
                sizes, kind = view.shape(old), view.dtype(old)
                if new.type is None and kind is not None:
                    new.type = ir.TensorType(kind)
                if new.shape is None and sizes is not None and new.type is not None and first.body.function is None:
                    new.shape = ir.Shape([dim_name(size) for size in sizes])
                rewrite.replace_all_uses(old, new, but=asked)
            function = first.body.function
            rewrite.record(inputs, before, inputs, after, "main" if function is None else function.name)
        if any(site.exposed or len(site.value_products) > 1 for site, _, _ in plans):
            # The blocks are in front of the first product: what reads probabilities may stand before them, and what
            # another product takes behind.
            first.graph.sort()
        boundaries = rewrite.commit()
        where = "" if first.body.function is None else f"; {first.body.where}"
        for (site, plan, note), boundary in zip(plans, boundaries, strict=True):
            finished = writer.finished(site)
            detail = self._detail(site, plan, finished)
            if self.memory_budget is not None:
                detail["predicted_bytes"] = Budget.read(self.memory_budget, self.assume).blocks(site).predicted
            whole = f"; mask {finished[0]!r} is sliced as a whole" if finished else ""
            reason = _what(site, plan) + where + note + whole
            report.sites.append(SiteReport(site.id, site.kinds, site.layer, "rewritten", reason, detail, (boundary,)))

    def _written_out(
        self, model: ir.Model, sites: Sequence[AttentionSite | FusedAttention], report: PassReport
    ) -> list[AttentionSite]:
        """The sites with fused operators written out, found again by their value products.

        What turns out to be beyond division only then stays as it is written out, and is reported so.
        """
        fused = {site.id: site for site in sites if isinstance(site, FusedAttention)}
        if not fused:
            return [site for site in sites if isinstance(site, AttentionSite)]
        products: dict[ir.Node, FusedAttention] = {}
        for group in _by_graph(fused.values(), lambda item: item):
            body, graph = group[0].body, group[0].graph
            rewrite = Rewrite(model, self.name, group[0].id, scope="attention", body=body, graph=graph)
            for site in group:
                rewrite.at_site(site.id, f"{_scope(site).removesuffix('/block_attention')}/written_out")
                products[unfuse(rewrite, site)] = site
            rewrite.commit()
        found = {
            site.product: site
            for site in find_attentions(model, shapes_of(model), index_of(model))
            if isinstance(site, AttentionSite)
        }
        again: dict[str, AttentionSite] = {}
        for product, fused_site in products.items():
            site_again = found.get(product)
            why = "it cannot be read" if site_again is None else self._within_budget(site_again).why_not(site_again)
            if site_again is not None and why is None:
                again[fused_site.id] = dataclasses.replace(
                    site_again, id=fused_site.id, layer=fused_site.layer, kinds=fused_site.kinds
                )
                continue
            reason = f"written out, and not divided: {why}"
            report.sites.append(SiteReport(fused_site.id, fused_site.kinds, fused_site.layer, "rewritten", reason))
        kept = {site.id: found[site.product] for site in sites if isinstance(site, AttentionSite)}
        here = [again.get(site.id) or kept.get(site.id) for site in sites]
        return [
            dataclasses.replace(place, id=site.id) for place, site in zip(here, sites, strict=True) if place is not None
        ]

    def plan(self, site: AttentionSite) -> tuple[BlockPlan, str]:
        """How the site is divided, and a note on what could not be had."""
        q_blocks, q_size = _count(self.q_blocks, self.q_block_size, site.length, self._loops(site.length))
        kv_blocks, kv_size = _count(self.kv_blocks, self.kv_block_size, site.total, self._loops_keys(site.total))
        head_blocks, _ = _count(self.head_blocks, self.head_block_size, site.heads, loops=False)
        note = ""
        mask: Mask | None = None
        several = q_blocks > 1 or q_size is not None
        skip = ("trim" if several else "none") if self.skip == "auto" else self.skip
        if skip != "none":
            mask, why = self._mask(site, skip)
            note = f"; no key is left out: {why}" if why else ""
        min_rows = self.min_rows if self.min_rows != "auto" else (q_size or 0)
        plan = BlockPlan(
            q_blocks=q_blocks,
            kv_blocks=kv_blocks,
            head_blocks=head_blocks,
            lanes=self.headpar_split,
            q_block_size=q_size,
            kv_block_size=kv_size,
            min_rows=0 if isinstance(site.length, int) else min_rows,
            skip=skip if mask is not None else "none",
            fold=self.fold_gqa,
            mask=mask,
        )
        return plan, note

    def _mask(self, site: AttentionSite, skip: str) -> tuple[Mask | None, str]:
        """The mask by which keys may be left out, or why they may not."""
        if skip == "trim" and self.q_blocks == 1 and self.q_block_size is None:
            return None, "there is one query block, which needs what the whole needs"
        if skip in ("if", "where") and self.kv_blocks == 1 and self.kv_block_size is None:
            return None, f"skip={skip} passes over key blocks, and there is one"
        if site.probabilities_read is not None:
            return None, f"{site.probabilities_read} reads its scores or probabilities"
        unclear = unclear_operand(site, site.body.view, columns=True)
        if unclear is not None:
            return None, unclear
        if site.body.opset < _TRIM_OPSET:
            return None, f"finding the last needed key takes opset {_TRIM_OPSET}"
        wide = [
            value
            for value in site.chain_operands()
            if (size := site.body.view.dim(value, -1)) is not None and runs_along(size, site.total)
        ]
        found = find_mask(site, wide)
        return (None, found) if isinstance(found, str) else (found, "")

    def _detail(self, site: AttentionSite, plan: BlockPlan, finished: list[str]) -> dict[str, Detail]:
        return {
            "q_blocks": f"of {plan.q_block_size}" if plan.q_block_size else plan.q_blocks,
            "kv_blocks": f"of {plan.kv_block_size}" if plan.kv_block_size else plan.kv_blocks,
            "head_blocks": plan.head_blocks,
            "headpar_split": plan.lanes,
            "lowering": "loop" if plan.q_block_size or plan.kv_block_size else "unroll",
            "skip": plan.skip,
            "min_rows": plan.min_rows,
            "keys": site.key.base.name,
            "values": ", ".join(item.source.base.name or "" for item in site.value_products),
            "query_heads": str(site.heads),
            "key_heads": str(site.key.heads),
            "sliced_masks": list(finished),
        }


def _by_graph(items: Iterable[T], site_of: Callable[[T], AttentionSite | FusedAttention]) -> list[list[T]]:
    """The items by the graph that holds their sites: what is made in one cannot be read in another."""
    groups: dict[ir.Graph, list[T]] = {}
    for item in items:
        groups.setdefault(site_of(item).graph, []).append(item)
    return list(groups.values())


def _count(count: int, size: int | None, length: Dim, loops: bool) -> tuple[int, int | None]:
    """Number of blocks that are written out, or the size of those that a Loop walks over."""
    if size is None:
        return (legal_blocks(length, count) if isinstance(length, int) else count), None
    if loops:
        return 1, size
    if isinstance(length, int):
        return max(1, -(-length // size)), None
    raise UsageError(
        f"A block size with lowering=unroll needs a fixed length, and the model has {length}: fix it with bind-dims, or "
        "give a number of blocks."
    )


def _scope(site: AttentionSite | FusedAttention) -> str:
    where = f"layers.{site.layer}.attention" if site.layer is not None else site.id.replace(":", ".")
    return f"{where}/block_attention"


def _what(site: AttentionSite, plan: BlockPlan) -> str:
    pieces = []
    for text, count, size in (
        ("query", plan.q_blocks, plan.q_block_size),
        ("key", plan.kv_blocks, plan.kv_block_size),
        ("head", plan.head_blocks, None),
    ):
        if size is not None:
            pieces.append(f"{text} blocks of {size} in a loop")
        elif count > 1:
            pieces.append(f"{count} {text} blocks")
    if plan.lanes > 1:
        pieces.append(f"{plan.lanes} lanes")
    if not pieces:
        pieces.append("one block")
    if plan.skip == "trim":
        pieces.append("keys trimmed by the mask")
    elif plan.skip != "none":
        pieces.append("key blocks skipped by the mask")
    if plan.fold and site.key.repeats != 1:
        pieces.append("keys and values not expanded")
    return ", ".join(pieces)


def _done(name: str, kinds: tuple[str, ...], layer: int | None) -> Done:
    return Done(id=name, kinds=kinds, layer=layer, reason="already blocked: an earlier run made its nodes")


def _written(model: ir.Model, shapes: Shapes, found: Sequence[Site]) -> list[Done]:
    """The attention that an earlier run has written in a form that is read as attention no more."""
    read = {site.product for site in found if isinstance(site, AttentionSite)}
    blocks = [
        (body, block)
        for body in bodies_of(model, shapes)
        for block in written_blocks(index_of(model, body.graph), BLOCKS_PASS, "MatMul", "Einsum")
        if read.isdisjoint(block)
    ]
    numbers = itertools.count(len(found))
    return [
        _done(f"attention:{number}", ("attention",), layer_in(block) if len(body.calls) < 2 else None)
        for number, (body, block) in zip(numbers, blocks, strict=False)
    ]
