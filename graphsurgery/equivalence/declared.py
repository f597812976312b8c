"""Whether outputs have the dims that a model declares: ONNX Runtime does not mind when they have not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphsurgery.equivalence.dims import evaluate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphsurgery.equivalence.dims import Dim
    from graphsurgery.equivalence.feeds import Feed
    from graphsurgery.equivalence.pairing import Pair
    from graphsurgery.equivalence.roles import Signature
    from graphsurgery.equivalence.running import Store

__all__ = ["declared_warnings"]


def declared_warnings(
    signatures: tuple[Signature, Signature],
    letters: Mapping[str, str],
    pairs: Sequence[Pair],
    feeds: Sequence[tuple[int, Feed]],
    stores: tuple[Store, Store],
) -> list[str]:
    """One sentence for each output of the rewritten model whose declared dims do not hold, where the reference's do.

    Args:
        signatures: of the reference and of the rewritten model.
        letters: what dim symbols of either stand for.
        pairs: outputs.
        feeds: number and feed, of those that both ran on; sizes of given feeds are not fully known, nor looked at.
        stores: outputs of both.
    """
    ours, theirs = ({output.name: output.dims for output in each.outputs} for each in signatures)
    warnings: list[str] = []
    for pair in pairs:
        for number, feed in feeds:
            sizes = feed.sizes.letters()
            symbols = {symbol: sizes[letter] for symbol, letter in letters.items()}
            reference = stores[0].value(number, pair.reference)
            if feed.seed is None or not _fits(ours.get(pair.reference), reference, symbols):
                continue
            value = stores[1].value(number, pair.rewritten)
            if not _fits(theirs.get(pair.rewritten), value, symbols):
                dims = ", ".join(str(dim) for dim in theirs[pair.rewritten] or ())
                warnings.append(
                    f"output {pair.rewritten} declares [{dims}] but has shape {list(value.shape)} (feed {feed.name})"
                )
                break
    return warnings


def _fits(dims: tuple[Dim, ...] | None, value: object, symbols: Mapping[str, int]) -> bool:
    if dims is None or not isinstance(value, np.ndarray):
        return True
    if len(dims) != value.ndim:
        return False
    return all(
        (expected := evaluate(dim, symbols)) is None or expected == size
        for dim, size in zip(dims, value.shape, strict=True)
    )
