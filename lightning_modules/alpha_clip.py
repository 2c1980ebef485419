"""Contrastive training: CLIP, Alpha-CLIP (HuLiRAG eq. 6) and image–image pairs, by one module.

What is trained follows from the batch: whole images only are CLIP; whole images and regions with their masks
are Alpha-CLIP; pictures on both sides are image–image InfoNCE (RoRA-VLM's entity retriever).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fovea import losses
from fovea.batches import PairBatch, RetrievalBatch
from fovea.models.encoders import Encoder, embed_dtype
from fovea.replace import replace_text
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
        recall_at: tuple[int, ...] = (1, 5, 20),
        chunk_size: int | None = None,
    ) -> None:
        """Constructor arguments are the config.

        Args:
            encoder: the dual encoder to train (`fovea.models.encoders`, or `fovea.bundle.load_encoder`).
            lr: peak learning rate (AdamW); see `lightning_modules.optim.encoder_groups` for the layers.
            weight_decay: 0.01 in the paper.
            warmup_steps: optimizer steps of linear warm-up before the cosine.
            depth_decay: learning-rate factor from one layer of the image tower to the next.
            depth_order: which way it runs; the paper's is `deeper_smaller`.
            freeze_text: the paper freezes the text encoder for Alpha-CLIP.
            region_weight: weight of the regional term of eq. 6 (1 in the paper).
            betas: AdamW's, CLIP's values.
            recall_at: cut-offs k of `val/recall@k` and `test/SPLIT/recall@k`.
            chunk_size: rows whose activations are held at once (GradCache): the towers run chunk by chunk,
                and again in the backward pass, for the gradient of the whole batch in the memory of a chunk
                and about a third more time. None holds the whole batch.
        """
        super().__init__()
        problems = []
        if not recall_at or min(recall_at) < 1:
            problems.append(f"model.recall_at={list(recall_at)}: at least one cut-off, each 1 or more")
        if not lr > 0:
            problems.append(f"model.lr={lr} must be positive")
        if chunk_size is not None and chunk_size < 1:
            problems.append(f"model.chunk_size={chunk_size} must be at least 1, or null")
        if not 0 < depth_decay <= 1:
            problems.append(f"model.depth_decay={depth_decay} must lie in (0, 1]")
        for name, value in (
            ("weight_decay", weight_decay),
            ("warmup_steps", warmup_steps),
            ("region_weight", region_weight),
        ):
            if not value >= 0:
                problems.append(f"model.{name}={value} must be at least 0")
        if problems:
            raise ValueError("; ".join(problems))
        self.save_hyperparameters(ignore=["encoder"])
        self.encoder = encoder.train()
        if freeze_text:
            for parameter in encoder.text_parameters():
                parameter.requires_grad_(False)
        # Rows of the galleries and their queries, per dataloader: embeddings and ids.
        self._gallery: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def on_fit_start(self) -> None:
        """Refuse what would silently train something else."""
        if self.trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"trainer.accumulate_grad_batches={self.trainer.accumulate_grad_batches} does not add "
                "negatives to InfoNCE; use a larger data.batch_size (or more ranks) and leave it at 1"
            )

        if self.hparams["chunk_size"] is not None:
            normed = [
                name
                for name, module in self.encoder.named_modules()
                if isinstance(module, nn.modules.batchnorm._BatchNorm)
            ]
            if normed:
                raise ValueError(
                    f"model.chunk_size={self.hparams['chunk_size']}: {normed[0]} is a batch norm, whose "
                    "statistics would be those of a chunk; train this encoder with chunk_size: null"
                )

    def embed(self, pixels: Tensor | None, alpha: Tensor | None, tokens: Tensor | None) -> Tensor:
        """Rows of a batch, pictures or texts → [n, D].

        With a `chunk_size` this is GradCache (Gao et al. 2021) by checkpointing: only the inputs and the
        embeddings are kept, and autograd runs a chunk again when its gradient is there. There is one backward
        pass, so that autocast, loss scaling and DDP need to know nothing of it.
        """
        inputs = (pixels, alpha, tokens)
        chunk_size, num_rows = (
            self.hparams["chunk_size"],
            next(len(rows) for rows in inputs if rows is not None),
        )
        if chunk_size is None or num_rows <= chunk_size or not torch.is_grad_enabled():
            return self._tower(*inputs)
        chunks = zip(
            *([None] * num_rows if rows is None else rows.split(chunk_size) for rows in inputs), strict=False
        )
        return torch.cat([checkpoint(self._tower, *chunk, use_reentrant=False) for chunk in chunks])

    def _tower(self, pixels: Tensor | None, alpha: Tensor | None, tokens: Tensor | None) -> Tensor:
        if pixels is None:
            assert tokens is not None
            return self.encoder.encode_text(tokens)
        mask = None if alpha is None else alpha[:, None].float()
        shown = self.encoder.transform.normalise(pixels).to(
            embed_dtype(self.encoder)
        )  # bf16-true has no cast
        return self.encoder.encode_image(shown, mask)

    def loss(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """The whole batch's global and regional terms of eq. 6, as this rank's share times the number of
        ranks.

        DDP averages gradients over ranks, so the share is scaled by the world size: the averaged gradient is
        that of one process with the whole batch.
        """
        if batch.partner_pixels is None:
            left = self.embed(batch.pixels, batch.alpha, None)
            if batch.texts_per_image > 1:
                num_images = batch.num_global // batch.texts_per_image
                whole = left[:num_images].repeat_interleave(batch.texts_per_image, 0)
                left = torch.cat([whole, left[num_images:]])
            right = self.embed(None, None, batch.tokens)
        else:
            # In one pass: apart, batch norm would see other statistics on each side than in evaluation.
            both = self.embed(torch.cat([batch.pixels, batch.partner_pixels]), None, None)
            left, right = both.chunk(2)
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
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"loss is {loss.item()} (global {whole.item()}, regional {regional.item()}) at step "
                f"{self.global_step}; logit scale {self.encoder.logit_scale.exp().item():.1f}; "
                f"rows of this batch: {', '.join(batch.names[:32])}"
            )
        figures = {"train/loss": loss, "train/logit_scale": self.encoder.logit_scale.exp()}
        if batch.alpha is not None:  # the same on all ranks, unlike the number of regions
            figures |= {"train/loss_global": whole, "train/loss_regional": regional}
        self.log_dict(figures, sync_dist=True, batch_size=batch.num_global)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Clamp the temperature after the step, as CLIP does."""
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
        # Pessimistic ties (every equal score counts as ahead): a collapsed encoder scores zero, not 100 %.
        ahead = ((scores >= gold) & (image_ids[None] != gold_ids[:, None])).sum(1)
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
