"""New files and directories → in the place of old ones; a kill leaves the old or the new, never half."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def replace_text(path: str | Path, text: str) -> None:
    """Write a text file beside `path` and rename it; its directory is made when it is not there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}.writing")
    try:
        writing.write_text(text, encoding="utf-8")
        os.replace(writing, path)
    finally:
        writing.unlink(missing_ok=True)


def replace_directory(writing: Path, root: Path) -> None:
    """Rename `writing` to `root`; what was there lies at `.NAME.old` between the two renames, then is gone.

    Args:
        writing: the finished new directory, on the same file system.
        root: a directory that may be deleted, or nothing.
    """
    old = _old(root)
    shutil.rmtree(old, ignore_errors=True)
    if root.exists():
        root.rename(old)
    writing.rename(root)
    shutil.rmtree(old, ignore_errors=True)


def restore_directory(root: Path) -> None:
    """Bring back the old directory of a replacement that a kill cut between its two renames."""
    old = _old(root)
    if old.is_dir() and not root.exists():
        old.rename(root)


def _old(root: Path) -> Path:
    return root.with_name(f".{root.name}.old")
