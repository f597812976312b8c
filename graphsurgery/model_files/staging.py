"""Files that appear all at once or not at all.

New files are made under temporary names beside their place and renamed at the commit, the model last: its rename is the
commit. What is there is never written to, so that a failure at any moment leaves it as it was; a process that is killed
leaves at most a temporary, recognisable by its name and harmless.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from graphsurgery.errors import SaveError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Staging", "is_temporary", "write_durably"]

_MARK = "graphsurgery-"
_TEMPORARY = re.compile(r"\..*\.graphsurgery-[0-9a-f]{8}\.tmp(\.onnx)?")


def is_temporary(name: str) -> bool:
    """Whether a file or directory of this name is what a killed save left behind."""
    return _TEMPORARY.fullmatch(name) is not None


@contextlib.contextmanager
def write_durably(path: Path) -> Iterator[int]:
    """A descriptor of the staged file ``path``, which is on the disk when the context ends; its directories are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Staging:
    """The files of one save.

    Attributes:
        directory: where they will be.
        model_path: the temporary .onnx, loadable in place.
    """

    def __init__(self, directory: Path, model: str, *, whole: bool, shares_data: bool) -> None:
        """Choose temporary names; nothing is written yet.

        Args:
            directory: where the files will be.
            model: path of the .onnx relative to it.
            whole: ``directory`` does not exist and appears with all its files by one rename.
            shares_data: the model refers to data that is in ``directory`` already, so that it must be staged there.
        """
        token = f".{_MARK}{secrets.token_hex(4)}.tmp"
        self.directory = directory
        self._model = model
        self._whole = whole
        # A directory that appears as a whole is staged beside its place, everything else within it.
        self._root = (
            directory.parent if whole else directory
        ) / f".{(directory if whole else Path(model)).name}{token}"
        self._direct = shares_data and not whole
        beside = (directory / model).parent / f".{Path(model).name}{token}.onnx"
        self.model_path = beside if self._direct else self._root / model
        self._pending: list[str] = []
        self._placed: list[Path] = []
        self._replaced: list[tuple[Path, Path]] = []
        self._made_directories: list[Path] = []

    def new_data(self, location: str) -> Path:
        """Where to write the new data file that the staged model calls ``location``, relative to the model."""
        relative = (Path(self._model).parent / location).as_posix()
        if not self._direct:
            return self.new_file(relative)
        # The staged model must find shared and new data in one directory: the new file gets its last name at once.
        path = self.directory / relative
        self._make_directories(path.parent)
        path.touch(exist_ok=False)
        self._placed.append(path)
        return path

    def new_file(self, relative: str) -> Path:
        """Where to write the file that will be ``relative`` in the directory."""
        self._pending.append(relative)
        return self._root / relative

    def commit(self, *, replace: bool) -> None:
        """Put the files in place, the model last.

        Args:
            replace: files that exist may be replaced.

        Raises:
            SaveError: a file has appeared in the place of one of them.
            OSError: a rename failed.
        """
        if self._whole:
            # POSIX renames over an empty directory that appeared meanwhile; over any other it fails.
            os.rename(self._root, self.directory)
            _sync_directory(self.directory.parent)
            return
        for relative in self._pending:
            self._put(self._root / relative, self.directory / relative, replace=replace)
        self._put(self.model_path, self.directory / self._model, replace=replace)
        self._placed.clear()
        self._replaced.clear()
        self._made_directories.clear()
        _sync_directory((self.directory / self._model).parent)
        self.discard()

    def _put(self, temporary: Path, path: Path, *, replace: bool) -> None:
        self._make_directories(path.parent)
        if not os.path.lexists(path):
            self._placed.append(path)
        elif not replace:
            raise SaveError(f"{path} appeared while the output was being made: choose another output, or --force.")
        elif temporary != self.model_path:
            self._keep_old(path)
        os.replace(temporary, path)

    def _keep_old(self, path: Path) -> None:
        """Keep a second name of a file that is about to be replaced, to put it back if a later step fails."""
        kept = self._root / f".replaced-{len(self._replaced)}"
        try:
            os.link(path, kept, follow_symlinks=False)
        except OSError:
            # No hard links here: a copy costs time, nothing else.
            shutil.copy2(path, kept, follow_symlinks=False)
        self._replaced.append((kept, path))

    def _make_directories(self, directory: Path) -> None:
        missing = []
        while not directory.exists():
            missing.append(directory)
            directory = directory.parent
        for path in reversed(missing):
            path.mkdir()
            self._made_directories.append(path)

    def discard(self) -> None:
        """Undo what is not committed and remove the temporaries."""
        for kept, path in reversed(self._replaced):
            os.replace(kept, path)
        # The error that led here matters more than one of tidying up: a temporary that stays is harmless.
        for path in (*self._placed, self.model_path):
            with contextlib.suppress(OSError):
                path.unlink()
        for path in reversed(self._made_directories):
            with contextlib.suppress(OSError):
                path.rmdir()
        shutil.rmtree(self._root, ignore_errors=True)
        self._replaced.clear()
        self._placed.clear()
        self._made_directories.clear()


def _sync_directory(directory: Path) -> None:
    """Make a rename durable where the system can; it is done in any case, so that failing here is no failure."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
