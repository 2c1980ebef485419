"""The encoders of HuLiRAG's Table 1, each by name in a config: `fovea.models.encoders.NAME`.

A file here is a family; its factory is listed below, and its arguments are the config.
"""

from fovea.models.encoders.base import Encoder, embed_dtype
from fovea.models.encoders.clip import (
    ClipEncoder,
    alpha_clip,
    open_clip,
    open_clip_from_config,
    tiny_clip,
)
from fovea.models.encoders.internvl import InternVLEncoder, internvl, internvl_from_config
from fovea.models.encoders.siglip import SiglipEncoder, siglip, siglip_from_config
from fovea.models.encoders.visualized_bge import (
    VisualizedBge,
    visualized_bge,
    visualized_bge_from_config,
)

__all__ = [
    "ClipEncoder",
    "Encoder",
    "InternVLEncoder",
    "SiglipEncoder",
    "VisualizedBge",
    "alpha_clip",
    "embed_dtype",
    "internvl",
    "internvl_from_config",
    "open_clip",
    "open_clip_from_config",
    "siglip",
    "siglip_from_config",
    "tiny_clip",
    "visualized_bge",
    "visualized_bge_from_config",
]
