"""A Hugging Face `tokenizer.json` → token ids, in a form that travels in a bundle and to data workers."""

from __future__ import annotations

import base64
import re
import string
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Clean = Literal["none", "lower", "canonical"]
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class JsonTokenizer:
    """Texts → int64 [B, L]; special tokens as the file's post-processor adds them, long texts cut at the end.

    `settings` is JSON and holds everything, the file's text included (compressed: SigLIP 2's is 34 MB), so
    that a bundle needs no other file. The tokenizer itself is built when first used, once a process.
    """

    def __init__(
        self,
        packed: str,
        length: int,
        pad_id: int,
        fill: bool = False,
        clean: Clean = "none",
        prefix: str = "",
        side: Literal["right", "left"] = "right",
    ) -> None:
        """Keyword arguments of `settings`.

        Args:
            packed: the text of tokenizer.json, as `pack` makes it.
            length: most tokens of a text, special ones included.
            pad_id: id of the padding.
            fill: pad every batch to `length` (models trained so), instead of to its longest text.
            clean: `lower` lower-cases; `canonical` also takes out ASCII punctuation and joins white space.
            prefix: set before every text, e.g. a query instruction.
            side: where the padding goes.
        """
        self.settings: dict[str, Any] = {
            "packed": packed,
            "length": length,
            "pad_id": pad_id,
            "fill": fill,
            "clean": clean,
            "prefix": prefix,
            "side": side,
        }
        self._tokenizer: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Settings alone: another process builds its own."""
        return self.settings

    def __setstate__(self, settings: dict[str, Any]) -> None:
        """See `__getstate__`."""
        self.settings, self._tokenizer = settings, None

    def ids(self, text: str) -> list[int]:
        """Token ids of one text as it is: neither cleaned nor behind the prefix."""
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_str(unpack(self.settings["packed"]))
            self._tokenizer.no_padding()
            self._tokenizer.enable_truncation(self.settings["length"])
        # One text a call: `encode_batch` starts threads, and a data worker forked after that would hang.
        found: list[int] = self._tokenizer.encode(text).ids
        return found

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Texts → int64 [B, L]."""
        settings = self.settings
        rows = [self.ids(settings["prefix"] + self._cleaned(text)) for text in texts]
        width = settings["length"] if settings["fill"] else max(map(len, rows), default=0)
        out = torch.full((len(rows), width), settings["pad_id"], dtype=torch.int64)
        for row, ids in zip(out, rows, strict=True):
            at = width - len(ids) if settings["side"] == "left" else 0
            row[at : at + len(ids)] = torch.tensor(ids)
        return out

    def _cleaned(self, text: str) -> str:
        if self.settings["clean"] == "none":
            return text
        text = text.lower()
        if self.settings["clean"] == "canonical":
            text = re.sub(r"\s+", " ", text.translate(_NO_PUNCTUATION)).strip()
        return text


def pack(text: str) -> str:
    """The text of a tokenizer.json, compressed, in ASCII."""
    return base64.b64encode(zlib.compress(text.encode())).decode()


def unpack(packed: str) -> str:
    """The inverse of `pack`.

    Raises:
        ValueError: damaged.
    """
    try:
        return zlib.decompress(base64.b64decode(packed)).decode()
    except (ValueError, zlib.error) as error:
        raise ValueError(f"encoder.tokenizer.packed is damaged ({error}); export the bundle again") from error
