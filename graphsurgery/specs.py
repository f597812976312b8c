"""The textual form of a pass: ``name`` or ``name{option=value,...}``.

A value is a bare word (``8``, ``auto``, ``256MiB``, ``1.5``), a quoted string (``'S=4096,P=0'``) or a list
(``[0-3,sliding]``). :func:`parse_spec` and :func:`format_spec` are inverse to each other; what a value means is
decided by the pass that takes it (:mod:`graphsurgery.pass_base`).
"""

from __future__ import annotations

import dataclasses
import re
from typing import TypeAlias

from graphsurgery.errors import UsageError

__all__ = ["OptionText", "PassSpec", "format_spec", "parse_spec", "split_specs"]

OptionText: TypeAlias = "str | tuple[str, ...]"

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]*")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_BARE = re.compile(r"[^\s,{}\[\]'\"=]+")


@dataclasses.dataclass(frozen=True)
class PassSpec:
    """A pass by name, with the options that were given, as text."""

    name: str
    options: tuple[tuple[str, OptionText], ...] = ()

    def __str__(self) -> str:
        return format_spec(self)


class _Reader:
    """A cursor over the text of one or several specs."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, expected: str) -> UsageError:
        rest = self.text[self.at :]
        where = f"at {rest!r}" if rest else "at the end"
        return UsageError(
            f"Cannot read pass spec {self.text!r}: expected {expected} {where}; "
            "write name or name{option=value,...}, with quotes around values that hold commas."
        )

    def skip_space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def take(self, literal: str) -> bool:
        self.skip_space()
        if not self.text.startswith(literal, self.at):
            return False
        self.at += len(literal)
        return True

    def match(self, pattern: re.Pattern[str], expected: str) -> str:
        self.skip_space()
        found = pattern.match(self.text, self.at)
        if found is None:
            raise self.fail(expected)
        self.at = found.end()
        return found.group()

    def scalar(self) -> str:
        self.skip_space()
        quote = self.text[self.at : self.at + 1]
        if quote not in ("'", '"') or not quote:
            return self.match(_BARE, "a value")
        end = self.at + 1
        pieces: list[str] = []
        while end < len(self.text) and self.text[end] != quote:
            if self.text[end] == "\\" and end + 1 < len(self.text):
                end += 1
            pieces.append(self.text[end])
            end += 1
        if end >= len(self.text):
            raise self.fail(f"a closing {quote}")
        self.at = end + 1
        return "".join(pieces)

    def value(self) -> OptionText:
        if not self.take("["):
            return self.scalar()
        items: list[str] = []
        while not self.take("]"):
            if items and not self.take(","):
                raise self.fail("',' or ']'")
            items.append(self.scalar())
        return tuple(items)

    def spec(self) -> PassSpec:
        name = self.match(_NAME, "a pass name")
        options: dict[str, OptionText] = {}
        if self.take("{"):
            while not self.take("}"):
                if options and not self.take(","):
                    raise self.fail("',' or '}'")
                key = self.match(_KEY, "an option name").replace("-", "_")
                if not self.take("="):
                    raise self.fail("'='")
                if key in options:
                    raise UsageError(f"Option {key!r} is given twice in pass spec {self.text!r}; keep one.")
                options[key] = self.value()
        return PassSpec(name, tuple(options.items()))


def parse_spec(text: str) -> PassSpec:
    """Read one spec.

    Raises:
        UsageError: the text is not of the form ``name`` or ``name{option=value,...}``.

    Example:
        >>> parse_spec("prune-last-token{index=mask,keep=2}").options
        (('index', 'mask'), ('keep', '2'))
    """
    specs = split_specs(text)
    if len(specs) != 1:
        raise UsageError(f"Expected one pass spec, got {len(specs)} in {text!r}; give each its own -p.")
    return specs[0]


def split_specs(text: str) -> tuple[PassSpec, ...]:
    """Read one or several specs separated by commas."""
    reader = _Reader(text)
    specs = [reader.spec()]
    while reader.take(","):
        specs.append(reader.spec())
    reader.skip_space()
    if reader.at != len(text):
        raise reader.fail("',' or the end")
    return tuple(specs)


def format_spec(spec: PassSpec) -> str:
    """The shortest text that :func:`parse_spec` reads back as ``spec``."""
    if not spec.options:
        return spec.name
    return f"{spec.name}{{{','.join(f'{key}={_format_value(value)}' for key, value in spec.options)}}}"


def _format_value(value: OptionText) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(_format_value(item) for item in value)}]"
    if _BARE.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
