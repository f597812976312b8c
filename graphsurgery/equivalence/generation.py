"""Decoding prompts with one party: greedily, or with tokens that are forced, each file by its own convention.

A model that is fed the tokens of the reference has, up to the first token that it would have chosen otherwise, computed
exactly what it computes when it decodes greedily. So one run with forced tokens tells both: where its own greedy tokens
first differ, and its logits and caches behind that.

Alphabet: B batch, S query length, T columns, N slots of a fixed-size cache, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx

from graphsurgery.equivalence.calls import Call
from graphsurgery.equivalence.drawing import Draw
from graphsurgery.equivalence.feeds import Sizes
from graphsurgery.equivalence.handover import Manner, columns_of, placed
from graphsurgery.equivalence.kept import Kept, kept_of
from graphsurgery.equivalence.roles import Role
from graphsurgery.equivalence.running import RunError, Session
from graphsurgery.equivalence.tape import Side, Tape
from graphsurgery.errors import CannotCheckError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphsurgery.equivalence.decoding import Decoder
    from graphsurgery.equivalence.feeds import Array
    from graphsurgery.equivalence.handover import Cache
    from graphsurgery.equivalence.layouts import Layout, Party, Prompt
    from graphsurgery.equivalence.running import Model, Outputs, Settings

__all__ = ["CallRecord", "Job", "Trace", "run_party"]


@dataclasses.dataclass(frozen=True)
class Job:
    """One prompt for one party.

    Attributes:
        number: distinguishes what is drawn for each.
        prompt: rows of token ids.
        party: the files that decode it.
        layout: how they are fed it.
        tokens: how many to decode for each row.
        forced: int64 ``[B, tokens]``, fed in place of the party's own; None to decode greedily.
        table: float ``[V, H]``, where a model takes hidden states.
        seed: what inputs of unknown meaning are drawn from.
        vocabulary: ids from here on are not chosen; None for no limit.
    """

    number: int
    prompt: Prompt
    party: Party
    layout: Layout
    tokens: int
    forced: Array | None = None
    table: Array | None = None
    seed: int = 0
    vocabulary: int | None = None


@dataclasses.dataclass(frozen=True)
class CallRecord:
    """One call.

    Attributes:
        columns: the column of the prompt or step that each place of the call stands for, int64 ``[B, S]``; -1 where a
            row was padded for this call alone, or behind its tokens.
        routed: the routers' values among its outputs.
        feed: the inputs that tell which rows it kept.
    """

    columns: Array
    routed: Outputs
    feed: dict[str, Array]


@dataclasses.dataclass
class Trace:
    """What decoding one prompt gave.

    Attributes:
        own: the tokens that the logits ask for, int64 ``[B, tokens]``.
        logits: ``[B, V]`` for each token.
        picked: the column that gave each token's logits, int64 ``[B, tokens]``.
        calls: in order.
        kept: what each cache holds at the end, by key.
        failure: why it was not decoded to the end.
    """

    own: list[Array] = dataclasses.field(default_factory=list)
    logits: list[Array] = dataclasses.field(default_factory=list)
    picked: list[Array] = dataclasses.field(default_factory=list)
    calls: list[CallRecord] = dataclasses.field(default_factory=list)
    kept: dict[str, Kept] = dataclasses.field(default_factory=dict)
    failure: str | None = None


class _Decoding:
    """One prompt on its way through one or two files."""

    def __init__(self, job: Job, routed: frozenset[str]) -> None:
        self.job, self.party, self.routed = job, job.party, routed
        self.tape = Tape.of(job.prompt.rows, job.layout.width, job.layout.side)
        self.state: dict[str, Array] = {}
        self.trace = Trace()

    def read_prompt(self, session: Session) -> None:
        """Feed the prompt; the first token."""
        last = self.tape.last_real(self.tape.width)
        picked: list[Array | None] = [None] * self.tape.batch
        for start, stop in self.job.layout.cuts:
            logits = self._call(session, self.party.prompt, start, stop, last)
            for row in np.flatnonzero((last >= start) & (last < stop)):
                picked[row] = logits[row]
        self._note(np.stack([row for row in picked if row is not None]), last)

    def take_steps(self, session: Session) -> None:
        """Feed token after token, and see what the caches hold at the end."""
        for step in range(1, self.job.tokens):
            forced = self.job.forced
            chosen = self.trace.own[-1] if forced is None else forced[:, step - 1]
            self.tape = self.tape.then(chosen)
            start, stop = self.tape.width - 1, self.tape.width
            wanted = np.full(self.tape.batch, start, dtype=np.int64)
            self._note(self._call(session, self.party.step, start, stop, wanted), wanted)

    def finish(self) -> None:
        """See what the caches hold."""
        file = self.party.step if self.job.tokens > 1 else self.party.prompt
        side: Side | None = None
        if self.party.anew:
            side = self._side_anew()
        elif file.packed:
            side = "right"
        for cache in file.caches:
            if cache.key in self.state:
                self.trace.kept[cache.key] = kept_of(cache, self.state[cache.key], self.tape, side)
        self.state.clear()

    def _note(self, logits: Array, picked: Array) -> None:
        limit = self.job.vocabulary
        self.trace.logits.append(logits)
        self.trace.own.append(np.argmax(logits[:, :limit].astype(np.float64), axis=1))
        self.trace.picked.append(picked)

    def _call(self, session: Session, file: Decoder, start: int, stop: int, wanted: Array) -> Array:
        """Run one call and hand its caches on; the logits ``[B, V]`` of the rows ``wanted``, clamped into the call."""
        tape, asked = self.tape, (wanted >= start) & (wanted < stop)
        columns = np.broadcast_to(np.arange(start, stop), (tape.batch, stop - start))
        # Padding behind the tokens of a row may be fed otherwise to the other model: it stands for no column.
        columns = np.where(_is_behind(tape, start, stop), -1, columns)
        if self.party.anew:
            # No cache asks for columns: rows are laid out anew, without gaps.
            tape = tape.relaid(stop, file.length or int(tape.counts(stop).max()), self._side_anew())
            columns = np.full((tape.batch, tape.width), -1)
            columns[tape.real] = np.nonzero(self.tape.real)[1]
            wanted = tape.last_real(tape.width)
            start, stop = 0, tape.width
        call = Call(
            file.signature,
            tape,
            start,
            stop,
            start if file.filled is None else file.filled,
            (file.slots or self.job.layout.slots) if _has_slots(file) else 0,
            wanted,
            file.packed,
            self._pad_position(file),
            self.job.table,
            self.job.seed,
            self.job.number,
            file.filled is not None,
        )
        feed = self._feed(file, call)
        outputs = session.run(feed)
        for cache in file.caches:
            if cache.output in outputs:
                self.state[cache.key] = columns_of(cache, outputs[cache.output], stop)
        read = {contract.source for contract in file.contracts} | {c.sequence for c in file.contracts}
        self.trace.calls.append(
            CallRecord(
                columns,
                {name: outputs[name] for name in self.routed if name in outputs},
                {name: feed[name] for name in read if name is not None and name in feed},
            )
        )
        return _picked(file, outputs, feed, np.where(asked, wanted - start, -1), stop - start)

    def _side_anew(self) -> Side:
        """The side on which rows are padded that are laid out anew for each call."""
        sides = self.party.sides
        return self.job.layout.side if self.job.layout.side in sides or not sides else sides[0]

    def _pad_position(self, file: Decoder) -> int | None:
        """-1 where the rows that are kept are told by positions alone."""
        return -1 if any(contract.index == "position" for contract in file.contracts) else None

    def _feed(self, file: Decoder, call: Call) -> dict[str, Array]:
        caches = {cache.input.name: cache for cache in file.fed if cache.input is not None}
        feed: dict[str, Array] = {}
        for spec in file.signature.inputs:
            cache = caches.get(spec.name)
            if cache is None or (cache.key not in self.state and spec.role in (Role.PAST_LENGTH, Role.WINDOW)):
                feed[spec.name] = call.array(spec, file.drawn_as.get(spec.name, spec.name))
                continue
            size = _fed_size(cache, call.slots)
            if cache.key in self.state:
                feed[spec.name] = placed(cache, self.state[cache.key], size)
                continue
            if call.start and cache.manner not in (Manner.COUNTER, Manner.CONSTANT):
                raise CannotCheckError(
                    f"{file.path} takes {cache.key} as input {spec.name}, which {self.party.prompt.path} does not return."
                )
            draw = Draw(file.signature, Sizes(call.tape.batch, 1, 0, "none", call.slots), 0, 0, None)
            shape = list(draw.shape(spec))
            if cache.counts_columns and cache.axis is not None:
                shape[cache.axis] = size or 0
            first = call.start if cache.manner is Manner.COUNTER else 0
            feed[spec.name] = np.full(shape, first, dtype=onnx.helper.tensor_dtype_to_np_dtype(spec.elem_type))
        return feed


def _has_slots(file: Decoder) -> bool:
    return any(cache.manner is Manner.SLOTS for cache in file.fed)


def _fed_size(cache: Cache, slots: int) -> int | None:
    if cache.manner not in (Manner.FILL, Manner.SLOTS) or cache.input is None or cache.axis is None:
        return None
    dim = cache.input.dims[cache.axis]
    return dim if isinstance(dim, int) else slots


def _is_behind(tape: Tape, start: int, stop: int) -> Array:
    """Which places of a call are padding behind the tokens of their row, bool ``[B, S]``."""
    real = tape.real[:, :stop]
    behind: Array = ~real & (np.cumsum(real, axis=1) > 0)
    return behind[:, start:]


def _picked(file: Decoder, outputs: Outputs, feed: dict[str, Array], places: Array, length: int) -> Array:
    """Logits ``[B, V]`` of one place ``0 <= place < length`` in each row; of any where the place is -1."""
    logits, held = file.rows(outputs, feed, length)
    picked: list[Array] = []
    for row, place in enumerate(places):
        found = np.flatnonzero((held[row] == place) | (held[row] == -1) | (place == -1))
        if not len(found):
            name, kept = file.logits.name, sorted(set(held[row].tolist()))
            raise RunError(f"{name} holds the rows {kept} of this call, not row {int(place)}, the last token")
        picked.append(logits[row, found[-1]])
    return np.stack(picked)


def run_party(
    jobs: Sequence[Job],
    models: tuple[Model, Model],
    settings: Settings,
    routed: frozenset[str],
    done: Callable[[Job], None],
) -> list[Trace]:
    """Decode all prompts with one party; one file is open at a time.

    Args:
        jobs: one for each prompt, all with one party's files.
        models: these files, as they run.
        settings: how.
        routed: outputs of routers, to be recorded.
        done: told of each prompt.

    Raises:
        LoadError: a file cannot be loaded at all.
        CannotCheckError: the files of the party do not go together.
    """
    under_way = [_Decoding(job, routed) for job in jobs]
    split = any(job.party.split and job.tokens > 1 for job in jobs)
    with Session(models[0], settings) as session:
        for decoding in under_way:
            _attempt(decoding, decoding.read_prompt, session)
            if not split:
                _attempt(decoding, decoding.take_steps, session)
                decoding.finish()
                done(decoding.job)
    if split:
        with Session(models[1], settings) as session:
            for decoding in under_way:
                _attempt(decoding, decoding.take_steps, session)
                decoding.finish()
                done(decoding.job)
    return [decoding.trace for decoding in under_way]


def _attempt(decoding: _Decoding, part: Callable[[Session], None], session: Session) -> None:
    if decoding.trace.failure is not None:
        return
    try:
        part(session)
    except RunError as error:
        decoding.trace.failure = str(error)
