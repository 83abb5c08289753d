"""Pictures in chats: real servers with tiny models that see, and with one that does not.

Answers are transformers' own, token by token; whatever is wrong with a picture is the answer to the one who sent it.
"""
import base64
import functools
import gc
import http.client
import json
import struct
import threading
import time
import urllib.error
import urllib.request
import weakref
import zlib
from types import SimpleNamespace

import numpy as np
import openai
import pytest
from mm_tiny import FAMILIES, Oracle, make_image
from picture_server import PNG, picture, pretend, save, serve_pictures
from PIL import Image
from server_tiny import ENGINES, ServerProcess, is_at_rest, serve_in_thread

from minengine.config import EngineArgs
from minengine.multimodal.image import MediaLimits, load_image
from minengine.multimodal.media import MediaConnector
from minengine.server.launcher import make_async_engine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")
ARGS = dict(num_gpu_blocks_override=200, max_num_seqs=8, enable_multiprocessing=False, disable_log_stats=False,
            use_tqdm_on_load=False, generation_config="vllm")


KINDS = ["v0", "v1"]


def make(kind, folder, **args): return make_async_engine(EngineArgs(model=folder, engine=kind, **ARGS | args))


def post(server, path="/v1/chat/completions", limit_s=30, **data):
    "Status and JSON of an answer."
    body = json.dumps({"model": "tiny"} | data).encode()
    request = urllib.request.Request(server.url + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as response: return response.status, json.load(response)
    except urllib.error.HTTPError as error: return error.code, json.load(error)


def data_url(image, format="PNG") -> str:
    data = image if isinstance(image, bytes) else save(image, format)
    return f"data:image/{format.lower()};base64," + base64.b64encode(data).decode()


def part(thing) -> dict:
    "A part of a message: a URL, an image, or a text."
    if isinstance(thing, Image.Image): thing = data_url(thing)
    is_url = thing.partition(":")[0] in ("data", "http", "https", "file", "ftp")
    return {"type": "image_url", "image_url": {"url": thing}} if is_url else {"type": "text", "text": thing}


def user(*things) -> dict: return {"role": "user", "content": [part(t) for t in things]}


def chat(server, *messages, max_tokens=6, **fields):
    return post(server, messages=list(messages), max_tokens=max_tokens, temperature=0, ignore_eos=True, **fields)


def answer(server, *messages, **fields) -> list[int]:
    "Ids of a good answer's tokens."
    status, told = chat(server, *messages, logprobs=True, return_tokens_as_token_ids=True, **fields)
    assert status == 200, told
    return ids_of(told["choices"][0]["logprobs"]["content"])


def ids_of(content) -> list[int]: return [int(entry["token"].removeprefix("token_id:")) for entry in content]


def refused(server, *messages, param, words=(), **fields) -> str:
    "The message of a 400 about `param`."
    status, told = chat(server, *messages, **fields)
    assert status == 400, told
    error = told["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param, error
    for word in words: assert word in error["message"], error
    return error["message"]


def rest(server, limit_s=10):
    "Until nothing runs, waits or is remembered."
    deadline = time.monotonic() + limit_s
    while server.server.running.names or not is_at_rest(server.engine):
        assert time.monotonic() < deadline, "something is left"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return functools.cache(lambda family: FAMILIES[family](tmp_path_factory.mktemp(family) / family))


@pytest.fixture(scope="module")
def oracle(folders): return functools.cache(lambda family: Oracle(folders(family)))


def expected(oracle, *messages, max_tokens=6) -> tuple[list[int], int]:
    "What transformers makes of the same conversation: its tokens, and how many the prompt has."
    images = [thing for message in messages for thing in message["images"]]
    text = oracle.tokenizer.apply_chat_template(
        [{"role": m["role"], "content": m["content"]} for m in messages], add_generation_prompt=True, tokenize=False)
    inputs = oracle.processor(text=text, images=images or None, return_tensors="pt", add_special_tokens=False)
    out = oracle.model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens, min_new_tokens=max_tokens,
                                eos_token_id=10**6)
    return out[0, inputs["input_ids"].shape[1]:].tolist(), inputs["input_ids"].shape[1]


def plain(*things, role="user") -> dict:
    return {"role": role, "images": [t for t in things if isinstance(t, Image.Image)],
            "content": [{"type": "image"} if isinstance(t, Image.Image) else {"type": "text", "text": t} for t in things]}


# Answers

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(family, kind, folders, oracle):
    "One picture and several, of different sizes, first and last, in earlier turns, and none."
    engine = make(kind, folders(family))
    a, b, c = make_image(40, 40, 1), make_image(64, 40, 2), make_image(30, 60, 3)
    conversations = [
        [("user", [a, "What is it?"])], [("user", ["Before ", b, " and after"])], [("user", [a, b, "Which?"])],
        [("user", ["Twice: ", c, " ", c])], [("user", ["No picture."])],
        [("user", [a, "One."]), ("assistant", ["Yes."]), ("user", [b, "Another."])]]
    with serve_in_thread(engine) as server:
        for turns in conversations:
            want, num_tokens = expected(oracle(family), *(plain(*things, role=role) for role, things in turns))
            messages = [{"role": role, "content": [part(t) for t in things]} for role, things in turns]
            assert answer(server, *messages) == want
            status, told = chat(server, *messages)
            assert told["usage"]["prompt_tokens"] == num_tokens, "places for pictures are counted, not their tokens"
        rest(server)


@pytest.fixture(scope="module")
def media_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    (folder / "inside").mkdir()
    for name in ("inside/ok.png", "no.png"): (folder / name).write_bytes(PNG)
    (folder / "inside/link.png").symlink_to(folder / "no.png")
    return folder


@pytest.fixture(scope="module", params=KINDS)
def llava(request, folders, media_folder):
    "A server that may ask some hosts and read one folder, and that waits a second for a picture."
    limits = MediaLimits(timeout_s=1, max_bytes=100_000, max_pixels=1_000_000, max_request_pixels=2_000_000)
    media = MediaConnector(str(media_folder / "inside"), ["pictures.test", "inside.test", "mixed.test"], limits)
    engine = make(request.param, folders("llava"), limit_mm_per_prompt={"image": 4})
    with serve_in_thread(engine, media=media) as server:
        server.media = media
        yield server


@pytest.fixture
def pictures():
    with serve_pictures() as server, pretend(): yield server


@pytest.fixture
def good(llava):
    "A request that must get the same answer as before; afterwards nothing may be left."
    question = user(picture(), "What is it?")
    want = answer(llava, question)
    def check(): assert answer(llava, question) == want
    yield check
    check()
    rest(llava)


def test_streams(llava, good):
    "Pieces are the whole."
    body = {"model": "tiny", "messages": [user(picture(), "What?")], "max_tokens": 8, "temperature": 0,
            "ignore_eos": True, "stream": True, "logprobs": True, "return_tokens_as_token_ids": True,
            "stream_options": {"include_usage": True}}
    request = urllib.request.Request(llava.url + "/v1/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.headers.get_content_type() == "text/event-stream"
        events = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
    pieces = [e["choices"][0]["logprobs"]["content"] for e in events if e["choices"] and e["choices"][0]["logprobs"]]
    assert [i for p in pieces for i in ids_of(p)] == answer(llava, user(picture(), "What?"), max_tokens=8)
    assert events[-1]["usage"]["prompt_tokens"] > 25


def test_where_pictures_come_from(llava, pictures, media_folder, good):
    "The same picture is the same picture, however it comes."
    want, url = answer(llava, user(picture(), "?")), f"http://pictures.test:{pictures.port}"
    for source in (data_url(PNG), data_url(save(picture(), "BMP"), "BMP"), url + "/ok.png", url + "/relative",
                   url + "/chunks.png", f"file://{media_folder}/inside/ok.png"):
        assert answer(llava, user(source, "?")) == want, source
    other = answer(llava, user(picture(1), "?"))
    assert other != want, "a picture that changes nothing proves nothing"
    before = len(pictures.asked)
    both = answer(llava, user(url + "/ok.png", picture(1), url + "/ok.png", "?"))
    assert both == answer(llava, user(picture(), picture(1), picture(), "?")) and len(pictures.asked) == before + 1
    with_detail = user(picture(), "?")
    with_detail["content"][0]["image_url"]["detail"] = "high"
    assert answer(llava, with_detail) == want


def test_kinds_of_pictures(llava, good):
    "CMYK, 16 bits, EXIF, palette, transparency, animation: what is seen is what `load_image` says."
    exif = Image.Exif()
    exif[0x0112] = 6
    clear = picture().convert("RGBA")
    clear.putalpha(Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 16), dtype=np.uint8)))
    deep = Image.fromarray(np.random.default_rng(0).integers(0, 2**16, (12, 16), dtype=np.uint16))
    for data, format in [
            (save(picture().convert("CMYK"), "JPEG"), "JPEG"), (save(deep), "PNG"), (save(clear), "PNG"),
            (save(picture(), "JPEG", exif=exif.tobytes()), "JPEG"), (save(picture().convert("L")), "PNG"),
            (save(picture().quantize(8), "GIF", transparency=0), "GIF"),
            (save(picture(), "GIF", save_all=True, append_images=[picture(1)]), "GIF")]:
        assert answer(llava, user(data_url(data, format), "?")) == answer(llava, user(load_image(data), "?"))


def test_second_question_finds_the_first_one_cached(llava, good):
    "V1; V0 keeps nothing of a request with pictures."
    def cached(*things):
        status, told = chat(llava, user(*things))
        assert status == 200, told
        return told["usage"]["prompt_tokens_details"]["cached_tokens"]
    image, text = picture(77, 20, 20), "A long enough question about a picture, so that it fills some blocks of the cache. "
    cached(image, text + "First?")
    again, other = cached(image, text + "Second?"), cached(picture(78, 20, 20), text + "First?")
    if llava.engine.engine_name == "v0": assert (again, other) == (0, 0)
    else: assert again >= 96 and other < 16, "the same text behind another picture is another prompt"


def test_pixels_are_let_go_while_an_answer_streams(llava, good, monkeypatch):
    loaded, real = [], llava.media.load_all_async

    async def load_all(urls):
        images = await real(urls)
        loaded.extend(weakref.ref(i) for i in images)
        return images
    monkeypatch.setattr(llava.media, "load_all_async", load_all)
    body = json.dumps({"model": "tiny", "messages": [user(picture(), "?")], "max_tokens": 400, "ignore_eos": True, "stream": True})
    connection = http.client.HTTPConnection(llava.url.removeprefix("http://"))
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    seen = 0
    while seen < 20: seen += response.readline().startswith(b"data: {")
    gc.collect()
    assert len(loaded) == 1 and loaded[0]() is None and llava.server.running.names
    connection.close()


def test_openai_s_own_client(llava, good):
    with openai.OpenAI(base_url=llava.url + "/v1", api_key="none", max_retries=0) as client:
        def ask(url): return client.chat.completions.create(
            model="tiny", max_tokens=6, temperature=0, extra_body={"ignore_eos": True}, messages=[
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}},
                                             {"type": "text", "text": "What is it?"}]}])
        told = ask(data_url(PNG))
        assert told.usage.completion_tokens == 6
        assert told.choices[0].message.content == chat(llava, user(picture(), "What is it?"))[1]["choices"][0]["message"]["content"]
        with pytest.raises(openai.BadRequestError, match="none of PNG"): ask(data_url(b"%PDF"))


# What is refused

def test_a_model_that_reads_text_alone(pictures):
    "It says so, and nobody is asked for a picture."
    for kind in ENGINES:
        engine = ENGINES[kind]()
        media = MediaConnector(allowed_media_domains=["*"])
        with serve_in_thread(engine, media=media) as server:
            for source in (data_url(PNG), f"http://pictures.test:{pictures.port}/ok.png", "file:///etc/passwd",
                           data_url(b"x")):
                refused(server, {"role": "user", "content": "hi"}, user("a", source), max_tokens=2,
                        param="messages[1].content[1].image_url", words=["'tiny'", "reads text alone"])
            status, told = post(server, messages=[{"role": "user", "content": "hi"}], max_tokens=2)
            assert status == 200
            rest(server)
    assert pictures.asked == []


def png_head(width, height) -> bytes:
    "A PNG that promises much and holds nothing."
    def chunk(kind, data): return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


BAD_DATA = {
    "truncated": (data_url(PNG[:300]), ["cut off"]), "empty": (data_url(b""), ["0 bytes"]),
    "zero-size": (data_url(png_head(0, 0)), ["without pixels"]),
    "bomb": (data_url(png_head(50_000, 50_000)), ["50,000 x 50,000", "2,500,000,000", "max_pixels is 1,000,000"]),
    "too long": (data_url(b"\x89PNG" + b"x" * 100_000), ["100,00", "max_bytes is 100,000"]),
    "no image": (data_url(b"%PDF-1.7"), ["none of PNG", "%PDF"]), "mime": ("data:text/html;base64,AAAA", ["text/html"]),
    "no base64": ("data:image/png;base64,&&&", ["no base64"]), "no comma": ("data:image/png", ["no comma"]),
    "not encoded": ("data:image/png,abc", [";base64"]), "ftp": ("ftp://pictures.test/ok.png", ["ftp://"]),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_pictures(llava, name, good):
    url, words = BAD_DATA[name]
    refused(llava, user("a", picture(), "b"), user(picture(1), url), param="messages[1].content[1].image_url", words=words)


BAD_URLS = {
    "cut": ["cut off"], "page": ["text/html"], "gone": ["404"], "lies": ["none of PNG"], "long": ["max_bytes is 100,000"],
    "loop": ["more than 5 times"], "to-private": ["10.0.0.5", "may not be asked"], "to-stranger": ["elsewhere.test"],
    "to-file": ["file:///etc/hostname"], "silent": ["within 1 s"], "slow-head": ["within 1 s"], "slow-body": ["within 1 s"],
    "endless": ["max_bytes is 100,000"], "endless-headers": ["HTTP"],
}


@pytest.mark.parametrize("path", BAD_URLS)
def test_bad_hosts(llava, pictures, path, good):
    url = f"http://pictures.test:{pictures.port}"
    refused(llava, user(f"{url}/ok.png", f"{url}/{path}"), param="messages[0].content[1].image_url", words=BAD_URLS[path])


@pytest.mark.parametrize("url,words", [
    ("http://inside.test/a.png", ["'inside.test'", "no public address"]),
    ("http://mixed.test/a.png", ["'mixed.test'", "no public address"]),
    ("http://127.0.0.1/a.png", ["'127.0.0.1'", "3 allowed_media_domains"]),
    ("http://elsewhere.test/a.png", ["'elsewhere.test'", "3 allowed_media_domains"]),
    ("http://pictures.test@elsewhere.test/", ["must name a host"]), ("file:///etc/passwd", ["outside of"])])
def test_places_that_are_not_asked(llava, pictures, url, words, good):
    message = refused(llava, user(url), param="messages[0].content[0].image_url", words=words)
    assert pictures.asked == [] and "10.0.0.5" not in message


def test_files_outside(llava, media_folder, good):
    base = f"file://{media_folder}/inside"
    for path in ("/../no.png", "/%2e%2e/no.png", "/link.png"):
        refused(llava, user(base + path), param="messages[0].content[0].image_url", words=["outside of"])


def test_placeholders_in_text(llava, good):
    "Words that mean a picture, without one, or with another number of them."
    def wrong(message, *words): refused(llava, message, param="messages", words=words)
    wrong({"role": "user", "content": "What is <image>?"}, "1 image placeholders", "0 images")
    wrong(user("a <image> b"), "1 image placeholders", "0 images")
    wrong(user(picture(), "and <image><image>"), "3 image placeholders", "1 images")
    status, told = post(llava, "/v1/completions", prompt="a <image> b", max_tokens=2)
    assert status == 400 and told["error"]["param"] == "prompt" and "1 image placeholders" in told["error"]["message"]


def test_numbers_of_pictures(llava, good):
    refused(llava, user(*[picture()] * 5), param="messages", words=["5 images", "limit_mm_per_prompt", "4"])
    refused(llava, *[user(picture(i), "x") for i in range(5)], param="messages", words=["5 images"])
    assert len(answer(llava, user(*[picture()] * 4))) == 6
    large = [data_url(save(Image.new("RGB", (999, 999), (i, 0, 0)))) for i in range(3)]
    refused(llava, user(*large), param="messages", words=["3 images", "2,994,003 pixels", "max_request_pixels is 2,000,000"])


@pytest.mark.parametrize("kind", KINDS)
def test_too_long_with_its_pictures(kind, folders):
    "The words would fit."
    engine = make(kind, folders("llava"), max_model_len=64)
    with serve_in_thread(engine) as server:
        assert len(answer(server, user(picture(), "x"), max_tokens=2)) == 2
        refused(server, user(picture(), picture(1), picture(2), "x"), param="messages", words=["64"])
        assert len(answer(server, user(picture(), "x"), max_tokens=1000)) < 64 - 25, "an answer fills the window"
        rest(server)


def test_tokens_of_pictures_are_not_counted(llava, good):
    status, told = post(llava, "/tokenize", messages=[user(picture(), "x")])
    assert status == 400 and told["error"]["param"] == "messages[0].content[0].image_url"
    status, told = post(llava, "/tokenize", messages=[user("x")])
    assert status == 200 and told["count"] > 1


def test_options_of_the_image_processor_are_the_server_s(llava, good):
    refused(llava, user(picture()), mm_processor_kwargs={"size": {"shortest_edge": 10**6}}, param="mm_processor_kwargs")


# Others

def in_thread(function, *args, **kwargs):
    "Start a call; `result()` waits for it."
    box = SimpleNamespace(value=None, end_s=None)
    def run(): box.value, box.end_s = function(*args, **kwargs), time.monotonic()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    def result():
        thread.join(30)
        assert box.end_s is not None, "no answer"
        return box.value
    return SimpleNamespace(result=result, box=box)


def test_slow_pictures_hold_nobody_up(llava, pictures, good):
    "While some wait for a silent server, others are answered."
    url = f"http://pictures.test:{pictures.port}/silent"
    slow = [in_thread(chat, llava, user(f"{url}?{i}")) for i in range(8)]
    while len(pictures.asked) < 8: time.sleep(0.005)
    for _ in range(3): good()
    assert not any(s.box.end_s for s in slow), "the good ones have waited for the slow ones"
    for status, told in (s.result() for s in slow): assert status == 400 and "within 1 s" in told["error"]["message"]


def test_good_and_bad_at_once(llava, pictures, good):
    "Bad ones hurt themselves alone."
    url = f"http://pictures.test:{pictures.port}"
    questions = [user(picture(i % 3), f"Number {i % 3}?") for i in range(12)]
    want = [answer(llava, q) for q in questions[:3]]
    bad = [user(u) for u, _ in BAD_DATA.values()] + [user(f"{url}/{path}") for path in BAD_URLS]
    running = [(in_thread(answer, llava, q), want[i % 3]) for i, q in enumerate(questions)]
    refusals = [in_thread(chat, llava, b) for b in bad]
    for call, tokens in running: assert call.result() == tokens
    for call in refusals: assert call.result()[0] == 400


def test_a_client_that_leaves_while_its_picture_is_fetched(llava, pictures, good):
    body = json.dumps({"model": "tiny", "messages": [user(f"http://pictures.test:{pictures.port}/silent")]})
    connection = http.client.HTTPConnection(llava.url.removeprefix("http://"))
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    while not pictures.asked: time.sleep(0.005)
    connection.close()
    rest(llava)


# Processes of their own

def test_server_process(folders, media_folder):
    "As a user starts it: options, the core in another process, one end for all."
    inside = media_folder / "inside"
    with ServerProcess(folders("llava"), "--load-format", "auto", "--tokenizer", folders("llava"), "--engine", "v1",
                       "--limit-mm-per-prompt", "image=2", "--allowed-local-media-path", str(inside),
                       "--allowed-media-domains", "example.com", "127.0.0.1", limit_s=180) as server:
        want = answer(server, user(picture(), "?"))
        assert answer(server, user(f"file://{inside}/ok.png", "?")) == want
        assert answer(server, user(picture(), "?")) == want, "the second time it comes from the caches"
        assert len(answer(server, user(picture(), picture(1), "?"))) == 6
        at = "messages[0].content[0].image_url"
        refused(server, user(f"file://{media_folder}/no.png"), param=at, words=["outside of"])
        refused(server, user("http://127.0.0.1:1/a.png"), param=at, words=["no public address"])
        refused(server, user("http://other.test/a.png"), param=at, words=["2 allowed_media_domains"])
        refused(server, user(picture(), picture(1), picture(2)), param="messages", words=["3 images", "allows 2"])
        assert answer(server, user(picture(), "?")) == want
