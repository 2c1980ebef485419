"""The file to read first: a question looks at a corpus coarsely, then at parts of a few images closely.

Query ──retrieve──▶ K Candidates           coarse: one cosine an image              fovea/retrieve.py
      ──what──────▶ Phrases                which referents the question names       fovea/what.py
      ──where─────▶ a Region a Phrase      the part of each candidate it means      fovea/where.py
      ──reweight──▶ ScoredImages           global and local evidence, fused         fovea/reweight.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fovea.reweight import CALIBRATED, Calibrations, MissingPhrase, Weights, fuse, local_score
from fovea.score_table import BEYOND, ScoreTable, draw_negatives
from fovea.types import FUSIONS, Candidate, Evidence, Phrase, Query, Region, ScoredImage
from fovea.where import Grounding, IntArray, nothing_grounded

if TYPE_CHECKING:  # torch, faiss and spaCy load when a stage runs
    from fovea.region_bank import RegionBank, RegionEmbeddings
    from fovea.region_sources import Prompts
    from fovea.retrieve import Retriever

What = Callable[[Sequence[str]], list[list[Phrase]]]
WHOLE = "full"  # id of the region that stands for a phrase under missing_phrase `full_mask`


class Look(NamedTuple):
    """What the cascade saw: the scores of every (query, candidate), and what they were made from."""

    table: ScoreTable
    phrases: list[list[Phrase]]
    images: dict[str, RegionEmbeddings]


class Plan(NamedTuple):
    """What a look will need: known before any region is.

    Attributes:
        candidates: the K kept of each query.
        beyond: golds of each query that were not kept.
        phrases: of each query; none without a local stage.
        asked: image id → prompt groups asked of it, for every image that will be looked at.
    """

    candidates: list[list[Candidate]]
    beyond: list[list[Candidate]]
    phrases: list[list[Phrase]]
    asked: dict[str, list[Prompts]]


class Cascade:
    """retrieve → what → where → reweight; the constructor's arguments are the stages and their settings."""

    def __init__(
        self,
        retriever: Retriever,
        what: What,
        where: RegionBank | None,
        images: Mapping[str, Mapping[str, Any]],
        *,
        num_candidates: int = 20,
        among: Literal["corpus", "own"] = "corpus",
        weights: Weights = "eq4",
        missing_phrase: MissingPhrase = "zero",
        fusion: str = "learned",
        calibrations: Calibrations | None = None,
        negative_seed: int = 0,
    ) -> None:
        """Nothing is computed yet.

        Args:
            retriever: the coarse stage; S_global is its cosine.
            what: questions → phrases of each (`fovea.what.phrases_batch`, or `whole_question` to leave the
                stage out).
            where: regions of an image and their embeddings by the local encoder; S_local comes from them.
                None is the coarse stage alone: no phrases, S_local 0.
            images: rows of the images table by id, for every image of the retriever's index.
            num_candidates: K; only these are re-ranked, the rest of the corpus stays behind them.
            among: search the whole `corpus`, or for each query its `own` candidate list only.
            weights: α of the local score: `eq4` is normalised, `eq4_raw` as printed, `uniform` 1/T.
            missing_phrase: what a phrase without a region counts (see `fovea.reweight.local_score`).
            fusion: one of `FUSIONS`; the order that `retrieve` returns.
            calibrations: scalars for the fusions of eq. 8.
            negative_seed: of eq. 9's one drawn negative a query.
        """
        if fusion not in FUSIONS:
            raise ValueError(f"fusion `{fusion}`: one of {', '.join(FUSIONS)}")
        if fusion in CALIBRATED and calibrations is None:
            raise ValueError(
                f"fusion `{fusion}` needs a calibration; give one, or choose a static fusion such as `add`"
            )
        if missing_phrase == "full_mask" and where is not None and not where.whole:
            raise ValueError("missing_phrase `full_mask` needs a RegionBank with whole=True")
        self.retriever = retriever
        self.what = what
        self.where = where
        self.images = images
        self.num_candidates = num_candidates
        self.among: Literal["corpus", "own"] = among
        self.weights: Weights = weights
        self.missing_phrase: MissingPhrase = missing_phrase
        self.fusion = fusion
        self.calibrations = calibrations
        self.negative_seed = negative_seed

    def retrieve(self, queries: Sequence[Query]) -> list[Evidence]:
        """The candidates of each query, best first, with the region that each phrase was found in."""
        return self.evidence(queries, self.look(queries))

    def scores(self, queries: Sequence[Query]) -> ScoreTable:
        """All scores of all (query, candidate) pairs; golds that the coarse stage missed are scored too."""
        return self.look(queries).table

    def plan(self, queries: Sequence[Query]) -> Plan:
        """The coarse stage and the phrases: which regions of which images a look needs."""
        candidates = self.retriever.candidates(queries, k=self.num_candidates, among=self.among)
        beyond = self._golds_beyond(queries, candidates)
        phrases: list[list[Phrase]] = [[] for _ in queries]
        asked: dict[str, list[Prompts]] = {}
        if self.where is not None:
            phrases = self.what([item.text for item in queries])
            for kept, lost, own in zip(candidates, beyond, phrases, strict=True):
                groups = self.where.source.prompts([p.text for p in own])
                for candidate in kept + lost:
                    asked.setdefault(candidate.image_id, []).extend(groups)
        return Plan(candidates, beyond, phrases, asked)

    def look(self, queries: Sequence[Query], plan: Plan | None = None) -> Look:
        """Run the stages, all queries at once."""
        plan = plan or self.plan(queries)
        phrases = plan.phrases
        kept = [(q, c.rank, c) for q, own in enumerate(plan.candidates) for c in own]
        rows = sorted(
            kept + [(q, BEYOND, c) for q, own in enumerate(plan.beyond) for c in own], key=_row_order
        )
        query = np.array([q for q, _, _ in rows], np.int64)
        rank = np.array([r for _, r, _ in rows], np.int64)
        image_ids = [c.image_id for _, _, c in rows]
        images: dict[str, RegionEmbeddings] = {}
        grounding = nothing_grounded(len(rows))
        if self.where is not None:
            images = self.where.embed([self.images[id_] for id_ in plan.asked], plan.asked)
            grounding = self._ground(queries, phrases, query, image_ids, images)
        # Reweight.
        counts = np.array([len(own) for own in phrases], np.int64)[query]
        local, weight = local_score(
            grounding.similarity, grounding.eq4, counts, weights=self.weights, missing=self.missing_phrase
        )
        local_eq5, _ = local_score(grounding.question_similarity, grounding.eq4, counts, weights="eq4_raw")
        query_ids = tuple(item.id for item in queries)
        gold = [set(item.gold_image_ids) for item in queries]
        is_gold = np.array([id_ in gold[q] for q, id_ in zip(query, image_ids, strict=True)], bool)
        table = ScoreTable(
            query_ids=query_ids,
            splits=tuple(item.split for item in queries),
            num_gold=np.array([len(ids) for ids in gold], np.int64),
            phrase_ids=tuple(tuple(p.id for p in own) for own in phrases),
            query=query,
            rank=rank,
            image_ids=tuple(image_ids),
            is_gold=is_gold,
            negative=draw_negatives(query_ids, query, rank, is_gold, self.negative_seed),
            global_=np.array([c.global_score for _, _, c in rows], np.float64),
            local=local,
            local_eq5=local_eq5,
            region_ids=tuple(
                tuple(_region_id(images[id_], r) for r in own)
                for id_, own in zip(image_ids, grounding.region.tolist(), strict=True)
            ),
            similarity=grounding.similarity,
            weight=weight,
            settings={
                "num_candidates": self.num_candidates,
                "weights": self.weights,
                "missing_phrase": self.missing_phrase,
                "negative_seed": self.negative_seed,
                "where": None if self.where is None else self.where.key,
            },
        )
        return Look(table, phrases, images)

    def _ground(
        self,
        queries: Sequence[Query],
        phrases: Sequence[Sequence[Phrase]],
        query: IntArray,
        image_ids: Sequence[str],
        images: Mapping[str, RegionEmbeddings],
    ) -> Grounding:
        """The region of each phrase in each row's image."""
        from fovea.retrieve import embed_texts
        from fovea.where import ground_candidates

        assert self.where is not None
        source = self.where.source
        said = [[p.text for p in own] for own in phrases]
        texts = sorted({text for own in said for text in own} | {item.text for item in queries})
        vectors = embed_texts(self.where.encoder, texts)
        place = {text: i for i, text in enumerate(texts)}
        per_phrase = any(source.prompts(own) for own in said)
        return ground_candidates(
            [vectors[[place[text] for text in own]] for own in said],
            vectors[[place[item.text] for item in queries]],
            query,
            image_ids,
            images,
            names=[[source.name(own, text) for text in own] for own in said] if per_phrase else None,
            full_mask_if_missing=self.missing_phrase == "full_mask",
        )

    def evidence(self, queries: Sequence[Query], look: Look) -> list[Evidence]:
        """The scores as domain objects, candidates by descending fused score (ties: larger id first)."""
        table, fused = look.table, fuse(self.fusion, look.table, self.calibrations)
        starts = table.starts()
        out = []
        for q, item in enumerate(queries):
            rows = [row for row in range(starts[q], starts[q + 1]) if table.rank[row] > 0]
            rows.sort(key=lambda row: (np.float32(fused[row]), table.image_ids[row]), reverse=True)
            phrases = look.phrases[q]
            images = tuple(self._scored(look, row, phrases, float(fused[row])) for row in rows)
            out.append(Evidence(item, tuple(phrases), images))
        return out

    def _scored(self, look: Look, row: int, phrases: Sequence[Phrase], score: float) -> ScoredImage:
        table, id_ = look.table, look.table.image_ids[row]
        known = {region.id: region for region in look.images[id_].regions} if phrases else {}
        image = self.images[id_]
        regions = []
        for t, phrase in enumerate(phrases):
            region_id = table.region_ids[row][t]
            if region_id is None:
                continue
            whole = Region(WHOLE, np.array([0, 0, image["width"], image["height"]], np.float32), None)
            found = known.get(region_id, whole)
            scores = {"similarity": float(table.similarity[row, t]), "weight": float(table.weight[row, t])}
            regions.append(Region(found.id, found.box, found.mask, phrase.id, found.label, scores))
        candidate = Candidate(
            id_, image.get("caption") or "", float(table.global_[row]), int(table.rank[row])
        )
        return ScoredImage(candidate, tuple(regions), candidate.global_score, float(table.local[row]), score)

    def _golds_beyond(
        self, queries: Sequence[Query], candidates: Sequence[Sequence[Candidate]]
    ) -> list[list[Candidate]]:
        """Gold images of the corpus that the coarse stage did not keep: positives of eq. 9 all the same."""
        from fovea.retrieve import embed_texts

        corpus = set(self.retriever.index.ids)
        lost = [
            sorted(set(item.gold_image_ids) & corpus - {c.image_id for c in own})
            for item, own in zip(queries, candidates, strict=True)
        ]
        asking = [q for q, ids in enumerate(lost) if ids]
        out: list[list[Candidate]] = [[] for _ in queries]
        if asking:
            embeddings = embed_texts(self.retriever.encoder, [queries[q].text for q in asking])
            found, scores = self.retriever.index.search_among(
                embeddings, [lost[q] for q in asking], max(len(lost[q]) for q in asking)
            )
            for q, ids, own in zip(asking, found, scores, strict=True):
                out[q] = [
                    Candidate(i, "", float(s), BEYOND) for i, s in zip(ids, own, strict=True) if i is not None
                ]
        return out


def whole_question(texts: Sequence[str]) -> list[list[Phrase]]:
    """The ablation "w/o what": the question itself is the only phrase."""
    return [[Phrase("p0", text, (0, len(text)), kind="whole_query")] for text in texts]


def _row_order(row: tuple[int, int, Candidate]) -> tuple[int, bool, int, str]:
    q, rank, candidate = row
    return q, rank == BEYOND, rank, candidate.image_id


def _region_id(image: RegionEmbeddings, region: int) -> str | None:
    if region < 0:
        return None
    return image.regions[region].id if region < len(image.regions) else WHOLE
