"""Bad images met by many processes → one list of a run, `bad_images.jsonl`."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Collection
from pathlib import Path

BAD_IMAGES = "bad_images.jsonl"


def bad_line(bad: tuple[str, str]) -> str:
    """(image id, reason) as a line of `bad_images.jsonl`."""
    return json.dumps({"id": bad[0], "reason": bad[1]}, ensure_ascii=False) + "\n"


class BadImageLog:
    """The bad images of a run whose loader workers and ranks each read a share of the images.

    Every process appends to a part of its own (nothing is shared, so network file systems are no trap), and
    the run calls `merge` once at its end, on one rank, after the others arrived.
    """

    def __init__(self, directory: str | Path) -> None:
        """`directory` is the run's; `bad_images.jsonl` and, while the run lasts, its parts lie in it."""
        self.directory = Path(directory)
        self._part: tuple[int, Path] | None = None

    def add(self, image_id: str, reason: str) -> None:
        """Write one bad image down, at once: a killed run has its list too."""
        # A forked worker inherits the parent's part: the process id tells.
        if self._part is None or self._part[0] != os.getpid():
            self.directory.mkdir(parents=True, exist_ok=True)
            name = f"{BAD_IMAGES}.{uuid.uuid4().hex}.part"
            self._part = os.getpid(), self.directory / name
        with open(self._part[1], "a", encoding="utf-8") as file:
            file.write(bad_line((image_id, reason)))

    def merge(self, good: Collection[str] = ()) -> list[tuple[str, str]]:
        """Join the parts, and what an earlier merge wrote, into `bad_images.jsonl`, sorted, each id once.

        Args:
            good: ids that an earlier run listed and that have been repaired since.

        Returns:
            (image id, reason) of every bad image of the run so far; an empty file says that there was none.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.directory, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks without a barrier may end together
            return self._merge(good)
        finally:
            os.close(lock)

    def _merge(self, good: Collection[str]) -> list[tuple[str, str]]:
        target = self.directory / BAD_IMAGES
        parts = sorted(self.directory.glob(f"{BAD_IMAGES}.*.part"))
        reasons: dict[str, str] = {}
        for path in [target, *parts]:
            for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
                try:
                    row = json.loads(line)
                except ValueError:  # the last line of a process that was killed while it wrote
                    continue
                reasons.setdefault(row["id"], row["reason"])
        bad = sorted(item for item in reasons.items() if item[0] not in good)
        writing = target.with_suffix(".writing")
        writing.write_text("".join(map(bad_line, bad)), encoding="utf-8")
        os.replace(writing, target)
        for path in parts:
            path.unlink(missing_ok=True)
        return bad
