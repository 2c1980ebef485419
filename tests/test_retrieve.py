"""The coarse stage: which images form the corpus, how they are embedded, what a question gets back."""

from typing import Any

import numpy as np
import pytest
import torch

from fovea.images import ImageTransform
from fovea.index.dense import DenseIndex
from fovea.models.encoders import Encoder
from fovea.retrieve import Retriever, corpus, embed_images, embed_texts
from fovea.tables import Tables, TableWriter
from fovea.types import Query

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


class ColourEncoder(Encoder):
    """Mean colour of the image against the colours that the text names: its right answers are known."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_dim = 3
        self.transform = ImageTransform(4, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
        self.logit_scale = torch.nn.Parameter(torch.tensor(0.0))
        self.batches: list[int] = []
        self.eval()

    def encode_image(self, pixels: torch.Tensor, alpha: torch.Tensor | None = None) -> torch.Tensor:
        self.batches.append(len(pixels))
        return 7 * pixels.mean((2, 3))

    def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
        return 3 * tokens.float()

    def tokenize(self, texts: Any) -> torch.Tensor:
        return torch.tensor([[int(colour in text) for colour in COLOURS] for text in texts])

    def depth_of(self, name: str) -> int | None:
        return None

    def text_parameters(self) -> list[torch.nn.Parameter]:
        return []

    def spec(self) -> dict[str, Any]:
        return {"class_path": "tests.ColourEncoder", "init_args": {}}


class ListReader:
    """Plain coloured images of several sizes by row id; ids `bad…` are left out, as under policy `skip`."""

    def read_many(self, rows):
        for number, row in enumerate(rows):
            if not row["id"].startswith("bad"):
                image = np.zeros((5 + number, 9, 3), np.uint8)
                image[:] = COLOURS.get(row["id"].split("-")[0], (0, 0, 0))
                yield row, image


def rows(*ids):
    return [{"id": id_} for id_ in ids]


def test_bad_images_take_their_ids_with_them():
    """PITFALLS 8: two of five images are left out: three ids and three vectors that belong together."""
    ids, vectors = embed_images(
        ColourEncoder(), rows("bad-0", "red-0", "green-0", "bad-1", "blue-0"), ListReader(), batch_size=2
    )
    assert ids == ["red-0", "green-0", "blue-0"] and vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, np.eye(3), atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_batching_changes_nothing(batch_size):
    """Every batch size gives the same embeddings, in batches no larger than asked."""
    encoder = ColourEncoder()
    ids, vectors = embed_images(
        encoder, rows("red-0", "blue-1", "red-2", "green-3"), ListReader(), batch_size=batch_size
    )
    assert ids == ["red-0", "blue-1", "red-2", "green-3"]
    np.testing.assert_allclose(vectors, np.eye(3)[[0, 2, 0, 1]], atol=1e-6)
    assert max(encoder.batches) <= batch_size and sum(encoder.batches) == 4
    texts = embed_texts(encoder, ["red and blue", "green"], batch_size=batch_size)
    np.testing.assert_allclose(texts, [[0.5**0.5, 0, 0.5**0.5], [0, 1, 0]], atol=1e-6)


def test_nothing_to_embed_gives_nothing():
    """No row, only bad rows, no text: empty arrays of the right width."""
    encoder = ColourEncoder()
    for some in (rows(), rows("bad-0")):
        ids, vectors = embed_images(encoder, some, ListReader())
        assert ids == [] and vectors.shape == (0, 3)
    assert embed_texts(encoder, []).shape == (0, 3)


def test_a_vector_without_direction_names_its_image_or_text():
    """Zero or NaN embeddings are errors that say where they come from; training mode is refused."""
    encoder = ColourEncoder()
    with pytest.raises(ValueError, match=r"1 of 2 embeddings.*'black-0'"):
        embed_images(encoder, rows("red-0", "black-0"), ListReader())
    with pytest.raises(ValueError, match="1 of 1 embeddings.*'a zebra'"):
        embed_texts(encoder, ["a zebra"])
    with pytest.raises(ValueError, match="training mode"):
        embed_texts(encoder.train(), ["red"])


def retriever(captions=None):
    encoder = ColourEncoder()
    ids, vectors = embed_images(encoder, rows("red-0", "green-0", "blue-0"), ListReader())
    manifest = {"encoder": "colour", "fingerprint": "f00d", "corpus": "gold"}
    return Retriever(encoder, DenseIndex.build(ids, vectors, manifest=manifest), captions=captions)


def test_candidates_come_in_order_with_cosine_rank_and_caption():
    """The green image comes first at cosine 1; k beyond the corpus gives fewer candidates, not Nones."""
    found = retriever({"green-0": "a lawn"}).candidates([Query("q", "what is green ?")], k=9)[0]
    assert [c.rank for c in found] == [1, 2, 3]
    assert (found[0].image_id, found[0].caption) == ("green-0", "a lawn") and found[1].caption == ""
    assert [c.global_score for c in found] == pytest.approx([1, 0, 0], abs=1e-6)


def test_candidates_among_a_querys_own_list():
    """The best image of the whole corpus is not there when the query's own list lacks it."""
    query = Query("q", "what is green ?", candidate_image_ids=("blue-0", "red-0"))
    found = retriever().candidates([query], k=1, among="own")
    assert [[c.image_id for c in row] for row in found] == [["red-0"]]


def test_an_index_of_another_width_is_refused():
    """4-wide embeddings and a 3-wide encoder: both numbers and the fix."""
    manifest = {"encoder": "other", "fingerprint": "f00d", "corpus": "gold"}
    index = DenseIndex.build(["a"], np.ones((1, 4)), manifest=manifest)
    with pytest.raises(ValueError, match="4-wide embeddings of other.*3-wide"):
        Retriever(ColourEncoder(), index)


def test_load_refuses_an_index_of_other_weights(tmp_path):
    """The index on disk belongs to the weights that made it: one changed weight is another encoder."""
    from fovea.bundle import fingerprint

    made = retriever()
    manifest = {"encoder": "colour", "fingerprint": fingerprint(made.encoder), "corpus": "gold"}
    DenseIndex.build(["a"], np.ones((1, 3)), manifest=manifest).save(tmp_path / "index")
    assert Retriever.load(made.encoder, tmp_path / "index").index.ids == ["a"]
    with torch.no_grad():
        made.encoder.logit_scale += 1
    with pytest.raises(ValueError, match="fingerprint: .*wanted"):
        Retriever.load(made.encoder, tmp_path / "index")


@pytest.fixture
def tables(tmp_path):
    with TableWriter(tmp_path / "tables") as writer:
        for id_, split in [("a", "test"), ("b", "test"), ("c", "test"), ("d", "val"), ("e", "test")]:
            writer.add("images", id=id_, path=f"{id_}.png", width=1, height=1, split=split)
        writer.add(
            "queries", id="1", text="?", gold_image_ids=["b"], candidate_image_ids=["c", "gone"], split="test"
        )
        writer.add("queries", id="2", text="?", gold_image_ids=["a", "b"], split="test")
        writer.add(
            "queries", id="3", text="?", gold_image_ids=["d"], candidate_image_ids=["c"], split="val"
        )  # c's row says test: both splits share it
        writer.add("queries", id="4", text="?", split="blind")
        writer.finish({"reader": "test"})
    return Tables(tmp_path / "tables")


@pytest.mark.parametrize(
    ("name", "splits", "ids", "absent"),
    [
        ("gold", ["test"], "ab", []),
        ("gold", ["test", "val"], "abd", []),
        ("candidates", ["test"], "abc", ["gone"]),
        ("full", ["test"], "abce", ["gone"]),
        ("full", ["val"], "cd", []),
        ("candidates", ["val"], "cd", []),
        ("full", ["val", "test"], "abcde", ["gone"]),
    ],
)
def test_corpora(tables, name, splits, ids, absent):
    """Gold images once each; with candidates, naming what is missing upstream; all images of the split.

    An image that two splits' queries name is in the corpora of both, whatever its row says.
    """
    found = corpus(tables, name, splits=splits)
    assert [row["id"] for row in found.rows] == list(ids) and found.absent == absent


@pytest.mark.parametrize(("name", "splits"), [("full", ["tset"]), ("gold", ["blind"]), ("gold", ["tset"])])
def test_an_empty_corpus_says_which_splits_there_are(tables, name, splits):
    """A misspelt split, or one without gold images, is an error that lists the splits."""
    with pytest.raises(ValueError, match=rf"'{splits[0]}'.*'test'.*'val'"):
        corpus(tables, name, splits=splits)
