"""Encoders in miniature in the layouts that are released: what their loaders are tested on.

Names and shapes of the tensors of CLIP and Visualized-BGE are written out here after upstream's classes, not
read off ours. Every tower is a head or two wide (64 is the width of a head that no file tells).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WORDS = "a the red blue green dog cat cone sign man in on left of two is ##s".split()
SIDE, PATCH, WIDTH, LAYERS = 32, 8, 128, 2
GRID = SIDE // PATCH


def _filled(shapes: dict[str, tuple[int, ...]], seed: int, std: float = 0.08) -> dict[str, Tensor]:
    """Random weights, norms around 1: as initialised, a tiny model's output hardly depends on its input."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: std * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in state:
        if re.search(r"(ln_\w+|norm\d?|LayerNorm|inner_attn_ln|ffn_ln)\.weight$", name):
            state[name] += 1
    return state


def _clip_blocks(prefix: str, width: int, layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        block = f"{prefix}resblocks.{layer}."
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{block}{norm}.weight": (width,), f"{block}{norm}.bias": (width,)}
        shapes |= {
            f"{block}attn.in_proj_weight": (3 * width, width),
            f"{block}attn.in_proj_bias": (3 * width,),
        }
        for name, out, into in (
            ("attn.out_proj", width, width),
            ("mlp.c_fc", 4 * width, width),
            ("mlp.c_proj", width, 4 * width),
        ):
            shapes |= {f"{block}{name}.weight": (out, into), f"{block}{name}.bias": (out,)}
    return shapes


def clip_state(seed: int = 0, vision: int = WIDTH, text: int = 64, dim: int = 32) -> dict[str, Tensor]:
    """A ViT CLIP's tensors, as OpenAI and open_clip name them: 32 px, patches of 8 px, 77 tokens."""
    shapes: dict[str, tuple[int, ...]] = {
        "positional_embedding": (77, text),
        "text_projection": (text, dim),
        "token_embedding.weight": (49408, text),
        "ln_final.weight": (text,),
        "ln_final.bias": (text,),
        "visual.class_embedding": (vision,),
        "visual.positional_embedding": (GRID * GRID + 1, vision),
        "visual.proj": (vision, dim),
        "visual.conv1.weight": (vision, 3, PATCH, PATCH),
    }
    for norm in ("ln_pre", "ln_post"):
        shapes |= {f"visual.{norm}.weight": (vision,), f"visual.{norm}.bias": (vision,)}
    shapes |= _clip_blocks("visual.transformer.", vision, LAYERS) | _clip_blocks("transformer.", text, LAYERS)
    return _filled(shapes, seed) | {"logit_scale": torch.tensor(4.6)}


class _Holder(nn.Module):
    """A module tree for any names of tensors, to be scripted."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def torchscript(state: dict[str, Tensor], path: Path) -> Path:
    """An archive as OpenAI ships them: half precision, its sizes among the tensors."""
    root = _Holder()
    sizes = {"input_resolution": SIDE, "context_length": 77, "vocab_size": 49408}
    for name, value in {**state, **{k: torch.tensor(v) for k, v in sizes.items()}}.items():
        *parents, last = name.split(".")
        module: nn.Module = root
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, _Holder())
            module = getattr(module, parent)
        module.register_buffer(last, value.half() if value.is_floating_point() else value)
    torch.jit.script(root).save(str(path))
    return path


def make_openai_clip(directory: Path) -> Path:
    """OpenAI's TorchScript archive."""
    directory.mkdir(parents=True, exist_ok=True)
    return torchscript(clip_state(), directory / "ViT-tiny.pt")


def make_alpha_visual(directory: Path, seed: int = 1) -> Path:
    """An official Alpha-CLIP visual checkpoint for `make_openai_clip`'s tower."""
    state = {n.removeprefix("visual."): v for n, v in clip_state(seed).items() if n.startswith("visual.")}
    state = {name.replace("in_proj_", "in_proj."): value for name, value in state.items()}
    state |= _filled({"conv1_alpha.weight": (WIDTH, 1, PATCH, PATCH)}, seed)
    directory.mkdir(parents=True, exist_ok=True)
    torch.save({name: value.half() for name, value in state.items()}, directory / "clip_tiny_alpha.pth")
    return directory / "clip_tiny_alpha.pth"


# Heads of 16, exact GELU and statistics of its own: what no tensor tells.
OPEN_CLIP: dict[str, Any] = {
    "model_cfg": {
        "embed_dim": 32,
        "vision_cfg": {
            "image_size": SIDE,
            "layers": LAYERS,
            "width": WIDTH,
            "head_width": 16,
            "patch_size": PATCH,
        },
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 4, "layers": LAYERS},
    },
    "preprocess_cfg": {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "interpolation": "bicubic"},
}


def make_open_clip(directory: Path) -> Path:
    """A directory in open_clip's hub layout."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "open_clip_config.json").write_text(json.dumps(OPEN_CLIP))
    save_file(clip_state(seed=2), directory / "open_clip_model.safetensors")
    return directory


def _sentencepiece_like(words: list[str]) -> Any:
    """SigLIP's tokenizer.json: unigrams behind ▁, "</s>" is end and padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyz0123456789▁"
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0)]
    pieces += [(f"▁{word}", -2.0) for word in words] + [(letter, -8.0) for letter in letters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def _gemma_like(words: list[str]) -> Any:
    """SigLIP 2's tokenizer.json: Gemma's byte pairs, with Gemma's post-processor that sets <bos> first."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    vocabulary = specials + list("▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?")
    merges = []
    for word in words:
        made = "▁"
        for letter in word:
            if made + letter not in vocabulary:
                merges.append((made, letter))
                vocabulary.append(made + letter)
            made += letter
    ids = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer.add_special_tokens(specials)
    return tokenizer


def make_siglip(directory: Path, *, second: bool = False) -> Path:
    """A directory of google/siglip-… , or of a fixed-resolution google/siglip2-…, as the hub has it."""
    from transformers import SiglipConfig, SiglipModel

    torch.manual_seed(3)
    words = [word for word in WORDS if word.isalpha()]
    tokenizer = _gemma_like(words) if second else _sentencepiece_like(words)
    towers: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    towers |= {"num_attention_heads": 2}
    text = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 64, "projection_size": 32}
    model = SiglipModel(
        SiglipConfig(
            text_config=towers | text, vision_config=towers | {"image_size": SIDE, "patch_size": PATCH}
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.logit_scale.fill_(4.7)
        model.logit_bias.fill_(-12.9)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    about: dict[str, Any] = {
        "tokenizer_class": "SiglipTokenizer", "do_lower_case": True, "model_max_length": 64,
        "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>", "model_input_names": ["input_ids"],
    }  # fmt: skip
    if second:
        about = {
            "tokenizer_class": "GemmaTokenizer", "add_bos_token": False, "add_eos_token": True,
            "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>",
            "padding_side": "right", "model_max_length": 64,
        }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    pixels = {
        "do_resize": True, "do_rescale": True, "do_normalize": True, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3, "resample": 2 if second else 3, "rescale_factor": 1 / 255,
        "size": {"height": SIDE, "width": SIDE}, "image_processor_type": "SiglipImageProcessor",
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(pixels))
    return directory


def bge_shapes(vocabulary: int, positions: int, types: int) -> dict[str, tuple[int, ...]]:
    """Visualized_*.pth: BERT's parts under bge_, the EVA tower, the projection between them."""
    hidden = int(WIDTH * 2.6667)
    shapes: dict[str, tuple[int, ...]] = {
        "bge_embeddings.word_embeddings.weight": (vocabulary, WIDTH),
        "bge_embeddings.position_embeddings.weight": (positions, WIDTH),
        "bge_embeddings.token_type_embeddings.weight": (types, WIDTH),
        "model_visual.logit_scale": (),
        "model_visual.visual.cls_token": (1, 1, WIDTH),
        "model_visual.visual.pos_embed": (1, GRID * GRID + 1, WIDTH),
        "model_visual.visual.patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH),
        "model_visual.visual.patch_embed.proj.bias": (WIDTH,),
    }

    def linear(name: str, out: int, into: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    norm("bge_embeddings.LayerNorm", WIDTH)
    linear("bge_pooler.dense", WIDTH, WIDTH)
    linear("visual_proj", WIDTH, WIDTH)
    linear("model_visual.visual.head", 32, WIDTH)
    norm("model_visual.visual.norm", WIDTH)
    for layer in range(LAYERS):
        text, block = f"bge_encoder.layer.{layer}.", f"model_visual.visual.blocks.{layer}."
        for name in ("query", "key", "value"):
            linear(f"{text}attention.self.{name}", WIDTH, WIDTH)
        linear(f"{text}attention.output.dense", WIDTH, WIDTH)
        linear(f"{text}intermediate.dense", 2 * WIDTH, WIDTH)
        linear(f"{text}output.dense", WIDTH, 2 * WIDTH)
        for name in ("attention.output", "output"):
            norm(f"{text}{name}.LayerNorm", WIDTH)
        for name in ("q_proj", "k_proj", "v_proj"):
            linear(f"{block}attn.{name}", WIDTH, WIDTH, bias=False)
        shapes[f"{block}attn.q_bias"] = shapes[f"{block}attn.v_bias"] = (WIDTH,)
        linear(f"{block}attn.proj", WIDTH, WIDTH)
        for name, into in (
            ("norm1", WIDTH),
            ("norm2", WIDTH),
            ("attn.inner_attn_ln", WIDTH),
            ("mlp.ffn_ln", hidden),
        ):
            norm(f"{block}{name}", into)
        linear(f"{block}mlp.w1", hidden, WIDTH)
        linear(f"{block}mlp.w2", hidden, WIDTH)
        linear(f"{block}mlp.w3", WIDTH, hidden)
    return shapes


def rotary_table() -> tuple[Tensor, Tensor]:
    """freqs_cos and freqs_sin of the grid, one patch and one pair of channels at a time."""
    cos, sin = torch.zeros(GRID * GRID, 64), torch.zeros(GRID * GRID, 64)
    for row in range(GRID):
        for column in range(GRID):
            for channel in range(64):
                at = (row if channel < 32 else column) * 16 / GRID
                angle = torch.tensor(at / 10000 ** ((channel % 32 // 2 * 2) / 32))
                cos[row * GRID + column, channel] = angle.cos()
                sin[row * GRID + column, channel] = angle.sin()
    return cos, sin


def make_visualized_bge(directory: Path, *, m3: bool = False) -> tuple[Path, Path]:
    """Visualized_base_en_v1.5.pth and its bge-base-en-v1.5, or Visualized_m3.pth and its bge-m3.

    Returns:
        the weights, and the directory of the text model (config and tokenizer, no weights).
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertTokenizer, XLMRobertaConfig

    text = directory / ("bge-m3" if m3 else "bge-base-en-v1.5")
    text.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
        "intermediate_size": 2 * WIDTH,
    }  # fmt: skip
    if m3:
        words = [f"▁{word}" for word in WORDS if word.isalpha()] + list("▁abcdefghijklmnopqrstuvwxyz")
        pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0)]
        pieces += [(word, -2.0 if len(word) > 1 else -8.0) for word in words] + [("<mask>", 0.0)]
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
        tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
        tokenizer.save(str(text / "tokenizer.json"))
        about = {"tokenizer_class": "XLMRobertaTokenizer", "pad_token": "<pad>", "model_max_length": 128}
        (text / "tokenizer_config.json").write_text(json.dumps(about))
        vocabulary, positions, types = len(pieces), 130, 1
        config: Any = XLMRobertaConfig(
            vocab_size=vocabulary, max_position_embeddings=positions, type_vocab_size=types,
            layer_norm_eps=1e-5, pad_token_id=1, **sizes,
        )  # fmt: skip
    else:
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"abcdefghijklmnopqrstuvwxyz?"]
        ids = {word: i for i, word in enumerate(dict.fromkeys(names))}
        BertTokenizer(vocab=ids).save_pretrained(text)
        vocabulary, positions, types = len(ids), 128, 2
        config = BertConfig(
            vocab_size=vocabulary, max_position_embeddings=positions, type_vocab_size=types, **sizes
        )
    config.save_pretrained(text)
    state = _filled(bge_shapes(vocabulary, positions, types), seed=4)
    for name, value in zip(("freqs_cos", "freqs_sin"), rotary_table(), strict=True):
        state[f"model_visual.visual.rope.{name}"] = value
        state |= {f"model_visual.visual.blocks.{i}.attn.rope.{name}": value for i in range(LAYERS)}
    weights = directory / ("Visualized_m3.pth" if m3 else "Visualized_base_en_v1.5.pth")
    torch.save(state, weights)
    return weights, text
