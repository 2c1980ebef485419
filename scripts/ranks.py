"""The processes of one run under torchrun or SLURM: whose rows are these, and have the others done theirs."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from fovea.ranks import own_device, rank_and_size

if TYPE_CHECKING:
    from fovea.types import FloatArray

__all__ = ["Ranks", "own_device", "rank_and_size"]

Item = TypeVar("Item")
TIMEOUT = datetime.timedelta(hours=2)  # of a rank whose share takes longer than the others'


class Ranks:
    """This process and its peers; a gloo group is made when there are several.

    What fails on one rank inside `together` fails on all, with that rank's message. A rank that ends anywhere
    else closes its connections, and the others fail at their next meeting: none waits for it.
    """

    def __init__(self) -> None:
        """Join the others, if there are any."""
        self.rank, self.size = rank_and_size()
        if self.size == 1:
            return
        import torch.distributed as dist

        if not dist.is_initialized():
            _name_the_meeting_point(self.rank, self.size)
            dist.init_process_group("gloo", timeout=TIMEOUT)

    def share(self, items: Sequence[Item], block: int) -> list[Item]:
        """This rank's items: whole blocks in turn, so that each batch of `block` is one that a single process
        would make. (An embedding may differ in its last bits with the batch that it was made in.)
        """
        starts = range(self.rank * block, len(items), self.size * block)
        return [item for start in starts for item in items[start : start + block]]

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Wait at the end until all ranks have done their part; nothing inside may wait for another rank.

        Args:
            doing: the part, for the messages.

        Raises:
            ValueError: it failed on another rank; says on which, and how.
        """
        try:
            yield
        except Exception as error:
            self._gather(f"{type(error).__name__}: {error}", doing, quiet=True)
            raise
        told = self._gather(None, doing)
        if failed := [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]:
            raise ValueError(f"{doing} failed on {len(failed)} of {self.size} ranks; {'; '.join(failed)}")

    def join_rows(
        self, ids: Sequence[str], vectors: FloatArray, *, order: Sequence[str]
    ) -> tuple[list[str], FloatArray]:
        """The rows of all ranks, on every rank.

        Args:
            ids: n distinct ids of this rank's rows; n may be 0.
            vectors: float32 [n, D].
            order: of all ids (and perhaps more), so that any number of ranks gives the same result.

        Returns:
            N ids and float32 [N, D].
        """
        if self.size == 1:
            return list(ids), vectors
        import numpy as np
        import torch
        import torch.distributed as dist

        names: list[list[str]] = self._gather(list(ids), "joining embeddings")
        most = max(map(len, names))
        padded = torch.zeros(most, vectors.shape[1])
        padded[: len(ids)] = torch.from_numpy(vectors)
        parts = [torch.empty_like(padded) for _ in names]
        _meet("joining embeddings", lambda: dist.all_gather(parts, padded))
        joined = np.concatenate([part[: len(own)].numpy() for part, own in zip(parts, names, strict=True)])
        flat = [id_ for own in names for id_ in own]
        place = {id_: number for number, id_ in enumerate(order)}
        rows = sorted(range(len(flat)), key=lambda row: place[flat[row]])
        return [flat[row] for row in rows], joined[rows]

    def _gather(self, value: Any, doing: str, *, quiet: bool = False) -> list[Any]:
        """The value of every rank; `quiet` forgives peers that are gone (this rank has its own error)."""
        values = [value] * self.size
        if self.size > 1:
            import torch.distributed as dist

            try:
                _meet(doing, lambda: dist.all_gather_object(values, value))
            except ValueError:
                if not quiet:
                    raise
        return values


def _meet(doing: str, collective: Callable[[], Any]) -> None:
    try:
        collective()
    except RuntimeError as error:  # gloo: the connection was closed, or nobody came before the time-out
        raise ValueError(
            f"{doing}: another rank has ended or does not answer ({str(error).splitlines()[0][:200]}); its "
            "own message says why"
        ) from error


def _name_the_meeting_point(rank: int, size: int) -> None:
    """What torchrun tells its processes and SLURM does not."""
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(size))
    nodes = os.environ.get("SLURM_NNODES", os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if "MASTER_ADDR" not in os.environ and nodes != "1":
        raise ValueError(
            "several nodes need a meeting point; before srun: export MASTER_PORT=29500 "
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    # A port of the job's own: two jobs may share a node.
    os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000))
