"""A server of pictures that does what the path says, on loopback; and pictures to serve.

Shared by the tests of images; no test by itself.
"""
import contextlib
import io
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
from PIL import Image

from minengine.multimodal import media


def save(image: Image.Image, format="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def picture(seed=0, width=16, height=12) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


PNG = save(picture())


def answer(body=b"", status="200 OK", **headers) -> bytes:
    headers = {"content_type": "image/png", "content_length": len(body)} | headers
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items() if value is not None]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + body


def moved(place) -> bytes: return answer(status="302 Found", location=place)


def drip(sock, data, pause_s=0.02, first=b""):
    "One byte at a time."
    sock.sendall(first)
    for byte in data:
        sock.sendall(bytes([byte]))
        time.sleep(pause_s)


def endless(sock, head, piece):
    sock.sendall(head)
    while True: sock.sendall(piece)


ENDLESS_KINDS = {
    "/endless": lambda s: endless(s, answer(content_length=None), b"x" * 4096),
    "/endless-chunks": lambda s: endless(s, answer(content_length=None, transfer_encoding="chunked"),
                                         b"1000\r\n" + b"x" * 4096 + b"\r\n"),
    "/endless-headers": lambda s: endless(s, b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
    "/endless-line": lambda s: endless(s, b"HTTP/1.1 200 OK\r\na: ", b"b" * 4096),
    "/endless-continue": lambda s: endless(s, b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}
SLOW_KINDS = {
    "/silent": lambda s: time.sleep(30),
    "/slow-head": lambda s: drip(s, answer(PNG)),
    "/slow-body": lambda s: drip(s, PNG, first=answer(content_length=len(PNG))),
    "/slow-chunks": lambda s: drip(s, b"1\r\nx\r\n" * 1000,
                                   first=answer(content_length=None, transfer_encoding="chunked")),
}
SCRIPTS = ENDLESS_KINDS | SLOW_KINDS | {
    "/ok.png": lambda s: s.sendall(answer(PNG)),
    "/chunks.png": lambda s: s.sendall(answer(content_length=None, transfer_encoding="chunked") +
                                       b"%x\r\n%s\r\n0\r\n\r\n" % (len(PNG), PNG)),
    "/until-the-end.png": lambda s: s.sendall(answer(content_length=None) + PNG),
    "/octets": lambda s: s.sendall(answer(PNG, content_type="application/octet-stream")),
    "/no-type": lambda s: s.sendall(answer(PNG, content_type=None)),
    "/cut": lambda s: s.sendall(answer(content_length=len(PNG)) + PNG[:100]),
    "/cut-chunk": lambda s: s.sendall(answer(content_length=None, transfer_encoding="chunked") + b"1000\r\nabc"),
    "/bad-chunk": lambda s: s.sendall(answer(content_length=None, transfer_encoding="chunked") + b"zz\r\nabc"),
    "/page": lambda s: s.sendall(answer(b"<html>", content_type="text/html; charset=utf-8")),
    "/lies": lambda s: s.sendall(answer(b"<html>")),
    "/gzip": lambda s: s.sendall(answer(PNG, content_encoding="gzip")),
    "/long": lambda s: s.sendall(answer(content_length=10**12)),
    "/nothing": lambda s: s.sendall(answer()),
    "/gone": lambda s: s.sendall(answer(b"no", status="404 Not Found", content_type="text/plain")),
    "/no-http": lambda s: s.sendall(b"220 mail.test ESMTP\r\n"),
    "/hang-up": lambda s: None,
    "/loop": lambda s: s.sendall(moved("/loop")),
    "/relative": lambda s: s.sendall(moved("ok.png")),
    "/to-private": lambda s: s.sendall(moved("http://10.0.0.5/ok.png")),
    "/to-metadata": lambda s: s.sendall(moved("http://169.254.169.254/latest/meta-data/")),
    "/to-file": lambda s: s.sendall(moved("file:///etc/hostname")),
    "/to-data": lambda s: s.sendall(moved("data:image/png;base64,AAAA")),
    "/to-stranger": lambda s: s.sendall(moved("http://elsewhere.test/ok.png")),
    "/to-nonsense": lambda s: s.sendall(moved("http://[::/")),
}


@contextlib.contextmanager
def serve_pictures():
    "Gives an object with `port` and `asked`: the first line of each request, and its Host."
    listener, asked = socket.create_server(("127.0.0.1", 0)), []

    def handle(sock):
        with sock, contextlib.suppress(OSError):
            sock.settimeout(30)
            head = b""
            while b"\r\n\r\n" not in head:
                head += sock.recv(4096)
                if head[:1] == b"\x16": return sock.sendall(b"HTTP/1.1 400 This is no TLS\r\n\r\n")
            lines = head.decode().split("\r\n")
            asked.append((lines[0], next(x[6:] for x in lines if x.startswith("Host: "))))
            SCRIPTS[lines[0].split()[1].partition("?")[0]](sock)

    def accept():
        with contextlib.suppress(OSError):
            while True: threading.Thread(target=handle, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try: yield SimpleNamespace(port=listener.getsockname()[1], asked=asked)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


NAMES = {"pictures.test": ["127.0.0.1"], "elsewhere.test": ["127.0.0.1"], "inside.test": ["10.0.0.5"],
         "loop.test": ["127.0.0.2"], "mixed.test": ["127.0.0.1", "10.0.0.5"], "six.test": ["::1"], "empty.test": []}


@contextlib.contextmanager
def pretend(public=("127.0.0.1",), names=NAMES):
    """Names of this test's own; and of the addresses near us, `public` count as far away.

    Gives the list of names that have been looked up.
    """
    real_lookup, real_is_public, looked_up = socket.getaddrinfo, media.is_public, []

    def lookup(host, port, *args, **kwargs):
        looked_up.append(host)
        if not str(host).endswith(".test"): return real_lookup(host, port, *args, **kwargs)
        if host not in names: raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        found = names[host]() if callable(names[host]) else names[host]
        return [(socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in found]

    socket.getaddrinfo, media.is_public = lookup, lambda a: a in public or real_is_public(a)
    try: yield looked_up
    finally: socket.getaddrinfo, media.is_public = real_lookup, real_is_public
