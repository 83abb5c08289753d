"""Pictures that mean harm, and servers of pictures that do: one clear error each, and the next one is fine.

Nothing leaves this machine: names are made up, and one loopback address counts as a public one.
"""
import asyncio
import base64
import io
import os
import random
import struct
import time
import warnings
import zlib

import numpy as np
import pytest
from picture_server import ENDLESS_KINDS, NAMES, PNG, SLOW_KINDS, picture, pretend, save, serve_pictures
from PIL import Image

from minengine.multimodal import image as image_module
from minengine.multimodal import media
from minengine.multimodal.image import MediaLimits, image_hash, load_image
from minengine.multimodal.media import MAX_FETCHES, MediaConnector, MediaError, is_public

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")   # Pillow comments on what it then refuses


def pixels(image) -> np.ndarray: return np.asarray(image)


def fails(function, *words):
    "The message of the `ValueError` that `function` must raise; every word must be in it, and nothing long."
    with pytest.raises(ValueError) as caught: function()
    message = str(caught.value)
    assert len(message) < 400, message
    for word in words: assert word in message, message
    return message


def chunk(kind, data): return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, raw=b"", depth=8, color=2, extra=b""):
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


def data_url(data, kind="image/png"): return f"data:{kind};base64," + base64.b64encode(data).decode()


# Files

FORMATS = [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("GIF", {}), ("JPEG", {}),
           ("JPEG", {"progressive": True}), ("WEBP", {"lossless": True}), ("WEBP", {}), ("AVIF", {})]
formats = pytest.mark.parametrize("format,options", FORMATS, ids=lambda x: x if isinstance(x, str) else "-".join(x))


def need(format):
    Image.init()
    if format not in Image.SAVE: pytest.skip(f"this Pillow writes no {format}")


@formats
def test_every_truncation(format, options):
    "Cut anywhere, a file is refused, unless every pixel is there (a PNG without its last words)."
    need(format)
    data = save(picture(), format, **options)
    whole = load_image(data).tobytes()
    for n in range(len(data)):
        try: got = load_image(data[:n])
        except ValueError as error: assert str(error).startswith("image "), error
        else: assert got.tobytes() == whole and n > len(data) - 24, n


@formats
def test_changed_bytes(format, options):
    "Whatever a file holds, a decoder's own kinds of errors stay inside."
    need(format)
    data, rng = save(picture(), format, **options), random.Random(0)
    for _ in range(300):
        broken = bytearray(data)
        for _ in range(rng.choice([1, 2, 5, 20])):
            broken[rng.randrange(min(len(broken), rng.choice([40, 200, 10_000])))] = rng.randrange(256)
        try: assert load_image(bytes(broken)).mode == "RGB"
        except ValueError: pass
    assert load_image(data).mode == "RGB"


def test_empty_and_too_long():
    fails(lambda: load_image(b""), "0 bytes")
    fails(lambda: load_image(PNG, MediaLimits(max_bytes=100)), f"{len(PNG):,} bytes", "max_bytes is 100")


@pytest.mark.parametrize("size", [(0, 0), (0, 5), (5, 0)])
def test_zero_size(size):
    fails(lambda: load_image(png(*size)), "without pixels")
    fails(lambda: load_image(Image.new("RGB", size)), f"{size[0]} x {size[1]} pixels")
    fails(lambda: load_image(np.zeros((size[1], size[0], 3), np.uint8)), f"{size[0]} x {size[1]} pixels")


def test_pixel_bombs_are_not_decoded(monkeypatch):
    "50 000 x 50 000 is known from the header alone."
    monkeypatch.setattr(image_module, "to_rgb", lambda *args: pytest.fail("pixels were decoded"))
    fails(lambda: load_image(png(50_000, 50_000)), "50,000 x 50,000", "2,500,000,000", "max_pixels is 50,000,000")
    fails(lambda: load_image(png(2**31 - 1, 1)), "2,147,483,647 x 1")
    for format in ("GIF", "BMP", "JPEG", "WEBP"):
        data = bytearray(save(picture(), format, **({"lossless": True} if format == "WEBP" else {})))
        if format == "GIF": data[6:10] = struct.pack("<HH", 65535, 65535)
        if format == "BMP": data[18:26] = struct.pack("<ii", 50_000, 50_000)
        if format == "JPEG":
            at = data.index(b"\xff\xc0") + 5
            data[at:at + 4] = struct.pack(">HH", 65_000, 65_000)
        if format == "WEBP": data[21:25] = struct.pack("<I", 16_382 | 16_382 << 14)
        # Pillow has looked before us at some.
        message = fails(lambda: load_image(bytes(data)), "pixels")
        assert "max_pixels is 50,000,000" in message or "is too large" in message, message


def test_limits_are_checked():
    for name in ("max_bytes", "max_pixels", "max_request_bytes", "max_request_pixels"):
        with pytest.raises(ValueError, match=f"{name} must be"): MediaLimits(**{name: 0})
    with pytest.raises(ValueError, match="timeout_s"): MediaLimits(timeout_s=0)
    with pytest.raises(ValueError, match="max_redirects"): MediaLimits(max_redirects=-1)
    load_image(Image.new("RGB", (10, 10)), MediaLimits(max_pixels=100))
    fails(lambda: load_image(Image.new("RGB", (10, 11)), MediaLimits(max_pixels=100)), "110", "max_pixels is 100")
    fails(lambda: load_image(np.zeros((11, 10), np.uint8), MediaLimits(max_pixels=100)), "110", "max_pixels is 100")


def test_no_images():
    for data in (b"%PDF-1.7 and so on", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"\0" * 100, b"GIF", b"a"):
        fails(lambda: load_image(data), "none of PNG, JPEG", repr(data[:12]))
    # Formats that Pillow reads and we do not: one of them would run Ghostscript.
    fails(lambda: load_image(save(picture(), "EPS")), "none of PNG")
    fails(lambda: load_image(save(picture(), "ICNS")), "none of PNG")
    for thing in (None, 5, [1], {"url": "x"}, object()):
        fails(lambda: load_image(thing), "must be a PIL image", type(thing).__name__)


def test_first_frame_of_animations():
    frames = [picture(seed) for seed in range(3)]
    for format, options in [("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})]:
        data = save(frames[0], format, save_all=True, append_images=frames[1:], **options)
        with Image.open(io.BytesIO(data)) as image: assert image.n_frames == 3
        assert (pixels(load_image(data)) == pixels(frames[0])).all(), format


def test_cmyk():
    red = load_image(save(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF"))
    assert (pixels(red) == [255, 0, 0]).all()
    for format in ("JPEG", "TIFF"):
        image = picture().convert("CMYK")
        data = save(image, format, **({"quality": 100} if format == "JPEG" else {}))
        with Image.open(io.BytesIO(data)) as opened: assert opened.mode == "CMYK"
        assert abs(pixels(load_image(data)).mean() - pixels(picture()).mean()) < 40, format


def test_sixteen_bits():
    values = np.random.default_rng(0).integers(0, 2**16, (12, 16), dtype=np.uint16)
    high = (values >> 8).astype(np.uint8)
    for data in (save(Image.fromarray(values), "PNG"), save(Image.fromarray(values), "TIFF")):
        assert (pixels(load_image(data)) == high[..., None]).all()
    assert (pixels(load_image(values)) == high[..., None]).all()
    deep = png(2, 1, b"\0" + struct.pack(">6H", 0x1234, 0xffff, 0, 0xabcd, 1, 0x8000), depth=16)
    assert pixels(load_image(deep)).tolist() == [[[0x12, 0xff, 0], [0xab, 0, 0x80]]]
    # Grey, and one value means transparent.
    clear = png(2, 1, b"\0" + struct.pack(">2H", 1000, 2000), 16, 0, chunk(b"tRNS", struct.pack(">H", 1000)))
    assert pixels(load_image(clear))[0, :, 0].tolist() == [255, 2000 >> 8]
    assert pixels(load_image(Image.fromarray(np.array([[0, 65535]], np.int32)))).tolist() == [[[0] * 3, [255] * 3]]
    fails(lambda: load_image(Image.fromarray(np.array([[-1, 70000]], np.int32))), "from -1 to 70000", "0 to 255")
    assert pixels(load_image(Image.fromarray(np.array([[0, 0.5, 1]], np.float32))))[0, :, 0].tolist() == [0, 128, 255]
    fails(lambda: load_image(Image.fromarray(np.array([[0, 1.5]], np.float32))), "0.0 to 1.5", "from 0 to 1")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_rotation(format, orientation):
    "A picture with a red corner, stored in each of the eight ways: the corner is where its maker saw it."
    upright = Image.new("RGB", (64, 32), "blue")
    upright.paste("red", (0, 0, 16, 16))
    # How a camera stores what it must later turn by 2 … 8.
    undo = {1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
            4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90,
            7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_270}[orientation]
    stored = upright if undo is None else upright.transpose(undo)
    exif = Image.Exif()
    exif[0x0112] = orientation
    exact = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95, "subsampling": 0}}
    data = save(stored, format, exif=exif.tobytes(), **exact.get(format, {}))
    image = load_image(data)
    assert image.size == (64, 32) and np.abs(pixels(image).astype(int) - pixels(upright)).max() < 10
    assert load_image(image).tobytes() == image.tobytes(), "turned twice"
    with Image.open(io.BytesIO(data)) as opened:   # a caller's own image is turned as well, and is not changed
        if format != "TIFF": assert (load_image(opened).size, opened.size) == ((64, 32), stored.size)


def test_transparency_shows_white():
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, 3] = 0, 128, 255     # black: invisible, half, solid
    want = [[[255] * 3, [127] * 3, [0] * 3]]
    for source in (rgba, Image.fromarray(rgba), save(Image.fromarray(rgba)), save(Image.fromarray(rgba).convert("LA"))):
        assert pixels(load_image(source)).tolist() == want
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    for format in ("PNG", "GIF"):
        shown = load_image(save(palette, format, transparency=0))
        assert pixels(shown).tolist() == [[[255] * 3, [0, 0, 255]]], format
    assert load_image(save(palette, transparency=bytes([0, 255]))).getpixel((0, 0)) == (255, 255, 255)
    assert load_image(save(Image.new("RGB", (1, 1), "red"), transparency=(255, 0, 0))).getpixel((0, 0)) == (255,) * 3


def test_arrays():
    rng = np.random.default_rng(0)
    rgb = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert (pixels(load_image(rgb)) == rgb).all() and load_image(rgb).size == (7, 5)
    assert (pixels(load_image(rgb[..., 0])) == rgb[..., :1]).all()
    assert (pixels(load_image(rgb[..., :1])) == rgb[..., :1]).all()
    assert (pixels(load_image(rgb[:, ::-2])) == rgb[:, ::-2]).all(), "a view is not laid out as it looks"
    assert (pixels(load_image(rgb.astype(np.int64))) == rgb).all()
    assert (pixels(load_image(rgb / 255)) == rgb).all() and (pixels(load_image((rgb / 255).astype("f4"))) == rgb).all()
    assert pixels(load_image(np.array([[True, False]])))[0, :, 0].tolist() == [255, 0]
    for bad, words in [(np.zeros((3, 8, 8), np.uint8), ["[3, 8, 8]", "channels"]), (np.zeros(4), ["[4]"]),
                       (np.zeros((2, 2, 2), np.uint8), ["[2, 2, 2]"]), (np.full((2, 2), 256), ["256", "0 to 255"]),
                       (np.full((2, 2), -1), ["-1"]), (np.full((2, 2), 1.01), ["1.01", "0 to 1"]),
                       (np.full((2, 2), np.nan), ["nan"]), (np.full((2, 2), "a"), ["<U1"]),
                       (np.full((2, 2), 1j), ["complex128"])]:
        fails(lambda: load_image(bad), *words)


def test_result_is_pixels_alone():
    "Neither the file nor its remarks stay; nothing is shared with the caller."
    source = picture()
    source.info["comment"] = b"x" * 1000
    image = load_image(source)
    assert type(image) is Image.Image and image.info == {} and dict(image.getexif()) == {}
    array = np.zeros((4, 4, 3), np.uint8)
    for mine, change in [(source, lambda: source.paste("red", (0, 0, 16, 12))), (array, lambda: array.fill(255))]:
        image = load_image(mine)
        before = image.tobytes()
        change()
        assert image.tobytes() == before


def test_hash():
    "What is seen names an image: not its file, and not its bytes without their shape."
    image = picture()
    names = {image_hash(load_image(save(image, f, **o))) for f, o in FORMATS if f in ("PNG", "BMP", "TIFF", "GIF")}
    assert names == {image_hash(load_image(image))} and len(names.pop()) == 64
    flat = np.arange(24 * 3, dtype=np.uint8)
    shapes = [(4, 6), (6, 4), (2, 12), (24, 1), (1, 24)]
    assert len({image_hash(load_image(flat.reshape(*s, 3))) for s in shapes}) == len(shapes)
    grey = np.full((2, 2), 7, np.uint8)
    assert image_hash(load_image(grey)) != image_hash(load_image(grey + 1))
    fails(lambda: image_hash(Image.new("P", (2, 2))), "RGB", "P")


# Paths and data URLs

def test_paths(tmp_path, monkeypatch):
    path = tmp_path / "a picture.png"
    path.write_bytes(PNG)
    assert load_image(path).tobytes() == load_image(str(path)).tobytes() == load_image(PNG).tobytes()
    monkeypatch.chdir(tmp_path)
    assert load_image("a picture.png").size == (16, 12)
    fails(lambda: load_image("no.png"), "'no.png'", "No such file")
    fails(lambda: load_image(tmp_path), "not a file")
    fails(lambda: load_image("a\0b"), "null")
    fails(lambda: load_image(path, MediaLimits(max_bytes=10)), "max_bytes is 10")
    os.mkfifo("pipe")
    start_s = time.monotonic()
    fails(lambda: load_image("pipe"), "not a file")
    fails(lambda: load_image("/dev/zero"), "not a file")
    assert time.monotonic() - start_s < 2, "somebody waited for a pipe"
    for url in ("http://example.com/a.png", "file:///etc/hostname", "ftp://x/y", "HTTPS://example.com/"):
        fails(lambda: load_image(url), "allowed_media_domains", "nobody may fetch")
    assert load_image("http://x/", fetch=lambda url: PNG).size == (16, 12)


DATA_URLS = {
    "data:image/png;base64": ["no comma"],
    "data:,": ["text/plain"],
    "data:text/html;base64,AAAA": ["text/html", "not an image"],
    "data:application/pdf;base64," + base64.b64encode(PNG).decode(): ["application/pdf", "not an image"],
    "data:image/png,%89PNG": [";base64"],
    "data:image/png;base64,": ["0 bytes"],
    "data:image/png;base64,&&&&": ["no base64"],
    "data:image/png;base64,AAAAA": ["no base64"],
    "data:image/png;base64,AAAA": ["none of PNG"],
    "data:image/png;base64," + base64.urlsafe_b64encode(b"\xff\xfe" * 20).decode(): ["no base64"],
    data_url(b"%PDF-1.7", "image/png"): ["none of PNG", "%PDF"],
    data_url(PNG[:200]): ["cut off"],
    data_url(png(50_000, 50_000)): ["50,000 x 50,000"],
    "data:image/png;base64," + "A" * 3_000_000: ["none of PNG"],
    "data:image/png;base64," + "ä" * 300: ["no base64"],
}


@pytest.mark.parametrize("url", DATA_URLS, ids=lambda url: url[:40])
def test_bad_data_urls(url):
    fails(lambda: load_image(url), *DATA_URLS[url])
    fails(lambda: MediaConnector().load(url), *DATA_URLS[url])


def test_good_data_urls():
    want = load_image(PNG).tobytes()
    assert load_image(data_url(PNG)).tobytes() == want
    assert load_image(data_url(PNG, "image/jpeg")).tobytes() == want, "the bytes decide, not the label"
    assert load_image("DATA:image/png;charset=x;BASE64," + base64.b64encode(PNG).decode()).tobytes() == want
    assert load_image(data_url(PNG).replace("+", "%2B").replace("=", "%3D")).tobytes() == want
    fails(lambda: load_image(data_url(PNG), MediaLimits(max_bytes=100)), "max_bytes is 100")


# Addresses and hosts

NEAR = """127.0.0.1 127.1.2.3 0.0.0.0 10.0.0.5 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254 100.64.0.1
    100.100.100.200 192.0.2.1 198.18.0.1 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255 168.63.129.16 192.0.0.1
    :: ::1 ::ffff:127.0.0.1 ::ffff:10.0.0.5 ::ffff:169.254.169.254 fe80::1 fe80::1%eth0 fc00::1 fd00:ec2::254 ff02::1
    2001:db8::1 64:ff9b::7f00:1 64:ff9b::a00:5 2002:7f00:1:: 2002:a00:5:: 2001::1 ::127.0.0.1 fec0::1""".split()
FAR = "1.1.1.1 8.8.8.8 93.184.216.34 2606:4700:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808 2002:808:808::".split()


def test_addresses():
    assert [a for a in NEAR if is_public(a)] == []
    assert [a for a in FAR if not is_public(a)] == []


@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "[::1]", "0",
                                  "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "169.254.169.254", "[64:ff9b::a9fe:a9fe]",
                                  "localhost", "LOCALHOST.", "10.0.0.5", "①②⑦.⓪.⓪.①"])
def test_near_addresses_are_never_asked(host, monkeypatch):
    "However they are written, and even where every host may be asked."
    monkeypatch.setattr(media, "connect", lambda *args: pytest.fail(f"a connection was made: {args}"))
    message = fails(lambda: MediaConnector(allowed_media_domains=["*", "127.0.0.1"]).load(f"http://{host}:9200/x.png"))
    assert "no public address" in message or "not known" in message, message


def test_names_of_near_addresses(monkeypatch):
    "A name is worth what it stands for; an answer that holds one near address holds none that we ask."
    monkeypatch.setattr(media, "connect", lambda *args: pytest.fail("a connection was made"))
    connector = MediaConnector(allowed_media_domains=["*"])
    with pretend():
        for name in ("inside.test", "loop.test", "mixed.test", "six.test", "empty.test"):
            message = fails(lambda: connector.load(f"http://{name}/x.png"), name, "no public address")
            assert not any(a in message for a in NAMES[name]), "a stranger learns our addresses"
        fails(lambda: connector.load("http://nobody.test/x.png"), "nobody.test", "not known")


@pytest.fixture
def pictures():
    with serve_pictures() as server, pretend(): yield server


LIMITS = MediaLimits(timeout_s=5, max_bytes=100_000)


def connect_to(*domains, **limits):
    fields = {name: getattr(LIMITS, name) for name in ("timeout_s", "max_bytes")} | limits
    return MediaConnector(allowed_media_domains=list(domains), limits=MediaLimits(**fields))


@pytest.mark.parametrize("path", ["ok.png", "chunks.png", "until-the-end.png", "octets", "no-type", "relative",
                                  "ok.png?a=b&c=%20#there"])
def test_good_answers(pictures, path):
    for domain in ("pictures.test", "*", "Pictures.Test."):
        image = connect_to(domain).load(f"http://pictures.test:{pictures.port}/{path}")
        assert image.tobytes() == load_image(PNG).tobytes()
    asked = f"GET /{path.partition('#')[0]} HTTP/1.1", f"pictures.test:{pictures.port}"
    assert asked in pictures.asked


BAD_ANSWERS = {
    "cut": ["cut off", "100 bytes of"], "cut-chunk": ["cut off"], "bad-chunk": ["cut off"],
    "page": ["not an image", "text/html"], "lies": ["none of PNG", "<html>"], "gzip": ["gzip"],
    "long": ["1,000,000,000,000 bytes", "max_bytes is 100,000"], "nothing": ["0 bytes"], "gone": ["404"],
    "no-http": ["does not speak HTTP", "BadStatusLine"], "hang-up": ["closed connection"],
    "loop": ["more than 5 times", "max_redirects"], "to-private": ["10.0.0.5", "no public address"],
    "to-metadata": ["169.254.169.254", "no public address"], "to-file": ["file:///etc/hostname", "neither http nor"],
    "to-data": ["neither http nor https"], "to-nonsense": ["redirected", "IPv6"],
}


@pytest.mark.parametrize("path", BAD_ANSWERS)
def test_bad_answers(pictures, path):
    connector = connect_to("*")
    fails(lambda: connector.load(f"http://pictures.test:{pictures.port}/{path}"), *BAD_ANSWERS[path])
    assert connector.load(f"http://pictures.test:{pictures.port}/ok.png").size == (16, 12)


def test_redirects_are_counted_and_checked(pictures):
    url = f"http://pictures.test:{pictures.port}"
    fails(lambda: connect_to("*").load(url + "/loop"), "5 times")
    assert len(pictures.asked) == 6
    fails(lambda: connect_to("*", max_redirects=0).load(url + "/relative"), "0 times")
    fails(lambda: connect_to("pictures.test").load(url + "/to-stranger"), "elsewhere.test", "1 allowed_media_domains")
    assert len(pictures.asked) == 8


def test_only_allowed_hosts(pictures):
    url = f"http://pictures.test:{pictures.port}/ok.png"
    fails(lambda: MediaConnector().load(url), "pictures.test", "until allowed_media_domains is set")
    fails(lambda: connect_to("example.com", "test").load(url), "none of the 2 allowed_media_domains")
    # What one reader of URLs takes for the host, another takes for a name and a password.
    for text in (f"http://pictures.test@elsewhere.test:{pictures.port}/ok.png", "http://a:b@pictures.test/",
                 "http://pictures.test\\@elsewhere.test/", "http://elsewhere.test\\.pictures.test/", "http:///ok.png",
                 "http://", "http://pictures.test:99999/", "http://pictures.test:x/", "http://pictures..test/",
                 "http://[::1/", "http://pic tures.test/", "http://pictures.test%00.com/", "http://" + "a" * 70 + ".test/"):
        fails(lambda: connect_to("pictures.test").load(text))
    for text in ("ftp://pictures.test/", "gopher://pictures.test/", "javascript:1", "ok.png", "", "//pictures.test/a"):
        fails(lambda: connect_to("*").load(text), "must have a URL")
    assert pictures.asked == []
    for bad in (["http://example.com"], ["a b"], [""], "example.com", ["*.example.com"]):
        with pytest.raises(ValueError, match="allowed_media_domains must"): MediaConnector(allowed_media_domains=bad)


def test_the_checked_address_is_the_one_asked():
    "A name that changes its meaning between look and leap: there is no between."
    answers = iter([["127.0.0.1"], ["10.0.0.5"], ["127.0.0.1"]])
    with serve_pictures() as pictures, pretend(names={"flips.test": lambda: next(answers)}) as looked_up:
        url = f"http://flips.test:{pictures.port}/ok.png"
        assert connect_to("*").load(url).size == (16, 12) and looked_up == ["flips.test"]
        fails(lambda: connect_to("*").load(url), "no public address")
        # A redirect is a new question.
        answers = iter([["127.0.0.1"], ["10.0.0.5"]])
        fails(lambda: connect_to("*").load(url.replace("ok.png", "relative")), "no public address")
        assert [line for line, _ in pictures.asked] == ["GET /ok.png HTTP/1.1", "GET /relative HTTP/1.1"]


def test_the_next_address_is_tried(pictures):
    "A host with two machines, one of them down."
    names = {"two.test": ["127.0.0.9", "127.0.0.1"], "down.test": ["127.0.0.9"]}
    with pretend(public=("127.0.0.1", "127.0.0.9"), names=names):
        assert connect_to("*").load(f"http://two.test:{pictures.port}/ok.png").size == (16, 12)
        fails(lambda: connect_to("*").load(f"http://down.test:{pictures.port}/ok.png"), "refused")


@pytest.mark.parametrize("path", SLOW_KINDS)
def test_slow_servers(pictures, path):
    start_s = time.monotonic()
    fails(lambda: connect_to("*", timeout_s=0.4).load(f"http://pictures.test:{pictures.port}{path}"),
          "did not arrive within 0.4 s")
    assert 0.3 < time.monotonic() - start_s < 3


@pytest.mark.parametrize("path", ENDLESS_KINDS)
def test_endless_answers(pictures, path):
    start_s = time.monotonic()
    message = fails(lambda: connect_to("*", timeout_s=2).load(f"http://pictures.test:{pictures.port}{path}"))
    assert "max_bytes is 100,000" in message or "HTTP" in message or "within 2 s" in message, message
    assert time.monotonic() - start_s < 5


def test_https_proves_its_name():
    "A server that speaks no TLS, or has a certificate of its own making, is not believed."
    with serve_pictures() as pictures, pretend():
        message = fails(lambda: connect_to("*").load(f"https://pictures.test:{pictures.port}/ok.png"))
        assert "SSL" in message or "TLS" in message, message


# Files below a folder

@pytest.fixture
def folder(tmp_path):
    for name in ("allowed", "allowed-not", "allowed/deep"): (tmp_path / name).mkdir()
    for name in ("allowed/ok.png", "allowed/a b%c.png", "allowed/deep/ok.png", "allowed-not/no.png", "no.png"):
        (tmp_path / name).write_bytes(PNG)
    (tmp_path / "allowed/link.png").symlink_to(tmp_path / "no.png")
    (tmp_path / "allowed/out").symlink_to(tmp_path)
    (tmp_path / "allowed/in.png").symlink_to(tmp_path / "allowed/ok.png")
    (tmp_path / "allowed/circle").symlink_to(tmp_path / "allowed/circle")
    os.mkfifo(tmp_path / "allowed/pipe")
    return tmp_path


def test_files_inside(folder):
    connector = MediaConnector(str(folder / "allowed"))
    base = f"file://{folder}/allowed"
    for path in ("/ok.png", "/deep/ok.png", "/deep/../ok.png", "/in.png", "/a%20b%25c.png", "/ok.png#x"):
        assert connector.load(base + path).size == (16, 12), path
    assert connector.load(base.replace("file://", "file://localhost") + "/ok.png").size == (16, 12)
    # The folder itself may be reached by a link.
    (folder / "name").symlink_to(folder / "allowed")
    assert MediaConnector(str(folder / "name")).load(base + "/ok.png").size == (16, 12)


def test_files_outside(folder):
    connector = MediaConnector(str(folder / "allowed"))
    base, outside = f"file://{folder}/allowed", ["outside of allowed_local_media_path"]
    for path, words in {
            "/../no.png": outside, "/%2e%2e/no.png": outside, "/..%2fno.png": outside, "/link.png": outside,
            "/out/no.png": outside, "/out/allowed/../no.png": outside, "-not/no.png": outside, "/deep/../../no.png": outside,
            "/%252e%252e/no.png": ["No such file"], "/none.png": ["No such file"], "/deep": ["not a file"],
            "/pipe": ["not a file"], "/circle": ["cannot be read"], "/ok.png%00.jpg": ["null"],
            "/" + "a" * 300: ["cannot be read"]}.items():
        fails(lambda: connector.load(base + path), *words)
    fails(lambda: connector.load("file:///etc/passwd"), *outside)
    fails(lambda: connector.load("file:ok.png"), *outside)
    fails(lambda: connector.load("file://" + "elsewhere" + str(folder) + "/allowed/ok.png"), "another machine")
    fails(lambda: MediaConnector().load(base + "/ok.png"), "allowed_local_media_path is not set")
    fails(lambda: MediaConnector(str(folder / "allowed"), limits=MediaLimits(max_bytes=10)).load(base + "/ok.png"), "is 10")
    for bad in (folder / "none", folder / "no.png"):
        with pytest.raises(ValueError, match="not a folder"): MediaConnector(str(bad))


# Many at a time

def test_loop_is_not_held_up(pictures):
    "While slow servers keep their threads busy, the loop turns, and a picture that is here comes at once."
    connector, url = connect_to("*", timeout_s=1.5), f"http://pictures.test:{pictures.port}"

    async def main():
        start_s, ticks = time.monotonic(), 0
        slow = [asyncio.create_task(connector.load_async(f"{url}/silent?{i}")) for i in range(MAX_FETCHES)]
        while len(pictures.asked) < MAX_FETCHES:
            ticks += 1
            await asyncio.sleep(0.005)
        image = await connector.load_async(data_url(PNG))
        assert image.size == (16, 12) and not any(t.done() for t in slow)
        while not all(t.done() for t in slow):
            ticks += 1
            await asyncio.sleep(0.005)
        assert ticks > 20, ticks
        results = await asyncio.gather(*slow, return_exceptions=True)
        assert all("within 1.5 s" in str(r) for r in results), results
        assert time.monotonic() - start_s < 6
        assert (await connector.load_async(url + "/ok.png")).size == (16, 12)
    asyncio.run(main())
    connector.close()


def test_several_at_once(pictures):
    "In order; what is there twice is got once; one that fails is the answer, and the rest is let go."
    connector, url = connect_to("*"), f"http://pictures.test:{pictures.port}"

    async def main():
        urls = [data_url(save(picture(1))), url + "/ok.png", data_url(save(picture(2))), url + "/ok.png"]
        images = await connector.load_all_async(urls)
        assert [i.tobytes() for i in images] == [load_image(x).tobytes() for x in
                                                  (picture(1), picture(), picture(2), picture())]
        assert len(pictures.asked) == 1 and await connector.load_all_async([]) == []
        start_s = time.monotonic()
        with pytest.raises(ValueError, match="404"):
            await connector.load_all_async([url + "/silent", url + "/gone", url + "/ok.png"])
        assert time.monotonic() - start_s < 3
    asyncio.run(main())


def test_errors_say_which_image(pictures):
    url = f"http://pictures.test:{pictures.port}"
    for bad in (url + "/gone", data_url(b"%PDF"), data_url(PNG[:300]), "data:image/png;base64,&", "ftp://x/"):
        with pytest.raises(MediaError) as caught:
            asyncio.run(connect_to("*").load_all_async([data_url(PNG), url + "/ok.png", bad, url + "/chunks.png"]))
        assert caught.value.url == bad


def test_one_request_has_limits_of_its_own():
    "Each picture is small enough; all together they are not."
    urls = [data_url(save(picture(seed))) for seed in range(4)]
    num_bytes = sum(len(save(picture(seed))) for seed in range(4))

    def load(urls, **limits): return asyncio.run(MediaConnector(limits=MediaLimits(**limits)).load_all_async(urls))
    assert len(load(urls, max_request_pixels=4 * 192, max_request_bytes=num_bytes)) == 4
    assert len(load(urls * 3, max_request_pixels=4 * 192)) == 12
    fails(lambda: load(urls, max_request_pixels=4 * 192 - 1), "4 images", "768 pixels", "max_request_pixels is 767")
    fails(lambda: load(urls, max_request_bytes=num_bytes - 1), f"{num_bytes:,} bytes", "max_request_bytes")


def test_bytes_of_one_request_are_counted_as_they_come(pictures):
    urls = [f"http://pictures.test:{pictures.port}/ok.png?{i}" for i in range(200)]
    connector = connect_to("*", max_request_bytes=3 * len(PNG))
    fails(lambda: asyncio.run(connector.load_all_async(urls)), "max_request_bytes is")
    assert len(pictures.asked) < 50


def test_a_client_that_leaves(pictures):
    connector, url = connect_to("*", timeout_s=1), f"http://pictures.test:{pictures.port}"

    async def main():
        task = asyncio.create_task(connector.load_all_async([f"{url}/silent?{i}" for i in range(50)]))
        while not pictures.asked: await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError): await task
        assert (await connector.load_async(url + "/ok.png")).size == (16, 12)
        assert len(pictures.asked) < 10, "what was not begun was fetched for nobody"
    asyncio.run(main())


def test_warnings_of_decoders_do_not_stop_us():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_image(PNG).size == (16, 12)
