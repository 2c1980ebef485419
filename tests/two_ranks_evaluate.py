"""One of two ranks of scripts/evaluate.py that fail, each in its way. Run by test_evaluate_ranks.

Usage: two_ranks_evaluate.py OUT ARGUMENTS… (those of `evaluate.py retrieval`).
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import evaluate
from ranks import Ranks


def main(out: Path, arguments: list[str]) -> None:
    ranks = Ranks()
    said = io.StringIO()
    # An image that only rank 1 reads is broken.
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        evaluate.main(["retrieval", *arguments])
    (out / f"bad-image-{ranks.rank}.txt").write_text(said.getvalue())
    # Both are still in step: what one skips, all go without.
    evaluate.main(["scores", *arguments, "--bad_images", "skip"])
    # Rank 1 is gone without a word.
    if ranks.rank == 1:
        os._exit(7)
    try:
        with ranks.together("waiting"):
            pass
    except ValueError as error:
        (out / "gone.txt").write_text(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
