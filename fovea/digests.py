"""Images rows → digests of their files' bytes, remembered: no corpus is read twice to learn its names.

A digest is remembered for as long as the file's size and times of change stay what they were; mtime alone
would miss a file that was replaced with its time kept, so ctime counts too.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fovea.images import BadImage, ImageReader


class Digests:
    """`ImageReader.digest` with a memory, on disk where a file is named.

    Several processes may share the file: each line is appended in one write and carries a checksum, and a
    line that was cut short or mixed up is forgotten.
    """

    def __init__(self, reader: ImageReader, file: str | Path | None = None) -> None:
        """`file` is made when the first digest is learned."""
        self.reader = reader
        self._file = None if file is None else Path(file)
        self._known: dict[str, str] = {}
        if self._file is not None and self._file.is_file():
            for line in self._file.read_bytes().splitlines():
                if line[:8] == b"%08x" % zlib.crc32(line[9:]):
                    key, digest = json.loads(line[9:])
                    self._known[key] = digest

    def __call__(self, row: Mapping[str, Any]) -> str:
        """The digest of one row's bytes.

        Raises:
            BadImage: there are no bytes.
        """
        key = self._key(row)
        if key not in self._known:
            self._known[key] = digest = self.reader.digest(row)
            self._remember([key, digest])
        return self._known[key]

    def known(self, row: Mapping[str, Any]) -> str | None:
        """The digest if it is remembered; nothing is read.

        Raises:
            BadImage: there is no file.
        """
        return self._known.get(self._key(row))

    def _key(self, row: Mapping[str, Any]) -> str:
        path = self.reader.path(row)
        try:
            stat = path.stat()
        except FileNotFoundError as error:
            where = f"image {row['id']} ({path})"
            raise BadImage("no such file", where=where, missing=True) from error
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}"
            raise BadImage(reason, where=f"image {row['id']} ({path})") from error
        part = (row.get("offset", -1), row.get("size", -1))
        return "|".join(map(str, (path.absolute(), *part, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)))

    def _remember(self, pair: list[str]) -> None:
        if self._file is None:
            return
        text = json.dumps(pair).encode()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError:  # a store that others filled may be read-only here: it is only slower
            self._file = None
            return
        try:
            os.write(descriptor, b"%08x %s\n" % (zlib.crc32(text), text))
        finally:
            os.close(descriptor)
