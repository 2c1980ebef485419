"""The mask store: what goes in comes out, a kill costs at most the row in flight, writers never collide."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from fovea import masks
from fovea.mask_store import MaskStore
from fovea.types import Region


def _region(seed: int) -> Region:
    rng = np.random.default_rng(seed)
    mask = rng.random((48, 64)) < 0.3
    scores = {"detector": float(np.float32(rng.random()))}
    return Region(f"r{seed}", masks.to_box(mask), masks.encode(mask), f"p{seed}", "red pig ü", scores)


def _same(left: list[Region], right: list[Region]) -> bool:
    def plain(region: Region) -> tuple[object, ...]:
        return (region.id, region.box.tolist(), region.mask, region.phrase_id, region.label, region.scores)

    return [plain(region) for region in left] == [plain(region) for region in right]


def test_regions_come_back_as_they_were(tmp_path: Path) -> None:
    """Box, mask, phrase, label and scores survive; zero regions and a box without a mask are results too."""
    store = MaskStore(tmp_path, "felzenszwalb")
    box_only = Region("b", np.array([1, 2, 3.5, 4], np.float32), None)
    store.append("a/1", [_region(0), _region(1)])
    store.append("zero", [])
    store.append("box", [box_only])
    for again in (store, MaskStore(tmp_path, "felzenszwalb"), MaskStore.open(tmp_path)):
        assert _same(again.get("a/1"), [_region(0), _region(1)])
        assert again.get("zero") == []
        assert _same(again.get("box"), [box_only])
        assert again.missing(["zero", "x", "a/1", "y", "x"]) == ["x", "y"]
        assert again.ids() == ["a/1", "box", "zero"]


def test_an_image_that_is_not_there_names_the_command(tmp_path: Path) -> None:
    """The error names image, key, the keys that are there, and the script that fills the store."""
    MaskStore(tmp_path, "other detector").append("1", [])
    with pytest.raises(KeyError, match=r"'7'.*'wanted'.*other detector.*precompute_masks\.py"):
        MaskStore(tmp_path, "wanted").get("7")


def test_keys_do_not_mix(tmp_path: Path) -> None:
    """A changed threshold is another key: its rows are missing, the old ones stay."""
    MaskStore(tmp_path, "d>0.3").append("1", [_region(0)])
    MaskStore(tmp_path, "d>0.5").append("1", [])
    assert _same(MaskStore(tmp_path, "d>0.3").get("1"), [_region(0)])
    assert MaskStore(tmp_path, "d>0.5").get("1") == []
    assert MaskStore.keys(tmp_path) == ["d>0.3", "d>0.5"]
    with pytest.raises(ValueError, match="holds 2 keys"):
        MaskStore.open(tmp_path)


@pytest.mark.parametrize("cut", [1, 5, 9, 40, -1])
def test_a_row_cut_short_is_missing_and_nothing_else(tmp_path: Path, cut: int) -> None:
    """Whatever byte a kill stopped at: earlier rows stay, the torn one is missing, appending it works."""
    store = MaskStore(tmp_path, "k")
    store.append("whole", [_region(0)])
    (shard,) = store.directory.glob("*.rows")
    whole = shard.stat().st_size
    store.append("torn", [_region(1)])
    store.close()
    data = shard.read_bytes()
    shard.write_bytes(data[: whole + cut] if cut > 0 else data[:cut])
    again = MaskStore(tmp_path, "k")
    assert again.missing(["whole", "torn"]) == ["torn"]
    again.append("torn", [_region(1)])
    again.append("next", [])
    assert MaskStore(tmp_path, "k").missing(["whole", "torn", "next"]) == []
    assert _same(again.get("torn"), [_region(1)]) and _same(again.get("whole"), [_region(0)])


def test_a_damaged_row_is_ignored_and_counted(tmp_path: Path) -> None:
    """A flipped bit in the middle of a shard costs its row only, and is counted."""
    store = MaskStore(tmp_path, "k")
    for name in "abc":
        store.append(name, [_region(3)])
    (shard,) = store.directory.glob("*.rows")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(bytes(data))
    again = MaskStore(tmp_path, "k")
    assert again.missing("abc") == ["b"] and again.num_damaged == 1
    again.append("b", [_region(3)])
    assert _same(again.get("b"), [_region(3)])


def test_a_reader_sees_the_store_grow(tmp_path: Path) -> None:
    """A store opened before the first row, and before a second writer's, finds both without reopening."""
    reader, first, second = (MaskStore(tmp_path, "k") for _ in range(3))
    assert reader.missing(["1", "2"]) == ["1", "2"]
    first.append("1", [_region(1)])
    assert _same(reader.get("1"), [_region(1)])
    second.append("2", [])
    assert reader.missing(["1", "2"]) == []
    assert len(list(reader.directory.glob("*.rows"))) == 2


def test_a_row_seen_half_written_is_found_once_it_is_whole(tmp_path: Path) -> None:
    """A reader that looks in the middle of a write neither counts damage nor misses the row afterwards."""
    store = MaskStore(tmp_path, "k")
    store.append("1", [_region(1)])
    store.append("2", [_region(2)])
    (shard,) = store.directory.glob("*.rows")
    data = shard.read_bytes()
    shard.write_bytes(data[:-30])
    reader = MaskStore(tmp_path, "k")
    assert reader.missing("12") == ["2"] and reader.num_damaged == 0
    shard.write_bytes(data)
    assert _same(reader.get("2"), [_region(2)]) and reader.num_damaged == 0


def _write_forever(path: Path, start: int) -> None:
    store = MaskStore(path, "k")
    for number in range(start, start + 100_000):
        store.append(str(number), [_region(number % 7)])


def test_two_writers_killed_leave_a_sound_store(tmp_path: Path) -> None:
    """Two processes write; both are killed with SIGKILL in full flight: every row that is there is exact."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_forever, args=(tmp_path, start)) for start in (0, 1_000_000)]
    for writer in writers:
        writer.start()
    store = MaskStore(tmp_path, "k")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not {"3", "1000003"} <= set(store.ids()):
        store.refresh()
        time.sleep(0.02)
    for writer in writers:
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
    again = MaskStore(tmp_path, "k")
    assert {"3", "1000003"} <= set(again.ids()) and again.num_damaged == 0
    for image_id, regions in again.items():
        assert _same(regions, [_region(int(image_id) % 7)])
    for start in (0, 1_000_000):  # no gap: only the row in flight can be lost
        numbers = sorted(int(name) for name in again.ids() if int(name) // 1_000_000 == start // 1_000_000)
        assert numbers == list(range(start, start + len(numbers)))
