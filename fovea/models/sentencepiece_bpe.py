"""A sentencepiece `tokenizer.model` of the BPE kind → a text's token ids, as sentencepiece itself gives them.

LLaMA's tokenizers are such files. Converted to a table of merges they are another tokenizer where pieces
share a score (18,000 have 0 in Chinese-LLaMA's, which InternVL has): sentencepiece then merges the leftmost
pair first, which no ranking of merges can say. So the pieces are merged here by score and place.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from heapq import heappop, heappush

_SPACE = "▁"  # U+2581, what stands for a space in a piece
_NORMAL, _UNKNOWN, _CONTROL, _UNUSED, _BYTE = 1, 2, 3, 5, 6  # sentencepiece_model.proto: SentencePiece.Type
_BPE = 2  # the same: TrainerSpec.ModelType


class SentencePieceBpe:
    """The encoder of one `tokenizer.model`.

    Attributes:
        num_pieces: V, the number of its ids.
    """

    def __init__(self, model: bytes, source: str) -> None:
        """Read the pieces.

        Args:
            model: bytes of the file.
            source: its name, for errors.

        Raises:
            ValueError: the bytes are no such file, or one that normalises or splits as LLaMA's do not.
        """
        self._ids: dict[str, int] = {}
        self._scores: dict[str, float] = {}
        self._bytes: dict[int, int] = {}
        self.num_pieces = 0
        # Defaults of sentencepiece_model.proto, for what the file leaves out.
        trainer: dict[int, int | bytes] = {3: 1}
        normalizer: dict[int, int | bytes] = {2: b"", 3: 1, 4: 1, 5: 1}
        others = set()
        try:
            for number, value in _fields(model):
                if number == 1:
                    others.add(self._add(value))
                elif number == 2:
                    trainer |= dict(_fields(value))
                elif number == 3:
                    normalizer |= dict(_fields(value))
        except (ValueError, TypeError, KeyError, struct.error) as error:
            raise ValueError(f"{source} is no sentencepiece model, or a damaged one: {error}") from error
        problems = []
        if trainer[3] != _BPE:
            problems.append(f"model_type {trainer[3]!r}, not {_BPE} (BPE)")
        if len(self._bytes) != 256:
            problems.append(f"{len(self._bytes)} byte pieces, not 256")
        if (normalizer[2], normalizer[3], normalizer[4], normalizer[5]) != (b"", 1, 0, 1):
            problems.append(
                "a normalizer other than LLaMA's (identity, dummy prefix, all spaces kept and escaped)"
            )
        if unknown := sorted(others - {_NORMAL, _UNKNOWN, _CONTROL, _BYTE}):
            problems.append(f"pieces of type {unknown}")
        if problems:
            raise ValueError(f"{source}: {'; '.join(problems)}; needed: a tokenizer.model as LLaMA's")

    def _add(self, message: int | bytes) -> int:
        piece: dict[int, int | bytes] = {2: bytes(4), 3: _NORMAL}
        piece |= dict(_fields(message))
        text, kind = _octets(piece[1]).decode(), piece[3]
        if not isinstance(kind, int):
            raise ValueError("bytes where a piece's type is needed")
        if kind == _NORMAL:
            self._ids[text] = self.num_pieces
            self._scores[text] = struct.unpack("<f", _octets(piece[2]))[0]
        elif kind == _BYTE:
            self._bytes[int(text[1:-1], 16)] = self.num_pieces  # "<0x0A>"
        self.num_pieces += 1
        return kind

    def __call__(self, text: str) -> list[int]:
        """Ids of a text, without any begin or end; a control token's name in it is plain text."""
        symbols = list(_SPACE + text.replace(" ", _SPACE)) if text else []
        after = list(range(1, len(symbols) + 1))
        before = list(range(-1, len(symbols) - 1))
        waiting: list[tuple[float, int, int, int]] = []

        def offer(left: int, right: int) -> None:
            joined = symbols[left] + symbols[right]
            if (score := self._scores.get(joined)) is not None:
                heappush(waiting, (-score, left, right, len(joined)))

        for left in range(len(symbols) - 1):
            offer(left, left + 1)
        while waiting:  # best score first, leftmost among equals
            _, left, right, length = heappop(waiting)
            same = len(symbols[left]) + len(symbols[right]) == length
            if not symbols[left] or after[left] != right or not same:
                continue  # one of the two has been merged since
            symbols[left] += symbols[right]
            symbols[right] = ""
            after[left] = after[right]
            if after[left] < len(symbols):
                before[after[left]] = left
                offer(left, after[left])
            if before[left] >= 0:
                offer(before[left], left)
        ids: list[int] = []
        for symbol in filter(None, symbols):
            if symbol in self._ids:
                ids.append(self._ids[symbol])
            else:  # a character that no piece has; a lone surrogate has no bytes of its own
                ids += [self._bytes[byte] for byte in symbol.encode(errors="replace")]
        return ids


def _octets(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes are needed")
    return value


def _fields(message: int | bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protocol-buffers message in order: number, and varint or raw bytes."""
    data, at = _octets(message), 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data):
                raise ValueError("it ends within a number")
            byte, at = data[at], at + 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(data):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(tag & 7) if tag & 7 != 2 else varint()
        if size is None:
            raise ValueError(f"wire type {tag & 7}")
        if at + size > len(data):
            raise ValueError(f"it ends within a field of {size} bytes")
        yield tag >> 3, data[at : at + size]
        at += size
