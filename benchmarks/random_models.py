"""Models with random weights in the real file formats: what benchmarks and tests run without a download.

`tiny` ones run in milliseconds; the others have the sizes of the released models.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

# BERT's ids for the tokens that GroundingDINO looks for by number.
SPECIAL = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103, ".": 1012, "?": 1029}
WORDS = "a the two man woman dog cone ##s sign door in on left of blue red um ##bre ##lla white big".split()


def tokenizer(words: Iterable[str] = WORDS, size: int = 1100) -> Any:
    """BERT's tokenizer with a vocabulary of `size`: the special tokens, the words from id 200 on, fillers."""
    from transformers import BertTokenizer

    names = {i: f"[unused{i}]" for i in range(size)} | {i: word for i, word in enumerate(words, 200)}
    names |= {i: token for token, i in SPECIAL.items()}
    return BertTokenizer(vocab={token: i for i, token in names.items()})


def _disturb(model: Any, std: float) -> Any:
    """Noise on every parameter: as initialised, a tiny model's output hardly depends on its input."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(std * torch.randn_like(parameter))
    return model


def grounding_dino(directory: Path, *, tiny: bool, seed: int = 0) -> Path:
    """GroundingDINO with its processor; GroundingDINO-T unless tiny."""
    import torch
    from transformers import (
        BertConfig,
        GroundingDinoConfig,
        GroundingDinoForObjectDetection,
        GroundingDinoImageProcessor,
        GroundingDinoProcessor,
        SwinConfig,
    )

    torch.manual_seed(seed)
    if tiny:
        swin = SwinConfig(
            image_size=64,
            embed_dim=8,
            depths=[1, 1, 1, 1],
            num_heads=[1, 2, 2, 2],
            window_size=4,
            out_indices=[2, 3, 4],
        )
        bert = BertConfig(
            vocab_size=1100,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=64,
        )
        config = GroundingDinoConfig(
            backbone_config=swin,
            text_config=bert,
            num_queries=12,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            d_model=64,  # group normalisation of 32 groups needs two channels each
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            max_text_len=24,
        )
        size = {"shortest_edge": 64, "longest_edge": 96}
    else:
        swin = SwinConfig(
            embed_dim=96,
            depths=[2, 2, 6, 2],
            num_heads=[3, 6, 12, 24],
            window_size=7,
            out_indices=[2, 3, 4],
        )
        config = GroundingDinoConfig(backbone_config=swin, text_config=BertConfig())
        size = {"shortest_edge": 800, "longest_edge": 1333}
    model = GroundingDinoForObjectDetection(config)
    if tiny:  # the last layer of every box head starts at zero: all boxes would be cells of the grid
        _disturb(model, 0.05)
    model.save_pretrained(directory)
    processor = GroundingDinoProcessor(
        GroundingDinoImageProcessor(size=size), tokenizer(size=config.text_config.vocab_size)
    )
    processor.save_pretrained(directory)
    return directory


def official_sam(checkpoint: Path, *, tiny: bool, seed: int = 0) -> Path:
    """A checkpoint in the layout of segment-anything; ViT-B at 1024 px unless tiny."""
    import torch

    from fovea.models.sam_checkpoint import SamSizes, build

    base = SamSizes(1024, 16, 768, 12, 12, 4.0, 14, (2, 5, 8, 11), 256, 16, 3, 2, 8, 2048, 2, 3, 256)
    small = SamSizes(48, 4, 24, 3, 3, 2.0, 5, (1,), 96, 12, 2, 1, 3, 80, 2, 2, 40)
    torch.manual_seed(seed)
    model = build(small if tiny else base)
    with torch.no_grad():
        # They start at zero, and every prompt would make nearly the same mask.
        for name, parameter in model.named_parameters():
            if "rel_pos" in name or "pos_embed" in name:
                parameter.normal_(std=0.1)
    torch.save(model.state_dict(), checkpoint)
    return checkpoint


def transformers_sam(directory: Path, *, seed: int = 0) -> Path:
    """A tiny SAM of transformers with its image processor."""
    import torch
    from transformers import (
        SamConfig,
        SamImageProcessor,
        SamMaskDecoderConfig,
        SamModel,
        SamPromptEncoderConfig,
        SamVisionConfig,
    )

    torch.manual_seed(seed)
    vision = SamVisionConfig(
        hidden_size=32,
        output_channels=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=64,
        patch_size=8,
        mlp_dim=64,
        mlp_ratio=2.0,
        window_size=3,
        global_attn_indexes=[1],
        num_pos_feats=16,
    )
    prompt = SamPromptEncoderConfig(hidden_size=32, image_size=64, patch_size=8, mask_input_channels=8)
    decoder = SamMaskDecoderConfig(
        hidden_size=32, mlp_dim=64, num_attention_heads=2, iou_head_depth=2, iou_head_hidden_dim=32
    )
    config = SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    _disturb(SamModel(config), 0.1).save_pretrained(directory)
    SamImageProcessor(
        size={"longest_edge": 64},
        pad_size={"height": 64, "width": 64},
        mask_size={"longest_edge": 16},
        mask_pad_size={"height": 16, "width": 16},
    ).save_pretrained(directory)
    return directory


def transformers_sam2(directory: Path, *, seed: int = 0) -> Path:
    """A tiny SAM 2 of transformers with its image processor."""
    import torch
    from transformers import (
        Sam2Config,
        Sam2HieraDetConfig,
        Sam2ImageProcessor,
        Sam2MaskDecoderConfig,
        Sam2Model,
        Sam2PromptEncoderConfig,
        Sam2VisionConfig,
    )

    torch.manual_seed(seed)
    hiera = Sam2HieraDetConfig(
        hidden_size=8,
        image_size=[64, 64],
        blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=[8, 16, 32, 64],
        num_attention_heads_per_stage=[1, 1, 2, 4],
        window_size_per_stage=[4, 4, 4, 2],
        global_attention_blocks=[3],
        window_positional_embedding_background_size=[4, 4],
    )
    vision = Sam2VisionConfig(
        backbone_config=hiera,
        backbone_channel_list=[64, 32, 16, 8],
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
        fpn_hidden_size=32,
    )
    prompt = Sam2PromptEncoderConfig(hidden_size=32, image_size=64, patch_size=16, mask_input_channels=8)
    decoder = Sam2MaskDecoderConfig(hidden_size=32, mlp_dim=64, num_attention_heads=2, iou_head_hidden_dim=32)
    config = Sam2Config(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    _disturb(Sam2Model(config), 0.1).save_pretrained(directory)
    size = {"height": 64, "width": 64}
    Sam2ImageProcessor(size=size, mask_size={"height": 16, "width": 16}).save_pretrained(directory)
    return directory
