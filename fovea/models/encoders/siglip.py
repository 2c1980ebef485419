"""SigLIP and SigLIP 2 of transformers: pairwise-sigmoid dual encoders of a fixed resolution."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fovea.images import ImageTransform
from fovea.models.encoders.base import Encoder
from fovea.models.encoders.json_tokenizer import Clean, JsonTokenizer, pack
from fovea.models.weights import check_loaded, model_directory

# Pillow's numbers in preprocessor_config.json.
_RESAMPLE: dict[int, Literal["bicubic", "bilinear"]] = {2: "bilinear", 3: "bicubic"}


class SiglipEncoder(Encoder):
    """A `SiglipModel` behind the interface; `alpha` is ignored.

    It pools its patches by attention: no patch token is in the space of the texts (`patch_tokens` refuses).
    """

    tokenizer: JsonTokenizer

    def __init__(self, model: Any, tokenizer: JsonTokenizer, transform: ImageTransform) -> None:
        """Use the factories below."""
        super().__init__()
        vision, text = model.config.vision_config, model.config.text_config
        width = text.projection_size or text.hidden_size
        if width != vision.hidden_size:
            raise ValueError(f"SigLIP with texts of {width} and images of {vision.hidden_size} dimensions")
        if not getattr(vision, "vision_use_head", True):
            raise ValueError("this SigLIP has no pooling head (vision_use_head: false): no image embedding")
        self.siglip = model
        # A softmax over candidates does not feel a bias: its gradient would be missing in DDP.
        model.logit_bias.requires_grad_(False)
        self.tokenizer = tokenizer
        self.transform = transform
        self.embed_dim = int(width)

    @property
    def logit_scale(self) -> nn.Parameter:  # type: ignore[override]
        """Natural log of the inverse temperature, [1] as upstream; `siglip.logit_bias` is upstream's bias."""
        scale: nn.Parameter = self.siglip.logit_scale
        return scale

    def encode_image(self, pixels: Tensor, alpha: Tensor | None = None) -> Tensor:  # noqa: D102
        pooled: Tensor = self.siglip.vision_model(pixel_values=pixels).pooler_output
        return pooled

    def encode_text(self, tokens: Tensor) -> Tensor:  # noqa: D102
        # No attention mask: it was trained to attend to the padding.
        pooled: Tensor = self.siglip.text_model(input_ids=tokens).pooler_output
        return pooled

    def depth_of(self, name: str) -> int | None:  # noqa: D102
        if "vision_model." not in name:
            return None
        found = re.search(r"encoder\.layers\.(\d+)\.", name)
        if found:
            return int(found.group(1)) + 1
        after = re.search(r"vision_model\.(post_layernorm|head)\.", name)
        return int(self.siglip.config.vision_config.num_hidden_layers) + 1 if after else 0

    def text_parameters(self) -> list[nn.Parameter]:  # noqa: D102
        return list(self.siglip.text_model.parameters())

    def spec(self) -> dict[str, Any]:  # noqa: D102
        arguments = {
            "config": json.loads(self.siglip.config.to_json_string(use_diff=False)),
            "tokenizer": self.tokenizer.settings,
            "mean": list(self.transform.mean),
            "std": list(self.transform.std),
            "resample": self.transform.resample,
        }
        return {"class_path": "fovea.models.encoders.siglip_from_config", "init_args": arguments}


def siglip_from_config(
    config: dict[str, Any],
    tokenizer: dict[str, Any],
    mean: list[float],
    std: list[float],
    resample: Literal["bicubic", "bilinear"] = "bicubic",
) -> SiglipEncoder:
    """A SigLIP of any size (random weights).

    Args:
        config: content of its config.json.
        tokenizer: `JsonTokenizer.settings`.
        mean: per-channel mean of [0, 1] pixels.
        std: per-channel standard deviation of [0, 1] pixels.
        resample: how pixels are interpolated.
    """
    from transformers import SiglipConfig, SiglipModel

    model = SiglipModel(SiglipConfig.from_dict(config))
    return SiglipEncoder(model, JsonTokenizer(**tokenizer), _transform(model.config, mean, std, resample))


def siglip(path: str) -> Encoder:
    """SigLIP or SigLIP 2 of a fixed resolution; what the files say of pixels, resolution and texts holds.

    Images are squashed to the square, as upstream does; texts are cut and padded to 64 tokens, lower-cased,
    and for SigLIP (not 2) without punctuation. A bundle carries the tokenizer.

    Args:
        path: directory of a transformers model (config.json, preprocessor_config.json, tokenizer.json,
            tokenizer_config.json and the weights), or a hub name, `google/siglip-so400m-patch14-384`.

    Raises:
        FileNotFoundError: no such model, or a file of it is missing.
        ValueError: a NaFlex variant, another model, or weights that do not fit its config.
    """
    from safetensors import SafetensorError
    from transformers import SiglipModel

    directory, kind = model_directory(path, ("siglip", "siglip2"))
    if kind == "siglip2":
        raise ValueError(
            f"{path} is a NaFlex SigLIP 2, whose patch grid follows each image's shape; take a variant of a "
            "fixed resolution, such as google/siglip2-so400m-patch14-384"
        )
    mean, std, resample, side = _pixels(directory)
    try:
        model, info = SiglipModel.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True, local_files_only=True
        )
    except SafetensorError as error:
        raise ValueError(f"{directory}: model.safetensors is damaged or cut short ({error})") from error
    check_loaded(directory, info)
    tokenizer = JsonTokenizer(**_texts(directory, model.config.text_config.max_position_embeddings))
    transform = _transform(model.config, mean, std, resample)
    if side != transform.size:
        raise ValueError(
            f"{directory}: images of {side} pixels in the processor, of {transform.size} in config.json"
        )
    return SiglipEncoder(model, tokenizer, transform).eval()


def _transform(
    config: Any, mean: list[float], std: list[float], resample: Literal["bicubic", "bilinear"]
) -> ImageTransform:
    (r, g, b), (u, v, w) = mean, std
    size = int(config.vision_config.image_size)
    return ImageTransform(size, mean=(r, g, b), std=(u, v, w), resample=resample)


def _read(directory: Path, name: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((directory / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{directory} has no {name}; save the processor there too") from error
    except ValueError as error:
        raise ValueError(f"{directory / name} is no JSON: {error}") from error
    return content


def _pixels(directory: Path) -> tuple[list[float], list[float], Literal["bicubic", "bilinear"], int]:
    """Mean, standard deviation, interpolation and side that the image processor uses."""
    name = "preprocessor_config.json"
    if not (directory / name).is_file() and (directory / "processor_config.json").is_file():
        name = "processor_config.json"  # where transformers 5 saves a whole processor
    content = _read(directory, name)
    content = content.get("image_processor", content)
    size = content.get("size", {})
    sides = {size.get("height"), size.get("width")}
    resample = content.get("resample", 3)
    problems = []
    if len(sides) != 1 or not isinstance(side := sides.pop(), int):
        problems.append(f"size {size}: a square {{height, width}} is needed")
    if resample not in _RESAMPLE:
        problems.append(f"resample {resample}: 2 (bilinear) or 3 (bicubic) is needed")
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if content.get(key) is False:
            problems.append(f"{key} is false")
    if problems:
        raise ValueError(f"{directory / name}: {'; '.join(problems)}")
    half = [0.5, 0.5, 0.5]
    return content.get("image_mean", half), content.get("image_std", half), _RESAMPLE[resample], side


def _texts(directory: Path, length: int) -> dict[str, Any]:
    """`JsonTokenizer.settings` of SigLIP's (sentencepiece) or SigLIP 2's (Gemma) tokenizer.

    The classes of transformers cannot be asked: SigLIP's needs the sentencepiece package, and SigLIP 2's
    files name Gemma's, which does not lower-case.
    """
    from tokenizers import Tokenizer, processors

    about = _read(directory, "tokenizer_config.json")
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{directory} has no tokenizer.json; the hub's copy has one. A spiece.model alone is not read"
        )
    tokenizer = Tokenizer.from_file(str(file))
    first = "SiglipTokenizer" in str(about.get("tokenizer_class"))
    names = {key: about.get(key) for key in ("pad_token", "eos_token", "bos_token")}
    names = {k: v["content"] if isinstance(v, dict) else v for k, v in names.items()}
    end = names["eos_token"] or ("</s>" if first else "<eos>")
    pad = names["pad_token"] or ("</s>" if first else "<pad>")
    ids = {token: tokenizer.token_to_id(token) for token in (end, pad)}
    if None in ids.values():
        raise ValueError(f"{file} lacks the special tokens {[t for t, id_ in ids.items() if id_ is None]}")
    # The flags decide what is added, not the file's post-processor, which Gemma's own may have left there.
    template, special = f"$A {end}", [(end, ids[end])]
    if about.get("add_bos_token") and names["bos_token"]:
        template = f"{names['bos_token']} {template}"
        special.append((names["bos_token"], tokenizer.token_to_id(names["bos_token"])))
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    clean: Clean = "canonical" if first else "lower"
    side = "left" if about.get("padding_side") == "left" else "right"
    return {
        "packed": pack(tokenizer.to_str()),
        "length": length,
        "pad_id": ids[pad],
        "fill": True,  # both generations were trained so: the last token is the pooled one, padding or not
        "clean": clean,
        "side": side,
    }
