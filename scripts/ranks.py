"""Ranks under torchrun or SLURM: who am I, whose rows are these, are the others done."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fovea.types import FloatArray

TIMEOUT = datetime.timedelta(hours=2)  # of a rank whose share takes longer than the others'


def rank_and_size() -> tuple[int, int]:
    """This process's rank and their number, under torchrun or SLURM; (0, 1) otherwise."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and size in os.environ:
            own = os.environ[rank], os.environ[size]
            if not (own[0].isdecimal() and own[1].isdecimal() and int(own[0]) < int(own[1])):
                raise ValueError(
                    f"{rank}={own[0]}, {size}={own[1]}: ranks count from 0 to below their number"
                )
            return int(own[0]), int(own[1])
    return 0, 1


def own_device(name: str) -> str:
    """This process's own GPU where a launcher started one process a GPU."""
    if not name.startswith("cuda"):
        return name
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch sees no GPU here; use --device cpu")
    local = os.environ.get("LOCAL_RANK") or (
        os.environ.get("SLURM_LOCALID") if "SLURM_NTASKS" in os.environ else None
    )
    if name != "cuda" or local is None:
        return name
    # A launcher may show each process its own GPU only.
    return f"cuda:{int(local) % max(1, torch.cuda.device_count())}"


class Ranks:
    """The processes of one run; a gloo group is made when there is more than one.

    A rank that fails closes its connections, so that the others fail at their next meeting instead of
    waiting.
    """

    def __init__(self) -> None:
        self.rank, self.size = rank_and_size()
        if self.size > 1:
            import torch.distributed as dist

            for name, slurm in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")):
                os.environ.setdefault(name, os.environ.get(slurm, ""))
            if not dist.is_initialized():
                dist.init_process_group("gloo", timeout=TIMEOUT)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier()

    def join_rows(
        self, ids: Sequence[str], vectors: FloatArray, *, order: Sequence[str]
    ) -> tuple[list[str], FloatArray]:
        """The rows of all ranks, on every rank.

        Args:
            ids: n distinct ids of this rank's rows.
            vectors: float32 [n, D].
            order: of all ids (and perhaps more), so that any number of ranks gives the same result.

        Returns:
            N ids and float32 [N, D].
        """
        if self.size == 1:
            return list(ids), vectors
        import numpy as np
        import torch.distributed as dist

        parts: list[tuple[list[str], FloatArray]] = [([], vectors)] * self.size
        dist.all_gather_object(parts, (list(ids), vectors))
        place = {id_: number for number, id_ in enumerate(order)}
        names = [id_ for own, _ in parts for id_ in own]
        rows = sorted(range(len(names)), key=lambda row: place[names[row]])
        return [names[row] for row in rows], np.concatenate([own for _, own in parts])[rows]
