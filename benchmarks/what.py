"""Phrases: what our rules cost on top of the bare spaCy pipeline, over the same questions.

python benchmarks/what.py --questions FILE…

A file is MultimodalQA's JSONL (`question`), WebQA's TSV (`Q`) or plain text, one question a line.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fovea.types import Phrase

DATA = Path(__file__).resolve().parents[2] / "shared/data"
FILES = [*sorted(DATA.glob("mmqa/MMQA_dev*.jsonl")), *sorted(DATA.glob("webqa/*_queries_*.tsv"))]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=Path, nargs="+", default=FILES, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(%(default)s)")
    parser.add_argument("--wall", action="store_true", help="wall-clock instead of CPU seconds")
    options = parser.parse_args()
    missing = [str(path) for path in options.questions if not path.is_file()]
    if missing or not options.questions:
        print(f"error: --questions {' '.join(missing)}: no such file", file=sys.stderr)
        return 2
    texts = [text for path in options.questions for text in read(path) if text.strip()]
    return measure(texts, options.rounds, time.perf_counter if options.wall else time.process_time)


def read(path: Path) -> list[str]:
    """The questions of one file."""
    with path.open(newline="") as file:
        if path.suffix == ".jsonl":
            return [json.loads(line)["question"] for line in file]
        if path.suffix == ".tsv":
            return [row["Q"] for row in csv.DictReader(file, delimiter="\t")]
        return [line.rstrip("\n") for line in file]


def measure(texts: list[str], rounds: int, clock: Callable[[], float]) -> int:
    """Our part on parsed questions against the parsing, turn about; together they are `Phraser.batch`.

    Timed apart, because the difference of two whole runs is smaller than their scatter.
    """
    import spacy
    from harness import compare

    from fovea import what

    # Without the entity recogniser, which is not needed for phrases: the stricter yardstick.
    nlp = spacy.load(what.DEFAULT_MODEL, exclude=["ner"])
    docs = list(nlp.pipe([what._clean(text)[0] for text in texts], batch_size=256))

    def ours() -> list[list[Phrase]]:
        cleaned = [what._clean(text) for text in texts]
        return [
            what._phrases(doc, offsets, text)
            for doc, (_, offsets), text in zip(docs, cleaned, texts, strict=True)
        ]

    if ours() != what.phrases_batch(texts):
        raise RuntimeError("our part on its own gives other phrases than Phraser.batch")
    comparison = compare(
        f"phrases of {len(texts)} questions, {what.DEFAULT_MODEL}",
        ("our part", ours),
        ("bare nlp.pipe", lambda: list(nlp.pipe(texts, batch_size=256))),
        items=len(texts),
        unit="questions",
        rounds=rounds,
        need=round(1 / 0.3, 2),
        clock=clock,
    )
    print(comparison.text())
    print(f"  our part costs {1 / comparison.ratio:.3f}× of the bare pipeline (at most 0.3×)")
    return 0 if comparison.ok else 1


if __name__ == "__main__":
    sys.exit(main())
