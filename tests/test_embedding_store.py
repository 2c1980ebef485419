"""Embeddings on disk: blocks that are whole or missing, of one encoder, whoever writes them."""

import numpy as np
import pytest
from PIL import Image
from test_retrieve import COLOURS, ColourEncoder

from fovea.embeddings import embed_blocks, embed_images, row_blocks
from fovea.images import BadImage, ImageReader
from fovea.index.embedding_store import EmbeddingStore
from fovea.ranks import rank_and_size

MADE_BY = {"encoder": "clip", "fingerprint": "f00d", "size": (3, 4)}


def store(path, **changes):
    return EmbeddingStore(path / "store", MADE_BY | changes, width=4)


def filled(path, count=3):
    made = store(path)
    for number in range(count):
        vectors = np.full((2, 4), number, np.float32)
        made.write(number, f"key{number}", [f"{number}a", f"{number}ü"], vectors, [(f"{number}x", "bad")])
    return made


def test_blocks_come_back_in_order_as_often_as_asked(tmp_path):
    """Another process's look: ids, vectors and what was left out, twice; nothing but blocks and manifest."""
    filled(tmp_path)
    again, keys = store(tmp_path), ["key0", "key1", "key2"]
    for blocks in [again.blocks(keys)] * 2:
        assert [ids for ids, _ in blocks] == [[f"{n}a", f"{n}ü"] for n in range(3)]
        values = np.concatenate([vectors for _, vectors in blocks])
        np.testing.assert_array_equal(values, np.repeat([[0] * 4, [1] * 4, [2] * 4], 2, axis=0))
    assert again.left_out(keys) == [(f"{n}x", "bad") for n in range(3)]
    assert sorted(path.name for path in again.directory.iterdir()) == [
        "00000000.npz", "00000001.npz", "00000002.npz", "manifest.json",
    ]  # fmt: skip
    assert 0 < again.bytes_there() < 4000 and again.estimate_bytes(10) == 10 * (4 * 4 + 32)


def test_every_damaged_byte_is_noticed(tmp_path):
    """Each byte of a block flipped, and each length cut short: the block is missing, or its content whole."""
    whole = filled(tmp_path).read(1, "key1")
    path = tmp_path / "store" / "00000001.npz"
    data = path.read_bytes()
    noticed = 0
    for at in range(0, len(data), 3):
        for damaged in (data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :], data[:at]):
            path.write_bytes(damaged)
            block = store(tmp_path).read(1, "key1")
            noticed += block is None
            if block is not None:  # a byte that says nothing, such as a time in a header
                assert block.ids == whole.ids and np.array_equal(block.vectors, whole.vectors)
    assert noticed > len(data) / 3 * 1.5
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"00000001.npz is missing or damaged; run the same command again"):
        list(store(tmp_path).blocks(["key0", "key1"]))
    with pytest.raises(ValueError, match=r"00000001.npz is missing or damaged"):
        store(tmp_path).left_out(["key0", "key1"])


def test_what_was_made_otherwise_is_refused(tmp_path):
    """Other weights, another type: both values. A block of another store among ours counts as missing."""
    filled(tmp_path)
    with pytest.raises(ValueError, match="made otherwise: fingerprint: 'f00d', now 'beef'; delete that"):
        store(tmp_path, fingerprint="beef")
    with pytest.raises(ValueError, match="width: 4, now 5; dtype: 'float32', now 'float16'"):
        EmbeddingStore(tmp_path / "store", MADE_BY, width=5, dtype="float16")
    other = EmbeddingStore(tmp_path / "other", MADE_BY | {"fingerprint": "beef"}, width=4)
    other.write(1, "key1", ["a"], np.ones((1, 4), np.float32), [])
    ours = store(tmp_path)
    assert ours.has(1, "key1") and not ours.has(1, "other key") and not ours.has(9, "key9")
    ours.path(1).write_bytes(other.path(1).read_bytes())
    assert not store(tmp_path).has(1, "key1")
    (tmp_path / "store" / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        store(tmp_path)


def test_two_commands_at_once_do_not_mix(tmp_path):
    """Both found no store; the second to write is refused, because the first one's encoder is another."""
    first, second = store(tmp_path), store(tmp_path, fingerprint="beef")
    first.write(0, "k", ["a"], np.ones((1, 4), np.float32), [])
    with pytest.raises(ValueError, match="made otherwise"):
        second.write(1, "k", ["a"], np.ones((1, 4), np.float32), [])


def test_float16_takes_half_and_rounds(tmp_path):
    """Unit vectors to 1e-3; what it cannot hold is an error, as are NaN, shapes and types that do not fit."""
    vectors = np.linspace(-1, 1, 400).reshape(100, 4).astype(np.float32)
    half = EmbeddingStore(tmp_path / "half", MADE_BY, width=4, dtype="float16")
    half.write(0, "k", [str(n) for n in range(100)], vectors, [])
    block = half.read(0, "k")
    assert block.vectors.dtype == np.float16
    np.testing.assert_allclose(block.vectors.astype(np.float32), vectors, atol=1e-3)
    for wrong, said in ((np.full((1, 4), 1e6), "float16 cannot hold"), (np.ones((1, 3)), r"\[1, 4\] wanted")):
        with pytest.raises(ValueError, match=said):
            half.write(1, "k", ["a"], wrong.astype(np.float32), [])
    with pytest.raises(ValueError, match="one of float32, float16"):
        EmbeddingStore(tmp_path, MADE_BY, width=4, dtype="int8")


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    """A full disk while a block is replaced: the error names it, the old block stays, no half file."""
    made = filled(tmp_path, 1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left.*00000000.npz"):
        made.write(0, "new", ["a"], np.ones((1, 4), np.float32), [])
    assert store(tmp_path).has(0, "key0")
    assert sorted(path.name for path in made.directory.iterdir()) == ["00000000.npz", "manifest.json"]
    (made.directory / ".00000003-killed").write_bytes(b"half")
    made.clean()
    assert sorted(path.name for path in made.directory.iterdir()) == ["00000000.npz", "manifest.json"]


@pytest.fixture
def pictures(tmp_path):
    """23 rows of coloured pictures; the 5th is broken, the 12th has no file; the last two share a file."""
    rows = []
    for number in range(23):
        name = list(COLOURS)[number % 3]
        rows.append({"id": f"{name}-{number}", "path": f"{min(number, 21)}.png", "offset": -1, "size": -1})
        Image.new("RGB", (9, 5 + number), COLOURS[name]).save(tmp_path / f"{number}.png")
    (tmp_path / "4.png").write_bytes(b"broken")
    (tmp_path / "11.png").unlink()
    return tmp_path, rows


@pytest.mark.parametrize("workers", [0, 3])
def test_blocks_hold_what_one_pass_gives(pictures, tmp_path, workers):
    """Blocks of 5, batches of 2, with and without threads: ids and vectors of `embed_images`, in its order;
    bad images with their block; the counts add up to the rows.
    """
    root, rows = pictures
    ids, vectors = embed_images(ColourEncoder(), rows, ImageReader(root, policy="skip"))
    reader, encoder = ImageReader(root, policy="skip"), ColourEncoder()
    blocks = row_blocks(rows, reader, 5)
    assert [len(block.rows) for block in blocks] == [5, 5, 5, 5, 3]
    assert [block.missing for block in blocks] == [[], [], [rows[11]["id"]], [], []]
    kept = EmbeddingStore(tmp_path / "store", MADE_BY, width=3)
    counts = list(embed_blocks(encoder, blocks, reader, kept, batch_size=2, workers=workers))
    assert sum(counts) == 23 and max(encoder.batches) == 2
    keys = [block.key for block in blocks]
    made = list(kept.blocks(keys))
    assert [id_ for some, _ in made for id_ in some] == ids and len(ids) == 21
    np.testing.assert_array_equal(np.concatenate([v for _, v in made]), vectors)
    bad = kept.left_out(keys)
    assert [id_ for id_, _ in bad] == [rows[4]["id"], rows[11]["id"]] and bad[1][1] == "no such file"


def test_a_bad_image_ends_a_threaded_run(pictures, tmp_path):
    """Under `fail`: the image is named, its block is not there, those before are."""
    root, rows = pictures
    reader = ImageReader(root)
    blocks = row_blocks(rows, reader, 4)
    kept = EmbeddingStore(tmp_path / "store", MADE_BY, width=3)
    with pytest.raises(BadImage, match=rows[4]["id"]):
        list(embed_blocks(ColourEncoder(), blocks, reader, kept, batch_size=2, workers=2))
    assert kept.has(0, blocks[0].key) and not kept.has(1, blocks[1].key)


def test_a_key_says_what_is_embedded(pictures):
    """The same on every look; another file size, id, place or order changes the block's key and no other."""
    root, rows = pictures
    reader = ImageReader(root)
    before = [block.key for block in row_blocks(rows, reader, 5)]
    assert [block.key for block in row_blocks(rows, ImageReader(root), 5)] == before

    def changed(rows):
        return [a != b.key for a, b in zip(before, row_blocks(rows, reader, 5), strict=True)]

    assert changed([rows[1], rows[0], *rows[2:]]) == [True, False, False, False, False]
    assert changed([{**row, "id": f"x{row['id']}"} if n == 6 else row for n, row in enumerate(rows)])[1]
    Image.new("RGB", (90, 70), "red").save(root / "21.png")
    assert changed(rows) == [False, False, False, False, True]
    Image.new("RGB", (9, 5)).save(root / "11.png")
    assert changed(rows) == [False, False, True, False, True]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (0, 4)),
        ({"RANK": "4", "WORLD_SIZE": "4"}, None),
    ],
)
def test_ranks(monkeypatch, environment, expected):
    """torchrun's names, SLURM's, neither; a rank beyond the number is refused."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if expected is None:
        with pytest.raises(ValueError, match="RANK=4, WORLD_SIZE=4: ranks count from 0"):
            rank_and_size()
    else:
        assert rank_and_size() == expected
