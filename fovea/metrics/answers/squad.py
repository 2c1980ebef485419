"""Answer × references → SQuAD's exact match and token F1, by torchmetrics.

HuLiRAG reports a "token-level F1" for WebQA and defines none: this is the field's usual one. Normal form:
lower case, no ASCII punctuation, no articles. F1 is over bags of tokens, the best over the references. Where
one side has no token left, torchmetrics follows SQuAD 2: 1 if the other has none either, else 0.
"""

from __future__ import annotations

from collections.abc import Sequence


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """1.0 if the prediction equals any reference in normal form, else 0.0."""
    return _squad(prediction, references, "exact_match")


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """Token F1, [0, 1], the best over the references: "a red ball" against "the red kite" is 0.5."""
    return _squad(prediction, references, "f1")


def _squad(prediction: str, references: Sequence[str], name: str) -> float:
    from torchmetrics.functional.text import squad

    if not isinstance(prediction, str) or isinstance(references, str) or not references:
        raise ValueError(
            f"needs a text and a non-empty list of references, got {prediction!r} and {references!r}"
        )
    target = {"answers": {"text": list(references), "answer_start": [0] * len(references)}, "id": "0"}
    return float(squad({"prediction_text": prediction, "id": "0"}, target)[name]) / 100
