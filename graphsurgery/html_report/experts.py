"""Tokens by expert, and rows that are computed against rows that are useful. Alphabet: T tokens, E experts, K chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsurgery.html_report.drawing import drawing, key, legend
from graphsurgery.html_report.markup import Html, el, plural, ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphsurgery.html_report.drawing import Ids
    from graphsurgery.picture.parts import ExpertLoad, ExpertPicture

__all__ = ["experts"]

_WIDTH, _HIGH, _LEFT = 330, 120, 36
_FORMS = {
    "dense": "every expert on every token",
    "gather": "chosen rows, with a copy of its expert's weights for each of them",
    "grouped": "each expert on its own rows",
    "packed": "chunks of rows of one expert",
}


# The form that computes the same rows as an exporter's.
_AS_EXPORTED = {"dense": "dense", "batched": "gather", "loop": "grouped", "grouped": "grouped"}


def experts(ids: Ids, kinds: Sequence[ExpertPicture]) -> Html:
    """Figures for each kind of expert block."""
    if not kinds:
        return el("p", "No pass reports an expert block.", class_="lede")
    return el("div", [_kind(ids, kind) for kind in kinds])


def _kind(ids: Ids, kind: ExpertPicture) -> Html:
    layers = f", layers {ranges(list(kind.layers))}" if kind.layers else ""
    title = f"{plural(len(kind.sites), 'block')} of {kind.experts} experts, {kind.top_k} chosen{layers}"
    lede = (
        f"Exported in {kind.form} form; written as {kind.strategy}. Which experts the router chooses is known only where it "
        f"runs: the two samples of {kind.tokens} tokens are drawn, not measured."
    )
    notes = [el("li", el("b", form), f": {words}") for form, words in _FORMS.items()]
    return el(
        "div",
        el("h3", title),
        el("p", lede, class_="note"),
        legend(
            key(
                el("line", x1=0, x2=16, y1=8, y2=8, class_="useful"), "useful: T \u00d7 K rows, or their mean by expert"
            ),
            key(el("rect", x=1, y=2, width=14, height=12, class_="b"), "tokens, or rows computed"),
        ),
        el(
            "div",
            [figure for load in kind.loads for figure in (_tokens(ids, kind, load), _rows(ids, kind, load))],
            class_="grid pairs",
        ),
        el(
            "details",
            el("summary", "What each form computes"),
            el("div", el("ul", list(notes), class_="plain"), class_="inner"),
        ),
    )


def _tokens(ids: Ids, kind: ExpertPicture, load: ExpertLoad) -> Html:
    most = max(*load.tokens, 1) if len(load.tokens) > 1 else max(load.tokens[0], 1)
    step = (_WIDTH - _LEFT - 6) / len(load.tokens)
    base = _HIGH + 14
    parts = [
        el(
            "rect",
            el("title", f"expert {number}: {plural(count, 'token')}") if len(load.tokens) <= 64 else None,
            x=_LEFT + step * number,
            y=base - _HIGH * count / most,
            width=max(step * 0.82, 0.4),
            height=_HIGH * count / most,
            class_="b",
        )
        for number, count in enumerate(load.tokens)
    ]
    mean = kind.useful_rows / kind.experts
    level = base - _HIGH * mean / most
    parts += [
        el("line", x1=_LEFT, x2=_WIDTH - 6, y1=base, y2=base, class_="axis"),
        el("line", x1=_LEFT, x2=_WIDTH - 6, y1=level, y2=level, class_="useful"),
        el("text", most, x=_LEFT - 5, y=22, text_anchor="end", class_="small soft"),
        el("text", 0, x=_LEFT - 5, y=base, text_anchor="end", class_="small soft"),
        el("text", "expert 0", x=_LEFT, y=base + 15, class_="small soft"),
        el("text", kind.experts - 1, x=_WIDTH - 6, y=base + 15, text_anchor="end", class_="small soft"),
    ]
    idle = sum(count == 0 for count in load.tokens)
    told = f"{plural(kind.experts, 'expert')}; most {most}, mean {mean:.1f}, without a token {idle}"
    return el(
        "figure",
        el("h3", f"Tokens by expert: {load.name} sample"),
        drawing(ids, _WIDTH, base + 22, f"Tokens by expert, {load.name} sample", told + ".", parts),
        el("figcaption", told[0].upper() + told[1:] + "."),
    )


def _whose(form: str, written: str, exported: str | None) -> str:
    """Whether a form is the exporter's or the one of the result."""
    found = [word for word, holds in (("exported", form == exported), ("now", form in written.split())) if holds]
    return f" ({', '.join(found)})" if found else ""


def _rows(ids: Ids, kind: ExpertPicture, load: ExpertLoad) -> Html:
    most = max(load.rows.values())
    useful = 2 + (_WIDTH - 12) * kind.useful_rows / most
    written, exported = kind.strategy, _AS_EXPORTED.get(kind.form)
    parts: list[Html] = []
    for line, (form, rows) in enumerate(load.rows.items()):
        y = 6 + 36 * line
        width = (_WIDTH - 12) * rows / most
        parts += [
            el("text", form + _whose(form, written, exported), x=2, y=y + 9, class_="small strong"),
            el(
                "text",
                f"{rows:,}".replace(",", "\u202f") + f" rows, {rows / kind.useful_rows:.1f} \u00d7",
                x=_WIDTH - 8,
                y=y + 9,
                text_anchor="end",
                class_="small soft",
            ),
            el("rect", x=2, y=y + 14, width=max(width, 1), height=12, rx=2, class_="b"),
            el("line", x1=useful, x2=useful, y1=y + 11, y2=y + 29, class_="useful"),
        ]
    told = "; ".join(f"{form}: {rows} rows, {_FORMS[form]}" for form, rows in load.rows.items())
    return el(
        "figure",
        el("h3", f"Rows computed: {load.name} sample"),
        drawing(ids, _WIDTH, 36 * len(load.rows) + 6, f"Rows computed by form, {load.name} sample", told + ".", parts),
        el("figcaption", f"{kind.useful_rows} rows are useful; chunks of {kind.chunk_size}."),
    )
