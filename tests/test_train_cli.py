"""scripts/train.py: overlays, loggers, seeds, every subcommand, and what a user's mistake ends in."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import TOWER

from fovea import bundle
from fovea.models.encoders import tiny_clip
from scripts import train

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("own_process")


@pytest.fixture(scope="session")
def config(train_config: Path) -> Path:
    """Two steps of a very small CLIP on a very small world."""
    return train_config


def run(subcommand: str, config: Path, out: Path, *flags: str) -> train.Cli:
    """`train.py SUBCOMMAND -c CONFIG FLAGS`, in this process."""
    return train.main([subcommand, "-c", str(config), f"--trainer.default_root_dir={out}", *flags])


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What `train.py ARGS` writes when it ends with status 2, within seconds."""
    start = time.process_time()
    with pytest.raises(SystemExit) as end:
        train.main(list(args))
    assert end.value.code == 2 and time.process_time() - start < 5
    error = capsys.readouterr().err
    return error[error.index("train.py: error: ") :]


WORLD_FREE = ("--data.tables=no/tables", "--model.encoder.vocabulary=[a]")
NO_BUNDLE = ("--model.encoder=fovea.bundle.load_encoder", "--model.encoder.path=no/bundle")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        # What is written wrongly: the key, and what would be right.
        (("--model.lrr=1",), ["'lrr' is not accepted"]),
        (("--trainer.max_stepss=3",), ["trainer.max_stepss"]),
        (("--model.lr=fast",), ['"lr"', "float", "fast"]),
        (("--model.depth_order=sideways",), ["depth_order", "deeper_smaller", "sideways"]),
        (("--data.partner=video",), ["partner", "text", "picture", "video"]),
        (("--model.recall_at=[0]",), ["model.recall_at=[0]", "1 or more"]),
        # What is not there: the path, the key that holds it, the command that makes it.
        (WORLD_FREE, ["no canonical tables at no/tables", "prepare.py", "--data.tables=no/tables"]),
        (("--model.encoder.vocabulary=no/words",), ["no/words", "--model.encoder.vocabulary=no/words"]),
        (NO_BUNDLE, ["no bundle at no/bundle", "export.py", "--model.encoder.path=no/bundle"]),
        (("--data.train_split=trian",), ["data.train_split='trian'", "singles"]),
        (("--data.val_image_split=kb",), ["data.val_image_split='kb'", "images", "'val'"]),
        # What cannot be together, found by constructors, by `setup` and at the start of the fit.
        (("--data.max_regions=2", "--data.partner=picture"), ["data.max_regions", "data.partner=text"]),
        (("--data.batch_size=9999",), ["data.batch_size=9999", "400 training images"]),
        (("--trainer.accumulate_grad_batches=4",), ["trainer.accumulate_grad_batches=4", "data.batch_size"]),
        (("--trainer.max_steps=-1", "--trainer.max_epochs=-1"), ["trainer.max_steps", "trainer.max_epochs"]),
        (("--trainer.devices=0",), ["devices"]),
    ],
)  # fmt: skip
def test_a_mistake_ends_in_a_message(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], told: list[str]
) -> None:
    """Each wrong flag ends with status 2 and a short message that names the key and what would be right."""
    error = refusal(capsys, "fit", "-c", str(config), f"--trainer.default_root_dir={tmp_path}", *flags)
    assert all(part in error for part in told), error
    assert "Traceback" not in error and "Given value type: <class 'jsonargparse" not in error
    assert len(error) < 1500


def test_a_mistake_in_a_file(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong key in YAML, at both depths, and a config that is not there."""
    for text, told in (("trainr: {max_steps: 1}", "trainr"), ("model: {init_args: {lrr: 1}}", "lrr")):
        wrong = tmp_path / "wrong.yaml"
        wrong.write_text(text)
        error = refusal(capsys, "fit", "-c", str(config), "-c", str(wrong))
        assert told in error and "accept" in error
    assert "no/such.yaml" in refusal(capsys, "fit", "-c", "no/such.yaml")


def test_a_fault_after_the_first_batch_keeps_its_traceback(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong inside training is no mistake of the config: nothing hides where it happened."""
    from lightning_modules.alpha_clip import AlphaClip

    def broken(*_: Any) -> None:
        raise ValueError("inside the step")

    monkeypatch.setattr(AlphaClip, "training_step", broken)
    with pytest.raises(ValueError, match="inside the step"):
        run("fit", config, tmp_path)


def test_from_a_shell(config: Path, tmp_path: Path) -> None:
    """The script itself: a missing path is one short message on stderr, status 2, no traceback."""
    command = [sys.executable, "scripts/train.py", "fit", "-c", str(config), *WORLD_FREE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "train.py: error: no canonical tables at no/tables" in done.stderr
    assert "Set by: --data.tables=no/tables" in done.stderr and "Traceback" not in done.stderr


def test_overlays_merge_and_later_ones_win(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three configs and a flag: each changes its own keys deep inside and leaves the others alone."""
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("model: {init_args: {lr: 5.0e-4, weight_decay: 0.2}}\ntrainer: {max_steps: 7}\n")
    second.write_text("model: {init_args: {lr: 7.0e-4, encoder: {init_args: {embed_dim: 24}}}}\n")
    overlays = ["-c", str(first), "-c", str(second), "-c", "configs/trainer/cpu.yaml"]
    with pytest.raises(SystemExit) as end:
        train.main(["fit", "-c", str(config), *overlays, "--trainer.max_steps=9", "--print_config"])
    assert end.value.code == 0
    merged = yaml.safe_load(capsys.readouterr().out)
    model, encoder = merged["model"]["init_args"], merged["model"]["init_args"]["encoder"]["init_args"]
    assert (model["lr"], model["weight_decay"], merged["trainer"]["max_steps"]) == (7e-4, 0.2, 9)
    assert (encoder["embed_dim"], encoder["widths"]) == (24, TOWER["widths"])
    assert merged["data"]["init_args"]["batch_size"] == 8 and merged["trainer"]["precision"] == "32-true"


def test_seeds_and_the_saved_config(config: Path, tmp_path: Path) -> None:
    """The same seed gives the same loss, another one another, and so does the config that a run leaves."""

    def loss(*args: str) -> float:
        return float(train.main(["fit", *args]).trainer.callback_metrics["train/loss"])

    first = loss("-c", str(config), "--seed_everything=3", f"--trainer.default_root_dir={tmp_path / 'a'}")
    other = loss("-c", str(config), "--seed_everything=4", f"--trainer.default_root_dir={tmp_path / 'b'}")
    assert other != first
    saved = tmp_path / "a" / "config.yaml"
    resolved = yaml.safe_load(saved.read_text())
    assert resolved["seed_everything"] == 3 and resolved["model"]["init_args"]["betas"] == [0.9, 0.98]
    assert loss("-c", str(saved)) == first


def test_validate_test_and_resume(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a checkpoint: `validate` gives the gallery's recall, `test` that of each of its splits.

    `test` writes results.json and leaves the training's config.yaml alone; recall grows with k. A longer fit
    goes on from the checkpoint's step. `predict` says where predictions come from. A torn file is named.
    """
    cli = run("fit", config, tmp_path, "--model.recall_at=[1, 3]")
    trained = (tmp_path / "config.yaml").read_text()
    ckpt = f"--ckpt_path={cli.trainer.checkpoint_callback.best_model_path}"
    cli = run("validate", config, tmp_path, ckpt, "--trainer.limit_val_batches=1.0")
    assert set(cli.trainer.callback_metrics) == {"val/recall@1", "val/recall@3"}
    assert "test_splits" in refusal(capsys, "test", "-c", str(config), ckpt)
    cli = run("test", config, tmp_path, ckpt, "--data.test_splits=[test-0, cal-0]")
    results = json.loads((tmp_path / "results.json").read_text())["retrieval"]
    assert list(results) == ["test-0", "cal-0"]
    for split, row in results.items():
        assert row["images"] == 20 and row["queries"] > 0
        assert 0 <= row["recall@1"] <= row["recall@3"] <= 1
        assert row["recall@3"] == pytest.approx(float(cli.trainer.callback_metrics[f"test/{split}/recall@3"]))
    assert (tmp_path / "config.yaml").read_text() == trained
    cli = run("fit", config, tmp_path / "longer", ckpt, "--trainer.max_steps=4", "--trainer.max_epochs=2")
    assert cli.trainer.global_step == 4
    assert "build_index.py" in refusal(capsys, "predict", "-c", str(config))
    torn = tmp_path / "torn.ckpt"
    torn.write_bytes(Path(ckpt.partition("=")[2]).read_bytes()[:5000])
    message = refusal(capsys, "fit", "-c", str(config), f"--ckpt_path={torn}")
    assert f"--ckpt_path {torn} (5,000 bytes) is no checkpoint: it was cut short" in message


def test_every_test_gallery_has_its_own_images(config: Path, tmp_path: Path) -> None:
    """Recall of a split is the same whether it is tested alone or after another one."""
    alone = run("test", config, tmp_path, "--data.test_splits=[cal-0]").trainer.callback_metrics
    both = run("test", config, tmp_path, "--data.test_splits=[test-0, cal-0]").trainer.callback_metrics
    for name, value in alone.items():
        assert both[name] == value


def test_trains_from_a_bundle(config: Path, tmp_path: Path, tiny_world: Path) -> None:
    """The encoder in the config may be a bundle: its sizes and vocabulary come along."""
    encoder = tiny_clip(str(tiny_world), image_size=32, **{k: v for k, v in TOWER.items()})
    bundle.save_encoder(encoder, tmp_path / "bundle")
    flags = ["--model.encoder=fovea.bundle.load_encoder", f"--model.encoder.path={tmp_path / 'bundle'}"]
    cli = run("fit", config, tmp_path / "run", *flags)
    assert cli.model.encoder.spec() == encoder.spec()


def records(file: Path) -> Iterator[Any]:
    """What a W&B offline run holds: protobuf records in LevelDB's log format, behind 7 bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, pending = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a block's end, too short for another header
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack_from("<4xHB", data, at)
        pending += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole record, or its last part
            record = Record()
            record.ParseFromString(pending)
            pending = b""
            yield record


def test_wandb_offline(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """configs/logger/wandb_offline.yaml: resolved config, losses and rates are in the offline run.

    CSV lies beside it, and both below the run's own directory.
    """
    import wandb

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monitor = "--trainer.callbacks=lightning.pytorch.callbacks.LearningRateMonitor"
    run("fit", config, tmp_path, "-c", str(ROOT / "configs/logger/wandb_offline.yaml"), monitor)
    # `finish` only asks W&B's service process to close the file; `teardown` waits until it has. (At the end
    # of a process W&B does both by itself.)
    wandb.finish()
    wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    settings: dict[str, Any] = {}
    logged: list[dict[str, Any]] = []
    for record in records(file):
        updates = [*record.run.config.update, *record.config.update]
        settings |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}
        items = record.history.item
        logged.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    found = json.dumps(settings)
    assert '"batch_size": 8' in found and "tiny_clip" in found and '"max_steps": 2' in found
    losses = [row["train/loss"] for row in logged if "train/loss" in row]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)
    assert any("lr-AdamW/text" in row for row in logged)
    assert len(list(tmp_path.glob("lightning_logs/version_0/metrics.csv"))) == 1


def test_pictures_of_validation_images(config: Path, tmp_path: Path, tiny_world: Path) -> None:
    """The callback from the command line, added to the config: PNGs of two images after validation."""
    callback = "--trainer.callbacks+=lightning_modules.pictures.LogPictures"
    settings = [f"--trainer.callbacks.tables={tiny_world}", "--trainer.callbacks.num_images=2"]
    settings += [
        "--trainer.callbacks.view.crop=true",
        "--trainer.limit_val_batches=1.0",
        "--trainer.val_check_interval=2",
    ]
    run("fit", config, tmp_path, "-c", str(ROOT / "configs/logger/none.yaml"), callback, *settings)
    assert len(list(tmp_path.glob("pictures/step-000002/*.png"))) == 2


@pytest.mark.parametrize(("name", "curves"), [("csv", 1), ("none", 0)])
def test_loggers_without_wandb(config: Path, tmp_path: Path, name: str, curves: int) -> None:
    """`csv` writes one file of curves, `none` nothing; both keep the checkpoint and the config."""
    monitor = "--trainer.callbacks=lightning.pytorch.callbacks.LearningRateMonitor"
    run("fit", config, tmp_path, "-c", str(ROOT / f"configs/logger/{name}.yaml"), monitor)
    assert len(list(tmp_path.rglob("metrics.csv"))) == curves
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1 and (tmp_path / "config.yaml").is_file()
    assert not (tmp_path / "wandb").exists()


def test_entities_from_fit_to_test(tiny_entities: Path, tmp_path: Path) -> None:
    """configs/quickstart/entities.yaml in miniature: fit, export, `test` from the bundle.

    The bundle gives the figures of the checkpoint that it was made of; each picture of a view counts once,
    although there are several questions about it.
    """
    from fovea.tables import Tables
    from scripts.export import export

    config = ROOT / "configs/quickstart/entities.yaml"
    small = [f"--data.tables={tiny_entities}", "--data.batch_size=8", "--trainer.enable_progress_bar=false"]
    short = ["--trainer.max_steps=3", "--trainer.check_val_every_n_epoch=1"]
    fitted = run("fit", config, tmp_path / "fit", *small, *short, "--trainer.callbacks=[]")
    ckpt = export(tmp_path / "fit", tmp_path / "bundle")
    assert fitted.trainer.global_step == 3
    results = []
    bundle_flags = [
        "--model.encoder=fovea.bundle.load_encoder",
        f"--model.encoder.path={tmp_path / 'bundle'}",
    ]
    for name, flags in (("ckpt", [f"--ckpt_path={ckpt}"]), ("bundle", bundle_flags)):
        run("test", config, tmp_path / name, *small, "--trainer.callbacks=[]", *flags)
        results.append(json.loads((tmp_path / name / "results.json").read_text())["retrieval"])
    assert results[0] == results[1]
    images = Tables(tiny_entities).table("images").column("split").to_pylist()
    for split in ("test-seen", "test-heldout"):
        row = results[0][split]
        assert (row["images"], row["queries"]) == (images.count("kb"), images.count(split))
        assert 0 <= row["recall@1"] <= row["recall@3"] <= row["recall@5"] <= 1
