"""Bytes → pixels: one decoder, one policy, and the joint image + mask transform."""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

from fovea.bad_images import BadImageLog, bad_line
from fovea.types import BoolArray, FloatArray, UInt8Array

if TYPE_CHECKING:  # imported where it is used: preparing data and proposing masks need no torch
    from torch import Tensor

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

MAX_PIXELS = 178_956_970  # Pillow's own refusal: twice Image.MAX_IMAGE_PIXELS (a 512 MB RGB image)
# Raster formats only: Pillow would hand an EPS to Ghostscript, and data comes from strangers. JPEG opens MPO.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "AVIF", "TIFF", "BMP", "PPM", "JPEG2000", "ICO")
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadImage(ValueError):
    """Bytes that are no usable image.

    Attributes:
        reason: what is wrong, without id or path.
        missing: there are no bytes at all (no such file), as against bytes that do not decode.
    """

    def __init__(self, reason: str, *, where: str = "", missing: bool = False) -> None:
        super().__init__(f"{where}: {reason}" if where else reason)
        self.reason = reason
        self.missing = missing


@dataclass(frozen=True)
class Decoded:
    """One decoded image.

    Attributes:
        pixels: uint8 [H, W, 3], RGB, EXIF-upright.
        orientation: the EXIF orientation 1–8 that was undone; 1 when there was none.
        stored_size: (height, width) as stored in the file, before it was turned upright.
    """

    pixels: UInt8Array
    orientation: int
    stored_size: tuple[int, int]


def decode(data: bytes, *, max_pixels: int = MAX_PIXELS) -> UInt8Array:
    """Image file → uint8 [H, W, 3], RGB, EXIF-upright; read-only, to save a copy.

    Every mode becomes RGB: transparent pixels are laid over white, deep grey is scaled (see
    `_grey_to_8_bit`), of an animation or a multi-page file the first frame counts. An unreadable EXIF block
    means "no rotation": the pixels are good.

    Args:
        data: the bytes of the file; its name plays no part, so a wrong extension does no harm.
        max_pixels: refuse a larger image before its pixels are unpacked. Pillow's own limit holds as well.

    Raises:
        BadImage: the bytes are empty, no image, truncated, corrupt or too large.
    """
    return decode_with_orientation(data, max_pixels=max_pixels).pixels


def decode_with_orientation(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Decoded:
    """As `decode`, and says how the file was turned: for annotations made on the pixels as stored."""
    if not data:
        raise BadImage("the file is empty (0 bytes)")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > max_pixels:
                raise BadImage(
                    f"{image.width}×{image.height} pixels are more than the cap of {max_pixels:,}; "
                    "scale the file down or raise max_pixels"
                )
            # Pillow turns a TIFF upright while it loads and drops the tag; others keep it. Asking a PNG for
            # its EXIF loads the pixels, whose errors must not pass for a broken EXIF block: load first.
            before = _orientation(image) if image.format == "TIFF" else None
            image.load()
            orientation = before or _orientation(image)
            turned = image if before or orientation == 1 else image.transpose(_UPRIGHT[orientation])
            pixels = np.asarray(_to_rgb(turned))
    except BadImage:
        raise
    except UnidentifiedImageError as error:
        raise BadImage(
            f"no image in a known format ({', '.join(FORMATS)}); it begins with {data[:12]!r}"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # Pillow's plugins raise a dozen types on corrupt bytes: a bad file
        raise BadImage(f"{type(error).__name__}: {error}") from error
    height, width = pixels.shape[:2]
    return Decoded(pixels, orientation, (width, height) if orientation >= 5 else (height, width))


def _orientation(image: Image.Image) -> int:
    try:
        value = int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # corrupt EXIF beside good pixels: cameras and editors write such files
        return 1
    return value if value in _UPRIGHT else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_grey_to_8_bit(np.asarray(image), image.mode)).convert("RGB")
    if image.has_transparency_data:
        rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def _grey_to_8_bit(values: np.ndarray[Any, Any], mode: str) -> UInt8Array:
    """Grey of 16 or 32 bits → 0..255.

    White is 65535 for 16-bit values and for 32-bit integers that fit, 1.0 for floats in [0, 1]. Other 32-bit
    values have no white point and are stretched from their minimum to their maximum.
    """
    deep = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = 0.0, 1.0 if mode == "F" else 65535.0
    if deep.size and (deep.min() < low or deep.max() > high):
        low, high = float(deep.min()), float(deep.max())
    scaled: UInt8Array = np.round((deep - low) / (high - low) * 255).astype(np.uint8)
    return scaled


def _without_waiting(path: str, flags: int) -> int:
    """A pipe that nobody writes into would hold `open` for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


class ImageReader:
    """Reads the pixels that rows of an images table name, with one policy for bad files (PITFALLS 16, 18).

    Attributes:
        bad: (image id, reason) of every bad image met so far, once each, in order. Each process has its own
            list; `log` brings them together.
    """

    def __init__(
        self,
        tables_root: str | Path,
        *,
        policy: Literal["fail", "skip"] = "fail",
        max_pixels: int = MAX_PIXELS,
        log: BadImageLog | None = None,
    ) -> None:
        """Set up; no file is opened.

        Args:
            tables_root: directory of the canonical tables; relative paths start there.
            policy: what `read_many` does with a bad image: `fail` raises, `skip` leaves its row out.
            max_pixels: see `decode`.
            log: where every bad image is written down at once, for runs that read in several processes.
        """
        if policy not in ("fail", "skip"):
            raise ValueError(f"policy={policy!r}: one of 'fail', 'skip'")
        self.root = Path(tables_root)
        self.policy = policy
        self.max_pixels = max_pixels
        self.log = log
        self.bad: list[tuple[str, str]] = []
        self._known_bad: set[str] = set()

    def path(self, row: Mapping[str, Any]) -> Path:
        """The file that holds the row's bytes: absolute, or inside the tables' directory.

        Raises:
            ValueError: a relative path that leaves the directory (the table was tampered with or moved).
        """
        name: str = row["path"]
        inside = os.path.normpath(name)
        if not name or inside.split(os.sep)[0] == os.pardir:
            raise ValueError(
                f"image {row['id']}: path {name!r} in {self.root}/images.parquet leaves the tables' "
                "directory; name a file by its absolute path or put it inside"
            )
        return self.root / inside

    def bytes(self, row: Mapping[str, Any]) -> bytes:
        """The image file's bytes: the whole file, or the row's byte range of a tar shard or base64 row."""
        path = self.path(row)
        offset, size = row.get("offset", -1), row.get("size", -1)
        try:
            with open(path, "rb", opener=_without_waiting) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise BadImage("no regular file, but a pipe, socket or device")
                if offset >= 0:
                    file.seek(offset)
                data = file.read(size if offset >= 0 else -1)
        except FileNotFoundError as error:
            raise BadImage("no such file", missing=True) from error
        except OSError as error:
            raise BadImage(f"cannot be read: {error.strerror or error}") from error
        if offset >= 0 and len(data) != size:
            raise BadImage(f"the shard ends after {len(data)} of the {size} bytes from offset {offset}")
        encoding = row.get("encoding") or ""
        if encoding == "base64":
            try:
                return base64.b64decode(data, validate=True)
            except binascii.Error as error:
                raise BadImage(f"no base64 text at offset {offset}: {error}") from error
        if encoding:
            raise ValueError(f"image {row['id']}: encoding {encoding!r}; it must be '' or 'base64'")
        return data

    def digest(self, row: Mapping[str, Any]) -> str:
        """blake2b (16 bytes, hex) of the image file's bytes: what names its pixels, whatever its id or path.

        Raises:
            BadImage: there are no bytes.
        """
        return blake2b(self.bytes(row), digest_size=16).hexdigest()

    def decode(self, row: Mapping[str, Any]) -> Decoded:
        """Pixels and EXIF orientation of one row; records a bad image in `bad` and raises BadImage."""
        try:
            return decode_with_orientation(self.bytes(row), max_pixels=self.max_pixels)
        except BadImage as error:
            if row["id"] not in self._known_bad:  # every epoch meets it again
                self._known_bad.add(row["id"])
                self.bad.append((row["id"], error.reason))
                if self.log is not None:
                    self.log.add(row["id"], error.reason)
            where = f"image {row['id']} ({self.path(row)})"
            raise BadImage(error.reason, where=where, missing=error.missing) from error

    def read(self, row: Mapping[str, Any]) -> UInt8Array:
        """uint8 [H, W, 3] of a row; a bad image is recorded in `bad` and raises BadImage under any policy."""
        return self.decode(row).pixels

    def read_many(self, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], UInt8Array]]:
        """(row, pixels) of every row in order; under `skip` bad images are left out (and stand in `bad`)."""
        for row in rows:
            try:
                pixels = self.read(row)
            except BadImage:
                if self.policy == "fail":
                    raise
                continue
            yield row, pixels

    def write_bad(self, path: str | Path) -> None:
        """Write `bad` as JSONL rows {"id", "reason"}; an empty file says that all images were good."""
        Path(path).write_text("".join(map(bad_line, self.bad)))


@dataclass(frozen=True)
class ImageTransform:
    """The one geometric transform that image and masks go through together (PITFALLS 14).

    Attributes:
        size: side S of the square output, pixels.
        mode: `squash` resizes both sides to S (the paper's "resized to 336×336"; nothing is cut off); `pad`
            keeps the aspect ratio and pads with zeros; `crop` resizes the shorter side and cuts the centre.
        mean: per-channel mean of [0, 1] pixels.
        std: per-channel standard deviation of [0, 1] pixels.
        resample: how pixels are interpolated; what the model was trained with (SigLIP 2: bilinear).
    """

    size: int
    mode: Literal["squash", "pad", "crop"] = "squash"
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD
    resample: Literal["bicubic", "bilinear"] = "bicubic"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"image_size={self.size} of an encoder must be at least 1 pixel")

    def __call__(self, image: UInt8Array, masks: BoolArray | None = None) -> tuple[UInt8Array, UInt8Array]:
        """Resize one image and its masks alike.

        Args:
            image: uint8 [H, W, 3].
            masks: bool [T, H, W], or None for no mask.

        Returns:
            uint8 [S, S, 3] and uint8 [T, S, S] of 0/1 ([0, S, S] when `masks` is None).
        """
        height, width = image.shape[:2]
        count = 0 if masks is None else len(masks)
        if masks is not None and masks.shape[1:] != (height, width):
            raise ValueError(
                f"masks of {masks.shape[1:]} pixels for an image of {(height, width)}: same size needed"
            )
        if (height, width) == (self.size, self.size):
            same = np.zeros((0, height, width), np.uint8) if masks is None else masks.astype(np.uint8)
            return image.copy(), same  # the caller may own it: decoded pixels are read-only
        box, target, offset = self._geometry(width, height)
        pixels = np.zeros((self.size, self.size, 3), np.uint8)
        out = np.zeros((count, self.size, self.size), np.uint8)
        x, y = offset
        resample = Image.Resampling[self.resample.upper()]
        resized = Image.fromarray(image).resize(target, resample, box=box)
        pixels[y : y + target[1], x : x + target[0]] = np.asarray(resized)
        window = np.s_[y : y + target[1], x : x + target[0]]
        for t in range(count):
            assert masks is not None
            out[t][window] = _resize_mask(masks[t], target, box)
        return pixels, out

    def _geometry(
        self, width: int, height: int
    ) -> tuple[tuple[float, float, float, float], tuple[int, int], tuple[int, int]]:
        """Source box (pixels of the original), target size (w, h) and its offset (x, y) in the output."""
        side = self.size
        if self.mode == "squash":
            return (0, 0, width, height), (side, side), (0, 0)
        if self.mode == "pad":
            scale = side / max(width, height)
            w, h = max(1, round(width * scale)), max(1, round(height * scale))
            return (0, 0, width, height), (w, h), ((side - w) // 2, (side - h) // 2)
        short = min(width, height)
        left, top = (width - short) / 2, (height - short) / 2
        return (left, top, left + short, top + short), (side, side), (0, 0)

    def back(self, grid: FloatArray, height: int, width: int) -> FloatArray:
        """A map over the square output → a map over the original, smoothly; the way back of this transform.

        Args:
            grid: float [g, g], any resolution g, e.g. one value a patch.
            height: H of the original, pixels.
            width: W of the original, pixels.

        Returns:
            float32 [H, W]; NaN where `crop` cut the original off.
        """
        (left, top, right, bottom), (w, h), (x, y) = self._geometry(width, height)
        unit = len(grid) / self.size
        size = max(1, round(right - left)), max(1, round(bottom - top))
        across, down = _positions(x, w, size[0], unit), _positions(y, h, size[1], unit)
        whole = _between(_between(grid, down).T, across).T
        out = np.full((height, width), np.nan, np.float32)
        out[int(top) : int(top) + size[1], int(left) : int(left) + size[0]] = whole
        return out

    @property
    def mean_pixel(self) -> tuple[int, int, int]:
        """The colour that `normalise` turns into zeros, as uint8."""
        red, green, blue = (round(255 * mean) for mean in self.mean)
        return red, green, blue

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 [B, S, S, 3] → float32 [B, 3, S, S], mean and standard deviation applied."""
        import torch

        mean = torch.tensor(self.mean, device=pixels.device) * 255
        std = torch.tensor(self.std, device=pixels.device) * 255
        return ((pixels.float() - mean) / std).permute(0, 3, 1, 2).contiguous()


def _positions(start: int, length: int, count: int, unit: float) -> FloatArray:
    """Where `count` pixels over [start, start + length) lie between the centres of cells `unit` a pixel wide.

    Clipped to the cells whose centre is inside: the others saw more of the padding than of the image.
    """
    at = (start + (np.arange(count) + 0.5) / count * length) * unit - 0.5
    first, last = np.ceil(start * unit - 0.5), np.floor((start + length) * unit - 0.5)
    middle = (start + length / 2) * unit - 0.5
    clipped: FloatArray = np.clip(at, first, last) if first <= last else np.full_like(at, round(middle))
    return np.maximum(clipped, 0)


def _between(grid: FloatArray, at: FloatArray) -> FloatArray:
    """Rows of a grid at fractional positions, linearly between neighbours."""
    lower = np.minimum(np.floor(at).astype(np.int64), len(grid) - 1)
    upper = np.minimum(lower + 1, len(grid) - 1)
    share = (at - lower)[:, None]
    out: FloatArray = (grid[lower] * (1 - share) + grid[upper] * share).astype(np.float32)
    return out


def _resize_mask(
    mask: BoolArray, target: tuple[int, int], box: tuple[float, float, float, float]
) -> UInt8Array:
    """0/1 where half of the output pixel is covered: the object neither grows nor shifts.

    An object too small for that keeps its best covered pixels, so that a region never loses its alpha
    (unless it lies outside `box`).
    """
    soft = Image.fromarray(mask.astype(np.uint8) * 255).resize(target, Image.Resampling.BOX, box=box)
    hard = (np.asarray(soft) >= 128).astype(np.uint8)
    if hard.any() or not mask.any():
        return hard
    exact = Image.fromarray(mask.astype(np.float32)).resize(target, Image.Resampling.BOX, box=box)
    cover = np.asarray(exact)
    best: UInt8Array = ((cover >= cover.max()) & (cover > 0)).astype(np.uint8)
    return best
