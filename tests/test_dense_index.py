"""The dense index: exact, honest about what it was made of, and never half on disk."""

import json

import numpy as np
import pytest

from fovea.index.dense import DenseIndex

MANIFEST = {"encoder": "clip", "fingerprint": "f00d", "corpus": "gold"}


def names(count):
    return [f"i{n}" for n in range(count)]


def make(count=20, width=8, seed=0, **extra):
    vectors = np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)
    return DenseIndex.build(names(count), vectors, manifest=MANIFEST | extra), vectors


def exact_cases(shared_data):
    cases = json.loads((shared_data / "metric_oracles.json").read_text())
    return [case for case in cases if case["metric"] == "exact_search"]


def test_equals_the_exact_search_oracles(shared_data):
    """faiss's own ids and scores: inner product, cosine with duplicates, more neighbours than vectors.

    The L2 case goes through the exact reduction −|q−v|² = 2(q·v − |v|²/2) − |q|².
    """
    for case in exact_cases(shared_data):
        queries = np.array(case["prediction"]["queries"], np.float32)
        vectors = np.array(case["references"]["vectors"], np.float32)
        metric, k = case["prediction"]["metric"], case["prediction"]["k"]
        square = (queries**2).sum(1, keepdims=True)
        if metric == "l2":
            vectors = np.hstack([vectors, -(vectors**2).sum(1, keepdims=True) / 2])
            queries = np.hstack([queries, np.ones_like(square)])
        index = DenseIndex.build(
            names(len(vectors)), vectors, manifest=MANIFEST | {"normalised": metric == "cosine"}
        )
        ids, scores = index.search(queries, k)
        expected = case["score"]["faiss_ids"]
        assert ids == [[None if n < 0 else f"i{n}" for n in row] for row in expected], case["id"]
        found = np.array(expected) >= 0
        scores = square - 2 * scores if metric == "l2" else scores
        np.testing.assert_allclose(
            scores[found], np.array(case["score"]["faiss_scores"])[found], atol=2e-4, err_msg=case["id"]
        )


@pytest.mark.parametrize("num_queries", [1, 50], ids=["one by one", "through BLAS"])
def test_equals_brute_force_with_duplicates(num_queries):
    """Cosine and stable order on 40 vectors of which half are duplicates, for both of faiss's code paths."""
    rng = np.random.default_rng(3)
    vectors = rng.integers(-2, 3, size=(40, 4)).astype(np.float32)
    vectors[~vectors.any(1)] = 1
    vectors[20:] = vectors[:20]
    queries = rng.normal(size=(num_queries, 4)).astype(np.float32)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosine = queries / np.linalg.norm(queries, axis=1, keepdims=True) @ unit.T
    ids, scores = DenseIndex.build(names(40), vectors, manifest=MANIFEST).search(queries, 40)
    for row in range(num_queries):
        np.testing.assert_allclose(scores[row], np.sort(cosine[row])[::-1], atol=1e-6)
        assert sorted(ids[row]) == sorted(names(40))
        for place in range(39):  # equal scores: index order
            if scores[row, place] == scores[row, place + 1]:
                assert int(ids[row][place][1:]) < int(ids[row][place + 1][1:])


def test_missing_neighbours_are_none_with_no_score():
    """PITFALLS 27: k = 5 of 3 vectors gives two Nones at -inf, never the last id (faiss's -1)."""
    index, vectors = make(3)
    ids, scores = index.search(vectors[:1], 5)
    assert ids[0][0] == "i0" and set(ids[0][:3]) == {"i0", "i1", "i2"} and ids[0][3:] == [None, None]
    assert np.isneginf(scores[0, 3:]).all() and scores.dtype == np.float32


def test_an_empty_index_finds_nothing():
    """No vector is a legal corpus of size 0 (everything was filtered away)."""
    index = DenseIndex.build([], np.zeros((0, 4)), manifest=MANIFEST)
    assert index.search(np.ones((2, 4)), 2)[0] == [[None, None]] * 2


def test_search_among_own_candidates():
    """Equal to a full search without the other ids; short and empty lists are filled with None."""
    index, vectors = make(20)
    queries = vectors[:3] + 0.1
    allowed = [["i5", "i1", "i9", "i1"], ["i2"], []]
    full, full_scores = index.search(queries, 20)
    ids, scores = index.search_among(queries, allowed, 3)
    for row, own in enumerate(allowed):
        kept = [(i, s) for i, s in zip(full[row], full_scores[row], strict=True) if i in own]
        assert ids[row] == [i for i, _ in kept] + [None] * (3 - len(kept))
        np.testing.assert_allclose(scores[row, : len(kept)], [s for _, s in kept], atol=1e-6)
    with pytest.raises(KeyError, match="2 ids are not in the index.*'x'"):
        index.search_among(queries, [["x"], ["i1", "y"], []], 3)
    with pytest.raises(ValueError, match="3 queries with 1 lists"):
        index.search_among(queries, [["i1"]], 3)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_scores_are_cosines_at_any_length(scale):
    """Vectors that are too long or short to be squared in float32 still have cosine 1 with themselves."""
    vectors = (np.eye(4, 8) + 0.5).astype(np.float32)
    index = DenseIndex.build(names(4), vectors * np.float32(scale), manifest=MANIFEST)
    ids, scores = index.search(vectors * np.float32(scale), 1)
    assert ids == [[f"i{n}"] for n in range(4)]
    np.testing.assert_allclose(scores, 1, atol=1e-6)


def test_save_and_load_give_the_same_index(tmp_path):
    """Same ids, scores and manifest; unicode ids; nothing but the three files; no left-overs beside it."""
    index, vectors = make(4, splits=["test-0"])
    index = DenseIndex.build(["Zürich/駅 \n'", *names(4)[1:]], vectors, manifest=index.manifest)
    index.save(tmp_path / "deep" / "index")
    again = DenseIndex.load(tmp_path / "deep" / "index", expect=MANIFEST | {"splits": ["test-0"]})
    assert again.ids == index.ids and len(again) == 4
    assert again.manifest == index.manifest == MANIFEST | {
        "width": 8, "count": 4, "normalised": True, "version": 2, "splits": ["test-0"],
        "kind": "flat", "metric": "inner_product",
    }  # fmt: skip
    assert again.search(vectors, 3)[0] == index.search(vectors, 3)[0]
    assert sorted(p.name for p in (tmp_path / "deep" / "index").iterdir()) == [
        "ids.arrow", "manifest.json", "vectors.faiss",
    ]  # fmt: skip
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["index"]


def test_a_mismatch_lists_every_differing_field_with_both_values(tmp_path):
    """Encoder, weights and corpus differ: one error with all three, what is there and what was wanted."""
    make()[0].save(tmp_path / "index")
    want = {"encoder": "siglip", "fingerprint": "beef", "corpus": "full", "width": 8}
    with pytest.raises(ValueError) as error:
        DenseIndex.load(tmp_path / "index", expect=want)
    message = str(error.value)
    for part in (
        "encoder: 'clip', wanted 'siglip'",
        "'f00d', wanted 'beef'",
        "corpus: 'gold', wanted 'full'",
    ):
        assert part in message
    assert "width" not in message


def test_an_interrupted_save_leaves_the_old_index(tmp_path, monkeypatch):
    """Dying while the ids are written: the old index still loads, and the next save goes through."""
    old, _ = make(3)
    old.save(tmp_path / "index")
    new, _ = make(5)
    with monkeypatch.context() as patch:
        patch.setattr("fovea.index.dense.pa.OSFile", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            new.save(tmp_path / "index", overwrite=True)
    assert len(DenseIndex.load(tmp_path / "index")) == 3
    new.save(tmp_path / "index", overwrite=True)
    assert len(DenseIndex.load(tmp_path / "index")) == 5


def test_save_does_not_overwrite_unasked_nor_anything_else(tmp_path):
    """An index is replaced only when told to, a directory of other files never."""
    index, _ = make()
    index.save(tmp_path / "index")
    with pytest.raises(FileExistsError, match="--overwrite"):
        index.save(tmp_path / "index")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"x")
    with pytest.raises(FileExistsError, match="no index"):
        index.save(tmp_path / "photos", overwrite=True)
    assert (tmp_path / "photos" / "a.jpg").exists()


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("damage", ["truncated", "empty", "gone", "other vectors", "other ids", "manifest"])
def test_a_damaged_index_is_refused(tmp_path, damage, mmap):
    """A short, empty, missing or exchanged file is an error that names the directory."""
    root = make()[0].save(tmp_path / "index")
    other = make(19)[0].save(tmp_path / "other")
    file = root / ("ids.arrow" if damage == "other ids" else "vectors.faiss")
    if damage == "gone":
        file.unlink()
    elif damage == "manifest":
        (root / "manifest.json").write_text("{")
    elif damage.startswith("other"):
        file.write_bytes((other / file.name).read_bytes())
    else:
        file.write_bytes(file.read_bytes()[: 100 if damage == "truncated" else 0])
    with pytest.raises(ValueError, match="index.*(damaged|does not fit)"):
        DenseIndex.load(root, mmap=mmap)


def test_an_index_of_the_old_format_is_refused(tmp_path):
    """Version 1 (ids in parquet): both versions, and the command; whatever else differs comes later."""
    root = make()[0].save(tmp_path / "index")
    manifest = json.loads((root / "manifest.json").read_text()) | {"version": 1}
    (root / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="version 1, this code reads 2; build it again with scripts/build"):
        DenseIndex.load(root, expect={"corpus": "full"})


def test_no_index_says_how_to_make_one(tmp_path):
    """The error of a missing index is the next command."""
    with pytest.raises(FileNotFoundError, match="scripts/build_index.py"):
        DenseIndex.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ids": ["a", "b", "a"]}, r"more than once, e.g. \['a'\]"),
        ({"ids": ["a", "b"]}, r"2 ids for embeddings of shape \(3, 4\)"),
        ({"ids": ["a", "", "c"]}, "non-empty strings"),
        ({"ids": ["a", 7, "c"]}, r"non-empty strings.*7"),
        ({"at": (1, np.nan)}, r"NaN or infinity, e.g. \['b'\]"),
        ({"at": (2, np.inf)}, r"NaN or infinity, e.g. \['c'\]"),
        ({"at": (0, 0.0)}, r"zero vectors.*\['a'\]"),
        ({"manifest": {"encoder": "clip", "corpus": ""}}, r"missing or empty: \['fingerprint', 'corpus'\]"),
        ({"manifest": MANIFEST | {"width": 5, "count": 2}}, "width: 4, wanted 5; count: 3, wanted 2"),
    ],
)
def test_build_refuses_bad_input_by_name(change, said):
    """Duplicate ids, NaN, infinity, zero vectors, wrong counts: an error with the id."""
    vectors = np.ones((3, 4), np.float32)
    if "at" in change:
        row, value = change["at"]
        vectors[row] = value
    with pytest.raises(ValueError, match=said):
        DenseIndex.build(
            change.get("ids", ["a", "b", "c"]), vectors, manifest=change.get("manifest", MANIFEST)
        )


@pytest.mark.parametrize(
    ("queries", "k", "said"),
    [
        (np.full((2, 8), np.nan), 1, r"2 queries hold NaN"),
        (np.zeros((2, 8)), 1, "zero vectors"),
        (np.ones((2, 7)), 1, r"takes \[Q, 8\]"),
        (np.ones(8), 1, r"takes \[Q, 8\]"),
        (np.ones((2, 8)), 0, "from 1"),
    ],
)
def test_search_refuses_bad_queries(queries, k, said):
    """NaN, zero, wrong width, no batch dimension, k = 0."""
    with pytest.raises(ValueError, match=said):
        make()[0].search(queries, k)
