"""A model made ready to be measured: what it is fed is written into a folder from which its process reads it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from graphsurgery.benching.bench_report import NotMeasured
from graphsurgery.benching.measuring import Contender

if TYPE_CHECKING:
    from pathlib import Path

    from graphsurgery.benching.subjects import Subject
    from graphsurgery.equivalence.feeds import Sizes

__all__ = ["write_contender"]


def write_contender(subject: Subject, sizes: Sizes | str, folder: Path, seed: int, row: int) -> Contender:
    """Write what ``subject`` is fed.

    Args:
        subject: the model.
        sizes: of its inputs, or why it does not take them (as :func:`graphsurgery.benching.fitting.fit` says it).
        folder: is made and filled, unless the model cannot be measured.
        seed: what arrays are drawn from.
        row: what is fed where rows are chosen at run time; negative from the end.
    """
    if isinstance(sizes, str):
        return Contender(subject.path, None, NotMeasured("failed" if subject.obstacle else "not applicable", sizes))
    folder.mkdir()
    names = {}
    for number, (name, array) in enumerate(subject.feed(sizes, seed, row).items()):
        names[name] = f"{number}.npy"
        np.save(folder / names[name], array)
    (folder / "names.json").write_text(json.dumps(names), encoding="utf-8")
    return Contender(subject.path, folder)
