"""One decoder for whatever users have, one policy for what is no image, one transform for image and masks."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from fovea import masks
from fovea.images import BadImage, ImageReader, ImageTransform, decode, decode_with_orientation

ORIENTATIONS = range(1, 9)


def _scene(height: int = 40, width: int = 60) -> np.ndarray[Any, Any]:
    """Red blob top left, blue below, on grey: no symmetry, so each wrong turn shows."""
    scene = np.full((height, width, 3), 120, np.uint8)
    scene[4:14, 6:26] = (220, 20, 20)
    scene[28:36, 4:10] = (20, 20, 220)
    return scene


def _bytes(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def _exif(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def stored(pixels: np.ndarray[Any, Any], orientation: int) -> np.ndarray[Any, Any]:
    """The pixels a camera would store so that `orientation` turns them back into `pixels` [H, W, …].

    The inverse of each turn: 6 and 8 are each other's, all others are their own.
    """
    inverse = {6: 8, 8: 6}.get(orientation, orientation)
    moved = np.moveaxis(pixels, -1, 0) if pixels.ndim == 3 else pixels
    turned = masks.orient_masks(moved, inverse)
    return np.moveaxis(turned, 0, -1) if pixels.ndim == 3 else turned


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_undone(kind: str, orientation: int) -> None:
    """All 8 EXIF orientations, in each format that carries them, decode to the same upright picture.

    Stored pixels come from numpy turns of our own, so Pillow's table is checked against an independent one.
    TIFF counts separately because Pillow turns it while loading: applying the tag again would turn it twice.
    """
    scene = _scene()
    options = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}.get(kind, {})
    data = _bytes(Image.fromarray(stored(scene, orientation)), kind, exif=_exif(orientation), **options)
    result = decode_with_orientation(data)
    assert result.pixels.shape == scene.shape and result.orientation == orientation
    assert result.stored_size == ((40, 60) if orientation < 5 else (60, 40))
    assert np.abs(result.pixels.astype(int) - scene).mean() <= (1 if kind == "JPEG" else 0)


@pytest.mark.parametrize("value", [0, 9, 255])
def test_an_invalid_orientation_means_upright(value: int) -> None:
    """Tags outside 1–8 exist in the wild and turn nothing."""
    data = _bytes(Image.fromarray(_scene()), "PNG", exif=_exif(value))
    assert np.array_equal(decode(data), _scene())


_GARBAGE = [b"", b"that is no TIFF", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\0\x09"]


@pytest.mark.parametrize("garbage", _GARBAGE)
def test_corrupt_exif_beside_good_pixels(garbage: bytes) -> None:
    """A broken EXIF block does not cost the image."""
    data = _bytes(Image.fromarray(_scene()), "JPEG")
    block = b"Exif\0\0" + garbage
    app1 = b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block
    assert decode(data[:2] + app1 + data[2:]).shape == (40, 60, 3)


def _modes() -> dict[str, tuple[Image.Image, str, tuple[int, int, int]]]:
    """name → (image of one colour, file format, the RGB we expect)."""
    palette = Image.new("P", (4, 3), 1)
    palette.putpalette([0, 0, 0, 10, 200, 30])
    return {
        "RGB": (Image.new("RGB", (4, 3), (10, 200, 30)), "PNG", (10, 200, 30)),
        "L": (Image.new("L", (4, 3), 77), "PNG", (77, 77, 77)),
        "1": (Image.new("1", (4, 3), 1), "PNG", (255, 255, 255)),
        "P": (palette, "PNG", (10, 200, 30)),
        "P GIF": (palette, "GIF", (10, 200, 30)),
        "RGBA opaque": (Image.new("RGBA", (4, 3), (10, 200, 30, 255)), "PNG", (10, 200, 30)),
        # Laid over white: half of red plus half of white.
        "RGBA half": (Image.new("RGBA", (4, 3), (255, 0, 0, 127)), "PNG", (255, 128, 128)),
        "RGBA clear": (Image.new("RGBA", (4, 3), (0, 0, 0, 0)), "PNG", (255, 255, 255)),
        "RGBA clear WebP": (Image.new("RGBA", (4, 3), (0, 0, 0, 0)), "WEBP", (255, 255, 255)),
        "RGBA clear TIFF": (Image.new("RGBA", (4, 3), (0, 0, 0, 0)), "TIFF", (255, 255, 255)),
        "LA half": (Image.new("LA", (4, 3), (0, 127)), "PNG", (128, 128, 128)),
        "CMYK JPEG": (Image.new("CMYK", (4, 3), (0, 255, 255, 0)), "JPEG", (255, 0, 0)),
        "CMYK TIFF": (Image.new("CMYK", (4, 3), (0, 255, 255, 0)), "TIFF", (255, 0, 0)),
        "YCbCr TIFF": (Image.new("RGB", (4, 3), (255, 0, 0)).convert("YCbCr"), "TIFF", (254, 0, 0)),
        "I;16 PNG": (Image.fromarray(np.full((3, 4), 32768, np.uint16)), "PNG", (128, 128, 128)),
        "I;16B TIFF": (Image.fromarray(np.full((3, 4), 32768, ">u2")), "TIFF", (128, 128, 128)),
        "I;16 TIFF": (Image.fromarray(np.full((3, 4), 65535, np.uint16)), "TIFF", (255, 255, 255)),
        "I TIFF": (Image.fromarray(np.full((3, 4), 32768, np.int32)), "TIFF", (128, 128, 128)),
        "F TIFF": (Image.fromarray(np.full((3, 4), 0.5, np.float32)), "TIFF", (128, 128, 128)),
        "F NaN TIFF": (Image.fromarray(np.full((3, 4), np.nan, np.float32)), "TIFF", (0, 0, 0)),
        "BMP": (Image.new("RGB", (4, 3), (10, 200, 30)), "BMP", (10, 200, 30)),
        "PPM": (Image.new("RGB", (4, 3), (10, 200, 30)), "PPM", (10, 200, 30)),
        "1×1": (Image.new("RGB", (1, 1), (10, 200, 30)), "PNG", (10, 200, 30)),
    }


@pytest.mark.parametrize("name", _modes())
def test_every_mode_becomes_rgb(name: str) -> None:
    """Each mode that Pillow opens gives uint8 [H, W, 3] of the colour it shows on white."""
    image, kind, expected = _modes()[name]
    options = {"quality": 100, "subsampling": 0} if kind == "JPEG" else {}
    pixels = decode(_bytes(image, kind, **options))
    assert pixels.dtype == np.uint8 and pixels.shape == (image.height, image.width, 3)
    assert np.abs(pixels.astype(int) - expected).max() <= 1


def test_cmyk_as_photo_editors_write_it() -> None:
    """JPEG holds ink inverted: with Adobe's mark, without it, and as YCCK, which Pillow cannot write."""
    ink = (0, 255, 255, 0)  # magenta and yellow: red
    data = _bytes(Image.new("CMYK", (16, 8), ink), "JPEG", quality=100)
    mark = data.index(b"Adobe")
    unmarked = data[: mark - 4] + data[mark + 12 :]
    luma = Image.new("RGB", (1, 1), ink[:3]).convert("YCbCr").getpixel((0, 0))
    inverted = (*(255 - value for value in luma), ink[3])
    ycck = bytearray(_bytes(Image.new("CMYK", (16, 8), inverted), "JPEG", quality=100))
    ycck[ycck.index(b"Adobe") + 11] = 2  # the mark's colour transform
    for file in (data, unmarked, bytes(ycck)):
        with Image.open(io.BytesIO(file)) as image:
            assert image.mode == "CMYK"
        assert np.abs(decode(file).astype(int) - (255, 0, 0)).max() <= 2


@pytest.mark.parametrize("mode,clear", [("P", 0), ("L", 0), ("RGB", (0, 0, 0)), ("1", 0)])
def test_a_transparent_colour_shows_white(mode: str, clear: Any) -> None:
    """PNG's tRNS names one colour as transparent, in every mode: palette, grey, RGB, bilevel."""
    image = Image.new(mode, (4, 3), 1 if mode != "RGB" else (10, 200, 30))
    if mode == "P":
        image.putpalette([0, 0, 0, 10, 200, 30])
    image.putpixel((0, 0), clear)
    pixels = decode(_bytes(image, "PNG", transparency=clear))
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[0, 1].tolist() != [0, 0, 0] and pixels[2, 3].tolist() == pixels[0, 1].tolist()


def test_palette_with_half_transparent_entries() -> None:
    """A palette may carry an alpha for each entry; half-clear green over white is light green."""
    image = Image.new("P", (4, 3), 1)
    image.putpalette([0, 0, 0, 0, 255, 0])
    pixels = decode(_bytes(image, "PNG", transparency=bytes([0, 127])))
    assert np.abs(pixels[0, 0].astype(int) - (128, 255, 128)).max() <= 1


def test_sixteen_bit_grey_keeps_its_order() -> None:
    """A 16-bit ramp stays a ramp: no wrap-around at 256, no clipping to white."""
    ramp = np.linspace(0, 65535, 64).astype(np.uint16)[None].repeat(2, 0)
    pixels = decode(_bytes(Image.fromarray(ramp), "PNG"))[0, :, 0]
    assert pixels[0] == 0 and pixels[-1] == 255 and (np.diff(pixels.astype(int)) > 0).all()


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP", "PNG"])
def test_of_many_frames_the_first_counts(kind: str) -> None:
    """Animations and multi-page files decode to their first frame."""
    first, second = Image.new("RGB", (8, 6), (255, 0, 0)), Image.new("RGB", (8, 6), (0, 0, 255))
    data = _bytes(first, kind, save_all=True, append_images=[second])
    assert np.abs(decode(data)[3, 3].astype(int) - (255, 0, 0)).max() <= 2


def test_animation_with_clear_and_small_frames() -> None:
    """A GIF's first frame shows white where it is clear; a later, smaller frame plays no part."""
    first = Image.new("P", (8, 6), 1)
    first.putpalette([0, 0, 0, 255, 0, 0])
    first.putpixel((0, 0), 0)
    second = Image.new("P", (8, 6), 1)
    second.putpalette([0, 0, 0, 0, 0, 255])
    pixels = decode(_bytes(first, "GIF", save_all=True, append_images=[second], transparency=0, loop=0))
    assert pixels[0, 0].tolist() == [255, 255, 255] and pixels[3, 3].tolist() == [255, 0, 0]


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow was built without AVIF")
def test_avif() -> None:
    """AVIF decodes where Pillow has it."""
    assert (
        np.abs(
            decode(_bytes(Image.new("RGB", (32, 16), (200, 40, 40)), "AVIF")).astype(int) - (200, 40, 40)
        ).max()
        < 12
    )


@pytest.mark.parametrize("size", [(20_000, 3), (3, 20_000), (3000, 2), (1, 1)])
def test_extreme_shapes(size: tuple[int, int]) -> None:
    """Very wide, very tall and single-pixel images decode, and go through every transform."""
    pixels = decode(_bytes(Image.new("RGB", size, (9, 9, 9)), "PNG"))
    assert pixels.shape == (size[1], size[0], 3)
    full = np.ones((1, size[1], size[0]), bool)
    for mode in ("squash", "pad", "crop"):
        image, alpha = ImageTransform(16, mode)(pixels, full)  # type: ignore[arg-type]
        assert image.shape == (16, 16, 3) and alpha.any()


def _png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds one row of nothing."""
    data = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for name, body in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(100)))):
        data += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    return data


_JPEG = _bytes(Image.fromarray(_scene(200, 300)), "JPEG")
_PNG = _bytes(Image.fromarray(_scene(200, 300)), "PNG")
_NOISE = _bytes(Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 90, 3), np.uint8)), "PNG")
_WEBP = _bytes(Image.fromarray(_scene(200, 300)), "WEBP")
_BAD = {
    "zero bytes": (b"", "empty"),
    "text": (b"this is a text file\n" * 9, "no image in a known format"),
    "html error page": (b"<!DOCTYPE html><html>404</html>", "no image in a known format"),
    "magic only": (b"\xff\xd8\xff", "."),
    "truncated JPEG": (_JPEG[: len(_JPEG) // 2], "truncated"),
    "truncated PNG": (_PNG[: len(_PNG) // 2], "."),
    "truncated WebP": (_WEBP[: len(_WEBP) // 2], "."),
    "PNG with a hole": (_NOISE[:9000] + bytes(2000) + _NOISE[11000:], "broken data stream"),
    "bomb: header of 50,000 × 50,000": (_png_header(50_000, 50_000), "(?i)bomb"),
    "bomb: just above Pillow's limit": (_png_header(13_378, 13_378), "178970884 pixels"),
    "EPS (would run Ghostscript)": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "no image in a known",
    ),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', "no image in a known format"),
    "null bytes": (bytes(5000), "no image in a known format"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", _BAD)
def test_what_is_no_image_says_why(name: str) -> None:
    """Each kind of bad file raises BadImage with a reason, never another type, never half an image."""
    data, reason = _BAD[name]
    with pytest.raises(BadImage, match=reason) as caught:
        decode(data)
    assert caught.value.reason and not caught.value.missing


def test_the_cap_is_checked_before_the_pixels_are_unpacked() -> None:
    """A cap of 1,000 pixels refuses a 40 × 60 image and names both numbers."""
    data = _bytes(Image.fromarray(_scene()), "PNG")
    with pytest.raises(BadImage, match=r"60×40 pixels.*2,399"):
        decode(data, max_pixels=2399)
    assert decode(data, max_pixels=2400).shape == (40, 60, 3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "ICO", "JPEG2000"])
def test_no_prefix_and_no_flipped_byte_escapes_as_another_error(kind: str) -> None:
    """Cut or damaged at each of 60 places, a file decodes or raises BadImage, and nothing else."""
    data = _bytes(Image.fromarray(_scene()), kind)
    broken = 0
    for position in range(0, len(data), max(1, len(data) // 60)):
        flipped = bytearray(data)
        flipped[position] ^= 0xFF
        for damaged in (data[:position], bytes(flipped)):
            try:
                assert decode(damaged).dtype == np.uint8
            except BadImage:
                broken += 1
    assert broken >= 40


def _row(path: str, **more: Any) -> dict[str, Any]:
    return {"id": path, "path": path, "offset": -1, "size": -1} | more


def test_reader_reads_files_and_tar_ranges(tmp_path: Path) -> None:
    """Relative path, absolute path and byte range give the same pixels; the extension plays no part."""
    data = _bytes(Image.fromarray(_scene()), "PNG")
    (tmp_path / "WRONG.JPG").write_bytes(data)
    (tmp_path / "shard.tar").write_bytes(b"x" * 512 + data + b"y" * 100)
    reader = ImageReader(tmp_path)
    for row in (
        _row("WRONG.JPG"),
        _row(str(tmp_path / "WRONG.JPG")),
        _row("a/../WRONG.JPG"),
        _row("shard.tar", offset=512, size=len(data)),
    ):
        assert np.array_equal(reader.read(row), _scene())
    assert reader.bad == []


@pytest.mark.parametrize("name", ["photo.JPG", "photo.png", "photo.Jpeg", "photo.gif", "photo", "photo.txt"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_names_play_no_part(tmp_path: Path, name: str, kind: str) -> None:
    """Upper-case, wrong or no extension: content decides; a text file is named, whatever it is called."""
    (tmp_path / name).write_bytes(_bytes(Image.fromarray(_scene()), kind))
    assert ImageReader(tmp_path).read(_row(name)).shape == (40, 60, 3)
    (tmp_path / name).write_text("I am a text file")
    with pytest.raises(BadImage, match=rf"image {name} \(.*no image in a known format"):
        ImageReader(tmp_path).read(_row(name))


def test_base64_rows_and_digests(tmp_path: Path) -> None:
    """A row of base64 text gives the file's own bytes and digest; broken text is a bad image, not garbage."""
    data = _bytes(Image.fromarray(_scene()), "PNG")
    text = base64.b64encode(data)
    (tmp_path / "x.png").write_bytes(data)
    (tmp_path / "imgs.tsv").write_bytes(b"30000000\t" + text + b"\n")
    reader = ImageReader(tmp_path, policy="skip")
    row = _row("imgs.tsv", offset=9, size=len(text), encoding="base64")
    assert reader.bytes(row) == data and np.array_equal(reader.read(row), _scene())
    assert reader.digest(row) == reader.digest(_row("x.png")) == blake2b(data, digest_size=16).hexdigest()
    for offset, size in ((8, len(text)), (9, len(text) + 1), (9, len(text) - 1), (10, len(text))):
        with pytest.raises(BadImage, match="base64|shard ends"):
            reader.read(_row("imgs.tsv", offset=offset, size=size, encoding="base64"))
    with pytest.raises(ValueError, match="encoding 'zip'"):
        reader.read(row | {"encoding": "zip"})


@pytest.mark.parametrize("path", ["../secret.png", "a/../../secret.png", "..", ""])
def test_reader_refuses_to_leave_the_tables(tmp_path: Path, path: str) -> None:
    """A relative path that climbs out of the tables' directory is an error under either policy."""
    (tmp_path / "secret.png").write_bytes(_bytes(Image.fromarray(_scene()), "PNG"))
    (tmp_path / "tables").mkdir()
    for policy in ("fail", "skip"):
        with pytest.raises(ValueError, match="leaves the tables' directory"):
            ImageReader(tmp_path / "tables", policy=policy).read(_row(path))  # type: ignore[arg-type]


def test_policy(tmp_path: Path) -> None:
    """`skip` leaves bad rows out, keeps ids with their pixels, lists every reason; `fail` names the file."""
    (tmp_path / "good.png").write_bytes(_bytes(Image.fromarray(_scene()), "PNG"))
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "shard.tar").write_bytes(b"x" * 10)
    good = [_row("good.png", id=name) for name in ("first", "last")]
    rows = [good[0], _row("empty.jpg"), _row("gone.jpg"), _row("shard.tar", offset=5, size=9), good[1]]
    reader = ImageReader(tmp_path, policy="skip")
    read = list(reader.read_many(rows))
    assert [row["id"] for row, _ in read] == ["first", "last"]
    assert all(np.array_equal(pixels, _scene()) for _, pixels in read)
    assert [image_id for image_id, _ in reader.bad] == ["empty.jpg", "gone.jpg", "shard.tar"]
    reader.write_bad(tmp_path / "bad_images.jsonl")
    listed = [json.loads(line) for line in (tmp_path / "bad_images.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in listed] == [
        "the file is empty (0 bytes)", "no such file", "the shard ends after 5 of the 9 bytes from offset 5",
    ]  # fmt: skip
    strict = ImageReader(tmp_path)
    with pytest.raises(BadImage, match=r"image empty\.jpg \(.*empty\.jpg\): the file is empty"):
        list(strict.read_many(rows))
    with pytest.raises(BadImage) as caught:
        strict.read(_row("gone.jpg"))
    assert caught.value.missing
    with pytest.raises(ValueError, match="policy='ignore'"):
        ImageReader(tmp_path, policy="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["squash", "pad", "crop"])
@pytest.mark.parametrize("shape", [(40, 80), (80, 40), (50, 50), (33, 117)])
def test_image_and_mask_share_one_geometry(mode: str, shape: tuple[int, int]) -> None:
    """The mask of a white square lands on it, at the centre and at the edge, in every mode (PITFALLS 14)."""
    height, width = shape
    for top, left in ((height // 2 - 6, width // 2 - 6), (height - 12, width - 12)):
        image, mask = np.zeros((height, width, 3), np.uint8), np.zeros((1, height, width), bool)
        image[top : top + 12, left : left + 12] = 255
        mask[0, top : top + 12, left : left + 12] = True
        pixels, alpha = ImageTransform(48, mode)(image, mask)  # type: ignore[arg-type]
        white = pixels[..., 0] > 127
        both, either = (white & (alpha[0] > 0)).sum(), (white | (alpha[0] > 0)).sum()
        assert either == 0 or both / either > 0.8
        assert set(np.unique(alpha)) <= {0, 1}


def test_a_small_region_keeps_its_alpha() -> None:
    """A 3 × 3 object in 640 × 480 covers 3 % of a pixel of 32 × 32: it keeps its best pixel, in place."""
    mask = np.zeros((2, 480, 640), bool)
    mask[0, 100:103, 50:53] = True  # 100 / 15 = row 6, 50 / 20 = column 2
    _, alpha = ImageTransform(32)(np.zeros((480, 640, 3), np.uint8), mask)
    assert np.argwhere(alpha[0]).tolist() == [[6, 2]]
    assert not alpha[1].any()


def test_real_photos_equal_plain_pillow(shared_data: Path) -> None:
    """On ordinary JPEGs the decoder returns what Pillow's own RGB conversion does, byte for byte."""
    for path in sorted((shared_data / "photos").rglob("*.jpg"))[::20]:
        assert np.array_equal(decode(path.read_bytes()), np.asarray(Image.open(path).convert("RGB")))
