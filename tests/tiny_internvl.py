"""InternVL 1.0 in miniature, in the layout of OpenGVLab/InternVL-14B-224px: what its loader is tested on.

Names and shapes of the tensors are written out here after upstream's classes, not read off ours.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# Merged pieces besides the single characters, best first; those of `EQUAL` share the best score of all.
MERGED = ["su", "mm", "ar", "▁r", "▁su", "▁summ", "iz", "ize", "▁summar", "▁summarize", "ed", "▁red", "▁a"]
EQUAL = ["熊猫", "猫的", "的照", "照片"]
CHARACTERS = "▁abcdefghijklmnopqrstuvwxyz:熊猫的照片"

CONFIG: dict[str, Any] = {
    "model_type": "internvl",
    "architectures": ["InternVLModel"],
    "auto_map": {"AutoModel": "modeling_internvl.InternVLModel"},
    "clip_embed_dim": 16,
    "attn_pool_num_heads": 4,
    "num_query_token": 5,
    "cross_attention_frequency": 2,
    "use_backbone_lora": 0,
    "use_qllama_lora": 0,
    "force_image_size": None,
    "label_smoothing": 0.0,
    "initializer_range": 0.02,
    "hidden_size": 24,
    "vision_config": {
        "model_type": "intern_vit_6b",
        "num_channels": 3,
        "patch_size": 14,
        "image_size": 28,
        "qkv_bias": False,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "qk_normalization": True,
        "num_hidden_layers": 2,
        "use_flash_attn": False,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
    },
    "qllama_config": {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    },
}


def shapes(config: dict[str, Any] = CONFIG) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor of the released state dict, at this config's sizes."""
    vision, llama, out = config["vision_config"], config["qllama_config"], config["clip_embed_dim"]
    v, vi, w, wi = (
        vision["hidden_size"],
        vision["intermediate_size"],
        llama["hidden_size"],
        llama["intermediate_size"],
    )
    patch, vocab = vision["patch_size"], llama["vocab_size"]
    side = config["force_image_size"] or vision["image_size"]
    named: dict[str, tuple[int, ...]] = {
        "query_tokens": (1, config["num_query_token"], w),
        "text_projection": (w, out),
        "logit_scale": (),
        "itm_head.weight": (2, w),
        "itm_head.bias": (2,),
        "vision_model.embeddings.class_embedding": (1, 1, v),
        "vision_model.embeddings.patch_embedding.weight": (v, 3, patch, patch),
        "vision_model.embeddings.patch_embedding.bias": (v,),
        "vision_model.embeddings.position_embedding": (1, 1 + (side // patch) ** 2, v),
        "qllama.lm_head.weight": (vocab, w),
        "qllama.model.embed_tokens.weight": (vocab, w),
        "qllama.model.norm.weight": (w,),
    }
    for i in range(vision["num_hidden_layers"]):
        block = {
            "attn.qkv.weight": (3 * v, v),
            "attn.q_norm.weight": (v,),
            "attn.k_norm.weight": (v,),
            "attn.proj.weight": (v, v),
            "attn.proj.bias": (v,),
            "mlp.fc1.weight": (vi, v),
            "mlp.fc1.bias": (vi,),
            "mlp.fc2.weight": (v, vi),
            "mlp.fc2.bias": (v,),
            **{name: (v,) for name in ("norm1.weight", "norm2.weight", "ls1", "ls2")},
        }
        named |= {f"vision_model.encoder.layers.{i}.{name}": shape for name, shape in block.items()}
    for i in range(llama["num_hidden_layers"]):
        block = {
            **{f"self_attn.{each}_proj.weight": (w, w) for each in "qkvo"},
            "mlp.gate_proj.weight": (wi, w),
            "mlp.up_proj.weight": (wi, w),
            "mlp.down_proj.weight": (w, wi),
            "input_layernorm.weight": (w,),
            "post_attention_layernorm.weight": (w,),
        }
        if i % config["cross_attention_frequency"] == 0:
            block |= {
                "cross_attn.q_proj.weight": (w, w),
                "cross_attn.o_proj.weight": (w, w),
                "cross_attn.k_proj.weight": (w, v),
                "cross_attn.v_proj.weight": (w, v),
                "cross_attn.norm1.weight": (w,),
                "cross_attn.norm2.weight": (v,),
            }
        named |= {f"qllama.model.layers.{i}.{name}": shape for name, shape in block.items()}
    for pool, width in (("clip_projector", v), ("clip_projector2", w)):
        for each in "qkv":
            named |= {f"{pool}.norm1_{each}.weight": (width,), f"{pool}.norm1_{each}.bias": (width,)}
            named |= {f"{pool}.cross_attn.{each}.weight": (width, width)}
            named |= {f"{pool}.cross_attn.{each}_bias": (width,)}
        named |= {f"{pool}.cross_attn.proj.weight": (out, width), f"{pool}.cross_attn.proj.bias": (out,)}
    return named


def weights(config: dict[str, Any] = CONFIG, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of these names and shapes, the same at every call; large, so that all parts matter."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in sorted(shapes(config).items()):
        spread = torch.randn(shape, generator=generator)
        scales = len(shape) == 1 and not name.endswith("bias")
        state[name] = 1 + 0.2 * spread if scales else 0.3 * spread
    return state


def sentencepiece_model() -> bytes:
    """A tokenizer.model as LLaMA's: unknown, begin and end, 256 bytes, then merged and single characters."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(piece, -float(rank), 1) for rank, piece in enumerate([*MERGED, *CHARACTERS], 1)]
    pieces += [(piece, 0.0, 1) for piece in EQUAL]
    data = b""
    for text, score, kind in pieces:
        raw = text.encode()
        piece = b"\x0a" + bytes([len(raw)]) + raw + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind])
        data += b"\x0a" + bytes([len(piece)]) + piece
    trainer = b"\x18\x02" + b"\x98\x02\x01"  # model_type BPE; byte_fallback (field 35)
    normalizer = b"\x0a\x08identity" + b"\x18\x01" + b"\x20\x00" + b"\x28\x01"
    for number, message in ((2, trainer), (3, normalizer)):
        data += bytes([number << 3 | 2, len(message)]) + message
    return data


def make_internvl(
    directory: Path, config: dict[str, Any] = CONFIG, *, kind: str = "safetensors", seed: int = 0
) -> Path:
    """Write the files of a tiny InternVL 1.0.

    Args:
        directory: where; made if it is not there.
        config: content of config.json; the tensors follow it.
        kind: `safetensors` or `bin`, in two shards with an index.
        seed: of the tensors.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.model").write_bytes(sentencepiece_model())
    state, stem = weights(config, seed), "model" if kind == "safetensors" else "pytorch_model"
    names, where = sorted(state), {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"{stem}-0000{number}-of-00002.{kind}"
        shard = {name: state[name] for name in part}
        if kind == "safetensors":
            save_file(shard, directory / file, {"format": "pt"})
        else:
            torch.save(shard, directory / file)
        where |= dict.fromkeys(part, file)
    (directory / f"{stem}.{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return directory
