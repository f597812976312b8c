"""The files of both sides as they decode and as they run: for the prompt, and for the steps behind it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from graphsurgery.equivalence.decoding import Decoder, read_decoder
from graphsurgery.equivalence.layouts import Party
from graphsurgery.equivalence.pairing import renamed_inputs, stated_contracts, with_row_inputs
from graphsurgery.equivalence.preparing import Prepared, prepare
from graphsurgery.equivalence.roles import Role
from graphsurgery.equivalence.signature import read_signature

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    import onnx

    from graphsurgery.equivalence.routers import Router
    from graphsurgery.equivalence.running import Model, Settings

__all__ = ["Contestants", "Files", "read_contestants", "takes_hidden_states"]


@dataclasses.dataclass(frozen=True)
class Files:
    """Paths: for the prompt, and for the steps behind it (None where that is the same file)."""

    reference: Path
    rewritten: Path
    decode_reference: Path | None = None
    decode: Path | None = None


@dataclasses.dataclass(frozen=True)
class Contestants:
    """Both sides.

    Attributes:
        parties: reference and rewritten.
        prompt: the files for the prompt, ready to run.
        step: the files for the steps; the same object where no side has two files.
    """

    parties: tuple[Party, Party]
    prompt: Prepared
    step: Prepared

    @property
    def decoders(self) -> tuple[Decoder, ...]:
        """All files, as decoders."""
        return tuple(file for party in self.parties for file in (party.prompt, party.step))

    @property
    def settings(self) -> Settings:
        """How all of them run."""
        both = (self.prompt.settings, self.step.settings)
        return dataclasses.replace(
            both[0], threads=min(each.threads for each in both), prepack=all(each.prepack for each in both)
        )

    @property
    def notes(self) -> list[str]:
        """What was assumed."""
        return list(dict.fromkeys(self.prompt.notes + self.step.notes))

    @property
    def warnings(self) -> list[str]:
        """What deserves a look."""
        return list(dict.fromkeys(self.prompt.warnings + self.step.warnings))

    @property
    def routers(self) -> tuple[tuple[tuple[Router, Router], ...], tuple[tuple[Router, Router], ...]]:
        """Matched routers for the prompt and for the steps."""
        return self.prompt.routers, self.step.routers

    def routed(self, place: int) -> frozenset[str]:
        """Values of the routers of one side, which its traced files return."""
        pairs = [pair for routers in self.routers for pair in routers]
        if place == 0:
            return frozenset(name for router, _ in pairs for name in (router.scores, router.indices))
        return frozenset(router.indices for _, router in pairs)

    def models(self, place: int, *, traced: bool) -> tuple[Model, Model]:
        """The files of one side, as they run."""
        prompt, step = (each.traced if traced else each.models for each in (self.prompt, self.step))
        if self.parties[place].split:
            return prompt[place], step[place]
        # One file for both: it returns what is compared in either.
        both = step if traced and not self.prompt.routers else prompt
        return both[place], both[place]


def read_contestants(files: Files, memory: int | None, stack: ExitStack) -> Contestants:
    """Read all files and how they decode.

    Args:
        files: paths.
        memory: bytes that may be used; None for what is available.
        stack: keeps temporary files for as long as the models run.

    Raises:
        InputRefusedError: a file is no model.
        CannotCheckError: a file cannot run, or does not decode.
    """
    prompt = step = prepare(files.reference, files.rewritten, memory, stack)
    if files.decode_reference is not None or files.decode is not None:
        step = prepare(files.decode_reference or files.reference, files.decode or files.rewritten, memory, stack)
    origin = prompt.protos[0]
    ours = _decoder(files.reference, origin, origin)
    theirs = _decoder(files.rewritten, prompt.protos[1], origin)
    parties = (
        Party(
            ours, ours if files.decode_reference is None else _decoder(files.decode_reference, step.protos[0], origin)
        ),
        Party(theirs, theirs if files.decode is None else _decoder(files.decode, step.protos[1], origin)),
    )
    return Contestants(parties, prompt, step)


def _decoder(path: Path, proto: onnx.ModelProto, origin: onnx.ModelProto) -> Decoder:
    signature = read_signature(proto)
    told = renamed_inputs(origin, proto)
    known = {spec.name for spec in read_signature(origin).inputs} | set(told)
    # An input that only this file has may choose rows.
    old = dataclasses.replace(signature, inputs=tuple(spec for spec in signature.inputs if spec.name in known))
    return read_decoder(str(path), proto, with_row_inputs(signature, old, stated_contracts(proto)), told)


def takes_hidden_states(decoder: Decoder) -> bool:
    """Whether a file takes hidden states in place of token ids."""
    return bool(decoder.signature.having(Role.EMBEDS)) and not decoder.signature.having(Role.TOKENS)
