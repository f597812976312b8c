"""What decoding found, as data and as text: prompts, and where the tokens of both models first differ."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

__all__ = ["PromptReport", "TokenDifference", "TopTwo", "print_differences"]


@dataclasses.dataclass(frozen=True)
class PromptReport:
    """A prompt that both models decoded.

    Attributes:
        name: short and unique.
        lengths: tokens of each row.
        padding: ``none``, ``left`` or ``right``, as the reference was fed.
        calls: calls of the reference that took the prompt.
        tokens: what the reference decoded, for each row; the rewritten model was fed them too.
    """

    name: str
    lengths: tuple[int, ...]
    padding: str
    calls: int
    tokens: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class TopTwo:
    """The two best tokens of one model, their logits, and the gap between these."""

    best: int
    best_logit: float
    second: int
    second_logit: float
    gap: float


@dataclasses.dataclass(frozen=True)
class TokenDifference:
    """Where the tokens of one row first differ.

    Attributes:
        prompt: the prompt.
        row: batch row.
        token: number of the token, 0 for the one that the prompt gives.
        level: graph optimisation level of both runs.
        reference: of the reference.
        rewritten: of the rewritten model, fed the reference's tokens before this one.
        gap: how far the token that the rewritten model chose lies behind in the reference.
        limit: a gap below it is a tie: it is the tolerance of these logits.
        tie: it is one, and no difference.
    """

    prompt: str
    row: int
    token: int
    level: Literal["disabled", "default"]
    reference: TopTwo
    rewritten: TopTwo
    gap: float
    limit: float
    tie: bool


def print_differences(differences: Sequence[TokenDifference], console: Console) -> None:
    """Print both models' two best tokens side by side, where their tokens first differ."""
    from rich.table import Table

    for each in differences:
        level = ", at ONNX Runtime's default level" if each.level == "default" else ""
        console.print(
            f"prompt {each.prompt}, row {each.row}, token {each.token}{level}:",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        table = Table("", "reference", "rewritten")
        both = (each.reference, each.rewritten)
        table.add_row("best", *(f"{top.best}: {top.best_logit:.7g}" for top in both))
        table.add_row("second", *(f"{top.second}: {top.second_logit:.7g}" for top in both))
        table.add_row("gap", *(f"{top.gap:.2e}" for top in both))
        console.print(table)
        verdict = (
            f"tie flip: in the reference {each.rewritten.best} lies {each.gap:.2e} behind {each.reference.best},"
            f" below the tolerance {each.limit:.2e}"
            if each.tie
            else f"no tie: in the reference {each.rewritten.best} lies {each.gap:.2e} behind {each.reference.best},"
            f" tolerance {each.limit:.2e}"
        )
        console.print(verdict, markup=False, highlight=False, soft_wrap=True)
