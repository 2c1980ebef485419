"""A bad image in the middle: every other id keeps its own pixels, and the run says what it left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datamodules.workers import ordered_map
from fovea.bad_images import BAD_IMAGES, BadImageLog
from fovea.images import BadImage, ImageReader
from fovea.tables import Tables, TableWriter

BAD = {3: b"", 4: b"<html>404</html>", 7: None}  # None: there is no such file
COLOURS = {f"i{n}": (20 * n, 250 - 20 * n, 10 * n) for n in range(12)}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Twelve pictures of a colour each, one question a picture; three of them are no pictures any more."""
    with TableWriter(tmp_path_factory.mktemp("bad") / "tables") as writer:
        for number, (name, colour) in enumerate(COLOURS.items()):
            path = writer.directory / f"{name}.png"
            Image.new("RGB", (20, 16), colour).save(path)
            for split in ("train", "val") if number == 6 else ("train",):
                writer.add("queries", id=f"{split}-{name}", text=name, gold_image_ids=[name], split=split)
            split = "val" if number >= 6 else "train"
            writer.add("images", id=name, path=path.name, width=20, height=16, split=split)
            if number in BAD:
                path.unlink()
                if (content := BAD[number]) is not None:
                    path.write_bytes(content)
        writer.finish({"reader": "test"})
    return Tables(writer.root)


GOOD = [name for n, name in enumerate(COLOURS) if n not in BAD]


class Mean:
    """Stands for a transform: an image is its mean colour."""

    size = 1

    def __call__(self, image: Any, masks: Any = None) -> tuple[Any, Any]:
        count = 0 if masks is None else len(masks)
        return image.mean((0, 1)).round().astype(np.uint8)[None, None], np.ones((count, 1, 1), np.uint8)

    def normalise(self, pixels: Any) -> Any:
        return pixels.float().permute(0, 3, 1, 2)

    mean_pixel = (0, 0, 0)


def _encoder() -> Any:
    from test_retrieve import ColourEncoder

    encoder = ColourEncoder()
    encoder.transform = Mean()  # type: ignore[assignment]
    return encoder


def _unit(name: str) -> Any:
    colour = np.array(COLOURS[name], np.float64)
    return colour / np.linalg.norm(colour)


@pytest.mark.parametrize("batch_size", [1, 4, 5, 100])
def test_embed_images(tables: Tables, batch_size: int) -> None:
    """Ids and vectors stay together, wherever in a batch the bad rows are, or when all of one are bad."""
    from fovea.retrieve import embed_images

    reader = ImageReader(tables.root, policy="skip")
    ids, vectors = embed_images(_encoder(), tables.rows("images"), reader, batch_size=batch_size)
    assert ids == GOOD
    for id_, vector in zip(ids, vectors, strict=True):
        np.testing.assert_allclose(vector, _unit(id_), atol=0.01)
    assert [id_ for id_, _ in reader.bad] == ["i3", "i4", "i7"]
    with pytest.raises(BadImage, match=r"image i3 \(.*i3\.png\): the file is empty"):
        embed_images(_encoder(), tables.rows("images"), ImageReader(tables.root), batch_size=batch_size)


def test_region_bank(tables: Tables, tmp_path: Path) -> None:
    """A bad image that is asked for is an error with its id; the others, before and after, are their own."""
    from fovea.region_bank import RegionBank, View
    from fovea.region_sources import WholeImage

    def bank() -> RegionBank:
        return RegionBank(
            _encoder(), WholeImage(), ImageReader(tables.root, policy="skip"), view=View(), batch_size=3,
            cache=tmp_path / "cache", fingerprint="f", tables_key="t", images_per_shard=2,
        )  # fmt: skip

    rows = list(tables.rows("images"))
    filling = bank()
    with pytest.raises(BadImage, match="image i7"):
        filling.embed(rows)
    good = [row for row in rows if row["id"] in GOOD]
    for found in (filling.embed(good), bank().embed(good[::-1])):  # after the failure; from the cache
        assert found.keys() == set(GOOD)
        for id_, embeddings in found.items():
            np.testing.assert_allclose(embeddings.vectors, [_unit(id_)] * 2, atol=0.01)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pairs(tables: Tables, tmp_path: Path, capsys: Any, num_workers: int) -> None:
    """Training batches and galleries pair each remaining picture with its own text and id."""
    import lightning as L

    from datamodules.pair_batches import stable_id
    from datamodules.pairs import PairData
    from fovea.models.encoders import tiny_clip
    from lightning_modules.alpha_clip import AlphaClip

    encoder = tiny_clip(list(COLOURS), image_size=16, embed_dim=8, widths=(4, 8), text_width=8, heads=2)
    data = PairData(str(tables.root), batch_size=6, bad_images="skip", seed=0, num_workers=num_workers)
    seen: dict[str, Any] = {}
    galleries: list[tuple[int, Any]] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
            texts = [encoder.tokenize([name]) for name in batch.names]
            for name, pixels, tokens, text in zip(
                batch.names, batch.pixels, batch.tokens, texts, strict=True
            ):
                seen[str(name)] = pixels.float().mean((0, 1)).numpy()
                assert (tokens == text[0]).all()

        def on_validation_batch_end(
            self, trainer: Any, module: Any, out: Any, batch: Any, i: int, loader: int = 0
        ) -> None:
            if batch.pixels is not None:
                galleries.extend(zip(batch.ids.tolist(), batch.pixels, strict=True))

    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=1,
        enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0, callbacks=[Look()],
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(AlphaClip(encoder), data)
    listed = [json.loads(line)["id"] for line in (tmp_path / BAD_IMAGES).read_text().splitlines()]
    assert listed == ["i3", "i4", "i7"] and "3 bad images were left out" in capsys.readouterr().out
    assert seen.keys() == set(GOOD)
    for name, colour in seen.items():
        np.testing.assert_allclose(colour, COLOURS[name], atol=1)
    assert [id_ for id_, _ in galleries] == [stable_id(name) for name in GOOD if int(name[1:]) >= 6]
    by_id = {stable_id(name): COLOURS[name] for name in COLOURS}
    for id_, pixels in galleries:
        np.testing.assert_allclose(pixels.float().mean((0, 1)).numpy(), by_id[id_], atol=1)


def test_evaluation_counts_what_it_left_out(tables: Tables, tmp_path: Path) -> None:
    """`--bad_images skip`: results.json and bad_images.jsonl name the count and the reasons; `fail` stops."""
    import importlib.util
    import sys

    import torch

    from fovea.bundle import save_encoder
    from fovea.models.encoders import tiny_clip

    scripts = Path(__file__).resolve().parents[1] / "scripts"
    sys.path.insert(0, str(scripts))
    spec = importlib.util.spec_from_file_location("evaluate_for_bad_images", scripts / "evaluate.py")
    assert spec is not None and spec.loader is not None
    evaluate = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = evaluate
    spec.loader.exec_module(evaluate)
    torch.manual_seed(0)
    encoder = tiny_clip(list(COLOURS), image_size=16, embed_dim=8, widths=(4, 8), text_width=8, heads=2)
    save_encoder(encoder.eval(), tmp_path / "bundle", provenance={})
    arguments = ["retrieval", "--tables", str(tables.root), "--splits", "train", "--coarse"]
    arguments += [str(tmp_path / "bundle"), "--what", "none", "--where", "full", "--bootstrap", "20"]
    evaluate.main([*arguments, "--out", str(tmp_path / "run"), "--bad_images", "skip"])
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    # All twelve pictures are gold for a question of this split, so all are in its corpus.
    assert results["corpus"]["images"] == {"train": 9} and results["corpus"]["unreadable"] == {"train": 3}
    assert results["coverage"]["gold_images_absent"] == 3 and results["coverage"]["queries_evaluated"] == 12
    assert results["retrieval"]["global"]["recall@20"] == pytest.approx(9 / 12)
    lines = (tmp_path / "run" / BAD_IMAGES).read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["i3", "i4", "i7"]
    with pytest.raises(BadImage, match="image i3"):
        evaluate.look_at(
            evaluate.Settings(str(tables.root), "train", str(tmp_path / "bundle"), str(tmp_path / "no")),
            "add", None, {},
        ).__next__()  # fmt: skip


def _read(item: tuple[str, dict[str, Any], str]) -> int:
    root, row, run = item
    reader = ImageReader(root, policy="skip", log=BadImageLog(run))
    return len(list(reader.read_many([row, row])))


def test_one_list_over_processes_and_runs(tables: Tables, tmp_path: Path) -> None:
    """Three processes find bad images, some twice; a part that a kill cut off costs its last line."""
    run = tmp_path / "run"
    jobs = [(str(tables.root), row, str(run)) for row in tables.rows("images")]
    assert sum(ordered_map(_read, jobs, workers=2)) == 2 * len(GOOD)
    reader = ImageReader(tables.root, policy="skip", log=BadImageLog(run))
    for _ in range(2):  # two epochs
        list(reader.read_many(tables.rows("images")))
    assert [id_ for id_, _ in reader.bad] == ["i3", "i4", "i7"]
    (run / f"{BAD_IMAGES}.killed.part").write_text('{"id": "x", "reason": "r"}\n{"id": "cut o')
    merged = BadImageLog(run).merge()
    assert [id_ for id_, _ in merged] == ["i3", "i4", "i7", "x"]
    assert merged[0][1] == "the file is empty (0 bytes)" and merged[2][1] == "no such file"
    assert sorted(path.name for path in run.iterdir()) == [BAD_IMAGES]
    reader.log.add("y", "late")  # type: ignore[union-attr]
    assert [id_ for id_, _ in BadImageLog(run).merge()] == ["i3", "i4", "i7", "x", "y"]
    assert (
        BadImageLog(tmp_path / "clean").merge() == [] and (tmp_path / "clean" / BAD_IMAGES).read_text() == ""
    )
