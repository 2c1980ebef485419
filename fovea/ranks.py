"""The environment of torchrun or SLURM → which of several processes this one is, and its own GPU.

For work whose processes share nothing but files: none of them waits for another, no group is set up.
"""

from __future__ import annotations

import os


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
    """A torch device by name; `cuda` is this process's own GPU where a launcher started one process a GPU.

    Raises:
        ValueError: there is no GPU here.
    """
    local = os.environ.get("LOCAL_RANK") or (
        os.environ.get("SLURM_LOCALID") if "SLURM_NTASKS" in os.environ else None
    )
    import torch

    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise ValueError(f"--device {name}: no device of torch; use cpu, cuda or cuda:N") from error
    if kind != "cuda":
        return name
    if not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch sees no GPU here; use --device cpu")
    if name != "cuda" or local is None:
        return name
    # A launcher may show each process its own GPU only.
    return f"cuda:{int(local) % max(1, torch.cuda.device_count())}"
