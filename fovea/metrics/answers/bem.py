"""(question, reference, candidate) → BEM's probability that the candidate is equivalent to the reference.

Upstream loads `https://tfhub.dev/google/answer_equivalence/bem/1` (a TensorFlow SavedModel of an uncased
BERT-base with two classes, the second "equivalent") and a word-piece vocabulary from a Google Cloud bucket.
The input is `[CLS] candidate [SEP] reference [SEP] question [SEP]` with segment ids 0, 1 and 2, at most 512
pieces.

Nothing is downloaded here and nothing stands in for the model. `Bem` opens a local *conversion*: a directory
    config.json         a BertForSequenceClassification with `num_labels: 2` and `type_vocab_size: 3`
    model.safetensors   its weights
    vocab.txt           the uncased vocabulary, one piece a line
Convert the SavedModel's variables to that layout once, where TensorFlow is installed. If it has only two
segment embeddings, the third row is probably zero (TensorFlow's one-hot lookup gives zeros beyond its table):
we could run neither the SavedModel nor a conversion, so compare the two before you report numbers.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

MOST_PIECES = 512


class Bem:
    """A local BEM.

    Args:
        path: the directory above.

    Raises:
        FileNotFoundError: a file of the directory is missing.
        ImportError: the `bem` extra is not installed.
        ValueError: the model is not a two-class one with three segments.
    """

    def __init__(self, path: str | Path) -> None:
        root = Path(path)
        if absent := [
            name for name in ("config.json", "model.safetensors", "vocab.txt") if not (root / name).is_file()
        ]:
            raise FileNotFoundError(
                f"no BEM at {root}: {', '.join(absent)} missing; it takes a converted copy of TF-Hub's "
                "answer_equivalence/bem (see fovea.metrics.answers.bem); evqa_exact_match needs none"
            )
        try:
            from tokenizers import BertWordPieceTokenizer
        except ImportError as error:
            raise ImportError("BEM needs its extra: pip install 'fovea-mm[bem]'") from error
        from transformers import BertForSequenceClassification

        model = BertForSequenceClassification.from_pretrained(root, local_files_only=True)
        config = model.config
        if config.num_labels != 2 or config.type_vocab_size < 3:
            raise ValueError(
                f"{root / 'config.json'}: BEM has 2 labels and 3 segment types, this has "
                f"{config.num_labels} and {config.type_vocab_size}; a BERT with two segments needs a third, "
                "zero row (see fovea.metrics.answers.bem)"
            )
        self._model = model.eval()
        self._tokenizer = BertWordPieceTokenizer(str(root / "vocab.txt"), lowercase=True)
        self._most = min(MOST_PIECES, config.max_position_embeddings)

    def __call__(self, question: str, reference: str, candidate: str) -> float:
        """Softmax of the second class, [0, 1].

        Raises:
            ValueError: more than 512 pieces; upstream raises as well, since cutting would change the
                question.
        """
        import torch

        vocabulary = self._tokenizer.get_vocab()
        ids, segments = [vocabulary["[CLS]"]], [0]
        for segment, text in enumerate((candidate, reference, question)):
            pieces = self._tokenizer.encode(text, add_special_tokens=False).ids + [vocabulary["[SEP]"]]
            ids += pieces
            segments += [segment] * len(pieces)
        if len(ids) > self._most:
            raise ValueError(
                f"BEM reads {self._most} word pieces, this question and its answers have {len(ids)}: "
                f"{question!r}"
            )
        with torch.inference_mode():
            logits = self._model(
                input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([segments])
            ).logits[0]
        return float(logits.float().softmax(-1)[1])


@lru_cache(maxsize=2)
def open_bem(path: str) -> Bem:
    """A `Bem`, opened once a process."""
    return Bem(path)
