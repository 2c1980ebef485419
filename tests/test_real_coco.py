"""Real photographs in COCO's layout, from the files to the figures: turned by EXIF, trained on, searched."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor, nn

from datamodules.pair_batches import PairDataset, Pictures
from datamodules.pairs import PairData
from fovea import bundle, masks
from fovea.images import ImageReader, ImageTransform
from fovea.models.encoders import Encoder, open_clip
from fovea.region_bank import RegionBank, View
from fovea.region_sources import AnnotatedRegions
from fovea.tables import Tables
from fovea.types import BoolArray, UInt8Array

ROOT = Path(__file__).resolve().parents[1]
TOWER = "configs/real/coco_regions/tower.json"
MARK = (255, 0, 255)  # painted over one object of each photo: no other pixel of these photos is near it
ORIENTATIONS = range(1, 9)


def script(name: str) -> ModuleType:
    """A script as a module."""
    sys.path.insert(0, str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location(f"{name}_of_real_coco", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mini(shared_data: Path) -> Path:
    """Eighty captioned photos with polygons and crowds."""
    return shared_data / "photos" / "coco_mini_train2017"


def store(pixels: np.ndarray[Any, Any], orientation: int) -> np.ndarray[Any, Any]:
    """Upright pixels [H, W, …] → the pixels that a file of this EXIF orientation holds (Pillow's words)."""
    turns = {
        1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a, 1), 7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
        8: lambda a: np.rot90(a, -1),
    }  # fmt: skip
    return np.ascontiguousarray(turns[orientation](pixels))


def exif(orientation: int) -> Image.Exif:
    """An EXIF block with nothing but the orientation."""
    block = Image.Exif()
    block[0x0112] = orientation
    return block


def run_lengths(mask: BoolArray) -> dict[str, Any]:
    """COCO's uncompressed RLE, by hand: column-major runs, the first one of zeros."""
    flat = mask.T.ravel()
    edges = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff([0, *edges, flat.size]).tolist()
    return {"size": list(mask.shape), "counts": ([0] if flat[0] else []) + counts}


def prepare(images: Path, captions: Path, instances: Path, out: Path, splits: str) -> Path:
    """Canonical tables by `scripts/prepare.py coco`."""
    arguments = ["coco", "--images", images, "--captions", captions, "--instances", instances]
    arguments += ["--splits", splits, "--out", out, "--workers", 1]
    assert script("prepare").main([str(a) for a in arguments]) == 0
    return out


def prepare_mini(mini: Path, out: Path, splits: str) -> Path:
    """Canonical tables of the eighty photos."""
    captions, instances = (mini / f"annotations/{kind}_train2017.json" for kind in ("captions", "instances"))
    return prepare(mini / "train2017", captions, instances, out, splits)


class Turned:
    """Four photos in all eight orientations, one object of each painted in MARK.

    Attributes:
        tables: canonical tables of the 32 photos, made by `scripts/prepare.py`.
        upright: image id → upright pixels; truth: image id → upright mask of the painted object.
    """

    def __init__(self, mini: Path, root: Path, annotated_on: str) -> None:
        captions = json.loads((mini / "annotations/captions_train2017.json").read_text())
        instances = json.loads((mini / "annotations/instances_train2017.json").read_text())
        sizes = {row["id"]: (row["height"], row["width"]) for row in instances["images"]}
        kinds: dict[str, list[dict[str, Any]]] = {"crowd": [], "portrait": [], "landscape": []}
        for row in instances["annotations"]:
            height, width = sizes[row["image_id"]]
            if height != width and 0.01 < row["area"] / (height * width) < 0.4:
                upright = "portrait" if height > width else "landscape"
                kinds["crowd" if row["iscrowd"] else upright].append(row)
        objects: list[dict[str, Any]] = []
        for kind in ("crowd", "portrait", "landscape", "landscape"):
            taken = {row["image_id"] for row in objects}
            objects.append(next(row for row in kinds[kind] if row["image_id"] not in taken))
        files = {row["id"]: row["file_name"] for row in instances["images"]}
        (root / "photos").mkdir(parents=True)
        images, annotations, texts = [], [], []
        self.upright: dict[str, UInt8Array] = {}
        self.truth: dict[str, BoolArray] = {}
        self.crowds: set[str] = set()
        for number, row in enumerate(objects):
            pixels = np.array(Image.open(mini / "train2017" / files[row["image_id"]]).convert("RGB"))
            mask = masks.decode(masks.from_coco(row["segmentation"], *pixels.shape[:2]))
            pixels[mask] = MARK
            for orientation in ORIENTATIONS:
                id_ = 100 * (number + 1) + orientation
                name = f"{id_}.png"  # lossless, so that every comparison below is exact
                stored = Image.fromarray(store(pixels, orientation))
                stored.save(root / "photos" / name, exif=exif(orientation), compress_level=1)
                shown = mask if annotated_on == "upright" else store(mask, orientation)
                images.append(
                    {"id": id_, "file_name": name, "height": shown.shape[0], "width": shown.shape[1]}
                )
                shape = row["segmentation"] if annotated_on == "upright" else run_lengths(shown)
                box = masks.to_box(shown).tolist()
                annotations.append(
                    row | {"id": id_, "image_id": id_, "segmentation": shape,
                           "bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]]}
                )  # fmt: skip
                texts += [
                    {"id": 10 * id_ + i, "image_id": id_, "caption": c["caption"]}
                    for i, c in enumerate(
                        c for c in captions["annotations"] if c["image_id"] == row["image_id"]
                    )
                ]
                self.upright[str(id_)], self.truth[str(id_)] = pixels, mask
                if row["iscrowd"]:
                    self.crowds.add(str(id_))
        self.num_captions = len(texts)
        (root / "captions.json").write_text(json.dumps({"images": images, "annotations": texts}))
        (root / "instances.json").write_text(
            json.dumps({"images": images, "annotations": annotations, "categories": instances["categories"]})
        )
        prepare(root / "photos", root / "captions.json", root / "instances.json", root / "tables", "train=1")
        self.tables = Tables(root / "tables")


@pytest.fixture(scope="module", params=["upright", "stored"])
def turned(request: pytest.FixtureRequest, mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Turned:
    """Annotated on the upright pixels (what COCO does) or on those that the file holds."""
    return Turned(mini, tmp_path_factory.mktemp(request.param), request.param)


class Watching(Encoder):
    """An encoder that keeps what it is shown; an image's embedding is the mean colour under its alpha."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_dim = 3
        self.transform = ImageTransform(96)
        self.tokenizer = lambda texts: torch.zeros(len(texts), 4, dtype=torch.int64)
        self.logit_scale = nn.Parameter(torch.zeros(()))

    def encode_image(self, pixels: Tensor, alpha: Tensor | None = None) -> Tensor:
        assert alpha is not None
        mean, std = (torch.tensor(v)[:, None, None] for v in (self.transform.mean, self.transform.std))
        return ((pixels * std + mean) * alpha).sum((2, 3)) / alpha.sum((2, 3))

    def encode_text(self, tokens: Tensor) -> Tensor:
        return torch.ones(len(tokens), 3)

    def depth_of(self, name: str) -> int | None:
        return None

    def text_parameters(self) -> list[nn.Parameter]:
        return []

    def spec(self) -> dict[str, Any]:
        return {}


def test_prepare_turns_photos_and_masks_alike(turned: Turned, capsys: pytest.CaptureFixture[str]) -> None:
    """32 photos, all captions, 32 masks: pixels and masks equal the originals exactly; doctor agrees."""
    rows = {row["id"]: row for row in turned.tables.rows("images")}
    regions = list(turned.tables.rows("regions"))
    assert set(rows) == set(turned.truth) == {row["image_id"] for row in regions} and len(regions) == 32
    assert turned.tables.table("queries").num_rows == turned.num_captions >= 160
    reader = ImageReader(turned.tables.root)
    for region in regions:
        id_ = region["image_id"]
        pixels = reader.read(rows[id_])
        assert np.array_equal(pixels, turned.upright[id_])
        assert (rows[id_]["height"], rows[id_]["width"]) == pixels.shape[:2]
        mask = masks.decode({"size": [region["height"], region["width"]], "counts": region["rle"]})
        assert np.array_equal(mask, turned.truth[id_])
        assert np.array_equal(mask, (pixels == MARK).all(-1))
        assert np.allclose(region["box"], masks.to_box(turned.truth[id_]))
    assert script("prepare").main(["doctor", str(turned.tables.root), "--workers", "1"]) == 0
    assert [line.split()[:4] for line in capsys.readouterr().out.splitlines()][-1] == [
        "total",
        "32",
        "0",
        "0",
    ]


@pytest.mark.parametrize("crop", [False, True])
def test_training_pairs_show_the_painted_object(turned: Turned, crop: bool) -> None:
    """A batch of `PairData`: alpha lies on the painted object in every orientation, pixel for pixel.

    The eight copies of a photo make the same rows; crowds train no region; no photo and no object is lost.
    """
    data = PairData(
        str(turned.tables.root),
        val_split="train",
        max_regions=1,
        full_image_rate=0,
        crop=crop,
        background="keep",
    )
    images = {row["id"]: row for row in turned.tables.rows("images")}
    pairs = PairDataset(data._train_rows(images), Pictures(data.tables, "fail", False), data, Watching())
    batch = pairs.__getitems__(list(range(32)))
    assert batch.num_global == 32 and sorted(batch.names[:32]) == sorted(turned.truth)
    assert batch.alpha is not None and batch.alpha[:32].all()
    regional = [name.split("/")[0] for name in batch.names[32:]]
    assert sorted(regional) == sorted(set(turned.truth) - turned.crowds)
    first: dict[str, tuple[Tensor, Tensor]] = {}
    for i, name in enumerate(batch.names):
        pixels, alpha = batch.pixels[i], batch.alpha[i].bool()
        photo = f"{name[0]} {'whole' if i < 32 else 'region'}"
        same = first.setdefault(photo, (pixels, alpha))
        assert torch.equal(pixels, same[0]) and torch.equal(alpha, same[1]), name
        if i >= 32:
            distance = (pixels.int() - torch.tensor(MARK)).abs().amax(-1)
            near = distance < 60
            assert (near & alpha).sum() > 0.8 * alpha.sum(), name  # the rest are blended edges
            assert (near & ~alpha).sum() <= 0.1 * alpha.sum(), name


def test_regions_of_the_evaluation_show_the_painted_object(turned: Turned, tmp_path: Path) -> None:
    """What `scripts/evaluate.py --masks annotated` embeds is the painted colour, in all 32 photos.

    Crowds included. The share of the photo that the mask covers (eq. 4's cells) is exact, too.
    """
    encoder = Watching().eval()
    bank = RegionBank(
        encoder,
        AnnotatedRegions(turned.tables),
        ImageReader(turned.tables.root),
        view=View(crop=True),
        cache=tmp_path,
        fingerprint="f",
        tables_key="t",
    )
    found = bank.embed(list(turned.tables.rows("images")))
    assert set(found) == set(turned.truth)
    mark = torch.nn.functional.normalize(torch.tensor(MARK, dtype=torch.float32), dim=0).numpy()
    for id_, image in found.items():
        assert len(image.regions) == 1
        assert image.vectors[0] @ mark > 0.98, id_
        assert image.vectors[0] @ mark > image.vectors[1] @ mark, "more than the whole photo"
        assert image.areas[image.cells[:, 0]].sum() == pytest.approx(turned.truth[id_].mean(), abs=1e-9)
        twin = found[f"{id_[0]}01"]
        assert np.allclose(image.vectors, twin.vectors, atol=1e-6) and np.allclose(image.areas, twin.areas)


def test_random_weights_score_chance(mini: Path, tmp_path: Path) -> None:
    """Eighty photos as one gallery, 400 captions, an untrained tower: recall@k is k/N, as far as luck goes.

    N = 80, top K = 20: 1.25 %, 12.5 % and 25 % at k = 1, 10, 20. Captions of a photo are alike, so there are
    about 80 independent draws, not 400: the standard error at 20 is 4.8 points; the bound is three of them.
    """
    tables = prepare_mini(mini, tmp_path / "tables", "test=1")
    torch.manual_seed(0)
    bundle.save_encoder(open_clip(str(ROOT / TOWER)), tmp_path / "bundle")
    script("evaluate").main(
        ["retrieval", "--tables", str(tables), "--splits", "test", "--coarse", str(tmp_path / "bundle"),
         "--crop=true", "--bootstrap", "20", "--out", str(tmp_path / "out")]
    )  # fmt: skip
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["corpus"]["images"] == {"test": 80} and results["coverage"]["queries_evaluated"] == 400
    for name, row in results["retrieval"].items():
        for k in (1, 5, 10, 20):
            error = (k / 80 * (1 - k / 80) / 80) ** 0.5
            assert abs(row[f"recall@{k}"] - k / 80) < 3 * error, (name, k)


def test_splits_are_galleries_of_their_own(mini: Path, tmp_path: Path) -> None:
    """`--splits val,test`: a split's captions search its own photos only, and every gold image is there."""
    tables = prepare_mini(mini, tmp_path / "tables", "train=.5,val=.25,test=.25")
    bundle.save_encoder(open_clip(str(ROOT / TOWER)), tmp_path / "bundle")
    script("evaluate").main(
        ["retrieval", "--tables", str(tables), "--splits", "val,test", "--coarse", str(tmp_path / "bundle"),
         "--where", "full", "--what", "none", "--bootstrap", "20", "--out", str(tmp_path / "out")]
    )  # fmt: skip
    split_of = {row["id"]: row["split"] for row in Tables(tables).rows("images")}
    sizes = {split: list(split_of.values()).count(split) for split in ("val", "test")}
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["corpus"]["images"] == sizes and results["coverage"]["gold_images_absent"] == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "queries.jsonl").read_text().splitlines()]
    assert len(lines) == 5 * sum(sizes.values())
    for line in lines:
        found = [candidate["image_id"] for candidate in line["before"]]
        assert {split_of[id_] for id_ in found} == {line["split"]}
        assert len(set(found)) == len(found) == sizes[line["split"]], "all photos are within the top 20"
        assert set(line["gold_image_ids"]) <= set(found)


def test_missing_photos_name_the_variable(tmp_path: Path) -> None:
    """Without the photos the row ends at once, names all that is missing and how to say where it is."""
    done = subprocess.run(
        [sys.executable, "scripts/reproduce.py", "--row", "coco-regions", "--set", f"photos={tmp_path}/none",
         "--set", f"images={tmp_path}/mine", "--out", str(tmp_path / "run")],
        cwd=ROOT, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 1 and not (tmp_path / "run").exists()
    assert f"{tmp_path}/mine is not there (variable images; give yours: --set images=PATH)" in done.stderr
    assert "(variable captions, made from photos; give yours: --set photos=PATH)" in done.stderr
    assert done.stderr.count("is not there") == 9


def test_two_runs_train_the_same_weights(mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coarse config, then the Alpha-CLIP one, one epoch each, twice with one seed: equal fingerprints."""
    monkeypatch.chdir(ROOT)
    tables = prepare_mini(mini, tmp_path / "tables", "train=.5,val=.25,test=.25")
    train, export = script("train"), script("export")
    prints = []
    for run in ("a", "b"):
        for stage in ("coarse", "alpha"):
            out = tmp_path / run / stage
            arguments = ["fit", "-c", f"configs/real/coco_regions/{stage}.yaml", "--seed_everything=3"]
            arguments += [f"--data.tables={tables}", f"--trainer.default_root_dir={out}"]
            arguments += ["--trainer.max_epochs=1", "--trainer.logger=false", "--trainer.callbacks=null"]
            arguments += ["--trainer.limit_val_batches=0", "--trainer.enable_progress_bar=false"]
            arguments += ["--trainer.check_val_every_n_epoch=1"]  # 5 epochs without a validation save nothing
            if stage == "alpha":
                arguments += [f"--model.encoder.path={tmp_path / run}/coarse/bundle", "--data.max_regions=1"]
            train.main(arguments)
            export.export(out, out / "bundle")
            prints.append(bundle.read_config(out / "bundle")["fingerprint"])
            for checkpoint in out.rglob("*.ckpt"):
                checkpoint.unlink()
    assert prints[:2] == prints[2:] and prints[0] != prints[1]


@pytest.mark.slow
def test_the_whole_graph_twice(shared_data: Path, tmp_path: Path) -> None:
    """The row in miniature, twice from nothing: the same figures to the last digit, in both galleries."""
    figures = []
    for run in ("a", "b"):
        out = tmp_path / run / "coco-regions"
        command = [sys.executable, "scripts/reproduce.py", "--row", "coco-regions", "--out", str(out)]
        short = "--trainer.max_epochs=2"
        command += ["--set", f"photos={shared_data / 'photos'}"]
        command += ["--set", f"coarse_args={short} --trainer.check_val_every_n_epoch=2"]
        command += ["--set", f"alpha_args={short}"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
        results = [
            json.loads(p.read_text()) for p in (out / "results.json", out / "evaluate-other/results.json")
        ]
        figures.append([(r["retrieval"], r["calibration"], r["galleries"]) for r in results])
        assert (out / "report.html").stat().st_size < 4e6
        shutil.rmtree(tmp_path / run)
    assert figures[0] == figures[1]


def test_paths_are_variables() -> None:
    """No path of a machine stands in the graph, and every data path is one that a user can set."""
    graph = yaml.safe_load((ROOT / "configs/real/coco_regions/stages.yaml").read_text())
    assert not [v for v in graph["vars"].values() if isinstance(v, str) and v.startswith("/")]
    inputs = {path for stage in graph["stages"] for path in stage.get("inputs", ())}
    assert len(inputs) == 9 and all(path.strip("{}") in graph["vars"] for path in inputs)
