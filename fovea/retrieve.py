"""Query → Candidates: the coarse stage, one cosine between whole question and whole image.

HuLiRAG eq. 1–2: frozen dual encoder, normalised embeddings, top K.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.nn import functional

from fovea.images import ImageReader
from fovea.index.dense import DenseIndex
from fovea.models.encoders import Encoder, embed_dtype
from fovea.tables import Tables
from fovea.types import Candidate, FloatArray, Query

CorpusName = Literal["gold", "candidates", "full"]


class Corpus(NamedTuple):
    """The images that a search runs over.

    Attributes:
        rows: rows of the images table, in its order.
        absent: ids that the queries name but the images table lacks (never downloaded, dead link), sorted.
    """

    rows: list[dict[str, Any]]
    absent: list[str]


def corpus(tables: Tables, name: CorpusName, *, splits: Collection[str]) -> Corpus:
    """Choose the corpus that a recall is measured on; a recall without its corpus's name says nothing.

    Args:
        tables: canonical tables.
        name: `gold`: every gold image of the splits' queries (what RagVL and HuLiRAG report); `candidates`:
            these and the data set's own candidate lists; `full`: these and every image of the splits. An
            image that several splits share is in the corpus of each that names it, though its row has one
            split.
        splits: names of splits; together they are one corpus.

    Raises:
        ValueError: the corpus is empty.
    """
    queries = [query for split in sorted(set(splits)) for query in tables.queries(split=split)]
    wanted = {id_ for query in queries for id_ in query.gold_image_ids}
    if name != "gold":
        wanted |= {id_ for query in queries for id_ in query.candidate_image_ids}
    own = list(splits) if name == "full" else []
    images = tables.table("images")
    kept = pc.or_kleene(  # filtered in Arrow: only the rows of the corpus become dicts
        pc.is_in(images["split"], pa.array(own, pa.string())),
        pc.is_in(images["id"], pa.array(sorted(wanted), pa.string())),
    )
    rows = images.filter(kept).to_pylist()
    absent = sorted(wanted - {row["id"] for row in rows})
    if name == "full" and not rows:
        there = sorted({row["split"] for row in tables.rows("images")})
        raise ValueError(f"{tables.root} has no image in {sorted(splits)}; its images are in {there}")
    if name != "full" and not wanted:
        there = sorted({query.split for query in tables.queries()})
        raise ValueError(
            f"{tables.root}: the {len(queries)} queries of {sorted(splits)} name no image for the corpus "
            f"{name!r}; queries are in {there}"
        )
    return Corpus(rows, absent)


def embed_images(
    encoder: Encoder,
    rows: Iterable[dict[str, Any]],
    reader: ImageReader,
    *,
    batch_size: int = 64,
    progress: bool = False,
) -> tuple[list[str], FloatArray]:
    """Embed whole images.

    Args:
        encoder: in evaluation mode, on the device that is to do the work.
        rows: rows of the images table.
        reader: gives their pixels; bad images that it skips are left out, with their ids.
        batch_size: images a forward pass.
        progress: show a bar with rate and remaining time.

    Returns:
        N ids and float32 [N, D], normalised.
    """
    from rich.progress import track

    _require_eval(encoder)
    rows = list(rows)
    ids: list[str] = []
    parts = [np.zeros((0, encoder.embed_dim), np.float32)]
    for start in track(
        range(0, len(rows), batch_size), description=f"embedding {len(rows)} images", disable=not progress
    ):
        kept, pixels = [], []
        for row, image in reader.read_many(rows[start : start + batch_size]):
            kept.append(row["id"])
            pixels.append(encoder.transform(image)[0])
        if kept:
            batch = torch.from_numpy(np.stack(pixels)).to(encoder.logit_scale.device)
            with torch.inference_mode():
                shown = encoder.transform.normalise(batch).to(embed_dtype(encoder))
                parts.append(_unit(encoder.encode_image(shown), kept))
            ids += kept
    return ids, np.concatenate(parts)


def embed_texts(encoder: Encoder, texts: Sequence[str], *, batch_size: int = 256) -> FloatArray:
    """Embed texts → float32 [Q, D], normalised.

    Args:
        encoder: in evaluation mode.
        texts: Q texts.
        batch_size: texts a forward pass.
    """
    _require_eval(encoder)
    parts = [np.zeros((0, encoder.embed_dim), np.float32)]
    for start in range(0, len(texts), batch_size):
        some = texts[start : start + batch_size]
        with torch.inference_mode():
            parts.append(
                _unit(encoder.encode_text(encoder.tokenize(some).to(encoder.logit_scale.device)), some)
            )
    return np.concatenate(parts)


def _require_eval(encoder: Encoder) -> None:
    if encoder.training:
        raise ValueError(
            "the encoder is in training mode, so dropout would change its embeddings; call .eval() first"
        )


def _unit(embeddings: torch.Tensor, names: Sequence[str]) -> FloatArray:
    """Normalise [B, D] in float32; a vector without a direction is an error that names its image or text."""
    embeddings = embeddings.float()
    lengths = embeddings.norm(dim=-1)
    bad = torch.nonzero(~torch.isfinite(lengths) | (lengths == 0)).flatten().tolist()
    if bad:
        raise ValueError(
            f"{len(bad)} of {len(names)} embeddings of a batch are NaN, infinite or zero, e.g. of "
            f"{[names[i] for i in bad[:5]]}; check the weights (and fp16 overflow)"
        )
    unit: FloatArray = functional.normalize(embeddings, dim=-1).cpu().numpy()
    return unit


class Retriever:
    """The coarse stage: an encoder and an index made by it.

    Attributes:
        encoder: in evaluation mode.
        index: embeddings of the corpus by the same encoder.
        captions: image id → caption, for the candidates; absent ids have none.
    """

    def __init__(
        self, encoder: Encoder, index: DenseIndex, *, captions: Mapping[str, str] | None = None
    ) -> None:
        if index.manifest["width"] != encoder.embed_dim:
            raise ValueError(
                f"the index holds {index.manifest['width']}-wide embeddings of {index.manifest['encoder']}, "
                f"the encoder makes {encoder.embed_dim}-wide ones; build the index again with this encoder"
            )
        self.encoder = encoder
        self.index = index
        self.captions = captions or {}

    @classmethod
    def load(
        cls, encoder: Encoder, directory: str | Path, *, captions: Mapping[str, str] | None = None
    ) -> Retriever:
        """Read an index from disk; refused unless these very weights made it."""
        from fovea.bundle import fingerprint

        return cls(
            encoder,
            DenseIndex.load(directory, expect={"fingerprint": fingerprint(encoder)}),
            captions=captions,
        )

    def candidates(
        self, queries: Sequence[Query], *, k: int = 20, among: Literal["corpus", "own"] = "corpus"
    ) -> list[list[Candidate]]:
        """The K best images of each query, best first (fewer where the corpus has fewer).

        Args:
            queries: the questions.
            k: how many.
            among: `corpus` searches the whole index; `own` each query's `candidate_image_ids` only.
        """
        embeddings = embed_texts(self.encoder, [query.text for query in queries])
        if among == "own":
            ids, scores = self.index.search_among(embeddings, [q.candidate_image_ids for q in queries], k)
        else:
            ids, scores = self.index.search(embeddings, k)
        return [
            [
                Candidate(id_, self.captions.get(id_, ""), float(score), rank)
                for rank, (id_, score) in enumerate(zip(row, row_scores, strict=True), 1)
                if id_ is not None
            ]
            for row, row_scores in zip(ids, scores, strict=True)
        ]
