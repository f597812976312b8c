"""Errors that users meet: each says who is at fault, names the file, tensor or node, and gives the remedy.

The command line turns an error into one line on stderr and its ``exit_code``; in Python they are ordinary
exceptions under :class:`GraphSurgeryError`.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "CannotCheckError",
    "DifferenceError",
    "GraphSurgeryError",
    "InputRefusedError",
    "InternalError",
    "NothingChangedError",
    "SaveError",
    "UsageError",
]


class GraphSurgeryError(Exception):
    """Base of every error that graphsurgery raises on purpose; ``str(error)`` is one complete sentence."""

    exit_code: ClassVar[int] = 70


class DifferenceError(GraphSurgeryError):
    """Two models that should compute the same do not, or a gate failed."""

    exit_code = 1


class UsageError(GraphSurgeryError):
    """The request cannot be honoured: an unknown name, a wrong option, a site id that matches nothing."""

    exit_code = 2


class InputRefusedError(GraphSurgeryError):
    """The input file is unreadable, unsafe or unsupported."""

    exit_code = 3


class NothingChangedError(GraphSurgeryError):
    """``--require-change`` was asked for and no pass changed the model."""

    exit_code = 4


class CannotCheckError(GraphSurgeryError):
    """The equivalence of two models could not be checked (a runtime or data file is missing, an op is unknown)."""

    exit_code = 5


class SaveError(GraphSurgeryError):
    """The output could not be written; what existed before is untouched."""

    exit_code = 3


class InternalError(GraphSurgeryError):
    """A fault of graphsurgery itself: an invariant was broken by a pass."""
