"""Reading a page as a browser would, and reports made by hand."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser
from typing import Any

from graphsurgery.picture.divisions import with_divisions
from graphsurgery.picture.expert_loads import expert_pictures
from graphsurgery.picture.parts import Layer, MaskPicture, MaskSample, OperatorCounts, Picture
from graphsurgery.site_report import PassReport, Report, SiteReport

VOID = frozenset({"meta", "link", "br", "hr", "img"})


@dataclasses.dataclass
class Element:
    """An element of a page."""

    tag: str
    attributes: dict[str, str]
    children: list[Element | str] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, tag: str = "", **attributes: str) -> list[Element]:
        """Elements below, in order, of a tag and with attributes (``class_`` matches one of the classes)."""
        found = []
        for child in self.children:
            if isinstance(child, str):
                continue
            fits = not tag or child.tag == tag
            for key, value in attributes.items():
                given = child.attributes.get(key.rstrip("_").replace("_", "-"))
                fits &= value in (given or "").split() if key == "class_" else given == value
            found += [child] if fits else []
            found += child.all(tag, **attributes)
        return found

    def one(self, tag: str = "", **attributes: str) -> Element:
        (found,) = self.all(tag, **attributes)
        return found


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"{tag} has an attribute twice"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read(text: str) -> Element:
    """The page as a tree; every element must be closed in its place."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == [reader.root]
    return reader.root


def causal_sample(length: int = 64, cells: int = 4) -> MaskSample:
    """A causal mask without a past."""
    step = length // cells
    rows = tuple(tuple(1.0 if k < q else 0.5 if k == q else 0.0 for k in range(cells)) for q in range(cells))
    needed = tuple((0, (q + 1) * step) for q in range(cells))
    live = length * (length + 1) // 2
    return MaskSample(length, 0, length, step, step, rows, needed, live, length * length, ("attention_mask",))


def moe_report(layers: int = 48, experts: int = 128, name: str = "m", **changes: Any) -> Report:
    """What a pipeline would say of a large model; ``name`` is in every name and text."""
    detail: dict[str, Any] = {"strategy": "packed", "form": "dense", "experts": experts, "top_k": 8, "chunk_size": 32}
    blocks: dict[str, Any] = {"q_blocks": 4, "kv_blocks": 2, "skip": "trim", "keys": name}
    gather = [
        SiteReport(f"experts:{i}{name}", ("experts", name), i, "rewritten", f"packed {name}", detail)
        for i in range(layers)
    ]
    attention = [
        SiteReport(
            f"attention:{i}", ("attention",), i, "refused" if i == 3 else "rewritten", f"four blocks {name}", blocks
        )
        for i in range(layers)
    ]
    head = [SiteReport(f"lm_head:{name}", ("lm_head",), None, "skipped", "not selected")]
    passes = [
        PassReport("prune-last-token", "prune-last-token", head, nodes_before=5000, nodes_after=5000),
        PassReport("block-attention", "block-attention{q_blocks=4}", attention, [f"mind {name}"], 5000, 5100),
        PassReport("gather-experts", f"gather-experts{name}", gather, nodes_before=5100, nodes_after=900),
        PassReport("tidy", "tidy", nodes_before=900, nodes_after=900),
    ]
    numbers = tuple(range(layers))
    ids = tuple(f"attention:{i}" for i in numbers)
    masks = (
        MaskPicture(f"mask{name}", ids, numbers, ("attention", "causal", "full"), causal_sample()),
        MaskPicture(
            None, ("attention:x",), (), ("attention", "fused"), None, f"the operator {name} masks within itself"
        ),
    )
    counts = (
        OperatorCounts("input", {"MatMul": 4000, f"x::{name}": 900, **{f"Op{i}": 5 for i in range(20)}}),
        OperatorCounts("tidy", {"MatMul": 600, "Loop": 3, **{f"Op{i}": 5 for i in range(20)}}),
    )
    picture = Picture(
        counts,
        tuple(Layer(i, ("causal", "full")) for i in numbers),
        with_divisions(masks, passes),
        expert_pictures(passes),
    )
    outputs = [
        {"name": f"logits{name}", "rewritten": f"logits{name}", "level": "disabled", "error": 2e-6, "tolerance": 1e-5}
        | {"feed": "b1-s5-p0", "problem": None},
        {"name": "present", "rewritten": "cache", "level": "disabled", "error": 0.0, "tolerance": 0.0}
        | {"feed": "b1-s5-p0", "problem": None},
        {"name": "worst", "rewritten": "worst", "level": "default", "error": "nan", "tolerance": 1e-4}
        | {"feed": "b1-s1-p7", "problem": f"element [0, 1] differs {name}"},
    ]
    verification = {
        "status": "different",
        "depth": "outputs",
        "seed": 7,
        "outputs": outputs,
        "reasons": [f"worst {name}"],
    }
    verification |= {"feeds": [{"name": "b1-s5-p0", "batch": 1, "length": 5, "past": 0, "padding": "none"}]}
    fields: dict[str, Any] = {"input": f"in{name}.onnx", "output": f"out{name}.onnx", "verification": verification}
    return Report(passes, [f"warning {name}"], picture=picture, **(fields | changes))
