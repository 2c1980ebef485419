"""lightning_modules.alpha_clip with datamodules.pairs: learns, resumes, shards, and refuses what it must."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from contrastive import Recorder, StopAt, build, gallery, pairs, ready, tiny_vit, trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from datamodules.pair_batches import stable_id
from datamodules.pairs import PairData
from fovea.models.encoders import tiny_clip
from fovea.tables import Tables
from lightning_modules.alpha_clip import MAX_LOGIT_SCALE, AlphaClip
from lightning_modules.optim import check_groups, cosine_with_warmup, encoder_groups


@pytest.fixture(scope="module")
def tables(tiny_world: Path) -> Path:
    """A tiny world."""
    return tiny_world


@pytest.mark.parametrize(("max_regions", "share"), [(0, 0.25), (2, 0.4)])
def test_overfits_one_batch(tables: Path, max_regions: int, share: float) -> None:
    """One batch again and again: the loss falls to a fraction of its start.

    With regions the floor is higher: a phrase that two regions share leaves the entropy of the choice.
    """
    module, data = build(tables, max_regions=max_regions, lr=1e-2, full_image_rate=0.0)
    record = Recorder()
    trainer(max_steps=1).fit(module, data)
    batch = next(iter(data.train_dataloader()))
    trainer(max_steps=100, callbacks=[record]).fit(module, DataLoader([batch], batch_size=None))
    assert record.losses[-1] < share * record.losses[0]


def test_three_and_three_steps_are_six(tables: Path, tmp_path: Path) -> None:
    """Stopped inside an epoch and resumed: ids, losses and weights are those of one run, bit for bit.

    25 batches an epoch: step 3 is inside it, so the loader's place in the epoch has to survive.
    """
    whole, data = build(tables, max_regions=1)
    record = Recorder()
    trainer(max_steps=6, callbacks=[record]).fit(whole, data)
    first, data = build(tables, max_regions=1)
    halves = Recorder()
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=3, filename="three", save_top_k=-1)
    # The schedule must know the whole run's length; the run is cut by a callback, as a kill would.
    cut = trainer(max_steps=6, callbacks=[halves, keep, StopAt(3)], enable_checkpointing=True)
    cut.fit(first, data)
    assert len(halves.losses) == 3
    second, data = build(tables, max_regions=1)
    torch.manual_seed(99)
    resumed = trainer(max_steps=6, callbacks=[halves])
    resumed.fit(second, data, ckpt_path=str(tmp_path / "three.ckpt"), weights_only=True)
    assert halves.names == record.names
    assert halves.losses == record.losses
    for (name, one), other in zip(whole.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_regions_of_a_batch(tables: Path) -> None:
    """Each regional row: its phrase's id, a mask of 0/1 black outside it; whole rows have alpha 1."""
    module, data = build(tables, max_regions=2, full_image_rate=0.0)
    trainer(max_steps=1).fit(module, data)
    batch = next(iter(data.train_dataloader()))
    assert batch.num_global == 16 < len(batch.pixels)
    assert (batch.alpha[: batch.num_global] == 1).all()
    phrases = {row["image_id"] + "/" + row["id"]: row["phrase"] for row in Tables(tables).rows("regions")}
    for i in range(batch.num_global, len(batch.pixels)):
        assert batch.ids[i, 1] == stable_id("right " + phrases[batch.names[i]])
        assert 0 < batch.alpha[i].float().mean() < 1
        # The encoder's mean colour, 0 after normalisation.
        assert (batch.pixels[i][batch.alpha[i] == 0] == 128).all()
    assert set(batch.image_ids[batch.num_global :].tolist()) <= set(
        batch.image_ids[: batch.num_global].tolist()
    )


def test_several_texts_of_an_image(tables: Path) -> None:
    """Three texts an image are the loss and gradient of three rows an image; the tower sees it once."""
    module, data = build(tables, texts_per_image=3, max_regions=1, full_image_rate=0.0)
    run = trainer(max_steps=1)
    run.fit(module, data)
    batch = next(iter(data.train_dataloader()))
    assert batch.num_global == 48 and len(batch.pixels) == len(batch.tokens) - 32 == len(batch.alpha)
    texts: dict[str, set[str]] = {}
    for query in data.tables.queries(split="train"):
        texts.setdefault(query.gold_image_ids[0], set()).add(query.text)
    for i in range(0, 48, 3):
        (name,) = set(batch.names[i : i + 3])
        said = {stable_id(f"right {text}") for text in texts[name]}
        assert set(batch.ids[i : i + 3, 1].tolist()) == said  # three captions a scene, each once

    module.encoder.eval()  # batch norm would count an image three times
    pixels, alpha = (
        torch.cat([rows[:16].repeat_interleave(3, 0), rows[16:]]) for rows in (batch.pixels, batch.alpha)
    )
    repeated = batch._replace(pixels=pixels, alpha=alpha, texts_per_image=1)
    gradients = []
    for each in (batch, repeated):
        module.zero_grad()
        sum(module.loss(each)).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "check"),
    [
        ({"full_image_rate": 1.0}, "whole"),
        ({"region_text": "query"}, "query"),
        ({"background": "keep"}, "keep"),
        ({"fill": "black"}, "black"),
        ({"crop": True}, "crop"),
    ],
)
def test_each_switch_changes_the_right_tensor(tables: Path, options: dict[str, Any], check: str) -> None:
    """Turning a switch changes what it names in the regional rows."""
    module, data = build(tables, max_regions=1, **({"full_image_rate": 0.0} | options))
    trainer(max_steps=1).fit(module, data)
    batch = next(iter(data.train_dataloader()))
    regional = slice(batch.num_global, None)
    if check == "whole":
        assert (batch.alpha[regional] == 1).all()
        assert set(batch.names[regional]) <= set(batch.names[: batch.num_global])
    elif check == "query":
        assert set(batch.ids[regional, 1].tolist()) <= set(batch.ids[: batch.num_global, 1].tolist())
    elif check == "crop":
        # The object fills the frame: its mask covers far more than in the scene.
        assert batch.alpha[regional].float().mean() > 0.3
    else:
        outside = batch.pixels[regional][batch.alpha[regional] == 0].float()
        assert outside.std() > 10 if check == "keep" else (outside == 0).all()


def test_pictures_as_partners(tmp_path: Path) -> None:
    """Image–image InfoNCE: the partner is the query's own picture, and validation retrieves with pictures."""
    from datamodules import world_entities

    out = world_entities.build(tmp_path / "entities", config=world_entities.EntityConfig.smoke(), workers=1)
    torch.manual_seed(0)
    encoder = tiny_clip(
        ["a"], image_size=48, widths=(8, 8, 16), layers=1, heads=2, embed_dim=16, text_width=16
    )
    splits = {row["split"] for row in Tables(out).rows("queries")}
    val = sorted(s for s in splits if s.startswith("val"))[0]
    data = PairData(
        str(out),
        partner="picture",
        train_split="train",
        val_split=val,
        val_image_split="kb",
        batch_size=8,
        min_crop=0.9,
    )
    module = AlphaClip(encoder, lr=1e-3)
    run = trainer(max_steps=3, limit_val_batches=1.0, val_check_interval=3, check_val_every_n_epoch=None)
    run.fit(module, data)
    assert 0 <= run.callback_metrics["val/recall@1"] <= run.callback_metrics["val/recall@20"] <= 1
    batch = next(iter(data.train_dataloader()))
    assert batch.tokens is None and batch.partner_pixels.shape == batch.pixels.shape
    assert (batch.partner_pixels != batch.pixels).any()


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_collapsed_encoder_scores_zero(value: float) -> None:
    """All embeddings equal: every gold is tied with all others, so pessimistic R@1 is 0, not 1. All NaN, as
    after a step that diverged: 0 as well, or that checkpoint would be kept as the best.
    """
    encoder = tiny_clip(list("abcd"), image_size=16, widths=(8, 8), embed_dim=8, heads=2, text_width=8)
    torch.nn.init.constant_(encoder.get_parameter("clip.visual.proj.weight"), value)
    module = AlphaClip(encoder)
    run = trainer(limit_val_batches=1.0)
    run.validate(module, gallery(), verbose=False)
    assert run.callback_metrics["val/recall@1"] == 0


def test_frozen_text_and_clamped_scale(tables: Path) -> None:
    """The text tower does not move; the temperature stays within CLIP's clamp even when pushed above it."""
    module, data = build(tables, max_regions=1, freeze_text=True, lr=0.1)
    before = {n: p.clone() for n, p in module.encoder.named_parameters() if n.startswith("clip.text.")}
    with torch.no_grad():
        module.encoder.logit_scale.fill_(MAX_LOGIT_SCALE)
    trainer(max_steps=2).fit(module, data)
    for name, parameter in module.encoder.named_parameters():
        if name in before:
            assert torch.equal(parameter, before[name])
    assert module.encoder.logit_scale <= MAX_LOGIT_SCALE


def test_optimizer_groups() -> None:
    """Deeper layers get smaller rates (the paper's) or larger; the temperature is alone, undecayed."""
    encoder = tiny_clip(
        ["a"], image_size=16, widths=(8, 8), layers=2, embed_dim=8, heads=2, text_width=8, alpha=True
    )
    groups = encoder_groups(encoder, lr=1.0, weight_decay=0.1, depth_decay=0.5)
    rates = {g["name"]: g["lr"] for g in groups}
    assert [rates[f"visual.{d}"] for d in range(4)] == [1.0, 0.5, 0.25, 0.125]
    reverse = encoder_groups(encoder, lr=1.0, weight_decay=0.1, depth_decay=0.5, depth_order="deeper_larger")
    assert {g["name"]: g["lr"] for g in reverse}["visual.0"] == 0.125
    scale = [g for g in groups if any(p is encoder.logit_scale for p in g["params"])]
    assert len(scale) == 1 and len(scale[0]["params"]) == 1 and scale[0]["weight_decay"] == 0
    check_groups(encoder, groups)
    with pytest.raises(ValueError, match="clip.logit_scale is in 0"):
        check_groups(encoder, [g for g in groups if g is not scale[0]])
    with pytest.raises(ValueError, match="is in 2"):
        check_groups(encoder, [*groups, scale[0]])


def test_depths_of_a_vit() -> None:
    """The stem is all that comes before the first block, class and position embeddings included."""
    encoder = tiny_vit()
    depths = {name.removeprefix("clip."): encoder.depth_of(name) for name, _ in encoder.named_parameters()}
    stem = {name for name, depth in depths.items() if depth == 0}
    assert stem == {f"visual.{name}" for name in (
        "class_embedding", "positional_embedding", "conv1.rgb.weight", "conv1.alpha.weight",
        "ln_pre.weight", "ln_pre.bias",
    )}  # fmt: skip
    assert depths["visual.transformer.resblocks.1.mlp.c_fc.weight"] == 2
    assert {depths[f"visual.{name}"] for name in ("ln_post.weight", "proj")} == {3}
    assert depths["logit_scale"] is None and depths["transformer.resblocks.1.mlp.c_fc.weight"] is None


def test_each_group_logs_its_rate(tmp_path: Path) -> None:
    """`LearningRateMonitor` writes a column for each depth, for the texts, and one for the temperature."""
    module = AlphaClip(tiny_vit(), lr=1.0, depth_decay=0.5, weight_decay=0.1)
    logger = CSVLogger(tmp_path, name="", version="")
    run = trainer(max_steps=1, logger=logger, callbacks=[LearningRateMonitor()], log_every_n_steps=1)
    run.fit(module, ready(pairs()))
    with (tmp_path / "metrics.csv").open() as file:
        logged = {k: float(v) for row in csv.DictReader(file) for k, v in row.items() if v}
    for name in ("visual.0", "visual.0.no_decay"):
        assert logged[f"lr-AdamW/{name}"] == 1
    assert [logged[f"lr-AdamW/visual.{depth}"] for depth in (1, 2, 3)] == [0.5, 0.25, 0.125]
    assert logged["lr-AdamW/text"] == logged["lr-AdamW/logit_scale"] == 1
    plain = encoder_groups(tiny_vit(), lr=1.0, weight_decay=0.1)
    assert sorted(g["name"] for g in plain) == sorted(
        ["visual", "visual.no_decay", "text", "text.no_decay", "logit_scale"]
    )


def test_the_schedule_follows_the_new_end() -> None:
    """A run that is resumed with more steps goes on along the longer cosine, not the one it started with."""

    def schedule(total: int) -> torch.optim.lr_scheduler.LambdaLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
        return cosine_with_warmup(optimizer, total_steps=total, warmup_steps=2)

    def steps(made: torch.optim.lr_scheduler.LambdaLR, count: int) -> list[float]:
        rates = []
        for _ in range(count):
            made.optimizer.step()
            made.step()
            rates.append(made.get_last_lr()[0])
        return rates

    short, whole = schedule(6), schedule(12)
    steps(short, 4)
    resumed = schedule(12)
    resumed.load_state_dict(short.state_dict())
    assert steps(resumed, 8) == steps(whole, 12)[4:]
    assert resumed.get_last_lr() == [0.0]


def test_refuses_accumulation(tables: Path) -> None:
    """Accumulated gradients would silently train with fewer negatives than the config says (PITFALLS 5)."""
    module, data = build(tables)
    with pytest.raises(ValueError, match="accumulate_grad_batches=4"):
        trainer(max_steps=1, accumulate_grad_batches=4).fit(module, data)


def test_non_finite_loss_names_step_and_rows(tables: Path) -> None:
    """NaN weights: training stops at once and says where."""
    module, data = build(tables)
    with torch.no_grad():
        module.encoder.get_parameter("clip.visual.proj.weight").fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"step 0.*train-"):
        trainer(max_steps=1).fit(module, data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_split": "trian"}, "trian.*no such split"),
        ({"batch_size": 10_000}, "batch_size=10000 is more than"),
        ({"partner": "picture", "max_regions": 1}, "needs data.partner=text"),
        ({"partner": "picture", "texts_per_image": 2}, "texts_per_image=2 needs data.partner=text"),
        ({"batch_size": 0, "max_regions": -1}, "data.batch_size=0 must be.*data.max_regions=-1 must be"),
        ({"full_image_rate": 7}, "full_image_rate=7 must lie in"),
        ({"lr": -1.0}, "model.lr=-1.0 must be positive"),
        ({"chunk_size": 0}, "model.chunk_size=0 must be at least 1"),
    ],
)
def test_impossible_settings_are_named(tables: Path, options: dict[str, Any], message: str) -> None:
    """Each is refused before the first step, with the key in the message."""
    with pytest.raises(ValueError, match=message):
        module, data = build(tables, **options)
        trainer(max_steps=1).fit(module, data)


def test_lightnings_own_sampler_is_refused(tables: Path) -> None:
    """It would pad and shuffle a second time."""
    module, data = build(tables)
    with pytest.raises(ValueError, match="use_distributed_sampler=false"):
        trainer(max_steps=1, use_distributed_sampler=True).fit(module, data)
