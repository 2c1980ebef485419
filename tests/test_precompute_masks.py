"""Tables → mask store: resumable, the same whatever was killed, and wrong arguments are named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fovea import masks
from fovea.images import ImageReader
from fovea.mask_store import Entry, MaskStore
from fovea.models.detectors import Felzenszwalb
from fovea.ranks import own_device
from fovea.tables import Tables, TableWriter

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, str(ROOT / "scripts/precompute_masks.py")]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables of 40 random block pictures of 48 px, splits a and b, and a uniform one without any region."""
    root = tmp_path_factory.mktemp("pictures") / "tables"
    rng = np.random.default_rng(0)
    with TableWriter(root) as writer:
        for number in range(41):
            blocks = (
                rng.integers(0, 255, (4, 4, 3), np.uint8) if number < 40 else np.full((4, 4, 3), 90, np.uint8)
            )
            pixels = blocks.repeat(12, 0).repeat(12, 1)
            Image.fromarray(pixels).save(writer.directory / f"{number}.png")
            row = {"id": f"i{number}", "path": f"{number}.png", "width": 48, "height": 48}
            writer.add("images", **row, split="a" if number < 30 else "b")
        writer.finish({"reader": "test"})
    return root


def _content(store: MaskStore) -> dict[str, Any]:
    return {
        entry: [(region.id, region.box.tolist(), region.mask, region.scores) for region in regions]
        for entry, regions in store.items()
    }


@pytest.fixture(scope="module")
def whole(pictures: Path) -> MaskStore:
    """The store that an uninterrupted run writes, split by split."""
    out = pictures.parent / "whole"
    first = _run("--tables", pictures, "--out", out, "--splits", "a", "--workers", 1)
    assert first.returncode == 0, first.stderr
    assert "0 of 30 results for 30 images are in" in first.stdout and "0 images unreadable" in first.stdout
    second = _run("--tables", pictures, "--out", out, "--workers", 1)
    assert "30 of 41 results" in second.stdout and "added for 11 images (1 without any" in second.stdout
    return MaskStore.open(out)


def test_the_store_holds_what_the_detector_proposes(pictures: Path, whole: MaskStore) -> None:
    """Every image has a row, under the detector's key, with its masks and their tight boxes; none is a
    result.
    """
    detector = Felzenszwalb()
    assert whole.key == detector.key and len(whole) == 41
    digest = {row["id"]: ImageReader(pictures).digest(row) for row in Tables(pictures).rows("images")}
    assert whole.get(Entry(digest["i40"])) == [] and whole.image_id(Entry(digest["i40"])) == "i40"
    for number in (0, 35):
        proposed = detector.propose(np.asarray(Image.open(pictures / f"{number}.png")))
        stored = whole.get(Entry(digest[f"i{number}"]))
        assert np.array_equal(masks.decode_many([region.mask or {} for region in stored]), proposed)
        assert [region.box.tolist() for region in stored] == [
            masks.to_box(mask).tolist() for mask in proposed
        ]
        assert len({region.id for region in stored}) == len(stored) > 0


def test_a_second_run_does_nothing(pictures: Path, whole: MaskStore) -> None:
    """What is there is not done again: no shard is added."""
    shards = sorted(whole.directory.glob("*.rows"))
    again = _run("--tables", pictures, "--out", whole.path)
    assert again.returncode == 0 and "41 of 41 results" in again.stdout
    assert sorted(whole.directory.glob("*.rows")) == shards


# Slow enough to be killed in the middle; importable by the workers through PYTHONPATH.
_SLOW = """
import time
from fovea.models.detectors import Felzenszwalb
class Slow:
    key = Felzenszwalb().key
    def rles(self, image):
        time.sleep(0.05)
        return Felzenszwalb().rles(image)
"""


def test_killed_and_run_again_equals_uninterrupted(pictures: Path, whole: MaskStore, tmp_path: Path) -> None:
    """Two workers, the run killed with SIGKILL half-way: the workers end with it, what is there is kept, the
    next run does the rest, and the store equals an uninterrupted run's.
    """
    (tmp_path / "slow.py").write_text(_SLOW)
    command = [*COMMAND, "--tables", str(pictures), "--out", str(tmp_path / "store"), "--workers", "2"]
    environment = ENVIRONMENT | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    process = subprocess.Popen(
        [*command, "--detector", "slow.Slow"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    store = MaskStore(tmp_path / "store", whole.key)
    deadline = time.monotonic() + 60
    while len(store) < 12 and time.monotonic() < deadline:
        store.refresh()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.5)
    store.refresh()
    done = len(store)
    assert 12 <= done < 41 and store.num_damaged == 0
    time.sleep(0.5)
    store.refresh()
    assert len(store) == done, "workers go on after their parent was killed"
    rest = _run("--tables", pictures, "--out", tmp_path / "store", "--workers", 2)
    assert rest.returncode == 0 and f"{done} of 41 results" in rest.stdout
    assert _content(MaskStore.open(tmp_path / "store")) == _content(whole)


def test_unreadable_images(pictures: Path, tmp_path: Path) -> None:
    """`fail` names the image and the way on; `skip` does the others and lists the bad one with its reason."""
    root = tmp_path / "tables"
    with TableWriter(root) as writer:
        for number, name in enumerate((pictures / "0.png", tmp_path / "gone.png")):
            writer.add("images", id=f"i{number}", path=str(name), width=48, height=48)
        writer.finish({"reader": "test"})
    failed = _run("--tables", root, "--out", tmp_path / "store")
    assert failed.returncode == 2 and "image i1: no such file (1 such images); --policy skip" in failed.stderr
    skipped = _run("--tables", root, "--out", tmp_path / "store", "--policy", "skip")
    assert skipped.returncode == 0 and "1 images unreadable" in skipped.stdout
    store = MaskStore.open(tmp_path / "store")
    assert [store.image_id(entry) for entry in store.entries()] == ["i0"]
    assert (tmp_path / "store/bad_images.jsonl").read_text() == '{"id": "i1", "reason": "no such file"}\n'


@pytest.mark.parametrize(
    "arguments,reason",
    [
        (["--splits", "a,z"], r"--splits z: not in .*\['a', 'b'\]"),
        (["--detector", "Nope"], "no attribute 'Nope'"),
        (["--detector", "no.such.module.Class"], "No module named"),
        (["--set", "scale=3"], "unexpected keyword argument 'scale'"),
        (["--set", "scales"], "NAME=VALUE"),
        (["--set", "min_size=abc"], "min_size=abc: min_size of .*Felzenszwalb must be of type int"),
        (["--set", "min_size=0"], "min_size=0 must be at least 1"),
    ],
)
def test_wrong_arguments(pictures: Path, tmp_path: Path, arguments: list[str], reason: str) -> None:
    """Each wrong argument ends at once with one line that names it."""
    import re

    result = _run("--tables", pictures, "--out", tmp_path / "store", *arguments)
    assert result.returncode == 2 and re.search(reason, result.stderr)
    assert len(result.stderr.strip().splitlines()) == 1 and not (tmp_path / "store").exists()


def test_detector_arguments_change_the_key(pictures: Path, tmp_path: Path) -> None:
    """Other settings are another key in the same store; nothing of the old one is touched."""
    for settings in ([], ["--set", "scales=[50]", "--set", "min_size=5"]):
        result = _run(
            "--tables", pictures, "--splits", "b", "--out", tmp_path / "s", "--workers", 1, *settings
        )
        assert result.returncode == 0, result.stderr
    assert MaskStore.keys(tmp_path / "s") == sorted([Felzenszwalb().key, Felzenszwalb((50,), 0.5, 5).key])


# Importable by the script through PYTHONPATH: a detector of phrases, quick and without weights.
_FAKE = """
import numpy as np
from fovea.models.detectors import Detection
class Letters:
    joint = False
    def __init__(self, threshold=0.3):
        self.threshold = threshold
    @property
    def key(self):
        return f"letters-{self.threshold:g}"
    def detect(self, image, phrases):
        height, width = image.shape[:2]
        found = []
        for phrase in phrases:
            x = len(phrase) % 7 * width / 14
            boxes = [[x, 0, x + width / 2, height / 2]] * (len(phrase) % 3)
            boxes = np.array(boxes, np.float32).reshape(-1, 4)
            found.append(Detection(boxes, np.full(len(boxes), 0.5, np.float32)))
        return found
"""


@pytest.fixture(scope="module")
def asked(pictures: Path) -> Path:
    """Tables with questions: image i is the gold of question i, and a candidate of the next one."""
    root = pictures.parent / "asked"
    (pictures.parent / "fake.py").write_text(_FAKE)
    things = ["red pig", "blue drum", "old house", "tall tree", "small boat"]
    with TableWriter(root) as writer:
        for number in range(12):
            path = pictures / f"{number}.png"
            writer.add("images", id=f"i{number}", path=str(path), width=48, height=48, split="a")
            text = f"what is next to the {things[number % 5]} with the {things[(number + 1) % 5]} ?"
            candidates = [f"i{number}", f"i{(number + 11) % 12}"]
            writer.add(
                "queries", id=f"q{number}", text=text, split="a", gold_image_ids=[f"i{number}"],
                candidate_image_ids=candidates,
            )  # fmt: skip
        writer.add("queries", id="gone", text="where is the pig ?", split="a", gold_image_ids=["never seen"])
        writer.finish({"reader": "test"})
    return root


def test_phrases_over_two_ranks(asked: Path, tmp_path: Path) -> None:
    """Two ranks fill what one would, each image once; then a preview, more prompts, and a check. Another
    threshold is another store.
    """
    sam = ROOT.parent / "shared/data/sam_tiny/sam_tiny.pth"
    segmenter = ["--segmenter", str(sam)] if sam.is_file() else []
    environment = ENVIRONMENT | {"PYTHONPATH": f"{ROOT}{os.pathsep}{asked.parent}"}

    def command(out: str, *more: str) -> list[str]:
        fixed = ["--tables", str(asked), "--out", str(tmp_path / out), "--detector", "fake.Letters"]
        return [*COMMAND, *fixed, *segmenter, *more]

    def run(*arguments: str, env: dict[str, str] = environment) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command(*arguments), capture_output=True, text=True, env=env, timeout=120)

    ranks = [
        subprocess.Popen(
            command("two"),
            env=environment | {"RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    one = run("one", "--preview", "3")
    assert one.returncode == 0, one.stderr
    assert "1 of 13 images that the questions name are not in" in one.stdout and "never seen" in one.stdout
    assert "24 results with" in one.stdout and "3 images → " in one.stdout
    page = (tmp_path / "one/preview.html").read_text()
    assert "red pig" in page and "blue drum" in page and "letters-0.3" in page
    for rank in ranks:
        assert rank.wait(timeout=120) == 0 and "for 6 images" in rank.stdout.read()
    whole, two = MaskStore.open(tmp_path / "one"), MaskStore.open(tmp_path / "two")
    assert _content(two) == _content(whole) and len(whole) == 24
    assert sum(len(shard.read_bytes().splitlines()) for shard in two.directory.glob("*.rows")) == 12

    again = run("one", "--prompts", "candidates")
    assert "results for 12 images" in again.stdout and "24 of " in again.stdout
    assert run("one", "--set", "threshold=0.5").returncode == 0
    keys = MaskStore.keys(tmp_path / "one")
    assert len(keys) == 2 and "letters-0.5" in keys[1]
    (shard, *_) = MaskStore(tmp_path / "one", keys[1]).directory.glob("*.rows")
    data = bytearray(shard.read_bytes())
    data[-20] ^= 1
    shard.write_bytes(bytes(data))
    verified = subprocess.run(  # no tables, no detector: whatever is there
        [*COMMAND, "--out", str(tmp_path / "one"), "--verify"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert verified.returncode == 1 and f"PROBLEM: {shard}" in verified.stdout
    assert "36 results in" in verified.stdout and "22 results in" in verified.stdout


@pytest.mark.parametrize(
    "arguments,reason",
    [
        (["--prompts", "none"], "finds what phrases name"),
        (["--prompts", "nowhere.jsonl"], "or a JSONL file"),
        (["--segmenter", "/no/sam.pth"], "/no/sam.pth does not exist"),
        (["--detector", "Felzenszwalb", "--prompts", "gold"], "Felzenszwalb is asked nothing"),
        (["--detector", "pathlib.Path"], "neither `detect`.*nor `rles`"),
        (["--workers", "0"], "--workers 0: 0 and 1 are the least"),
        (["--preview", "-3"], "--preview -3"),
    ],
)
def test_wrong_prompts(asked: Path, tmp_path: Path, arguments: list[str], reason: str) -> None:
    """Each ends at once with one line that says what would be right."""
    import re

    environment = ENVIRONMENT | {"PYTHONPATH": f"{ROOT}{os.pathsep}{asked.parent}"}
    command = [
        *COMMAND,
        "--tables",
        str(asked),
        "--out",
        str(tmp_path / "s"),
        "--detector",
        "fake.Letters",
        *arguments,
    ]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 2 and re.search(reason, result.stderr), result.stderr


def test_an_unknown_device_is_named() -> None:
    """Whatever torch does not know, before any weights are loaded."""
    with pytest.raises(ValueError, match="--device banana: no device of torch"):
        own_device("banana")
    assert own_device("cpu") == "cpu"
