"""Query → Candidates: the coarse stage, one cosine between whole question and whole image.

HuLiRAG eq. 1–2: frozen dual encoder, normalised embeddings, top K.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from fovea.embeddings import embed_images, embed_texts
from fovea.index.dense import DenseIndex
from fovea.models.encoders import Encoder
from fovea.tables import Tables
from fovea.types import Candidate, Query

__all__ = ["Corpus", "CorpusName", "Retriever", "corpus", "embed_images", "embed_texts"]

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
        cls,
        encoder: Encoder,
        directory: str | Path,
        *,
        captions: Mapping[str, str] | None = None,
        mmap: bool = False,
        gpu: bool = False,
    ) -> Retriever:
        """Read an index from disk; refused unless these very weights made it.

        Args:
            encoder: in evaluation mode, with the weights' type as exported (cast it afterwards).
            directory: what `scripts/build_index.py` wrote.
            captions: image id → caption.
            mmap: see `DenseIndex.load`.
            gpu: see `DenseIndex.load`.
        """
        from fovea.bundle import fingerprint

        expect = {"fingerprint": fingerprint(encoder)}
        index = DenseIndex.load(directory, expect=expect, mmap=mmap, gpu=gpu)
        return cls(encoder, index, captions=captions)

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
