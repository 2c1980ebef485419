"""The Felzenszwalb proposer, on pictures whose segments are known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from datamodules import world, world_scenes
from fovea.models.detectors import Felzenszwalb, Proposer


def _two_squares() -> tuple[np.ndarray, list[np.ndarray]]:
    """A grey picture of 40×60 with a red and a blue square; the three segments as masks."""
    image = np.full((40, 60, 3), 128, np.uint8)
    red, blue = np.zeros((40, 60), bool), np.zeros((40, 60), bool)
    red[5:20, 5:20] = True
    blue[15:35, 35:55] = True
    image[red], image[blue] = (255, 0, 0), (0, 0, 255)
    return image, [red, blue, ~(red | blue)]


def test_flat_squares_are_found_exactly_and_once():
    """Two squares and their background at three scales: three regions, not nine, equal to the drawn ones."""
    image, segments = _two_squares()
    proposer: Proposer = Felzenszwalb(sigma=0.0)
    found = proposer.propose(image)
    assert found.dtype == bool and found.shape == (3, 40, 60)
    for segment in segments:
        assert sum(bool((mask == segment).all()) for mask in found) == 1


@pytest.mark.parametrize("value", [0, 200])
def test_a_uniform_image_has_no_region(value: int):
    """The one segment is the whole image, which is left out: zero regions are a normal result."""
    assert Felzenszwalb().propose(np.full((24, 32, 3), value, np.uint8)).shape == (0, 24, 32)


@pytest.mark.parametrize("min_size", [20, 60])
def test_regions_are_large_enough_distinct_and_repeatable(min_size: int):
    """On noise: no region below the least size, none twice, none the whole image, the same on a second
    call."""
    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    proposer = Felzenszwalb(min_size=min_size)
    found = proposer.propose(image)
    assert len(found) > 0 and found.sum((1, 2)).min() >= min_size
    assert not found.all((1, 2)).any()
    assert len({mask.tobytes() for mask in found}) == len(found)
    assert (proposer.propose(image) == found).all()


def test_each_scale_partitions_the_image():
    """At one scale every pixel is in exactly one region; the pooled regions are the union over the scales."""
    image = np.random.default_rng(1).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    single = [Felzenszwalb(scales=(scale,)).propose(image) for scale in (20.0, 80.0)]
    for masks in single:
        assert (masks.sum(0) == 1).all()
    pooled = Felzenszwalb(scales=(20.0, 80.0)).propose(image)
    assert {m.tobytes() for m in pooled} == {m.tobytes() for masks in single for m in masks}


@pytest.mark.parametrize("change", [{"scales": (100.0,)}, {"sigma": 0.8}, {"min_size": 10}])
def test_the_key_changes_with_every_setting(change: dict[str, object]):
    """A mask store of one setting is not taken for that of another."""
    base = Felzenszwalb(scales=(60.0, 200.0))
    assert base.key == "felzenszwalb-60-200-s0.5-m20"
    assert dataclasses.replace(base, **change).key != base.key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": ()}, "scales"),
        ({"scales": (0.0,)}, "scales"),
        ({"sigma": -1.0}, "sigma=-1"),
        ({"min_size": 0}, "min_size=0"),
    ],
)
def test_a_bad_setting_is_named(change: dict[str, object], message: str):
    """Each bad field raises with its value."""
    with pytest.raises(ValueError, match=message):
        Felzenszwalb(**change)


@pytest.mark.parametrize(
    "image", [np.zeros((8, 8), np.uint8), np.zeros((8, 8, 4), np.uint8), np.zeros((8, 8, 3), np.float32)]
)
def test_another_type_of_image_is_refused(image: np.ndarray):
    """Grey, RGBA and float images raise with what came, instead of giving segments of something else."""
    with pytest.raises(ValueError, match=r"uint8 \[H, W, 3\], got"):
        Felzenszwalb().propose(image)


def test_things_of_the_world_are_proposed():
    """On 20 scenes of the default world at least 85 % of the true masks have a proposal with IoU above a
    half."""
    config = world.WorldConfig(num_singles=0, num_scenes=0, gallery_size=20)
    look = world_scenes.Look(config.sizes, config.max_overlap, config.grey, config.rotation)
    overlaps: list[float] = []
    for scene in world.plan(config)["val"]:
        image, truth = world_scenes.draw(scene, look)
        regions = Felzenszwalb().propose(image)
        for mask in truth:
            joint = (regions & mask).sum((1, 2)) / (regions | mask).sum((1, 2))
            overlaps.append(float(joint.max()))
    assert len(overlaps) == 60 and np.mean(np.array(overlaps) > 0.5) >= 0.85
