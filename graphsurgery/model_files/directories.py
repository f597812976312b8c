"""Model directories: which .onnx is meant, and which files belong with it."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from graphsurgery.errors import InputRefusedError, UsageError
from graphsurgery.model_files.locations import unsafe_location
from graphsurgery.model_files.staging import is_temporary
from graphsurgery.model_files.wire import peek_output_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["CONFIG_NAME", "Companions", "find_companions", "find_model", "rename_decoder"]

CONFIG_NAME = "genai_config.json"

# What version control and download tools keep beside a model: not part of it, and possibly as large as it.
_BOOKKEEPING = frozenset({".git", ".cache"})


def find_model(directory: Path, file: str | None = None) -> Path:
    """The model that is meant by ``directory``.

    It is the decoder that genai_config.json names (``model.decoder.filename``), else the only .onnx file with an output
    that looks like logits. Of each file only the names of its graph outputs are read.

    Args:
        directory: an existing directory.
        file: the file to take, relative to ``directory``.

    Raises:
        UsageError: ``file`` is not there; the closest name is given.
        InputRefusedError: there is no .onnx file, or no telling which is meant; the candidates are listed.
    """
    if file is not None:
        return _named(directory, file)
    config = directory / CONFIG_NAME
    decoder = _decoder_filename(config)
    if decoder is not None:
        reason = unsafe_location(decoder)
        if reason is not None:
            raise InputRefusedError(
                f"{config} names the decoder {decoder!r}, which {reason}: correct it, or use --file NAME."
            )
        if os.path.lexists(directory / decoder):
            return directory / decoder
        there = _listed(_onnx_files(directory))
        raise InputRefusedError(
            f"{config} names the decoder {decoder!r}, which is not there ({there}): use --file NAME."
        )
    candidates = _onnx_files(directory)
    if not candidates:
        raise InputRefusedError(f"{directory} holds no .onnx file: give the directory of a model, or an .onnx file.")
    with_logits = [name for name in candidates if _has_logits(directory / name)]
    if len(with_logits) == 1:
        return directory / with_logits[0]
    if with_logits:
        message = f"{directory} holds {len(with_logits)} models with logits ({_listed(with_logits)}): choose with --file NAME."
    else:
        message = (
            f"{directory} holds no model with an output named logits ({_listed(candidates)}): choose with --file NAME."
        )
    raise InputRefusedError(message)


def _named(directory: Path, file: str) -> Path:
    reason = unsafe_location(file)
    if reason is not None:
        raise UsageError(f"--file {file!r} {reason}: give a name relative to {directory}.")
    path = directory / file
    if os.path.lexists(path):
        return path
    candidates = _onnx_files(directory)
    close = difflib.get_close_matches(file, candidates, n=1, cutoff=0.0)
    remedy = f"the closest is {close[0]!r}" if close else "it holds no .onnx file"
    raise UsageError(f"{directory} has no file {file!r}: {remedy}.")


def _onnx_files(directory: Path) -> list[str]:
    """Names of the .onnx files in ``directory``, or else, as on model hubs, in its sub-directories."""
    try:
        top = sorted(entry.name for entry in os.scandir(directory) if _is_onnx(entry.name))
    except OSError as error:
        raise InputRefusedError(f"{directory} cannot be listed ({error.strerror}): check its permissions.") from error
    if top:
        return top
    return sorted(name for name, _ in _walk(directory, _Skipped()) if _is_onnx(PurePosixPath(name).name))


def _is_onnx(name: str) -> bool:
    return name.endswith(".onnx") and not is_temporary(name)


def _has_logits(path: Path) -> bool:
    return any("logits" in name.lower() for name in peek_output_names(path))


def _listed(names: list[str], most: int = 12) -> str:
    if not names:
        return "there is no .onnx file"
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _decoder_filename(config: Path) -> str | None:
    """What the configuration calls the decoder; None where there is no configuration, or none of a single decoder."""
    if not config.exists():
        return None
    filename = _decoder_of(_read_config(config)).get("filename")
    return filename if isinstance(filename, str) else None


def _read_config(config: Path) -> dict[str, Any]:
    try:
        content = json.loads(config.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        message = f"{config} cannot be read as JSON ({error}): correct it, or give the .onnx file itself."
        raise InputRefusedError(message) from error
    return content if isinstance(content, dict) else {}


def _decoder_of(content: dict[str, Any]) -> dict[str, Any]:
    model = content.get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    return decoder if isinstance(decoder, dict) else {}


def rename_decoder(
    config: Path,
    old: str,
    new: str,
    inputs: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    notes: list[str] | None = None,
) -> str | None:
    """The text of ``config`` with the decoder ``old`` called ``new``, and its inputs and outputs by their new names.

    Args:
        config: a genai_config.json.
        old: the model's path relative to the model directory.
        new: its path in the output directory.
        inputs: every input of the model, from the name in ``old`` to the name in ``new``.
        outputs: the same of the outputs.
        notes: takes a sentence for each entry that cannot follow.

    Returns:
        The new text, indented as before; None where the configuration does not name ``old`` or says it all already.
    """
    content = _read_config(config)
    decoder = _decoder_of(content)
    filename = decoder.get("filename")
    if not isinstance(filename, str) or PurePosixPath(filename) != PurePosixPath(old):
        return None
    changed = old != new
    if changed:
        decoder["filename"] = new
    for section, names in (("inputs", inputs), ("outputs", outputs)):
        entries = decoder.get(section)
        if isinstance(entries, dict) and names is not None:
            changed |= _follow(entries, names, f"{config}: model.decoder.{section}", notes if notes is not None else [])
    if not changed:
        return None
    text = config.read_bytes().decode("utf-8-sig")
    indent = re.match(r"\s*\{\r?\n([ \t]+)", text)
    body = json.dumps(content, indent=indent.group(1) if indent else None, ensure_ascii=False)
    body = body + "\n" if text.endswith("\n") else body
    return body.replace("\n", "\r\n") if "\r\n" in text else body


def _follow(entries: dict[str, Any], names: Mapping[str, str], where: str, notes: list[str]) -> bool:
    """Give the entries their new names, in place; an entry with ``%d`` stands for one name a layer."""
    changed = False
    for key, value in entries.items():
        if not isinstance(value, str):
            continue
        renamed = _new_pattern(value, names) if "%d" in value else names.get(value, value)
        if renamed is None:
            notes.append(f"{where}.{key} = {value!r} cannot follow the new names of all layers: edit it")
        elif renamed != value:
            entries[key] = renamed
            changed = True
    return changed


def _new_pattern(pattern: str, names: Mapping[str, str]) -> str | None:
    """The pattern of the new names of what ``pattern`` stands for; None where they have none in common."""
    shape = re.compile(re.escape(pattern).replace("%d", r"(\d+)", 1))
    layers = [(found[1], new) for old, new in names.items() if (found := shape.fullmatch(old))]
    if not layers:
        return pattern
    number, first = layers[0]
    for found in re.finditer(rf"(?<!\d){number}(?!\d)", first):
        candidate = f"{first[: found.start()]}%d{first[found.end() :]}"
        if all(candidate.replace("%d", layer, 1) == new for layer, new in layers):
            return candidate
    return None


@dataclasses.dataclass(frozen=True)
class Companions:
    """The files of a model directory that go along with the model.

    Attributes:
        files: name relative to the directory, and path, sorted.
        notes: what was left out, and why.
    """

    files: tuple[tuple[str, Path], ...]
    notes: tuple[str, ...]


@dataclasses.dataclass
class _Skipped:
    notes: list[str] = dataclasses.field(default_factory=list)


def find_companions(directory: Path, exclude: set[Path], output: Path) -> Companions:
    """Every regular file below ``directory``, links to files included, but for ``exclude`` and what is in ``output``.

    Directories of version control and of download tools are left out, and so are linked directories and files that are
    not regular; the notes name them.

    Args:
        directory: the model directory.
        exclude: the model and its data files, spelled as ``directory`` joined with a relative path.
        output: the output directory, which may lie within ``directory``.
    """
    skipped = _Skipped()
    files = tuple(sorted(item for item in _walk(directory, skipped, output) if item[1] not in exclude))
    return Companions(files, tuple(skipped.notes))


def _walk(directory: Path, skipped: _Skipped, output: Path | None = None) -> Iterator[tuple[str, Path]]:
    avoid = os.path.realpath(output) if output is not None else None

    def refuse(error: OSError) -> None:
        raise InputRefusedError(
            f"{error.filename} cannot be listed ({error.strerror}): check its permissions."
        ) from error

    for top, directories, names in os.walk(directory, onerror=refuse):
        here = Path(top)
        descend = []
        for name in sorted(directories):
            path = here / name
            if name in _BOOKKEEPING or path.is_symlink():
                skipped.notes.append(
                    f"{path} was left out: {'a linked' if path.is_symlink() else 'not a model'} directory"
                )
            elif not is_temporary(name) and os.path.realpath(path) != avoid:
                descend.append(name)
        directories[:] = descend
        for name in sorted(names):
            path = here / name
            if is_temporary(name):
                continue
            if _is_regular(path):
                yield path.relative_to(directory).as_posix(), path
            else:
                skipped.notes.append(f"{path} was left out: not a regular file")


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False  # a link that leads nowhere
