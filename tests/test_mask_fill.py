"""Images × phrases → mask store: nothing is done twice, and every message's command does what it says."""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from datamodules import fill_masks
from fovea import masks
from fovea.digests import Digests
from fovea.images import BadImage, ImageReader
from fovea.mask_store import MaskStore
from fovea.models.detectors import Detection, Felzenszwalb
from fovea.tables import Tables, TableWriter
from fovea.types import BoolArray, FloatArray, Region, UInt8Array
from fovea.where import Locator

ROOT = Path(__file__).resolve().parents[1]


class Halves:
    """A box of the left half for every phrase with an even number of letters; counts what it was asked."""

    joint = False

    def __init__(self, threshold: float = 0.3, sides: tuple[int, ...] = (2,), device: str = "cpu") -> None:
        self.threshold, self.sides, self.device = threshold, sides, device
        self.asked: list[tuple[str, ...]] = []

    @property
    def key(self) -> str:
        return f"halves-{self.threshold:g}-{self.sides}"

    def detect(self, image: UInt8Array, phrases: Sequence[str]) -> list[Detection]:
        self.asked.append(tuple(phrases))
        height, width = image.shape[:2]
        box = np.array([[0, 0, width / 2, height]], np.float32)
        found = [box[: len(phrase) % 2 == 0] for phrase in phrases]
        return [Detection(own, np.full(len(own), 0.9, np.float32)) for own in found]


class Fill:
    """The whole box as mask, with a checkpoint to name."""

    key = "fill"
    checkpoint = Path("my sam.pth")

    def segment(self, image: UInt8Array, boxes_K4: FloatArray) -> BoolArray:
        return masks.from_boxes(boxes_K4, *image.shape[:2])


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    """Six pictures; question i names two things; its gold are pictures i, i + 1, and one that is absent."""
    rng = np.random.default_rng(0)
    with TableWriter(tmp_path / "tables") as writer:
        for i in range(6):
            Image.fromarray(rng.integers(0, 255, (12, 20, 3), np.uint8)).save(writer.directory / f"{i}.png")
            writer.add("images", id=f"i{i}", path=f"{i}.png", width=20, height=12, split="a")
            gold = [f"i{i}", f"i{(i + 1) % 6}", "gone"]
            text = f"what is next to the {'red' if i % 2 else 'blue'} pig with the drum ?"
            writer.add("queries", id=f"q{i}", text=text, gold_image_ids=gold, split="a")
        writer.finish({"reader": "test"})
    return Tables(tmp_path / "tables")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`main` of scripts/precompute_masks.py, in this process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    main = runpy.run_path(str(ROOT / "scripts/precompute_masks.py"))["main"]
    return lambda *arguments: main(list(map(str, arguments)))


def _gold(tables: Tables) -> list[fill_masks.Asked]:
    rows = {row["id"]: row for row in tables.rows("images")}
    texts = fill_masks.phrase_texts()
    return fill_masks.ask_phrases(rows, tables.queries(), lambda q: q.gold_image_ids, texts, joint=False)


def test_an_image_is_looked_at_once_for_all_that_it_lacks(tables: Tables, tmp_path: Path) -> None:
    """One call for all phrases of an image, none for what is there; the same bytes under another id are not
    looked at again, changed bytes under the same id are.
    """
    detector = Halves()
    maker, reader = Locator(detector, Fill()), ImageReader(tables.root)
    digests = Digests(reader, tmp_path / "digests.txt")
    store = MaskStore(tmp_path / "store", maker.key)
    asked = _gold(tables)
    assert [len(item.prompts) for item in asked] == [3] * 6  # two questions share "drum"
    fresh = fill_masks.todo(asked, store, digests, read=False)
    assert (fresh.num_missing, fresh.num_asked, len(fresh.asked)) == (18, 18, 6)
    filler = fill_masks.Filler(maker, reader, store, digests)
    assert [filler(item).num_results for item in fresh.asked] == [3] * 6
    assert len(detector.asked) == 6 and all(len(phrases) == 3 for phrases in detector.asked)
    assert fill_masks.todo(asked, store, digests, read=False).asked == []
    twin = asked[0]._replace(row=asked[0].row | {"id": "twin"})
    assert filler(twin).num_results == 0 and len(detector.asked) == 6
    more = asked[0]._replace(prompts=(*asked[0].prompts, ("green house",)))
    assert filler(more).num_results == 1 and detector.asked[-1] == ("green house",)

    path = Path(tables.root) / "3.png"
    before = path.stat()
    data = bytearray(path.read_bytes())
    Image.fromarray(np.zeros((12, 20, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes().ljust(len(data), b"\0"))  # the same size and time: only ctime tells
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    left = fill_masks.todo(asked, store, Digests(reader, tmp_path / "digests.txt"), read=False)
    assert [item.row["id"] for item in left.asked] == ["i3"]


def test_commands_in_messages_work(
    tables: Tables, tmp_path: Path, script: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a message says to run makes the same maker: class, changed arguments, segmenter; and fills."""
    maker = Locator(Halves(0.5, sides=(1, 2)), Fill())
    options = fill_masks.made_by(maker)
    assert (
        options
        == f"--detector {__name__}.Halves --set threshold=0.5 --set 'sides=[1, 2]' --segmenter 'my sam.pth'"
    )
    assert fill_masks.made_by(Felzenszwalb(min_size=9)).endswith("Felzenszwalb --set min_size=9")
    monkeypatch.setattr("fovea.models.segmenters.load", lambda checkpoint, device: Fill())
    with pytest.raises(ValueError, match="6 of 6 images are missing") as failure:
        fill_masks.fill(tables, _gold(tables), tmp_path / "store", maker, key=None, max_build=5, splits="a")
    command = str(failure.value).rpartition("; run: python scripts/precompute_masks.py ")[2]
    assert script(*shlex.split(command)) == 0
    store = MaskStore.open(tmp_path / "store")
    assert store.key == maker.key and len(store) == 18 and store.made_by == options
    fill_masks.fill(tables, _gold(tables), tmp_path / "store", None, key=None, max_build=0, splits="a")


def test_unreadable_images_of_ranks(
    tables: Tables, tmp_path: Path, script: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Under `skip` no rank fails for its unreadable images, all of them are listed once; what is repaired is
    done by the next run and leaves the list. A rank beyond the last is refused.
    """
    arguments = ["--tables", tables.root, "--out", tmp_path / "store", "--workers", 1, "--policy", "skip"]
    kept = tmp_path / "kept.png"
    for name in ("1.png", "4.png"):
        shutil.copy(Path(tables.root) / name, kept)
        (Path(tables.root) / name).write_bytes(kept.read_bytes()[:50])
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert script(*arguments) == 0
        assert "1 images unreadable, 0 results missing" in capsys.readouterr().out
    listed = tmp_path / "store/bad_images.jsonl"
    assert [line[:12] for line in listed.read_text().splitlines()] == ['{"id": "i1",', '{"id": "i4",']
    monkeypatch.setenv("RANK", "2")
    assert script(*arguments) == 2 and "RANK=2, WORLD_SIZE=2" in capsys.readouterr().err
    monkeypatch.delenv("RANK")
    shutil.copy(kept, Path(tables.root) / "4.png")
    assert script(*arguments) == 0 and "1 images unreadable" in capsys.readouterr().out
    assert [line[:12] for line in listed.read_text().splitlines()] == ['{"id": "i1",']
    assert len(MaskStore.open(tmp_path / "store")) == 5


def test_prompts_of_a_parquet_file(tables: Tables, tmp_path: Path) -> None:
    """Columns query_id and image_id, or image_id and prompts, ask what JSONL would; a foreign id is named."""
    rows = {row["id"]: row for row in tables.rows("images")}

    def ask(columns: dict[str, Any]) -> list[tuple[str, tuple[tuple[str, ...], ...]]]:
        pq.write_table(pa.table(columns), tmp_path / "p.parquet")
        texts = fill_masks.phrase_texts()
        asked = fill_masks.ask_file(tmp_path / "p.parquet", rows, tables.queries(), texts, joint=False)
        return [(item.row["id"], item.prompts) for item in asked]

    assert ask({"query_id": ["q1", "q1"], "image_id": ["i5", "i0"]}) == [
        (id_, (("red pig",), ("drum",))) for id_ in ("i5", "i0")
    ]
    assert ask({"image_id": ["i2"], "prompts": [[["a", "b"], ["c"]]]}) == [("i2", (("a", "b"), ("c",)))]
    with pytest.raises(ValueError, match="row 1: image 'x9' is not among"):
        ask({"query_id": ["q1"], "image_id": ["x9"]})


def test_digests_without_a_place_to_write(tables: Tables, tmp_path: Path) -> None:
    """A store that cannot be written to (a file stands where its folder should be) is only slower to read;
    what has no file is named as such.
    """
    (tmp_path / "file").write_text("")
    row = next(tables.rows("images"))
    digests = Digests(ImageReader(tables.root), tmp_path / "file" / "digests.txt")
    assert digests.known(row) is None and digests(row) == digests.known(row)
    with pytest.raises(BadImage, match="no such file"):
        digests.known(row | {"path": "nowhere.png"})


def test_stores_give_their_files_back(tmp_path: Path) -> None:
    """Many stores, and many shards, leave no file open; a box outside its image is a fault."""
    region = Region("r", np.array([0, 0, 9, 4], np.float32), masks.encode(np.ones((4, 4), bool)))
    for i in range(80):
        store = MaskStore(tmp_path, "k")
        store.append(f"d{i}", {(): [region] if i == 7 else []}, image_id=f"i{i}")
        store.close()
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    reader = MaskStore(tmp_path, "k")
    assert sum(len(regions) for _, regions in reader.items()) == 1
    (fault,) = reader.verify()
    assert "image 'i7': region r: box [0.0, 0.0, 9.0, 4.0] leaves the image of 4×4" in fault
    del reader
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before
