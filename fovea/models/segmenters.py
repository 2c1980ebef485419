"""Image × boxes → masks: SAM of the official package, SAM and SAM 2 of transformers, behind one interface.

Shapes: `K` boxes of one image, `H`/`W` its height and width in pixels.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fovea.models import sam_checkpoint
from fovea.models.weights import check_loaded, fingerprint, model_directory, model_files
from fovea.types import BoolArray, FloatArray, UInt8Array

if TYPE_CHECKING:  # torch starts slowly, and the keys of a mask store need none
    from torch import Tensor

# Boxes decoded at once: each takes a copy of the image's embedding through the decoder (4 MB a copy in the
# released sizes, of which some ten live at once), and 4 bytes a pixel of the image after it.
_MAX_BOXES = 16
_MAX_PIXELS = 2**26


class Segmenter(Protocol):
    """Refines boxes to masks, with one image embedding for all boxes of an image.

    Attributes:
        key: names the weights and the threshold; part of a mask store's key.
    """

    @property
    def key(self) -> str:
        """See the class."""
        ...

    def segment(self, image: UInt8Array, boxes_K4: FloatArray) -> BoolArray:
        """The mask of every box.

        Args:
            image: uint8 [H, W, 3], RGB.
            boxes_K4: [K, 4], xyxy, pixels of the image; K may be 0. What lies outside the image is cut off.

        Returns:
            bool [K, H, W]; a mask may be empty.
        """
        ...


def load(checkpoint: str | Path, device: str = "cpu", *, decoder_heads: int | None = None) -> SamSegmenter:
    """Open a SAM of any size, told by its files alone.

    Args:
        checkpoint: a `.pth` of the official segment-anything package, or a directory or hub name of
            transformers' SAM or SAM 2.
        device: where torch runs it.
        decoder_heads: heads of an official checkpoint's mask decoder, where it is none of the released
            sizes (see `sam_checkpoint.sizes`).

    Raises:
        FileNotFoundError: neither a file nor a directory, and no hub name that can be had.
        ValueError: the file is unreadable or of another layout; names missing and unexpected tensors.
    """
    if Path(checkpoint).expanduser().is_file():
        return OfficialSam(Path(checkpoint).expanduser(), device, decoder_heads=decoder_heads)
    if Path(checkpoint).suffix in (".pth", ".pt"):
        raise FileNotFoundError(
            f"{checkpoint} does not exist; pass the path of a segment-anything checkpoint"
        )
    directory, model_type = model_directory(checkpoint, ("sam", "sam2", "sam2_video"))
    return TransformersSam(directory, model_type, device)


class SamSegmenter(ABC):
    """What the SAMs share: one embedding an image, bounded batches of boxes, the threshold.

    The embedding of the last image is kept, so that a second call with the same pixels costs the decoder
    alone.

    Attributes:
        key: see `Segmenter`.
        checkpoint: where the weights came from.
        device: where torch runs it.
    """

    def __init__(self, key: str, checkpoint: Path, device: str) -> None:
        self.key = key
        self.checkpoint = checkpoint
        self.device = device
        self._last: tuple[bytes, Any] = (b"", None)

    def segment(self, image: UInt8Array, boxes_K4: FloatArray) -> BoolArray:
        """See `Segmenter`; a pixel belongs to a mask when its probability is above 0.5 (METHOD.md 1.3)."""
        boxes = _clipped(image, boxes_K4)
        masks = np.zeros((len(boxes), *image.shape[:2]), np.bool_)
        for rows, logits in self._decoded(image, boxes):
            masks[rows] = (logits > 0).cpu().numpy()
        return masks

    def logits(self, image: UInt8Array, boxes_K4: FloatArray) -> FloatArray:
        """The mask logits, float32 [K, H, W], upscaled to the image; arguments as for `segment`."""
        boxes = _clipped(image, boxes_K4)
        out = np.zeros((len(boxes), *image.shape[:2]), np.float32)
        for rows, logits in self._decoded(image, boxes):
            out[rows] = logits.float().cpu().numpy()
        return out

    def _decoded(self, image: UInt8Array, boxes: FloatArray) -> Iterator[tuple[slice, Tensor]]:
        """Batches of boxes: their rows and logits [k, H, W]."""
        import torch

        if not len(boxes):
            return
        height, width = image.shape[:2]
        # A strip whose short side the model's resize would round to no pixel repeats its edge.
        least = math.ceil(max(height, width) / self.image_size)
        short = ((0, max(0, least - height)), (0, max(0, least - width)), (0, 0))
        image = np.pad(image, short, mode="edge") if np.any(short) else np.ascontiguousarray(image)
        digest = hashlib.blake2b(image.data, digest_size=16, key=b"%d" % width).digest()
        if digest != self._last[0]:
            self._last = (b"", None)  # frees the old one first
            with torch.inference_mode():
                self._last = digest, self._embed(image)
        step = max(1, min(_MAX_BOXES, _MAX_PIXELS // (height * width + self.image_size**2)))
        for start in range(0, len(boxes), step):
            rows = slice(start, start + step)
            with torch.inference_mode():
                logits = self._decode(self._last[1], torch.from_numpy(boxes[rows]).to(self.device))
            yield rows, logits[:, :height, :width]

    @property
    @abstractmethod
    def image_size(self) -> int:
        """Side of the square model input, pixels."""

    @abstractmethod
    def _embed(self, image: UInt8Array) -> Any:
        """What `_decode` needs to know of an image uint8 [H, W, 3]."""

    @abstractmethod
    def _decode(self, embedded: Any, boxes: Tensor) -> Tensor:
        """Logits [k, H, W] for boxes float32 [k, 4] in pixels of the image."""


class OfficialSam(SamSegmenter):
    """SAM of the official segment-anything package (ViT-B, -L, -H, or any size of its layout)."""

    def __init__(self, checkpoint: Path, device: str = "cpu", *, decoder_heads: int | None = None) -> None:
        """Arguments as for `load`."""
        self.model = sam_checkpoint.load(checkpoint, decoder_heads=decoder_heads).to(device)
        heads = "" if decoder_heads is None else f"-h{decoder_heads}"
        # The file's name is no part of it: the same weights under another name make the same masks.
        with open(checkpoint, "rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
        super().__init__(f"sam-{digest}{heads}-m0.5", checkpoint, device)

    @property
    def image_size(self) -> int:
        """Side of the square model input, pixels."""
        size: int = self.model.image_encoder.img_size
        return size

    def _embed(self, image: UInt8Array) -> Any:
        import torch
        from PIL import Image

        height, width = image.shape[:2]
        scale = self.image_size / max(height, width)
        size = int(height * scale + 0.5), int(width * scale + 0.5)
        resized = Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous().to(self.device)
        features = self.model.image_encoder(self.model.preprocess(pixels[None]))
        return features, size, (height, width)

    def _decode(self, embedded: Any, boxes: Tensor) -> Tensor:
        features, (new_height, new_width), (height, width) = embedded
        scale = boxes.new_tensor([new_width / width, new_height / height])
        sparse, dense = self.model.prompt_encoder(
            points=None, boxes=(boxes.view(-1, 2, 2) * scale).view(-1, 4), masks=None
        )
        low, _ = self.model.mask_decoder(
            image_embeddings=features,
            image_pe=self.model.prompt_encoder.get_dense_pe(),
            sparse_prompt_embeddings=sparse,
            dense_prompt_embeddings=dense,
            multimask_output=False,
        )
        logits: Tensor = self.model.postprocess_masks(low, (new_height, new_width), (height, width))[:, 0]
        return logits


class TransformersSam(SamSegmenter):
    """SAM or SAM 2 of transformers, with the image processor that is saved beside it.

    The weights are loaded when the first image comes.
    """

    def __init__(self, directory: Path, model_type: str, device: str = "cpu") -> None:
        """Arguments as `weights.model_directory` returns them."""
        self.directory = directory
        self.is_sam2 = model_type != "sam"
        kind = "sam2" if self.is_sam2 else "sam"
        super().__init__(f"{kind}-hf-{fingerprint(model_files(directory))}-m0.5", directory, device)

    @cached_property
    def _processor(self) -> Any:
        from transformers import Sam2ImageProcessor, SamImageProcessor

        kind = Sam2ImageProcessor if self.is_sam2 else SamImageProcessor
        return kind.from_pretrained(self.directory, local_files_only=True)

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import Sam2Model, SamModel

        kind = Sam2Model if self.is_sam2 else SamModel
        model, info = kind.from_pretrained(
            self.directory, local_files_only=True, output_loading_info=True, dtype=torch.float32
        )
        check_loaded(self.directory, info)
        return model.to(self.device).eval().requires_grad_(False)

    @property
    def image_size(self) -> int:
        """Side of the square model input, pixels."""
        size = self._processor.size
        return int(size["height"] if self.is_sam2 else size["longest_edge"])

    def _embed(self, image: UInt8Array) -> Any:
        from PIL import Image

        # As a picture: an array of three rows would be read as three channels.
        inputs = self._processor(images=Image.fromarray(image), return_tensors="pt")
        features = self._model.get_image_embeddings(inputs["pixel_values"].to(self.device))
        if self.is_sam2:
            return features, (self.image_size, self.image_size), image.shape[:2]
        return features, tuple(inputs["reshaped_input_sizes"][0].tolist()), image.shape[:2]

    def _decode(self, embedded: Any, boxes: Tensor) -> Tensor:
        features, (new_height, new_width), (height, width) = embedded
        scale = boxes.new_tensor([new_width / width, new_height / height]).repeat(2)
        low = self._model(
            image_embeddings=features, input_boxes=(boxes * scale)[None], multimask_output=False
        ).pred_masks[0]
        sizes = [[(height, width)]] if self.is_sam2 else [[(height, width)], [(new_height, new_width)]]
        logits: Tensor = self._processor.post_process_masks([low], *sizes, binarize=False)[0][:, 0]
        return logits


def _clipped(image: UInt8Array, boxes_K4: FloatArray) -> FloatArray:
    """Boxes float32 [K, 4] within the image, corners in order."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise ValueError(f"an image is uint8 [H, W, 3]; got {image.dtype} {list(image.shape)}")
    boxes = np.asarray(boxes_K4, np.float32)
    if boxes.size == 0:
        return np.zeros((0, 4), np.float32)
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ValueError(f"boxes are [K, 4], xyxy, pixels; got {list(boxes.shape)}")
    if np.isnan(boxes).any():
        raise ValueError(f"box {int(np.isnan(boxes).any(1).argmax())} of {len(boxes)} holds NaN")
    height, width = image.shape[:2]
    boxes = np.clip(boxes, 0, np.array([width, height, width, height], np.float32))
    return np.concatenate([np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])], 1)
