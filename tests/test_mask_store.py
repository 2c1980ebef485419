"""The mask store: what goes in comes out, a kill costs at most the row in flight, writers never collide."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from fovea import masks
from fovea.digests import Digests
from fovea.images import BadImage, ImageReader
from fovea.mask_store import Entry, MaskStore
from fovea.types import Region


def _region(seed: int) -> Region:
    rng = np.random.default_rng(seed)
    mask = rng.random((48, 64)) < 0.3
    scores = {"detector": float(np.float32(rng.random()))}
    return Region(f"r{seed}", masks.to_box(mask), masks.encode(mask), f"p{seed}", "red pig ü", scores)


def _missing(store: MaskStore, digests: Iterable[str]) -> list[str]:
    return [entry.digest for entry in store.missing(map(Entry, digests))]


def _digests(store: MaskStore) -> list[str]:
    return [entry.digest for entry in store.entries()]


def _same(left: list[Region], right: list[Region]) -> bool:
    def plain(region: Region) -> tuple[object, ...]:
        return (region.id, region.box.tolist(), region.mask, region.phrase_id, region.label, region.scores)

    return [plain(region) for region in left] == [plain(region) for region in right]


def test_regions_come_back_as_they_were(tmp_path: Path) -> None:
    """Box, mask, phrase, label and scores survive; zero regions and a box without a mask are results too."""
    store = MaskStore(tmp_path, "felzenszwalb")
    box_only = Region("b", np.array([1, 2, 3.5, 4], np.float32), None)
    store.append("a/1", {(): [_region(0), _region(1)]})
    store.append("zero", {(): []})
    store.append("box", {(): [box_only]})
    for again in (store, MaskStore(tmp_path, "felzenszwalb"), MaskStore.open(tmp_path)):
        assert _same(again.get(Entry("a/1")), [_region(0), _region(1)])
        assert again.get(Entry("zero")) == []
        assert _same(again.get(Entry("box")), [box_only])
        assert _missing(again, ["zero", "x", "a/1", "y", "x"]) == ["x", "y"]
        assert _digests(again) == ["a/1", "box", "zero"]


def test_an_image_that_is_not_there_names_the_command(tmp_path: Path) -> None:
    """The error names image, key, the keys that are there, and the script that fills the store."""
    MaskStore(tmp_path, "other detector").append("1", {(): []})
    with pytest.raises(KeyError, match=r"'7'.*'wanted'.*other detector.*precompute_masks\.py"):
        MaskStore(tmp_path, "wanted").get(Entry("7"))


def test_keys_do_not_mix(tmp_path: Path) -> None:
    """A changed threshold is another key: its rows are missing, the old ones stay."""
    MaskStore(tmp_path, "d>0.3").append("1", {(): [_region(0)]})
    MaskStore(tmp_path, "d>0.5").append("1", {(): []})
    assert _same(MaskStore(tmp_path, "d>0.3").get(Entry("1")), [_region(0)])
    assert MaskStore(tmp_path, "d>0.5").get(Entry("1")) == []
    assert MaskStore.keys(tmp_path) == ["d>0.3", "d>0.5"]
    with pytest.raises(ValueError, match="holds 2 keys"):
        MaskStore.open(tmp_path)


@pytest.mark.parametrize("cut", [1, 5, 9, 40, -1])
def test_a_row_cut_short_is_missing_and_nothing_else(tmp_path: Path, cut: int) -> None:
    """Whatever byte a kill stopped at: earlier rows stay, the torn one is missing, appending it works."""
    store = MaskStore(tmp_path, "k")
    store.append("whole", {(): [_region(0)]})
    (shard,) = store.directory.glob("*.rows")
    whole = shard.stat().st_size
    store.append("torn", {(): [_region(1)]})
    store.close()
    data = shard.read_bytes()
    shard.write_bytes(data[: whole + cut] if cut > 0 else data[:cut])
    again = MaskStore(tmp_path, "k")
    assert _missing(again, ["whole", "torn"]) == ["torn"]
    again.append("torn", {(): [_region(1)]})
    again.append("next", {(): []})
    assert _missing(MaskStore(tmp_path, "k"), ["whole", "torn", "next"]) == []
    assert _same(again.get(Entry("torn")), [_region(1)]) and _same(again.get(Entry("whole")), [_region(0)])


def test_a_damaged_row_is_ignored_and_counted(tmp_path: Path) -> None:
    """A flipped bit in the middle of a shard costs its row only, and is counted."""
    store = MaskStore(tmp_path, "k")
    for name in "abc":
        store.append(name, {(): [_region(3)]})
    (shard,) = store.directory.glob("*.rows")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(bytes(data))
    again = MaskStore(tmp_path, "k")
    assert _missing(again, "abc") == ["b"] and again.num_damaged == 1
    again.append("b", {(): [_region(3)]})
    assert _same(again.get(Entry("b")), [_region(3)])


def test_a_reader_sees_the_store_grow(tmp_path: Path) -> None:
    """A store opened before the first row, and before a second writer's, finds both without reopening."""
    reader, first, second = (MaskStore(tmp_path, "k") for _ in range(3))
    assert _missing(reader, ["1", "2"]) == ["1", "2"]
    first.append("1", {(): [_region(1)]})
    assert _same(reader.get(Entry("1")), [_region(1)])
    second.append("2", {(): []})
    assert _missing(reader, ["1", "2"]) == []
    assert len(list(reader.directory.glob("*.rows"))) == 2


def test_a_row_seen_half_written_is_found_once_it_is_whole(tmp_path: Path) -> None:
    """A reader that looks in the middle of a write neither counts damage nor misses the row afterwards."""
    store = MaskStore(tmp_path, "k")
    store.append("1", {(): [_region(1)]})
    store.append("2", {(): [_region(2)]})
    (shard,) = store.directory.glob("*.rows")
    data = shard.read_bytes()
    shard.write_bytes(data[:-30])
    reader = MaskStore(tmp_path, "k")
    assert _missing(reader, "12") == ["2"] and reader.num_damaged == 0
    shard.write_bytes(data)
    assert _same(reader.get(Entry("2")), [_region(2)]) and reader.num_damaged == 0


def _write_forever(path: Path, start: int) -> None:
    store = MaskStore(path, "k")
    for number in range(start, start + 100_000):
        store.append(str(number), {(): [_region(number % 7)]})


def test_two_writers_killed_leave_a_sound_store(tmp_path: Path) -> None:
    """Two processes write; both are killed with SIGKILL in full flight: every row that is there is exact."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_forever, args=(tmp_path, start)) for start in (0, 1_000_000)]
    for writer in writers:
        writer.start()
    store = MaskStore(tmp_path, "k")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not {"3", "1000003"} <= set(_digests(store)):
        store.refresh()
        time.sleep(0.02)
    for writer in writers:
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
    again = MaskStore(tmp_path, "k")
    assert {"3", "1000003"} <= set(_digests(again)) and again.num_damaged == 0
    for entry, regions in again.items():
        assert _same(regions, [_region(int(entry.digest) % 7)])
    for start in (0, 1_000_000):  # no gap: only the row in flight can be lost
        numbers = sorted(
            int(name) for name in _digests(again) if int(name) // 1_000_000 == start // 1_000_000
        )
        assert numbers == list(range(start, start + len(numbers)))


def test_results_of_one_pass_are_kept_by_prompt(tmp_path: Path) -> None:
    """Phrases of one image, asked alone or together, are results of their own; what is there stays."""
    store = MaskStore(tmp_path, "k")
    store.append("d", {("pig",): [_region(0)], ("red drum",): []}, image_id="photo 1")
    store.append("d", {("pig",): [_region(1)], ("pig", "red drum"): [_region(2)]})
    again = MaskStore(tmp_path, "k")
    assert _same(again.get(Entry("d", ("pig",))), [_region(0)])
    assert again.get(Entry("d", ("red drum",))) == []
    assert _same(again.get(Entry("d", ("pig", "red drum"))), [_region(2)])
    assert again.image_id(Entry("d", ("pig",))) == "photo 1" and Entry("d") not in again
    with pytest.raises(KeyError, match="'goat'.*precompute_masks"):
        again.get(Entry("d", ("goat",)))


def test_verify_reads_everything_again(tmp_path: Path) -> None:
    """A sound store has no fault; a flipped byte, a mask that does not decode and a wrong box are named."""
    store = MaskStore(tmp_path, "k")
    for name in "abc":
        store.append(name, {(): [_region(3)]}, image_id=f"image {name}")
    assert list(store.verify()) == []
    bad = Region("odd", np.array([5, 5, 1, 9], np.float32), {"size": [48, 64], "counts": b"nonsense!"})
    store.append("d", {(): [bad]}, image_id="image d")
    faults = "\n".join(store.verify())
    assert "'image d': region odd: box [5.0, 5.0, 1.0, 9.0]" in faults and len(faults.splitlines()) == 2
    (shard,) = store.directory.glob("*.rows")
    data = bytearray(shard.read_bytes())
    data[40] ^= 1
    shard.write_bytes(bytes(data))
    assert f"{shard} at byte 0: the checksum" in next(store.verify())


def test_an_older_store_is_refused(tmp_path: Path) -> None:
    """Rows of another format are not read as if they were of this one."""
    store = MaskStore(tmp_path, "k")
    store.append("a", {(): []})
    manifest = store.directory / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 1'))
    for look in (lambda: MaskStore(tmp_path, "k"), lambda: MaskStore.open(tmp_path)):
        with pytest.raises(ValueError, match="version 1, this code reads 2; delete it"):
            look()
    manifest.write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json is damaged .* keeps all rows"):
        MaskStore.open(tmp_path)


def test_a_store_travels_to_other_processes(tmp_path: Path) -> None:
    """A pickled store (a loader worker's) opens its own files."""
    store = MaskStore(tmp_path, "k")
    store.append("a", {(): [_region(1)]})
    store.get(Entry("a"))
    copy = pickle.loads(pickle.dumps(store))
    store.close()
    assert _same(copy.get(Entry("a")), [_region(1)])


def test_digests_are_remembered_until_the_file_changes(tmp_path: Path) -> None:
    """The bytes are read once in all runs; a changed file, and a torn or mixed-up line, are read again."""
    (tmp_path / "a.png").write_bytes(b"first")
    row = {"id": "a", "path": "a.png"}
    digests = Digests(ImageReader(tmp_path), tmp_path / "digests.txt")
    first = digests(row)
    assert first == blake2b(b"first", digest_size=16).hexdigest()

    class NoReader(ImageReader):
        def digest(self, row: object) -> str:
            raise AssertionError("read again")

    file = tmp_path / "digests.txt"
    file.write_bytes(file.read_bytes() + b"0000 torn")
    assert Digests(NoReader(tmp_path), file)(row) == first
    (tmp_path / "a.png").write_bytes(b"second")
    assert Digests(ImageReader(tmp_path), file)(row) != first
    with pytest.raises(BadImage, match="no such file"):
        digests({"id": "gone", "path": "gone.png"})


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2}', '{"version": 2, "key": "another"}', None])
def test_a_damaged_manifest_costs_no_rows(tmp_path: Path, text: str | None) -> None:
    """A reader names file and command; the maker of that key writes it anew, and every row is there."""
    store = MaskStore(tmp_path, "sam", "--detector x")
    store.append("1", {(): [_region(1)]})
    store.close()
    manifest = store.directory / "manifest.json"
    whole = manifest.read_text()
    if text is None:
        manifest.unlink()
    else:
        manifest.write_text(text)
        for opened in (lambda: MaskStore.open(tmp_path), lambda: MaskStore(tmp_path, "sam")):
            with pytest.raises(ValueError, match=r"manifest\.json is damaged .*precompute_masks\.py"):
                opened()
    assert _digests(MaskStore(tmp_path, "sam", "--detector x")) == ["1"]
    assert manifest.read_text() == whole and _digests(MaskStore.open(tmp_path)) == ["1"]
