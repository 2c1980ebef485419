"""Image × phrases → boxes: GroundingDINO through transformers, with an exact map from tokens to phrases.

A prompt is `[CLS] phrase . phrase . [SEP]`; the model compares every one of its queries (box candidates) with
every token. Prompts are put together from token ids, so that it is known which token belongs to which phrase,
however a word was split. No text is decoded from tokens.

Shapes: `B` prompts, `Q` queries, `L` tokens.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fovea.models.detectors import Detection
from fovea.models.weights import check_loaded, fingerprint, model_directory, model_files
from fovea.types import FloatArray, UInt8Array

if TYPE_CHECKING:
    from torch import Tensor

# A longer strip is padded: its feature maps would hold fewer cells than the model has queries.
_MAX_ASPECT = 16


class Prompt(NamedTuple):
    """One text for the model.

    Attributes:
        ids: token ids, special ones included.
        phrases: positions of its phrases in the caller's list.
        spans: their tokens, [start, end) of `ids`, each with the full stop that closes it.
    """

    ids: list[int]
    phrases: list[int]
    spans: list[tuple[int, int]]


class GroundingDino:
    """GroundingDINO (any size) from a directory or a hub name.

    The score of a box is that of upstream's post-processing: the highest sigmoid over the tokens. In a prompt
    of several phrases, a box has a score for each phrase, over that phrase's tokens; `[CLS]` and `[SEP]`,
    which see no phrase, count for none. A box may therefore serve several phrases ("man", "man in blue").

    Phrases are lower-cased, as the model was trained. A full stop or question mark in a phrase would end it;
    these tokens are left out. A phrase of which no token is left has no box.

    The weights are loaded when the first image comes; the key needs them hashed only.

    Attributes:
        path: where the model came from.
        threshold: boxes with a score above it are kept (METHOD.md 1.3: 0.3).
        prompt: `single` asks one phrase a prompt, `joint` all phrases in as few prompts as the token limit
            allows: faster, but what is found for a phrase then depends on its neighbours.
        batch_size: prompts run at once; memory grows with it.
        device: where torch runs it.
    """

    def __init__(
        self,
        path: str | Path,
        threshold: float = 0.3,
        prompt: Literal["single", "joint"] = "single",
        *,
        batch_size: int = 4,
        device: str = "cpu",
    ) -> None:
        """See the class.

        Raises:
            FileNotFoundError: there is no model at `path`; the message says what to pass.
            ValueError: the model is of another kind, or a setting is out of range.
        """
        problems = []
        if not 0 < threshold < 1:
            problems.append(f"threshold={threshold} must lie in (0, 1)")
        if prompt not in ("single", "joint"):
            problems.append(f"prompt={prompt!r} must be 'single' or 'joint'")
        if batch_size < 1:
            problems.append(f"batch_size={batch_size} must be at least 1")
        if problems:
            raise ValueError("GroundingDino: " + "; ".join(problems))
        self.path, _ = model_directory(path, ("grounding-dino",))
        self.threshold = threshold
        self.prompt = prompt
        self.batch_size = batch_size
        self.device = device

    @cached_property
    def key(self) -> str:
        """`grounding-dino-<fingerprint>-t0.3-single`."""
        return f"grounding-dino-{fingerprint(model_files(self.path))}-t{self.threshold:g}-{self.prompt}"

    @property
    def joint(self) -> bool:
        """Whether the phrases of an image share prompts."""
        return self.prompt == "joint"

    def detect(self, image: UInt8Array, phrases: Sequence[str]) -> list[Detection]:
        """Boxes of every phrase.

        Args:
            image: uint8 [H, W, 3], RGB.
            phrases: any text; equal ones are asked once.

        Returns:
            one detection for each phrase, in order.

        Warns:
            UserWarning: a phrase was longer than the model's token limit and was cut.
        """
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
            raise ValueError(f"an image is uint8 [H, W, 3]; got {image.dtype} {list(image.shape)}")
        asked = list(dict.fromkeys(phrases))
        found = {phrase: _NOTHING for phrase in asked}
        if prompts := self.prompts(asked):
            height, width = image.shape[:2]
            inputs = self._pixels(image)
            for start in range(0, len(prompts), self.batch_size):
                batch = prompts[start : start + self.batch_size]
                probabilities, boxes = self._run(batch, inputs)
                for row, prompt in enumerate(batch):
                    for position, (first, last) in zip(prompt.phrases, prompt.spans, strict=True):
                        alone = len(prompt.phrases) == 1
                        own = probabilities[row] if alone else probabilities[row, :, first:last]
                        found[asked[position]] = self._kept(own.max(1), boxes[row], height, width)
        return [found[phrase] for phrase in phrases]

    def prompts(self, phrases: Sequence[str]) -> list[Prompt]:
        """Phrases → prompts; a phrase without a token is in none."""
        limit = self._limit
        cls, stop, sep = self._tokenizer.convert_tokens_to_ids(["[CLS]", ".", "[SEP]"])
        room = limit - 3
        made: list[Prompt] = []
        for position, tokens in enumerate(self._tokens(phrases)):
            if not tokens:
                continue
            if len(tokens) > room:
                warnings.warn(
                    f"phrase of {len(tokens)} tokens cut to {room}, the limit of {self.path}: "
                    f"{phrases[position][:60]!r}…",
                    stacklevel=3,
                )
            own = [*tokens[:room], stop]
            if not made or not self.joint or len(made[-1].ids) + len(own) > limit:
                made.append(Prompt([cls, sep], [], []))
            prompt = made[-1]
            start = len(prompt.ids) - 1
            prompt.ids[start:start] = own  # before [SEP]
            prompt.phrases.append(position)
            prompt.spans.append((start, start + len(own)))
        return made

    def _tokens(self, phrases: Sequence[str]) -> list[list[int]]:
        """Token ids of each phrase, without those that separate phrases."""
        if not phrases:
            return []
        texts = [phrase.lower() for phrase in phrases]
        ids = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        separators = set(self._tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]", "[PAD]", ".", "?"]))
        return [[token for token in own if token not in separators] for own in ids]

    def _run(self, prompts: Sequence[Prompt], inputs: dict[str, Tensor]) -> tuple[FloatArray, FloatArray]:
        """Probabilities [B, Q, L] and boxes [B, Q, 4], xyxy, shares of the (padded) image's sides."""
        import torch

        length = max(len(prompt.ids) for prompt in prompts)
        ids = torch.full((len(prompts), length), self._tokenizer.pad_token_id)
        mask = torch.zeros((len(prompts), length), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt.ids)] = torch.tensor(prompt.ids)
            mask[row, : len(prompt.ids)] = 1
        with torch.inference_mode():
            output = self._model(
                **{name: value.expand(len(prompts), *value.shape[1:]) for name, value in inputs.items()},
                input_ids=ids.to(self.device),
                attention_mask=mask.to(self.device),
                token_type_ids=torch.zeros_like(ids).to(self.device),
            )
            centre, size = output.pred_boxes.float().split(2, dim=-1)
            boxes = torch.cat([centre - size / 2, centre + size / 2], dim=-1)
            probabilities = output.logits.float().sigmoid()[..., :length]
        return probabilities.cpu().numpy(), boxes.cpu().numpy()

    def _kept(self, scores: FloatArray, boxes: FloatArray, height: int, width: int) -> Detection:
        """The boxes above the threshold, in pixels, cut at the image's edge, best first."""
        padded = _padded(height, width)
        rows = np.flatnonzero(scores > self.threshold)
        rows = rows[np.argsort(-scores[rows], kind="stable")]
        cut = boxes[rows] * np.array([padded[1], padded[0]] * 2, np.float32)
        cut = np.clip(cut, 0, np.array([width, height] * 2, np.float32))
        real = (cut[:, 2] > cut[:, 0]) & (cut[:, 3] > cut[:, 1])
        return Detection(cut[real].astype(np.float32), scores[rows][real].astype(np.float32))

    def _pixels(self, image: UInt8Array) -> dict[str, Tensor]:
        """The model's input for one image; from here on its backbone sees this image only."""
        from PIL import Image

        height, width = image.shape[:2]
        tall, wide = _padded(height, width)
        image = np.pad(image, ((0, tall - height), (0, wide - width), (0, 0)), mode="edge")
        # As a picture: an array of three rows would be read as three channels.
        inputs = self._processor.image_processor(images=Image.fromarray(image), return_tensors="pt")
        self._model.model.backbone.forget()
        return {name: inputs[name].to(self.device) for name in ("pixel_values", "pixel_mask")}

    @property
    def _tokenizer(self) -> Any:
        return self._processor.tokenizer

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(self.path, local_files_only=True)

    @cached_property
    def _limit(self) -> int:
        """Tokens of a prompt; positions count anew in each phrase, but one phrase may fill it."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.path, local_files_only=True)
        return min(int(config.max_text_len), int(config.text_config.max_position_embeddings))

    @cached_property
    def _model(self) -> Any:
        import torch
        from transformers import GroundingDinoForObjectDetection

        model, info = GroundingDinoForObjectDetection.from_pretrained(
            self.path,
            local_files_only=True,
            output_loading_info=True,
            dtype=torch.float32,
            disable_custom_kernels=True,  # they would be compiled, and differ from the CPU's
        )
        check_loaded(self.path, info)
        model.model.backbone = _backbone_once(model.model.backbone)
        return model.to(self.device).eval().requires_grad_(False)


_NOTHING = Detection(np.zeros((0, 4), np.float32), np.zeros(0, np.float32))


def _padded(height: int, width: int) -> tuple[int, int]:
    """Height and width with an aspect of at most `_MAX_ASPECT`."""
    least = math.ceil(max(height, width) / _MAX_ASPECT)
    return max(height, least), max(width, least)


def _backbone_once(backbone: Any) -> Any:
    """The same backbone, which runs once for all prompts about one image: the text does not reach it."""
    from torch import nn

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = backbone
            self._kept: Any = None

        @property
        def position_embedding(self) -> Any:
            return self.backbone.position_embedding

        def forget(self) -> None:
            self._kept = None

        def forward(self, pixel_values: Tensor, pixel_mask: Tensor) -> tuple[list[Any], list[Tensor]]:
            if self._kept is None:
                self._kept = self.backbone(pixel_values[:1], pixel_mask[:1])
            maps, positions = self._kept
            rows = len(pixel_values)
            # New lists, for the caller appends to them.
            return (
                [tuple(part.expand(rows, *part.shape[1:]) for part in level) for level in maps],
                [part.expand(rows, *part.shape[1:]) for part in positions],
            )

    return Once()
