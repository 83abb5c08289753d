"""A crowd at the door of server processes: many streams, a third of which leave; nonsense, and clients that never read.

Everybody else gets the offline engine's text and token ids, the pool is whole
afterwards, and memory does not grow. With a tiny model here, with SmolLM2 and
200 streams where it is slow.
"""
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import signal
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from served import (
    FEW_KERNELS, KEY, KINDS, LLM_ARGS, SMOLLM2_ARGS, call, core_pid, is_alive, metrics, rss_bytes, smollm2, start_smollm2,
    wait_idle, wait_until)

from minengine.llm import LLM
from minengine.sampling_params import SamplingParams
from minengine.server.serving import default_params

WORDS = "the sea is a list of three prime numbers and gravity explains itself to children wörld €".split()
MIB = 1 << 20


@dataclass
class Wish:
    "A request, and what the offline engine says to it."
    fields: dict
    stream: bool
    answer: tuple[str, list[int]] | None = None


def make_wishes(llm, rng, count, max_tokens) -> list[Wish]:
    "Greedy and seeded, streamed and not, of all lengths."
    # V0's seeds start again when a request is recomputed, see test_equality.py.
    temperatures = [0.0] if llm.engine_name == "v0" else [0.0, 1.0]
    defaults = default_params(llm.vllm_config.model_config.generation_config)
    wishes, params = [], []
    for i in range(count):
        sampling = {"temperature": rng.choice(temperatures), "seed": i, "max_tokens": rng.randrange(max_tokens // 3, max_tokens)}
        prompt = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 12)))
        wishes.append(Wish({"prompt": prompt, **sampling}, stream=rng.random() < 0.7))
        params.append(SamplingParams(**{**defaults, **sampling}, ignore_eos=True))
    for wish, out in zip(wishes, llm.generate([w.fields["prompt"] for w in wishes], params, use_tqdm=False)):
        wish.answer = out.outputs[0].text, list(out.outputs[0].token_ids)
    return wishes


async def ask(client, wish, leave_after=None, reasons=("length",)):
    "Text and token ids, or None for a client that hung up after so many chunks."
    answer = await client.completions.create(
        model="tiny", **wish.fields, stream=wish.stream, logprobs=0,
        extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True})
    async def once(): yield answer
    text, ids, num_chunks = "", [], 0
    async for chunk in answer if wish.stream else once():
        choice, num_chunks = chunk.choices[0], num_chunks + 1
        text += choice.text
        if choice.logprobs: ids += [int(t.removeprefix("token_id:")) for t in choice.logprobs.tokens]
        if wish.stream and num_chunks == leave_after: return await answer.close()
    assert choice.finish_reason in reasons, choice
    return text, ids


async def one_round(client, wishes, rng) -> int:
    "All at once; a third leaves at random, by closing or by being cancelled. The others' answers are checked."
    leaving = set(rng.sample(range(len(wishes)), len(wishes) // 3))
    tasks = [asyncio.create_task(ask(client, wish, rng.randrange(1, 8) if i in leaving else None))
             for i, wish in enumerate(wishes)]
    for k, i in enumerate(sorted(leaving, key=lambda i: rng.random())[::2]):
        # Not by the clock: as others end, so that requests are met in every state.
        while sum(t.done() for t in tasks) < k and not tasks[i].done(): await asyncio.sleep(0.002)
        tasks[i].cancel()
    await asyncio.wait(tasks)
    for i in set(range(len(wishes))) - leaving: assert tasks[i].result() == wishes[i].answer, wishes[i]
    # Whoever hung up has seen no failure of ours.
    return sum(tasks[i].cancelled() or tasks[i].result() is None for i in leaving)


def run(url, main, limit_s=60):
    "Run `main(client)`; nothing may hang."
    async def limited():
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0, timeout=limit_s) as client:
            async with asyncio.timeout(limit_s): return await main(client)
    return asyncio.run(limited())


def check_pool_is_whole(url, num_blocks=64, window=256):
    "Requests that need every block, side by side: if one is missing, somebody is preempted or has to wait."
    wait_idle(url)
    before, rng = metrics(url), random.Random(time.time_ns())
    if call(url, "/version")["engine"] == "v0": num_blocks -= 1   # it wants one that is free, needed or not
    lengths = [window] * (num_blocks * 16 // window) + [num_blocks * 16 % window][:num_blocks * 16 % window > 24]
    answer = call(url, "/v1/completions", {
        "model": "tiny", "prompt": [[rng.randrange(200) for _ in range(length - 24)] for length in lengths],
        "max_tokens": 24, "temperature": 0, "ignore_eos": True}, limit_s=120)
    assert answer["usage"]["completion_tokens"] == 24 * len(lengths)
    after = metrics(url)
    assert after["num_preemptions_total"] == before["num_preemptions_total"], "a block is missing"
    num_steps = after["iteration_tokens_total_count"] - before["iteration_tokens_total_count"]
    assert 24 <= num_steps < 36, f"a block is missing: {num_steps} steps"   # 48 if one waits for another


@pytest.fixture(scope="module", params=KINDS)
def tiny(request, tiny_server):
    "A server, and what the offline engine says to 48 requests."
    server = tiny_server(request.param)
    llm = LLM(server.folder, request.param, **LLM_ARGS)
    server.wishes = make_wishes(llm, random.Random(0), 48, 30)
    llm.shutdown()
    return server


def test_a_third_leaves_and_nothing_stays(tiny):
    rng, sizes, pids = random.Random(1), [], (tiny.process.pid, core_pid(tiny))
    for _ in range(4):   # and one before, to warm up
        assert run(tiny.url, lambda client: one_round(client, tiny.wishes, rng)) >= 10
        check_pool_is_whole(tiny.url)
        sizes.append([rss_bytes(pid) for pid in pids])
    for _, first, *_, last in zip(*sizes): assert last - first < 4 * MIB, sizes


@pytest.mark.parametrize("num_blocks", [66, 80])
def test_a_block_too_few_would_be_seen(tiny, num_blocks):
    "The check of the pool checks."
    with pytest.raises(AssertionError, match="a block is missing"): check_pool_is_whole(tiny.url, num_blocks)


# Trouble beside them ---------------------------------------------------------------

def http_request(path, body=b"", length=None, kind="application/json") -> bytes:
    length = len(body) if length is None else length
    return (f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {length}\r\n\r\n").encode() + body


async def send(url, data: bytes, limit_s=30):
    "Send bytes as they are; status and body of what comes back."
    address = urlsplit(url)
    async with asyncio.timeout(limit_s):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            # The answer may come before everything is sent.
            sending = asyncio.create_task(_write(writer, data))
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            body = await reader.readexactly(int(length[1])) if length else await reader.read()
            sending.cancel()
            return int(head.split()[1]), body
        finally: writer.close()


async def _write(writer, data):
    with contextlib.suppress(ConnectionError):
        for start in range(0, len(data), MIB):
            writer.write(data[start:start + MIB])
            await writer.drain()


async def refused(url, path, body: bytes, status=400, param=None, **kw):
    "The right status, the API's shape, and the field's name."
    found, answer = await send(url, http_request(path, body, **kw))
    assert found == status, (body[:100], found, answer[:300])
    error = json.loads(answer)["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
    if param: assert error["param"].startswith(param), (body[:100], error)


async def send_100_megabytes(url):
    await refused(url, "/v1/completions", b" " * (100 * MIB), 413)


async def send_nonsense(url):
    good = b'{"model": "tiny", "prompt": "abc", "max_tokens": 2}'
    for path in PATHS:
        for body in (b"", b"{", b"nonsense", b"[]", b"7", b"null", b'"text"', good[:-1], good + b"}", b"[" * 100_000,
                     b'{"prompt": "\xff\xfe"}', b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\\ud800"}', b"\0" * 20,
                     b'{"max_tokens": ' + b"9" * 5000 + b"}", b'{"temperature": NaN}', b'{"a": 1, "a": 2}'):
            await refused(url, path, body)
        await refused(url, path, good, 415, kind="text/plain")
    assert (await send(url, b"\x16\x03\x01 this is not HTTP\r\n\r\n"))[0] == 400


async def send_wrong_types(url):
    "No field is a list of lists of lists."
    schemas = json.loads((await asyncio.to_thread(call, url, "/openapi.json", raw=True)))["components"]["schemas"]
    fine = {"/v1/completions": {"model": "tiny", "prompt": "a"}, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [1]},
            "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}}
    for path, name in PATHS.items():
        for field in schemas[name]["properties"]:
            await refused(url, path, json.dumps({**fine[path], field: [[[{"a": 1}]]]}).encode(), param=field)


async def never_read(url):
    "Ask for much, read nothing, stay; a second one hangs up in the middle of its request."
    address, sock = urlsplit(url), socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (address.hostname, address.port))
    await loop.sock_sendall(sock, http_request("/v1/completions", json.dumps({
        "model": "tiny", "prompt": "abc", "n": 4, "temperature": 1, "max_tokens": 200, "stream": True, "logprobs": 20,
        "ignore_eos": True}).encode()))
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(http_request("/v1/completions", b'{"model": "ti', 1000))
    await writer.drain()
    writer.transport.abort()
    return sock


PATHS = {"/v1/completions": "CompletionRequest", "/v1/chat/completions": "ChatCompletionRequest",
         "/tokenize": "TokenizeRequest", "/detokenize": "DetokenizeRequest"}


def test_trouble_harms_nobody_else(tiny):
    "A body of 100 MB, nonsense, wrong types, clients that never read; and 48 others, who notice nothing."
    async def main(client):
        silent = [await never_read(tiny.url) for _ in range(3)]
        try:
            trouble = [asyncio.create_task(make(tiny.url)) for make in (send_100_megabytes, send_nonsense, send_wrong_types)]
            answers = await asyncio.gather(*(ask(client, wish) for wish in tiny.wishes))
            assert answers == [wish.answer for wish in tiny.wishes]
            await asyncio.gather(*trouble)
            # Those who never read have been answered, or wait; the engine has long gone on.
            await asyncio.to_thread(check_pool_is_whole, tiny.url)
        finally:
            for sock in silent: sock.close()
    run(tiny.url, main)
    wait_idle(tiny.url)
    assert call(tiny.url, "/health") == ""


# The same with SmolLM2 -------------------------------------------------------------------

NUM_STREAMS, POOL = 200, dict(num_gpu_blocks_override=512, max_model_len=512, max_num_seqs=32)
POOL_WORDS = [word for name, value in POOL.items() for word in ("--" + name.replace("_", "-"), str(value))]


@pytest.fixture(scope="module", params=KINDS)
def large(request):
    "What SmolLM2 says offline to 200 requests."
    llm = LLM(smollm2(), request.param, **{**SMOLLM2_ARGS, **POOL})
    wishes = make_wishes(llm, random.Random(2), NUM_STREAMS, 20)
    llm.shutdown()
    return request.param, wishes


@pytest.mark.slow
def test_smollm2_200_streams_a_third_leaves_and_nothing_stays(large):
    kind, wishes = large
    rng, sizes = random.Random(3), []
    with start_smollm2(kind, "--api-key", KEY, *POOL_WORDS, **FEW_KERNELS) as server:
        pids = server.process.pid, core_pid(server)
        for _ in range(4):   # and one before, to warm up
            start = time.monotonic()
            assert run(server.url, lambda client: one_round(client, wishes, rng), 300) >= NUM_STREAMS // 5
            seconds = time.monotonic() - start
            check_pool_is_whole(server.url, 512, 512)
            sizes.append([rss_bytes(pid) for pid in pids])
            print(f"{kind}: {seconds:.0f} s, server and engine {[size // MIB for size in sizes[-1]]} MiB")
        for _, first, *_, last in zip(*sizes): assert last - first < 24 * MIB, sizes


async def all_until(server, wishes, make_trouble):
    "Ask for everything; make trouble once some have their answer; what each client got, or its error."
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        tasks = [asyncio.create_task(ask(client, wish, reasons=("length", "abort"))) for wish in wishes]
        async with asyncio.timeout(120):
            while sum(t.done() for t in tasks) < len(tasks) // 10: await asyncio.sleep(0.01)
            make_trouble()
            start = time.monotonic()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            return results, time.monotonic() - start


@pytest.mark.slow
def test_smollm2_sigterm_under_load(large):
    "Every client gets the right answer or the start of it; nobody is left."
    kind, wishes = large
    with start_smollm2(kind, "--api-key", KEY, "--shutdown-timeout", "3", *POOL_WORDS) as server:
        children = [server.process.pid, *server.children()]
        results, seconds = asyncio.run(all_until(server, wishes, lambda: server.process.send_signal(signal.SIGTERM)))
        assert server.wait(20) == 0 and seconds < 15
    assert not any(isinstance(r, BaseException) for r in results), results
    whole = sum(result == wish.answer for result, wish in zip(results, wishes))
    assert NUM_STREAMS // 10 <= whole < NUM_STREAMS
    for (_, ids), wish in zip(results, wishes): assert ids == wish.answer[1][:len(ids)]
    wait_until(lambda: not any(map(is_alive, children)))


@pytest.mark.slow
def test_smollm2_kill_9_of_the_engine_under_load(large):
    "Within seconds every client knows; those who were done before have the right answer."
    kind, wishes = large
    with start_smollm2(kind, "--api-key", KEY, *POOL_WORDS) as server:
        children = [server.process.pid, *server.children()]
        results, seconds = asyncio.run(all_until(server, wishes, lambda: os.kill(core_pid(server), signal.SIGKILL)))
        assert server.wait(20) == (1 if kind == "v1" else -signal.SIGKILL)   # V0's engine is the server
    assert seconds < 5
    answered = [(result, wish.answer) for result, wish in zip(results, wishes) if not isinstance(result, BaseException)]
    assert all(found == wanted for found, wanted in answered) and NUM_STREAMS // 10 <= len(answered) < NUM_STREAMS
    for error in results:
        if not isinstance(error, BaseException): continue
        if kind == "v1": assert isinstance(error, openai.APIError) and "the engine has died" in str(error), error
        else: assert isinstance(error, (openai.APIConnectionError, httpx.HTTPError)), error
    wait_until(lambda: not any(map(is_alive, children)))
