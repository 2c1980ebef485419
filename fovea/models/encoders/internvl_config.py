"""config.json of InternVL 1.0 → the sizes of its towers; what this code cannot build is refused by key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class VisionConfig:
    """InternViT; names and defaults are upstream's (the 6B model). Sizes in pixels or channels."""

    image_size: int = 224
    patch_size: int = 14
    hidden_size: int = 3200
    num_attention_heads: int = 25
    intermediate_size: int = 12800
    num_hidden_layers: int = 48
    qkv_bias: bool = False
    qk_normalization: bool = True
    layer_norm_eps: float = 1e-6


@dataclass(frozen=True)
class QLlamaConfig:
    """QLLaMA; names and defaults are LLaMA's and upstream's."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    num_attention_heads: int = 32
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    rms_norm_eps: float = 1e-6
    bos_token_id: int = 1
    eos_token_id: int = 2
    cross_attention_frequency: int = 2


@dataclass(frozen=True)
class InternVLConfig:
    """The whole model; `dataclasses.asdict` of it reads back with `read`."""

    vision_config: VisionConfig
    qllama_config: QLlamaConfig
    clip_embed_dim: int = 768
    attn_pool_num_heads: int = 16
    num_query_token: int = 96

    @classmethod
    def read(cls, content: Mapping[str, Any], source: str | Path) -> InternVLConfig:
        """Check and take what is needed.

        Args:
            content: config.json of the model.
            source: its name, for errors.

        Raises:
            ValueError: another model, LoRA weights that are not merged, or another activation.
        """
        vision, qllama = content.get("vision_config"), content.get("qllama_config")
        if not isinstance(vision, Mapping) or not isinstance(qllama, Mapping):
            raise ValueError(
                f"{source}: no vision_config and qllama_config, so this is not InternVL 1.0 "
                "(InternVL-14B-224px, the model with InternVL-C and InternVL-G)"
            )
        given = [
            *((key, content.get(key) or 0, 0) for key in ("use_backbone_lora", "use_qllama_lora")),
            ("vision_config.hidden_act", vision.get("hidden_act", "gelu"), "gelu"),
            ("qllama_config.hidden_act", qllama.get("hidden_act", "silu"), "silu"),
        ]
        wrong = [f"{key} is {value!r}, not {needed!r}" for key, value, needed in given if value != needed]
        # Upstream keeps the size of a fine-tuned model's positions here, and the old one in vision_config.
        vision = {**vision, **({"image_size": size} if (size := content.get("force_image_size")) else {})}
        if "cross_attention_frequency" in content:  # upstream writes it to both, and reads this one
            qllama = {**qllama, "cross_attention_frequency": content["cross_attention_frequency"]}
        towers = {"vision_config": _take(VisionConfig, vision), "qllama_config": _take(QLlamaConfig, qllama)}
        config: InternVLConfig = _take(cls, {**content, **towers})
        for key, tower, heads in (
            ("vision_config.num_attention_heads", config.vision_config, None),
            ("qllama_config.num_attention_heads", config.qllama_config, None),
            ("attn_pool_num_heads", config.vision_config, config.attn_pool_num_heads),
            ("attn_pool_num_heads", config.qllama_config, config.attn_pool_num_heads),
        ):
            if tower.hidden_size % (heads or tower.num_attention_heads):
                wrong.append(f"{key} does not divide hidden_size {tower.hidden_size}")
        if wrong:
            raise ValueError(f"{source}: {'; '.join(wrong)}; merge LoRA weights first, or use another model")
        return config


def _take(cls: Any, values: Mapping[str, Any]) -> Any:
    return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})
