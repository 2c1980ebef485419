"""Contrastive training: CLIP, Alpha-CLIP (HuLiRAG eq. 6) and image–image pairs, by one module.

What is trained follows from the batch: whole images only are CLIP; whole images and regions with their masks
are Alpha-CLIP; pictures on both sides are image–image InfoNCE (RoRA-VLM's entity retriever).
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor

from fovea import losses
from fovea.batches import PairBatch, RetrievalBatch
from fovea.models.encoders import Encoder
from fovea.replace import replace_text
from lightning_modules.chunks import batch_norms, in_chunks
from lightning_modules.gather import gather_rows
from lightning_modules.optim import DepthOrder, check_groups, cosine_with_warmup, encoder_groups

MAX_LOGIT_SCALE = math.log(100.0)


class AlphaClip(L.LightningModule):
    """InfoNCE over whole images and regions: `NCE(I, q) + region_weight · (1/T) Σ_k NCE(Ĩ_k, n_k)`."""

    def __init__(
        self,
        encoder: Encoder,
        lr: float = 1e-5,
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
        depth_decay: float = 1.0,
        depth_order: DepthOrder = "deeper_smaller",
        freeze_text: bool = False,
        region_weight: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.98),
        chunk_size: int | None = None,
        recall_at: tuple[int, ...] = (1, 5, 20),
    ) -> None:
        """Constructor arguments are the config.

        Args:
            encoder: the dual encoder to train (`fovea.models.encoders`, or `fovea.bundle.load_encoder`).
            lr: peak learning rate (AdamW); see `lightning_modules.optim.encoder_groups` for the layers.
            weight_decay: 0.01 in the paper.
            warmup_steps: optimizer steps of linear warm-up before the cosine.
            depth_decay: learning-rate factor from one layer of the image tower to the next.
            depth_order: which way it runs; the paper's is `deeper_smaller`.
            freeze_text: the paper freezes the text encoder for Alpha-CLIP; it keeps no activations then, and
                its dropout is off.
            region_weight: weight of the regional term of eq. 6 (1 in the paper).
            betas: AdamW's, CLIP's values.
            chunk_size: rows of a tower whose activations are held at once, pictures and texts alike
                (GradCache): the gradient of the whole batch in the memory of a chunk, for a second forward
                pass. None holds all.
            recall_at: cut-offs k of `val/recall@k` and `test/SPLIT/recall@k`.
        """
        super().__init__()
        problems = []
        if not recall_at or min(recall_at) < 1:
            problems.append(f"model.recall_at={list(recall_at)}: at least one cut-off, each 1 or more")
        if not lr > 0:
            problems.append(f"model.lr={lr} must be positive")
        if not 0 < depth_decay <= 1:
            problems.append(f"model.depth_decay={depth_decay} must lie in (0, 1]")
        for name, value in (
            ("weight_decay", weight_decay),
            ("warmup_steps", warmup_steps),
            ("region_weight", region_weight),
        ):
            if not value >= 0:
                problems.append(f"model.{name}={value} must be at least 0")
        if chunk_size is not None and chunk_size < 1:
            problems.append(f"model.chunk_size={chunk_size} must be at least 1, or null")
        if problems:
            raise ValueError("; ".join(problems))
        self.save_hyperparameters(ignore=["encoder"])
        self.encoder = encoder.train()
        if freeze_text:
            for parameter in encoder.text_parameters():
                parameter.requires_grad_(False)
        for module in encoder.modules():
            weights = list(module.parameters())
            if weights and not any(parameter.requires_grad for parameter in weights):
                module.eval()  # what is frozen: no dropout, no running statistics that move
                # Lightning cannot know that this is meant.
                warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")
        # Rows of the galleries and their queries, per dataloader: embeddings and ids.
        self._gallery: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def on_fit_start(self) -> None:
        """Refuse what would silently train something else."""
        trainer, problems = self.trainer, []
        if trainer.accumulate_grad_batches != 1:
            problems.append(
                f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} does not add negatives "
                "to InfoNCE; leave it at 1 and use a larger data.batch_size, with model.chunk_size when that "
                "does not fit into memory (or more ranks)"
            )
        trained = {str(p.dtype).removeprefix("torch.") for p in self.parameters() if p.requires_grad}
        half = sorted(trained & {"float16", "bfloat16"})
        # DeepSpeed keeps float32 copies of its own.
        if half and not isinstance(trainer.strategy, DeepSpeedStrategy):
            problems.append(
                f"the trained weights are {' and '.join(half)} (trainer.precision={trainer.precision}): most "
                "of a step of AdamW is rounded away there; keep them in float32 and set trainer.precision to "
                "bf16-mixed or 16-mixed"
            )
        normed = batch_norms(self.encoder) if self.hparams["chunk_size"] is not None else []
        if normed:
            names = ", ".join(f"encoder.{name}" for name in normed[:4]) + (", …" if len(normed) > 4 else "")
            problems.append(
                f"model.chunk_size={self.hparams['chunk_size']} would not be the big batch: {names} "
                "(batch norm) would see the statistics of a chunk; set model.chunk_size=null, with more "
                "ranks and trainer.sync_batchnorm=true for a larger batch, or train an encoder without batch "
                "norm, such as open_clip's ViTs"
            )
        pictures = getattr(getattr(trainer, "datamodule", None), "partner", None) == "picture"
        text_trains = any(parameter.requires_grad for parameter in self.encoder.text_parameters())
        if pictures and text_trains and trainer.world_size > 1:
            problems.append(
                "data.partner=picture gives the text tower no gradient, for which DDP would wait: set "
                "model.freeze_text=true"
            )
        if problems:
            raise ValueError("; ".join(problems))

    def embed(self, pixels: Tensor | None, alpha: Tensor | None, tokens: Tensor | None) -> Tensor:
        """Rows of a batch, pictures or texts → [n, D]."""
        size = self.hparams["chunk_size"]
        if pixels is None:
            assert tokens is not None
            return in_chunks(self.encoder.encode_text, (tokens,), size)
        return in_chunks(self._embed_pictures, (pixels, alpha), size)

    def _embed_pictures(self, pixels: Tensor, alpha: Tensor | None) -> Tensor:
        mask = None if alpha is None else alpha[:, None].float()
        return self.encoder.encode_image(self.encoder.transform.normalise(pixels), mask)

    def sides(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """Embeddings [n, D] of both sides of each row; whole images and regions go through in one pass."""
        if batch.partner_pixels is None:
            left = self.embed(batch.pixels, batch.alpha, None)
            if batch.texts_per_image > 1:
                num_images = batch.num_global // batch.texts_per_image
                whole = left[:num_images].repeat_interleave(batch.texts_per_image, 0)
                left = torch.cat([whole, left[num_images:]])
            return left, self.embed(None, None, batch.tokens)
        # In one pass: apart, batch norm would see other statistics on each side than in evaluation.
        both = self.embed(torch.cat([batch.pixels, batch.partner_pixels]), None, None)
        left, right = both.chunk(2)
        return left, right

    def loss(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """The whole batch's global and regional terms of eq. 6, as this rank's share times the number of
        ranks.

        DDP averages gradients over ranks, so the share is scaled by the world size: the averaged gradient is
        that of one process with the whole batch.
        """
        left, right = self.sides(batch)
        terms = []
        for part in (slice(0, batch.num_global), slice(batch.num_global, None)):
            ids, image_ids = batch.ids[part], batch.image_ids[part]
            count = torch.tensor([len(ids)], device=left.device)
            all_left, all_right, all_ids, all_image_ids, owner = gather_rows(
                self,
                left[part],
                right[part],
                ids,
                image_ids,
                torch.full((len(ids),), self.global_rank).to(count),
            )
            if len(all_ids) == 0:
                terms.append(left.sum() * 0)
                continue
            if part.start == 0:
                weights = torch.full((len(all_ids),), 1 / len(all_ids), device=left.device)
            else:
                weights = losses.regional_weights(all_image_ids)
            mine = owner == self.global_rank
            term = losses.weighted_info_nce(
                left[part],
                right[part],
                all_left,
                all_right,
                self.encoder.logit_scale,
                losses.positives(ids, all_ids),
                weights[mine],
            )
            terms.append(term * self.trainer.world_size)
        return terms[0], terms[1]

    def training_step(self, batch: PairBatch, _: int) -> Tensor:
        """Forward, loss, log."""
        whole, regional = self.loss(batch)
        loss = whole + self.hparams["region_weight"] * regional
        self._stop_unless_finite(loss, whole, regional, batch)
        figures = {"train/loss": loss, "train/logit_scale": self.encoder.logit_scale.exp()}
        if batch.alpha is not None:  # the same on all ranks, unlike the number of regions
            figures |= {"train/loss_global": whole, "train/loss_regional": regional}
        self.log_dict(figures, sync_dist=True, batch_size=batch.num_global)
        return loss

    def _stop_unless_finite(self, loss: Tensor, whole: Tensor, regional: Tensor, batch: PairBatch) -> None:
        """Raise on every rank when any rank's loss is not finite: one alone would leave the others waiting.

        Gradients that overflow under a finite loss are the gradient scaler's business.
        """
        finite = self.all_gather(torch.isfinite(loss).int())
        assert isinstance(finite, Tensor)
        if bool(finite.all()):
            return
        with torch.no_grad():
            left, right = self.sides(batch)
        good = (torch.isfinite(left) & torch.isfinite(right)).all(1).cpu().numpy()
        named = batch.names if good.all() else batch.names[~good]
        what = "all embeddings finite, rows" if good.all() else "rows with non-finite embeddings"
        about: list[str | None] = [
            f"loss {loss.item()} (global {whole.item()}, regional {regional.item()}), {what}: "
            f"{', '.join(named[:32])}{f' and {len(named) - 32} more' if len(named) > 32 else ''}"
        ]
        if self.trainer.world_size > 1:
            mine, about = about[0], [None] * self.trainer.world_size
            torch.distributed.all_gather_object(about, mine)
        raise FloatingPointError(
            f"loss is not finite at step {self.global_step}, logit scale "
            f"{self.encoder.logit_scale.exp().item():.1f}; "
            + "; ".join(
                f"rank {rank}: {text}"
                for rank, (text, sound) in enumerate(zip(about, finite.flatten().tolist(), strict=True))
                if not sound
            )
        )

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step, then clamp the temperature, as CLIP does: before any callback averages or saves it."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        with torch.no_grad():
            self.encoder.logit_scale.clamp_(0.0, MAX_LOGIT_SCALE)

    def on_validation_epoch_start(self) -> None:
        """Forget the last gallery."""
        self._gallery = {}

    def validation_step(self, batch: RetrievalBatch, _: int, dataloader_idx: int = 0) -> None:
        """Embed one batch of the gallery (dataloader 0) or of its queries (1)."""
        embedded = F.normalize(self.embed(batch.pixels, None, batch.tokens).float(), dim=-1)
        self._gallery.setdefault(dataloader_idx, []).append((embedded, batch.ids))

    def on_validation_epoch_end(self) -> None:
        """Recall of the validation gallery."""
        recall, _, _ = self.recall(0)
        for i, (k, value) in enumerate(recall.items()):
            self.log(f"val/recall@{k}", value, prog_bar=i == 0)

    def on_test_epoch_start(self) -> None:
        """Forget the last galleries."""
        self._gallery = {}

    def test_step(self, batch: RetrievalBatch, _: int, dataloader_idx: int = 0) -> None:
        """As validation, for several galleries: dataloaders 2g and 2g + 1 are the two sides of gallery g."""
        self.validation_step(batch, _, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        """Recall of each gallery, logged and written to `results.json` at the top of the run's directory.

        The DataModule names its galleries in `test_splits`.
        """
        results: dict[str, dict[str, float]] = {}
        for g, name in enumerate(getattr(self.trainer, "datamodule").test_splits):  # noqa: B009
            recall, num_images, num_queries = self.recall(g)
            self.log_dict({f"test/{name}/recall@{k}": value for k, value in recall.items()})
            results[name] = {f"recall@{k}": value.item() for k, value in recall.items()}
            results[name] |= {"images": num_images, "queries": num_queries}
        if self.trainer.is_global_zero:
            path = Path(self.trainer.default_root_dir) / "results.json"
            replace_text(path, json.dumps({"retrieval": results}, indent=1) + "\n")

    def recall(self, gallery: int) -> tuple[dict[int, Tensor], int, int]:
        """Recall at each cut-off of a whole gallery, exact on any number of ranks; its images and queries."""
        empty = (
            torch.zeros(0, self.encoder.embed_dim, device=self.device),
            torch.zeros(0, dtype=torch.int64).to(self.device),
        )
        sides = []
        for side in (2 * gallery, 2 * gallery + 1):
            rows = self._gallery.get(side) or [empty]
            sides.append(gather_rows(self, torch.cat([r[0] for r in rows]), torch.cat([r[1] for r in rows])))
        (images, image_ids), (queries, gold_ids) = sides
        if len(images) == 0 or len(queries) == 0:
            return {}, len(images), len(queries)
        scores = queries @ images.T
        gold = scores.masked_fill(image_ids[None] != gold_ids[:, None], -math.inf).amax(1, keepdim=True)
        # Pessimistic: what is not below counts as ahead, so that a collapsed encoder (all scores equal) and a
        # diverged one (NaN, which no comparison holds for) score zero, not 100 %.
        ahead = (~(scores < gold) & (image_ids[None] != gold_ids[:, None])).sum(1)
        recall = {k: (ahead < k).float().mean() for k in self.hparams["recall_at"]}
        return recall, len(images), len(queries)

    def configure_optimizers(self) -> Any:
        """AdamW with depth-dependent rates, linear warm-up, cosine."""
        h = self.hparams
        groups = encoder_groups(
            self.encoder,
            lr=h["lr"],
            weight_decay=h["weight_decay"],
            depth_decay=h["depth_decay"],
            depth_order=h["depth_order"],
        )
        check_groups(self, groups)
        optimizer = torch.optim.AdamW(groups, betas=h["betas"])
        schedule = cosine_with_warmup(
            optimizer, total_steps=self.trainer.estimated_stepping_batches, warmup_steps=h["warmup_steps"]
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say how to rebuild the encoder, so that `scripts/export.py` needs nothing else."""
        checkpoint["fovea"] = {"kind": "encoder", "spec": self.encoder.spec(), "prefix": "encoder."}
