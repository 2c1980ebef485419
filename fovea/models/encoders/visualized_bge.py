"""Visualized-BGE: image tokens of EVA-02-CLIP, read by the BGE text encoder as if they were words.

Source: VISTA (Zhou et al. 2024) and its release: `Visualized_base_en_v1.5.pth` (BGE-base-en-v1.5 and
EVA02-CLIP-B-16) and `Visualized_m3.pth` (BGE-M3 and EVA02-CLIP-L-14).
Shapes: `B` batch, `L` text tokens, `P` patches, `D` width.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fovea.images import ImageTransform
from fovea.models.alpha_clip import load_strict
from fovea.models.clip_checkpoint import read_state
from fovea.models.encoders.base import Encoder
from fovea.models.encoders.clip import Resize
from fovea.models.encoders.json_tokenizer import JsonTokenizer, pack
from fovea.models.eva import HEAD_WIDTH, EvaSizes, EvaTower, rotary
from fovea.models.weights import model_directory

_TEMPERATURE = 0.02  # upstream's, fixed
_TOWER = "model_visual.visual."
# In the release, of no effect on an embedding: CLIP's own end of the tower, BERT's pooler, position counters.
_UNUSED = re.compile(
    r"model_visual\.logit_scale|model_visual\.visual\.(norm|head)\.(weight|bias)|bge_pooler\.dense\.(weight|bias)"
    r"|bge_embeddings\.(position_ids|token_type_ids)"
)
_ROTARY = re.compile(r"model_visual\.visual\.(blocks\.\d+\.attn\.)?rope\.freqs_(cos|sin)")


class VisualizedBge(Encoder):
    """An EVA tower in front of a BERT or XLM-RoBERTa, pooled at [CLS]; `alpha` is ignored.

    Its patch tokens are words to the text encoder, not embeddings in the space of the texts: `patch_tokens`
    refuses. The text encoder also reads the images: with it frozen, tower and projection learn through it.
    """

    tokenizer: JsonTokenizer
    cls_sep: Tensor

    def __init__(self, bert: Any, sizes: EvaSizes, tokenizer: JsonTokenizer, resize: Resize) -> None:
        """Use the factories below.

        Args:
            bert: a `BertModel` or `XLMRobertaModel`.
            sizes: of the image tower.
            tokenizer: its texts; of `bert`.
            resize: how images become square.
        """
        super().__init__()
        self.embed_dim = int(bert.config.hidden_size)
        self.transform = ImageTransform(sizes.image_size, mode=resize)
        self.tokenizer = tokenizer
        self.bert_config = bert.config
        self.vision = EvaTower(sizes)
        self.visual_proj = nn.Linear(sizes.width, self.embed_dim)
        # Names as in the release.
        self.bge_embeddings = bert.embeddings
        self.bge_encoder = bert.encoder
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(_TEMPERATURE)))
        self.register_buffer("cls_sep", torch.tensor(tokenizer.ids("")), persistent=False)
        room = len(self.bge_embeddings.position_embeddings.weight) - self.vision.pos_embed.shape[1]
        if len(self.cls_sep) != 2 or room < 1:
            raise ValueError(
                f"encoder.text_model: an empty text must be [CLS] [SEP], got {self.cls_sep.tolist()}, and "
                f"{self.vision.pos_embed.shape[1]} image tokens must leave positions for it"
            )

    def encode_image(self, pixels: Tensor, alpha: Tensor | None = None) -> Tensor:  # noqa: D102
        return self.encode_image_text(pixels, self.cls_sep.expand(len(pixels), -1))

    def encode_image_text(self, pixels: Tensor, tokens: Tensor) -> Tensor:
        """Embed images with a text each: [CLS], the image, the text, [SEP].

        Args:
            pixels: float [B, 3, S, S].
            tokens: int64 [B, L].

        Returns:
            float [B, D], not normalised.

        Raises:
            ValueError: more tokens than the text encoder has positions.
        """
        image = self.visual_proj(self.vision(pixels)[:, 1:])
        patches, length = image.shape[1], tokens.shape[1]
        embed = self.bge_embeddings
        if patches + length > len(embed.position_embeddings.weight):
            raise ValueError(
                f"{patches} image tokens and {length} text tokens are more than the text encoder's "
                f"{len(embed.position_embeddings.weight)} positions; cut the text (encoder.text_length)"
            )
        places = torch.arange(patches + length, device=tokens.device)
        # [CLS] has place 0, the image 1 … P, the text what follows: upstream's count, in XLM-RoBERTa too.
        image = image + embed.position_embeddings(places[1 : patches + 1])
        image = embed.LayerNorm(image)
        after = torch.cat([places[:1], places[patches + 1 :]]).expand(len(tokens), -1)
        text = embed(input_ids=tokens, position_ids=after, token_type_ids=torch.zeros_like(tokens))
        seen = self._seen(tokens)
        seen = torch.cat([seen[:, :1].expand(-1, patches), seen], 1)
        return self._pooled(torch.cat([text[:, :1], image, text[:, 1:]], 1), seen)

    def encode_text(self, tokens: Tensor) -> Tensor:  # noqa: D102
        embedded = self.bge_embeddings(input_ids=tokens, token_type_ids=torch.zeros_like(tokens))
        return self._pooled(embedded, self._seen(tokens))

    def _seen(self, tokens: Tensor) -> Tensor:
        """bool [B, L]: False for the padding, which is all after the last other token."""
        there: Tensor = tokens != self.tokenizer.settings["pad_id"]
        return there.flip(1).cumsum(1).flip(1) > 0

    def _pooled(self, embedded: Tensor, seen: Tensor) -> Tensor:
        states = self.bge_encoder(embedded, attention_mask=seen[:, None, None]).last_hidden_state
        pooled: Tensor = states[:, 0]
        return pooled

    def depth_of(self, name: str) -> int | None:  # noqa: D102
        if name.startswith("visual_proj."):
            return self.vision.sizes.layers + 1
        if not name.startswith("vision."):
            return None
        found = re.search(r"blocks\.(\d+)\.", name)
        return int(found.group(1)) + 1 if found else 0

    def text_parameters(self) -> list[nn.Parameter]:  # noqa: D102
        return [*self.bge_embeddings.parameters(), *self.bge_encoder.parameters()]

    def spec(self) -> dict[str, Any]:  # noqa: D102
        arguments = {
            "bert": json.loads(self.bert_config.to_json_string(use_diff=False)),
            "vision": self.vision.sizes.as_dict(),
            "tokenizer": self.tokenizer.settings,
            "resize": self.transform.mode,
        }
        return {"class_path": "fovea.models.encoders.visualized_bge_from_config", "init_args": arguments}


def visualized_bge_from_config(
    bert: dict[str, Any], vision: dict[str, int], tokenizer: dict[str, Any], resize: Resize = "crop"
) -> VisualizedBge:
    """A Visualized-BGE of any size (random weights).

    Args:
        bert: content of the text model's config.json (`model_type` bert or xlm-roberta).
        vision: `EvaSizes`.
        tokenizer: `JsonTokenizer.settings`.
        resize: how images become square.
    """
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(**bert)
    model = AutoModel.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return VisualizedBge(model, EvaSizes(**vision), JsonTokenizer(**tokenizer), resize)


def visualized_bge(
    weights: str,
    text_model: str,
    query_instruction: str = "",
    text_length: int = 512,
    resize: Resize = "crop",
) -> Encoder:
    """Visualized-BGE base or m3, from the release's files, for images of 224 × 224.

    A bundle carries the tokenizer.

    Args:
        weights: `Visualized_base_en_v1.5.pth` or `Visualized_m3.pth`; the text encoder's weights are in it.
        text_model: directory or hub name of the text model, for its config and tokenizer alone:
            `BAAI/bge-base-en-v1.5` or `BAAI/bge-m3`.
        query_instruction: set before every text. Upstream sets none, for either model: its evaluation has a
            switch for it that does nothing.
        text_length: most tokens of a text; 512 in upstream's evaluation.
        resize: how images become square (see `ImageTransform`); upstream cuts out the centre.

    Raises:
        FileNotFoundError: no such file or model.
        ValueError: the weights are cut short, or not of this layout or these sizes (every tensor is named).
    """
    directory, _ = model_directory(text_model, ("bert", "xlm-roberta"), weights=False)
    state = read_state(weights)
    sizes = _sizes(state, weights)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    tokenizer = _tokenizer(directory, text_length, query_instruction)
    encoder = visualized_bge_from_config(config, sizes.as_dict(), tokenizer, resize)
    state = _renamed(state, sizes, weights)
    state["logit_scale"] = encoder.logit_scale.detach().clone()
    load_strict(encoder, state, weights)
    return encoder.eval()


def _tokenizer(directory: Path, length: int, prefix: str) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.pad_token_id is None:
        raise ValueError(f"{directory}: a tokenizer.json (or vocab.txt) with a padding token is needed")
    return {
        "packed": pack(backend.to_str()),
        "length": length,
        "pad_id": tokenizer.pad_token_id,
        "prefix": prefix,
    }


def _sizes(state: Mapping[str, Tensor], source: str) -> EvaSizes:
    """The tower's sizes, as its tensors tell them."""
    telling = [
        f"{_TOWER}{name}"
        for name in (
            "patch_embed.proj.weight",
            "pos_embed",
            "blocks.0.attn.q_proj.weight",
            "blocks.0.mlp.w1.weight",
        )
    ]
    telling.append("visual_proj.weight")
    missing = [name for name in telling if name not in state]
    if missing:
        known = (_TOWER, "bge_", "visual_proj.", "model_visual.")
        other = [name for name in state if not name.startswith(known)]
        raise ValueError(
            f"{source} is no Visualized-BGE as released: missing {', '.join(missing)}"
            + (f"; unexpected {', '.join(other[:8])}" if other else "")
        )
    width, _, patch, _ = state[telling[0]].shape
    grid = round((state[telling[1]].shape[1] - 1) ** 0.5)
    blocks = {
        n.removeprefix(f"{_TOWER}blocks.").split(".")[0] for n in state if n.startswith(f"{_TOWER}blocks.")
    }
    return EvaSizes(grid * patch, patch, width, len(blocks), len(state[telling[3]]))


def _renamed(state: Mapping[str, Tensor], sizes: EvaSizes, source: str) -> dict[str, Tensor]:
    """The release's names → ours, without what has no effect; its rotary table must be the one we make."""
    own = dict(zip(("cos", "sin"), rotary(sizes.image_size // sizes.patch_size, HEAD_WIDTH), strict=True))
    renamed = {}
    for name, value in state.items():
        table = _ROTARY.fullmatch(name)
        if table:
            mine = own[table.group(2)]
            if value.shape != mine.shape or not torch.allclose(value, mine, atol=1e-3):  # half precision
                raise ValueError(f"{source}: {name} is not the rotary table of a {sizes} tower")
        elif not _UNUSED.fullmatch(name):
            renamed[f"vision.{name.removeprefix(_TOWER)}" if name.startswith(_TOWER) else name] = value
    return renamed
