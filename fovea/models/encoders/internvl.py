"""InternVL-C and InternVL-G: the two retrieval modes of InternVL 1.0 (OpenGVLab/InternVL-14B-224px).

C, contrastive: an attention pool over InternViT's tokens. G, "generative": the sum of C's direction and that
of a second pool, over query tokens that went through QLLaMA and looked at InternViT's tokens there. Texts are
the same in both: QLLaMA's state at the last token of "summarize:" and the text, projected.

The towers are ours (`internvl_towers`): nothing from the model's repository is run.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fovea.images import ImageTransform
from fovea.models.alpha_clip import load_strict
from fovea.models.encoders.base import Encoder
from fovea.models.encoders.internvl_config import InternVLConfig
from fovea.models.encoders.internvl_towers import AttentionPool, QLlama, VisionTower
from fovea.models.sentencepiece_bpe import SentencePieceBpe
from fovea.models.weights import model_directory

Mode = Literal["c", "g"]
Dtype = Literal["float32", "float16", "bfloat16"]

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as in upstream's preprocessor_config
_PREFIX = "summarize:"  # the instruction that upstream trained and evaluated texts with; no space after it
_CONTEXT = 80  # tokens, begin and end included, as upstream evaluates
_PAD = 0  # upstream's; also <unk>, which a vocabulary with byte pieces never gives

# In the file, and not for embeddings: matching and language heads, and constants of rotary positions.
_UNUSED = re.compile(r"itm_head\.|qllama\.lm_head\.|qllama\..*\.rotary_emb\.inv_freq$")
_ONLY_G = re.compile(r"query_tokens$|clip_projector2\.|qllama\.model\.layers\.\d+\.cross_attn\.")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


class InternVLTokenizer:
    """Texts → int64 [B, 80]: <s>, "summarize:" and the text, </s>; padded with 0 on the right.

    A long text is cut at its end, so that </s>, whose state is the embedding, stays.
    """

    def __init__(self, model: bytes, source: str, begin: int, end: int) -> None:
        """Args: bytes and name of a tokenizer.model; ids of <s> and </s>."""
        self.model, self.source, self.begin, self.end = model, source, begin, end
        self.encode = SentencePieceBpe(model, source)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the file's bytes: smaller and faster than the tables made of them."""
        return InternVLTokenizer, (self.model, self.source, self.begin, self.end)

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Texts → int64 [B, 80]."""
        out = torch.full((len(texts), _CONTEXT), _PAD, dtype=torch.int64)
        for row, text in enumerate(texts):
            ids = [self.begin, *self.encode(_PREFIX + text)[: _CONTEXT - 2], self.end]
            out[row, : len(ids)] = torch.tensor(ids)
        return out


class InternVLEncoder(Encoder):
    """One mode of InternVL; without mode G's parts in mode C. It has no alpha branch."""

    tokenizer: InternVLTokenizer

    def __init__(self, config: InternVLConfig, mode: Mode, tokenizer: InternVLTokenizer) -> None:
        """Uninitialised; use the factories below."""
        super().__init__()
        if mode not in ("c", "g"):
            raise ValueError(f"encoder.mode {mode!r}: c (InternVL-C) or g (InternVL-G)")
        vision, qllama = config.vision_config, config.qllama_config
        if tokenizer.encode.num_pieces > qllama.vocab_size:
            raise ValueError(
                f"{tokenizer.source} has {tokenizer.encode.num_pieces} pieces, more than the model's "
                f"vocab_size {qllama.vocab_size}; they are not of one model"
            )
        self.config, self.mode, self.tokenizer = config, mode, tokenizer
        self.embed_dim = config.clip_embed_dim
        self.transform = ImageTransform(vision.image_size, mean=_MEAN, std=_STD)
        width, heads, dim = qllama.hidden_size, config.attn_pool_num_heads, config.clip_embed_dim
        self.vision_model = VisionTower(vision)
        self.clip_projector = AttentionPool(vision.hidden_size, heads, dim)
        llama = QLlama(qllama, vision.hidden_size if mode == "g" else None)
        self.qllama = nn.ModuleDict({"model": llama})
        self.text_projection = nn.Parameter(torch.empty(width, dim))
        self.logit_scale = nn.Parameter(torch.empty(()))
        if mode == "g":
            self.query_tokens = nn.Parameter(torch.empty(1, config.num_query_token, width))
            self.clip_projector2 = AttentionPool(width, heads, dim)

    def encode_image(self, pixels: Tensor, alpha: Tensor | None = None) -> Tensor:  # noqa: D102
        tokens = self.vision_model(pixels.to(self.logit_scale.dtype))
        pooled: Tensor = self.clip_projector(tokens)
        if self.mode == "c":
            return pooled
        queries = self.query_tokens.expand(len(pixels), -1, -1)
        looked = self.clip_projector2(self.qllama["model"](queries, image=tokens))
        # Directions are summed, as upstream: the two pools' lengths mean nothing to each other.
        return nn.functional.normalize(pooled, dim=-1) + nn.functional.normalize(looked, dim=-1)

    def patch_tokens(self, pixels: Tensor, alpha: Tensor | None = None) -> Tensor:
        """What the pool over InternViT's tokens would give if it looked at one patch alone; in both modes."""
        tokens = self.vision_model(pixels.to(self.logit_scale.dtype))
        return self.clip_projector.each(tokens[:, 1:])

    def encode_text(self, tokens: Tensor) -> Tensor:  # noqa: D102
        counts = tokens != _PAD
        length = max(1, int(counts.sum(1).max()))
        tokens, counts = tokens[:, :length], counts[:, :length]  # what lies behind is padding in every row
        seen = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        mask = seen & counts[:, None, None, :]
        # A row of padding may see itself: its softmax would be NaN, and a NaN's gradient reaches everything.
        mask = mask | torch.eye(length, dtype=torch.bool, device=tokens.device)
        llama: Any = self.qllama["model"]
        states = llama(llama.embed_tokens(tokens), mask)
        last = states[torch.arange(len(tokens), device=tokens.device), counts.sum(1) - 1]
        embedded: Tensor = last @ self.text_projection
        return embedded

    def depth_of(self, name: str) -> int | None:  # noqa: D102
        if "vision_model.embeddings." in name:
            return 0
        if found := re.search(r"vision_model\.encoder\.layers\.(\d+)\.", name):
            return int(found.group(1)) + 1
        after = re.search(r"clip_projector2?\.|query_tokens$|qllama\..*\.cross_attn\.", name)
        return self.config.vision_config.num_hidden_layers + 1 if after else None

    def text_parameters(self) -> list[nn.Parameter]:
        """QLLaMA (its blocks see mode G's images too) and the projection; cross-attention is the images'."""
        return [
            parameter
            for name, parameter in self.named_parameters()
            if name != "logit_scale" and self.depth_of(name) is None
        ]

    def spec(self) -> dict[str, Any]:  # noqa: D102
        arguments = {
            "config": asdict(self.config),
            "mode": self.mode,
            "tokenizer": base64.b64encode(self.tokenizer.model).decode(),
            "dtype": str(self.logit_scale.dtype).removeprefix("torch."),
        }
        return {"class_path": "fovea.models.encoders.internvl_from_config", "init_args": arguments}


def internvl_from_config(
    config: dict[str, Any], mode: Mode, tokenizer: str, dtype: Dtype = "float32"
) -> InternVLEncoder:
    """An InternVL 1.0 of any size (random weights).

    Args:
        config: content of its config.json (`vision_config`, `qllama_config`, …); upstream's defaults hold.
        mode: `c` or `g`.
        tokenizer: bytes of its tokenizer.model, in base64.
        dtype: type of the weights.
    """
    encoder = _on_meta(
        InternVLConfig.read(config, "encoder.config"),
        mode,
        base64.b64decode(tokenizer),
        "encoder.tokenizer",
        dtype,
    ).to_empty(device="cpu")
    with torch.no_grad():
        for name, weight in encoder.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.02)
            elif name.endswith("bias"):
                weight.zero_()
            else:
                weight.fill_(0.1 if name.endswith((".ls1", ".ls2")) else 1.0)
        encoder.logit_scale.fill_(math.log(1 / 0.07))
    return encoder


def internvl(path: str, mode: Mode = "c", dtype: Dtype = "float32") -> InternVLEncoder:
    """InternVL-C or InternVL-G from the released files; no code of theirs is run.

    Shards are read one after the other into weights of `dtype`, so that the model lies in memory once. The
    released one has 14 billion parameters: 27 GB in half precision.

    Args:
        path: directory with config.json, tokenizer.model and the weights (safetensors or pytorch_model*.bin,
            sharded or not), or the hub's `OpenGVLab/InternVL-14B-224px`.
        mode: `c` (InternVL-C: contrastive) or `g` (InternVL-G: with QLLaMA's view of the image).
        dtype: type of the weights; `float16` is what upstream evaluates in, on a GPU.

    Raises:
        FileNotFoundError: no such model, or a file of it is missing.
        ValueError: another model, a damaged file, or tensors missing, unexpected or of another shape.
    """
    directory, _ = model_directory(path, ["internvl"])
    settings, vocabulary = directory / "config.json", directory / "tokenizer.model"
    if not vocabulary.is_file():
        raise FileNotFoundError(f"{vocabulary} is missing: the sentencepiece model of the repository's root")
    config = InternVLConfig.read(json.loads(settings.read_text(encoding="utf-8")), settings)
    encoder = _on_meta(config, mode, vocabulary.read_bytes(), str(vocabulary), dtype)
    ignored = [_UNUSED] if mode == "g" else [_UNUSED, _ONLY_G]
    state = {
        name: tensor.to(getattr(torch, dtype), copy=True)  # else it would be a window on the file
        for shard in _shards(directory)
        for name, tensor in _read(shard, ignored)
    }
    load_strict(encoder, state, directory, assign=True)
    return encoder


def _on_meta(
    config: InternVLConfig, mode: Mode, tokenizer: bytes, source: str, dtype: Dtype
) -> InternVLEncoder:
    if dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"encoder.dtype {dtype!r}: float32, float16 or bfloat16")
    ids = config.qllama_config.bos_token_id, config.qllama_config.eos_token_id
    with torch.device("meta"):  # names and shapes alone
        encoder = InternVLEncoder(config, mode, InternVLTokenizer(tokenizer, source, *ids))
    return encoder.to(getattr(torch, dtype))


def _shards(directory: Path) -> list[Path]:
    """The files of the weights: those that an index names, else all; safetensors before .bin."""
    for index, pattern in zip(_INDEXES, ("*.safetensors", "pytorch_model*.bin"), strict=True):
        if (directory / index).is_file():
            try:
                content = json.loads((directory / index).read_text(encoding="utf-8"))
                names = set(content["weight_map"].values())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{directory / index} is no index of shards ({error!r})") from error
            absent = sorted(name for name in names if not (directory / name).is_file())
            if absent:
                raise FileNotFoundError(f"{directory} lacks {', '.join(absent)}, which {index} names")
            return [directory / name for name in sorted(names)]
        if found := sorted(directory.glob(pattern)):
            return found
    raise FileNotFoundError(f"{directory} has no weights")


def _read(shard: Path, ignored: list[re.Pattern[str]]) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of a shard's entries, one at a time; those that match `ignored` are not read."""
    from pickle import UnpicklingError

    from safetensors import SafetensorError, safe_open

    try:
        if shard.suffix == ".safetensors":
            with safe_open(shard, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    if not any(pattern.match(name) for pattern in ignored):
                        yield name, file.get_tensor(name)
            return
        for name, tensor in torch.load(shard, "cpu", weights_only=True, mmap=True).items():
            if not any(pattern.match(name) for pattern in ignored):
                yield name, tensor
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError, AttributeError) as error:
        raise ValueError(f"{shard} is damaged or no file of weights ({error}); fetch it again") from error
