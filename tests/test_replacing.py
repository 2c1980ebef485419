"""What is replaced on disk: only what the project wrote itself, and never so that a kill loses both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import save_file

from fovea import bundle
from fovea.models.encoders import tiny_clip
from fovea.replace import replace_directory, replace_text, restore_directory
from fovea.tables import Tables, TableWriter
from scripts import prepare


def write(root: Path, reader: str, **options: Any) -> Path:
    """Tables of one image, with a shard of their own."""
    with TableWriter(root, **options) as writer:
        (writer.directory / "train-0000.tar").write_bytes(b"pixels")
        writer.add("images", id="1", path="train-0000.tar", width=4, height=4)
        return writer.finish({"reader": reader})


def files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))


def test_tables_replace_tables_and_nothing_else(tmp_path: Path) -> None:
    """A foreign file beside them, a directory of another kind, a file: refused, and all is still there."""
    root = write(tmp_path / "tables", "first")
    with pytest.raises(FileExistsError, match="pass --overwrite to replace the tables"):
        write(root, "second")
    write(root, "second", overwrite=True)
    assert Tables(root).manifest["reader"] == "second"
    assert Tables(root).manifest["files"] == files(root)
    (root / "manifest.json").write_text('{"torn')  # still ours: the names say so
    write(root, "third", overwrite=True)
    (root / "masks").mkdir()
    (root / "masks" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"no part of the tables \(masks/notes.txt\)"):
        write(root, "fourth", overwrite=True)
    assert Tables(root).manifest["reader"] == "third" and (root / "masks" / "notes.txt").exists()

    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "a.jpg").write_bytes(b"a photo")
    (tmp_path / "file").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "manifest.json").write_text('{"name": "of another program"}')
    for place in (photos, tmp_path / "model"):
        with pytest.raises(FileExistsError, match="holds no canonical tables, so it is never replaced"):
            write(place, "fifth", overwrite=True)
    with pytest.raises(FileExistsError, match="is a file"):
        write(tmp_path / "file", "fifth", overwrite=True)
    assert files(photos) == ["a.jpg"]
    assert not list(tmp_path.glob(".*"))


def test_tables_of_before_files_were_listed(tmp_path: Path) -> None:
    """A manifest without `files`: the names that readers have always written are the tables'."""
    root = write(tmp_path / "tables", "first")
    manifest = json.loads((root / "manifest.json").read_text())
    del manifest["files"]
    (root / "manifest.json").write_text(json.dumps(manifest))
    write(root, "second", overwrite=True)
    assert Tables(root).manifest["reader"] == "second"


@pytest.mark.parametrize(
    ("images", "out", "told"),
    [
        ("photos", "photos", "lies inside --out"),
        ("photos/more", "photos", "lies inside --out"),
        ("photos", "photos/tables", "lies inside --images"),
        ("photos", "link", "lies inside --out"),
    ],
)
def test_inputs_and_tables_lie_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], images: str, out: str, told: str
) -> None:
    """--out is neither an input nor inside one, by whatever name; the photos survive --overwrite."""
    more = tmp_path / "photos" / "more"
    more.mkdir(parents=True)
    (tmp_path / "link").symlink_to("photos")
    Image.new("RGB", (4, 4)).save(more / "a.jpg")
    command = ["folder", "--images", str(tmp_path / images), "--out", str(tmp_path / out), "--overwrite"]
    assert prepare.main(command) == 2
    assert told in capsys.readouterr().err and (more / "a.jpg").exists()


def test_a_pipe_among_photos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A FIFO named like a photo is listed and left alone; one that tables name is a bad image."""
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("RGB", (4, 4)).save(photos / "a.jpg")
    os.mkfifo(photos / "b.jpg")
    command = ["folder", "--images", str(photos), "--out", str(tmp_path / "t"), "--workers", "1"]
    assert prepare.main(command) == 0
    assert "1 pipes, sockets or devices in the folder were passed over: 'b.jpg'" in capsys.readouterr().out
    (photos / "a.jpg").unlink()
    os.mkfifo(photos / "a.jpg")
    assert prepare.main(["doctor", str(tmp_path / "t"), "--workers", "1"]) == 1
    assert "unreadable: a.jpg" in (told := capsys.readouterr().out) and "no regular file" in told


def test_bundles_replace_bundles_and_nothing_else(tmp_path: Path) -> None:
    """A model folder of another library, or a bundle with something beside it, is left alone."""
    encoder = tiny_clip(["a"], image_size=16, widths=(8, 8), embed_dim=8, heads=2, text_width=8)
    foreign = tmp_path / "clip-vit"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "clip"}')
    save_file({}, foreign / "model.safetensors")
    mine = bundle.save_encoder(encoder, tmp_path / "mine")
    (mine / "thesis.txt").write_text("years of work")
    for place in (foreign, mine):
        before = files(place)
        with pytest.raises(FileExistsError, match="not a bundle, or holds other files"):
            bundle.save_encoder(encoder, place)
        assert files(place) == before
    (tmp_path / "empty").mkdir()
    bundle.save_encoder(encoder, tmp_path / "empty")
    bundle.save_encoder(encoder, tmp_path / "empty", provenance={"second": True})
    assert bundle.read_config(tmp_path / "empty")["provenance"] == {"second": True}
    assert not list(tmp_path.glob(".*"))


KILLED = """
import os, sys
from pathlib import Path
from fovea import replace
step, rename = int(sys.argv[1]), Path.rename
def counted(self, target):
    global step
    step -= 1
    if step < 0:
        os.kill(os.getpid(), 9)
    return rename(self, target)
Path.rename = counted
replace.shutil.rmtree = lambda path, **_: os.kill(os.getpid(), 9) if step == 0 and path.exists() else None
replace.replace_directory(Path("new"), Path("there"))
"""


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_kill_leaves_the_old_or_the_new(tmp_path: Path, step: int) -> None:
    """`kill -9` before each rename and before the old is deleted: one whole directory can be had."""
    for name in ("there", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "what").write_text(name)
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{KILLED}", str(step)]
    assert subprocess.run(command, cwd=tmp_path).returncode == -9
    restore_directory(tmp_path / "there")
    assert (tmp_path / "there" / "what").read_text() == ("new" if step == 2 else "there")
    (tmp_path / "newer").mkdir()
    replace_directory(tmp_path / "newer", tmp_path / "there")
    assert files(tmp_path / "there") == [] and not list(tmp_path.glob(".*"))


def test_interrupted_tables_are_brought_back(tmp_path: Path) -> None:
    """A writer was killed between its renames: the message names the old tables, a writer restores them."""
    root = write(tmp_path / "tables", "first")
    root.rename(tmp_path / ".tables.old")
    with pytest.raises(FileNotFoundError, match=r"bring back .*\.tables\.old"):
        Tables(root)
    with pytest.raises(FileExistsError):
        write(root, "second")
    assert Tables(root).manifest["reader"] == "first"


def test_replaced_text(tmp_path: Path) -> None:
    replace_text(tmp_path / "new" / "a.json", "one")
    replace_text(tmp_path / "new" / "a.json", "two")
    assert files(tmp_path / "new") == ["a.json"] and (tmp_path / "new" / "a.json").read_text() == "two"


def test_damaged_tables_are_named(tmp_path: Path) -> None:
    """A torn or foreign manifest, a table that is gone or cut short: file and fix stand in the message."""
    root = write(tmp_path / "tables", "first")
    regions = root / "regions.parquet"
    regions.write_bytes(regions.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"regions\.parquet is damaged .*prepare.py first --out"):
        Tables(root).table("regions")
    regions.unlink()
    with pytest.raises(ValueError, match=r"regions\.parquet is missing; make the tables again"):
        Tables(root).table("regions")
    for text in ("[]", '{"version": 2, "ro'):
        (root / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=r"manifest\.json is damaged .*make the tables again"):
            Tables(root)


def test_damaged_bundle_configs_are_named(tmp_path: Path) -> None:
    """Torn, foreign and incomplete config.json: the file, the key, and what to do."""
    encoder = tiny_clip(["a"], image_size=16, widths=(8, 8), embed_dim=8, heads=2, text_width=8)
    file = bundle.save_encoder(encoder, tmp_path / "b") / "config.json"
    whole = json.loads(file.read_text())
    cases = [
        (file.read_text()[:40], "is damaged"),
        ('{"model_type": "clip"}', "no `format`"),
        (json.dumps({k: v for k, v in whole.items() if k != "encoder"}), "lacks encoder;"),
        (json.dumps(whole | {"encoder": {"class_path": "fovea.x"}}), "lacks encoder.init_args"),
    ]
    for text, told in cases:
        file.write_text(text)
        with pytest.raises(ValueError, match=rf"config\.json .*{told}.*export it again"):
            bundle.load_encoder(tmp_path / "b")


def test_images_listed_twice_are_not_trained_on(tmp_path: Path) -> None:
    """One of two rows would win without a word: PairData names the ids."""
    from datamodules.pairs import PairData

    with TableWriter(tmp_path / "t") as writer:
        for id_ in ("a", "b", "a"):
            writer.add("images", id=id_, path="/x.png", width=4, height=4, split="train")
        writer.finish({"reader": "test"})
    with pytest.raises(ValueError, match=r"images\.parquet: 1 ids have more than one row, e.g. a;"):
        PairData(str(tmp_path / "t"))
