"""An encoder and a few rows of canonical tables → what it embeds them as: does this layout load at all?"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from fovea.ranks import own_device

if TYPE_CHECKING:
    import numpy as np

    from fovea.images import ImageReader, UInt8Array
    from fovea.tables import Tables
    from fovea.types import FloatArray

ABOUT = "these figures say that the layout loads, not how well it retrieves"


def smoke(source: str, directory: str, num: int, device: str, dtype: str) -> dict[str, Any]:
    """Embed the first images and the texts that go with them.

    Args:
        source: a bundle, or a YAML file that names a class.
        directory: canonical tables.
        num: how many pairs; the first ones.
        device: where it runs.
        dtype: floating type of the weights.

    Raises:
        ValueError: nothing to embed, an unknown type, or no such device.
    """
    import numpy as np
    import torch

    from fovea import bundle
    from fovea.images import ImageReader
    from fovea.models.encoders import embed_dtype
    from fovea.tables import Tables

    if num < 1 or dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"--num {num}: at least 1; --dtype {dtype}: float32, float16 or bfloat16")
    tables = Tables(directory)
    images, texts, kind = pairs(tables, ImageReader(tables.root), num)
    start = time.perf_counter()
    encoder = bundle.open_encoder(source).to(own_device(device), getattr(torch, dtype))
    loaded = time.perf_counter()
    place = encoder.logit_scale.device
    with torch.inference_mode():
        pixels = torch.from_numpy(np.stack([encoder.transform(image)[0] for image in images])).to(place)
        shown = encoder.transform.normalise(pixels).to(embed_dtype(encoder))
        seen = encoder.encode_image(shown).float().cpu().numpy()
        said = encoder.encode_text(encoder.tokenize(texts).to(place)).float().cpu().numpy()
    return {
        "smoke": True,
        "about": ABOUT,
        "encoder": type(encoder).__name__,
        "source": str(source),
        "embed_dim": encoder.embed_dim,
        "image_size": encoder.transform.size,
        "dtype": dtype,
        "device": str(place),
        "parameters": sum(p.numel() for p in encoder.parameters()),
        "images": len(seen),
        "texts": len(said),
        "embedded": int(np.isfinite(seen).all(1).sum()),
        "pairs": kind,
        **describe(seen, said, paired=kind is not None),
        "seconds": {"load": loaded - start, "embed": time.perf_counter() - loaded},
    }


def pairs(tables: Tables, reader: ImageReader, num: int) -> tuple[list[UInt8Array], list[str], str | None]:
    """Images, texts, and what pairs them: `query` with its first gold image, `caption`, or None (they do not
    belong together: tables without either).
    """
    wanted: dict[str, str] = {}
    for query in tables.queries():
        if query.gold_image_ids and len(wanted) < num:
            wanted.setdefault(query.gold_image_ids[0], query.text)
    found = [row for row in tables.rows("images") if row["id"] in wanted]
    if found:
        return [reader.read(row) for row in found], [wanted[row["id"]] for row in found], "query"
    rows = list(itertools.islice(tables.rows("images"), num))
    if not rows:
        raise ValueError(f"{tables.root} has no image to embed")
    images = [reader.read(row) for row in rows]
    if all(row.get("caption") for row in rows):
        return images, [row["caption"] for row in rows], "caption"
    return images, [query.text for query in tables.queries()[:num]] or ["a picture"], None


def describe(seen: FloatArray, said: FloatArray, *, paired: bool) -> dict[str, Any]:
    """Lengths, and cosines of what belongs together (`diagonal`) and what does not; None where unknown."""
    import numpy as np

    finite = bool(np.isfinite(seen).all() and np.isfinite(said).all())
    lengths = {"image": np.linalg.norm(seen, axis=1), "text": np.linalg.norm(said, axis=1)}
    norms = {name: [_number(own.min()), _number(own.max())] for name, own in lengths.items()}
    cosines: dict[str, float | None] = {}
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine = (said / lengths["text"][:, None]) @ (seen / lengths["image"][:, None]).T
    if paired:
        same = np.eye(len(cosine), dtype=bool)
        cosines["diagonal"] = _number(cosine[same].mean())
        cosines["off_diagonal"] = _number(cosine[~same].mean()) if len(cosine) > 1 else None
    for name, value in (("min", cosine.min()), ("mean", cosine.mean()), ("max", cosine.max())):
        cosines[name] = _number(value)
    return {"finite": finite, "norms": norms, "cosines": cosines}


def _number(value: np.floating[Any]) -> float | None:
    """JSON has no NaN and no infinity."""
    import math

    return float(value) if math.isfinite(value) else None
