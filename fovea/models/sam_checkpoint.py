"""A checkpoint of the official segment-anything package → its model; every size is read off the tensors.

There is no model type to name: ViT-B, -L, -H and any other size of this layout load the same way.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_SHOWN = 8  # names in an error

# The tensors that tell the sizes. With them present, the others are compared by name and shape.
_TELLING = (
    "image_encoder.pos_embed",
    "image_encoder.patch_embed.proj.weight",
    "image_encoder.blocks.0.attn.rel_pos_h",
    "image_encoder.blocks.0.mlp.lin1.weight",
    "image_encoder.neck.0.weight",
    "prompt_encoder.mask_downscaling.3.weight",
    "mask_decoder.mask_tokens.weight",
    "mask_decoder.transformer.layers.0.mlp.lin1.weight",
    "mask_decoder.transformer.layers.0.cross_attn_token_to_image.q_proj.weight",
    "mask_decoder.iou_prediction_head.layers.0.weight",
)


@dataclass(frozen=True)
class SamSizes:
    """The sizes of a SAM.

    Attributes:
        image_size: side of the square input, pixels.
        patch_size: pixels.
        width: of the image encoder.
        depth: blocks of the image encoder.
        heads: of the image encoder; the relative positions are as wide as a head.
        mlp_ratio: hidden over input width of the image encoder's MLPs.
        window_size: side of the windows of local attention, patches; 0 when every block is global.
        global_blocks: blocks whose relative positions span the whole grid.
        prompt_width: of the prompts and the mask decoder.
        mask_channels: hidden channels of the mask prompt.
        num_masks: masks offered for an ambiguous prompt.
        decoder_depth: blocks of the mask decoder.
        decoder_heads: see `sizes`.
        decoder_mlp: hidden width of its MLPs.
        decoder_downsample: input over inner width of its cross-attention.
        iou_depth: layers of the quality head.
        iou_width: its hidden width.
    """

    image_size: int
    patch_size: int
    width: int
    depth: int
    heads: int
    mlp_ratio: float
    window_size: int
    global_blocks: tuple[int, ...]
    prompt_width: int
    mask_channels: int
    num_masks: int
    decoder_depth: int
    decoder_heads: int
    decoder_mlp: int
    decoder_downsample: int
    iou_depth: int
    iou_width: int


def sizes(state: Mapping[str, Tensor], *, decoder_heads: int | None = None) -> SamSizes:
    """Read the sizes off a state dict of the official layout.

    One size leaves no trace in any tensor: the number of heads of the mask decoder. Unless given, it is the
    official 32 channels a head, and at least two heads: 8 for every released model.

    Raises:
        ValueError: a tensor that tells a size is missing, or the windows have several sizes.
    """
    if absent := [name for name in _TELLING if name not in state]:
        raise ValueError(
            f"not in the layout of segment-anything: {len(absent)} tensors that tell its size are missing: "
            f"{absent}; unexpected: {_some(sorted(state))}"
        )
    shape = {name: tuple(tensor.shape) for name, tensor in state.items()}
    _, grid, _, width = shape["image_encoder.pos_embed"]
    patch_size = shape["image_encoder.patch_embed.proj.weight"][-1]
    depth = _count(state, "image_encoder.blocks.")
    # rel_pos_h is [2 · side − 1, channels of a head]; a window as large as the grid is global attention.
    spans = [
        (shape.get(f"image_encoder.blocks.{i}.attn.rel_pos_h", (0, 0))[0] + 1) // 2 for i in range(depth)
    ]
    windows = {span for span in spans if span != grid}
    if len(windows) > 1:
        raise ValueError(f"windows of one size are needed; the relative positions span {spans} patches")
    prompt_width = shape["image_encoder.neck.0.weight"][0]
    inner = shape["mask_decoder.transformer.layers.0.cross_attn_token_to_image.q_proj.weight"][0]
    return SamSizes(
        image_size=grid * patch_size,
        patch_size=patch_size,
        width=width,
        depth=depth,
        heads=width // shape["image_encoder.blocks.0.attn.rel_pos_h"][1],
        mlp_ratio=shape["image_encoder.blocks.0.mlp.lin1.weight"][0] / width,
        window_size=windows.pop() if windows else 0,
        global_blocks=tuple(i for i, span in enumerate(spans) if span == grid),
        prompt_width=prompt_width,
        mask_channels=shape["prompt_encoder.mask_downscaling.3.weight"][0],
        num_masks=shape["mask_decoder.mask_tokens.weight"][0] - 1,
        decoder_depth=_count(state, "mask_decoder.transformer.layers."),
        decoder_heads=decoder_heads or max(2, prompt_width // 32),
        decoder_mlp=shape["mask_decoder.transformer.layers.0.mlp.lin1.weight"][0],
        decoder_downsample=prompt_width // inner,
        iou_depth=_count(state, "mask_decoder.iou_prediction_head.layers."),
        iou_width=shape["mask_decoder.iou_prediction_head.layers.0.weight"][0],
    )


def build(of: SamSizes) -> Any:
    """The `segment_anything.modeling.Sam` of these sizes, in evaluation mode, with random weights."""
    from functools import partial

    from segment_anything.modeling import ImageEncoderViT, MaskDecoder, PromptEncoder, Sam, TwoWayTransformer
    from torch import nn

    grid = of.image_size // of.patch_size
    return Sam(
        ImageEncoderViT(
            img_size=of.image_size,
            patch_size=of.patch_size,
            embed_dim=of.width,
            depth=of.depth,
            num_heads=of.heads,
            mlp_ratio=of.mlp_ratio,
            out_chans=of.prompt_width,
            qkv_bias=True,
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
            use_rel_pos=True,
            window_size=of.window_size,
            global_attn_indexes=of.global_blocks,
        ),
        PromptEncoder(
            embed_dim=of.prompt_width,
            image_embedding_size=(grid, grid),
            input_image_size=(of.image_size, of.image_size),
            mask_in_chans=of.mask_channels,
        ),
        MaskDecoder(
            transformer_dim=of.prompt_width,
            transformer=TwoWayTransformer(
                depth=of.decoder_depth,
                embedding_dim=of.prompt_width,
                num_heads=of.decoder_heads,
                mlp_dim=of.decoder_mlp,
                attention_downsample_rate=of.decoder_downsample,
            ),
            num_multimask_outputs=of.num_masks,
            iou_head_depth=of.iou_depth,
            iou_head_hidden_dim=of.iou_width,
        ),
    ).eval()


def load(checkpoint: Path, *, decoder_heads: int | None = None) -> Any:
    """Build the model that the file holds, with its weights.

    Its tensors stay mapped to the file until they are used, so that several processes share them.

    Args:
        checkpoint: a `.pth` of the official layout.
        decoder_heads: see `sizes`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is unreadable or of another layout; names missing and unexpected tensors.
    """
    import torch

    state = _read(checkpoint)
    try:
        found = sizes(state, decoder_heads=decoder_heads)
        with torch.device("meta"):  # names and shapes alone: random weights for ViT-H would take seconds
            model = build(found)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{checkpoint}: {error}; {_NEEDED}") from error
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in state.items()}
    missing, unexpected = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    other = [
        f"{name} {given[name]} for {own[name]}" for name in own if own[name] != given.get(name, own[name])
    ]
    if missing or unexpected or other:
        raise ValueError(
            f"{checkpoint}: {len(missing)} tensors are missing {_some(missing)}, {len(unexpected)} are "
            f"unexpected {_some(unexpected)}, {len(other)} have another shape {_some(other)}; {_NEEDED}"
        )
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    # The pixel statistics are in no checkpoint; those that the package itself fills in.
    model.pixel_mean = torch.tensor([123.675, 116.28, 103.53]).view(-1, 1, 1)
    model.pixel_std = torch.tensor([58.395, 57.12, 57.375]).view(-1, 1, 1)
    return model.requires_grad_(False)


_NEEDED = "needed: a checkpoint of the official segment-anything package (SAM 2: a transformers directory)"


def _read(checkpoint: Path) -> dict[str, Tensor]:
    """The state dict of the file."""
    import pickle

    import torch

    if not checkpoint.is_file():
        raise FileNotFoundError(
            f"{checkpoint} is no file; pass a segment-anything checkpoint (sam_vit_b_….pth) or a directory "
            "with a transformers SAM or SAM 2"
        )
    try:
        # Only archives can be mapped; files from before torch 1.6 are read whole.
        state = torch.load(checkpoint, "cpu", weights_only=True, mmap=zipfile.is_zipfile(checkpoint))
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        size = checkpoint.stat().st_size
        cause = (str(error).splitlines() or [type(error).__name__])[0][:200]
        if isinstance(error, pickle.UnpicklingError):  # torch's own advice is to run what the file says
            cause = "it is no pickle of tensors alone, and nothing else is loaded"
        raise ValueError(
            f"{checkpoint} ({size:,} bytes) is no readable checkpoint, or cut short: {cause}; fetch it again"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        names = _some(sorted(map(str, state))) if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"{checkpoint} holds no dict of tensors but {names}; {_NEEDED}")
    return state


def _count(state: Mapping[str, Tensor], prefix: str) -> int:
    """How many numbered modules there are under a prefix."""
    return len({name[len(prefix) :].split(".")[0] for name in state if name.startswith(prefix)})


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{names[:_SHOWN]}{more}"
