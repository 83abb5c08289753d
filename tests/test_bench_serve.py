"""The load generator tells the truth, about times and about failures.

Most tests run on a clock that jumps: what a fake server waits is exactly what
the client has to report, however busy the machine is.
"""
import asyncio
import contextlib
import errno
import json
import os
import random
import selectors
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minengine import bench_serve
from minengine.bench_serve import load_levels, main, running_server
from minengine.server.client import ApiClient, EventParser, RequestFailed, complete, parse_event, read_response
from minengine.server.traffic import PlannedRequest, plan_requests, read_lengths, send_all, summarise

ROOT = Path(__file__).parent.parent
LIMIT_S = 60


@pytest.fixture(autouse=True)
def limit():
    "No test of this file takes longer, whatever hangs."
    def ring(*_): raise RuntimeError(f"the test took longer than {LIMIT_S} s")
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


class JumpingSelector(selectors.DefaultSelector):
    "Instead of waiting for a timer, moves the clock there."
    now_s = 100.0

    def select(self, timeout=None):
        found = super().select(0 if timeout == 0 else 0.002)  # bytes on the way come first
        if found or timeout == 0: return found
        if timeout is None:
            found = super().select(30)
            assert found, "nothing will ever happen"
            return found
        self.now_s += timeout
        return []


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self): super().__init__(JumpingSelector())

    def time(self): return self._selector.now_s


def run(job, loop_factory=JumpingLoop):
    with asyncio.Runner(loop_factory=loop_factory) as runner: return runner.run(job)


def now(): return asyncio.get_running_loop().time()


class FakeServer:
    "An OpenAI-compatible server whose answers are functions of the test's."

    def __init__(self, answer, ssl_context=None):
        self.answer, self.ssl_context = answer, ssl_context
        self.bodies, self.heads, self.came_s = [], [], []   # of each request
        self.inside = self.most_inside = 0
        self.left_early_s = []   # when clients hung up before their answer ended

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.handle, "127.0.0.1", 0, ssl=self.ssl_context)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def handle(self, reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split()[0])
            body = json.loads(await reader.readexactly(length) or b"null")
        except (asyncio.IncompleteReadError, ConnectionError): return writer.close()  # a probe
        self.heads.append(head.decode()); self.bodies.append(body); self.came_s.append(now())
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        job = asyncio.ensure_future(self.answer(body, writer))
        gone = asyncio.ensure_future(reader.read())
        await asyncio.wait([job, gone], return_when=asyncio.FIRST_COMPLETED)
        if not job.done(): self.left_early_s.append(now())
        job.cancel(); gone.cancel()
        self.inside -= 1
        with contextlib.suppress(asyncio.CancelledError): await job
        writer.close()


def start(writer, status="200 OK", kind="text/event-stream", more=""):
    writer.write(f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{more}\r\n".encode())


def piece(text=" a", finish_reason=None):
    return json.dumps({"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def usage(prompt, output, cached=None):
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return json.dumps({"choices": [], "usage": {
        "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output} | details})


def say(writer, *events):
    for event in events: writer.write(f"data: {event}\n\n".encode())


async def whole_answer(body, writer, waits_s=None, per_piece=1):
    "An answer of as many tokens as asked for, after the given waits."
    start(writer)
    num_pieces = body["max_tokens"] // per_piece
    for i, wait_s in enumerate(waits_s or [0.01] * num_pieces):
        await asyncio.sleep(wait_s)
        say(writer, piece(f" {i}"))
    say(writer, piece("", "length"), usage(len(body["prompt"]), body["max_tokens"]), "[DONE]")


async def ask(answer, timeout_s=30.0, **body):
    "One request to a server that gives one kind of answer."
    async with FakeServer(answer) as server:
        body = {"prompt": [1, 2, 3], "max_tokens": 3} | body
        found = await complete(ApiClient(server.url), body, timeout_s)
        await asyncio.sleep(0.01)   # the server notices that we have gone
        return found, server


def planned(due_s, number, output_tokens):
    return PlannedRequest(due_s, [number], 1, output_tokens)


# ------------------------------------------------------------------ times

def in_ms(seconds):
    found = {"mean": np.mean(seconds)} | {
        f"p{p}": np.percentile(seconds, p, method="inverted_cdf") for p in (50, 90, 99)}
    return {name: pytest.approx(value * 1000, abs=0.02) for name, value in found.items()}


def test_reported_percentiles_are_the_truth():
    rng = random.Random(7)
    waits = [[rng.expovariate(1 / 0.3)] + [rng.expovariate(1 / 0.02) for _ in range(rng.randrange(12))]
             for _ in range(150)]
    plan = [planned(i * 0.05, i, len(w)) for i, w in enumerate(waits)]

    async def work():
        async def answer(body, writer): await whole_answer(body, writer, waits[body["prompt"][0]])
        async with FakeServer(answer) as server:
            return await send_all(ApiClient(server.url), plan, {}), server.came_s
    answers, came_s = run(work())
    row = summarise(answers)
    assert row["completed"] == 150 and row["errors"] == {}
    assert row["first_token_ms"] == in_ms([w[0] for w in waits])
    assert row["between_pieces_ms"] == in_ms([gap for w in waits for gap in w[1:]])
    assert row["whole_request_ms"] == in_ms([sum(w) for w in waits])
    assert row["per_token_ms"] == in_ms([sum(w[1:]) / (len(w) - 1) for w in waits if len(w) > 1])
    assert row["send_delay_ms"]["p99"] == 0
    tokens, seconds = sum(map(len, waits)), max(i * 0.05 + sum(w) for i, w in enumerate(waits))
    assert row["output_tokens"] == tokens and row["tokens_counted_by"] == "server"
    assert row["seconds"] == pytest.approx(seconds, abs=0.001)
    assert row["output_tokens_per_s"] == pytest.approx(tokens / seconds, abs=0.1)
    assert np.diff(came_s) == pytest.approx(0.05, abs=1e-6), "requests left when they were due"


def test_the_same_on_a_real_clock():
    "Loose, as a busy machine is late; a clock in wrong units would show."
    async def answer(body, writer): await whole_answer(body, writer, [0.3, 0.1, 0.1])
    found, _ = run(ask(answer), loop_factory=asyncio.new_event_loop)
    assert 0.3 <= found.first_token_s < 2 and 0.5 <= found.total_s < 4
    assert len(found.gaps_s) == 2 and found.per_token_s < 2


def test_closed_loop_keeps_its_number_of_users():
    async def work():
        async def answer(body, writer): await whole_answer(body, writer, [0.1] * 5)
        async with FakeServer(answer) as server:
            plan = [planned(None, i, 5) for i in range(12)]
            return await send_all(ApiClient(server.url), plan, {}, max_concurrency=3), server
    answers, server = run(work())
    row = summarise(answers)
    assert server.most_inside == 3
    assert row["seconds"] == pytest.approx(12 / 3 * 0.5, abs=0.001)
    # A user's clock starts with his own request, not with the run.
    assert row["first_token_ms"]["p99"] == pytest.approx(100, abs=0.02)
    assert [a.text for a in answers] == [" 0 1 2 3 4"] * 12


def stalled(due):
    "Requests at a server that takes one at a time and stalls from 1 to 2 s."
    async def work():
        begin_s, one = now(), asyncio.Lock()
        async def answer(body, writer):
            async with one:
                if 1 <= now() - begin_s < 2: await asyncio.sleep(begin_s + 2 - now())
                await whole_answer(body, writer, [0.01])
        async with FakeServer(answer) as server:
            plan = [planned(due_s, i, 1) for i, due_s in enumerate(due)]
            return summarise(await send_all(ApiClient(server.url), plan, {}, max_concurrency=1))
    return run(work())


def test_no_coordinated_omission():
    "A stall counts for everybody who came during it, also for those who could not even be sent."
    closed = stalled([None] * 150)
    opened = stalled([i * 0.02 for i in range(150)])
    assert closed["first_token_ms"]["p99"] == pytest.approx(10, abs=0.1)
    assert opened["first_token_ms"]["p90"] > 700
    assert opened["send_delay_ms"]["p90"] > 700, "and the row tells where they waited"
    assert opened["first_token_ms"]["p99"] == pytest.approx(1000, abs=30)


def test_an_open_loop_does_not_wait_for_answers():
    async def work():
        async def answer(body, writer): await whole_answer(body, writer, [1000.0])
        async with FakeServer(answer) as server:
            plan = [planned(i * 0.1, i, 1) for i in range(100)]
            return await send_all(ApiClient(server.url), plan, {}), server.most_inside
    answers, most = run(work())
    assert most == 100 and {a.error_kind for a in answers} == {"timeout"}


def test_poisson_plan_is_kept():
    async def work():
        async def answer(body, writer): await whole_answer(body, writer, [0.5])
        async with FakeServer(answer) as server:
            plan = plan_requests(60, [(4, 1)], request_rate=20.0, seed=3)
            begin_s = now()
            await send_all(ApiClient(server.url), plan, {})
            return [s - begin_s for s in server.came_s], [r.due_s for r in plan]
    came, due = run(work())
    assert came == pytest.approx(due, abs=1e-6)


# ------------------------------------------------------------------ counting

def test_pieces_of_several_tokens():
    async def answer(body, writer): await whole_answer(body, writer, [0.1] * 4, per_piece=2)
    found, _ = run(ask(answer, max_tokens=8))
    assert (found.output_tokens, len(found.arrivals_s), found.prompt_tokens) == (8, 4, 3)
    assert found.gaps_s == pytest.approx([0.1] * 3) and found.per_token_s == pytest.approx(0.3 / 7)


def test_without_usage_pieces_are_counted_and_the_row_says_so():
    async def answer(body, writer):
        start(writer)
        say(writer, piece(), piece(""), piece("b", "length"), "[DONE]")
    found, server = run(ask(answer))
    assert server.bodies[0]["stream_options"] == {"include_usage": True} and server.bodies[0]["stream"] is True
    assert found.output_tokens == 3 and not found.counted_by_server and found.error_kind is None
    assert summarise([found])["tokens_counted_by"] == "pieces"


def test_tokens_without_text_are_tokens_and_an_empty_end_is_none():
    async def answer(body, writer):
        start(writer)
        await asyncio.sleep(0.1); say(writer, piece(""))
        await asyncio.sleep(0.1); say(writer, piece("é"))
        await asyncio.sleep(0.1); say(writer, piece("", "stop"), "[DONE]")
    found, _ = run(ask(answer))
    assert found.first_token_s == pytest.approx(0.1) and found.gaps_s == pytest.approx([0.1])
    async def only_end(body, writer): start(writer); say(writer, piece("", "stop"), "[DONE]")
    assert run(ask(only_end))[0].output_tokens == 1, "an answer that is one special token"


def test_cached_prompt_tokens_are_reported():
    async def answer(body, writer): start(writer); say(writer, piece(), usage(64, 1, cached=48), "[DONE]")
    found, _ = run(ask(answer))
    row = summarise([found]) | {"server": "x", "request_rate": None, "max_concurrency": 1}
    assert row["cached_prompt_tokens"] == 48 and row["prompt_tokens"] == 64
    bench_serve.print_result(row)


def test_a_stream_that_arrives_byte_by_byte():
    text = "héllo ✓ 𝄞"
    async def answer(body, writer):
        start(writer, more="Transfer-Encoding: chunked\r\n")
        data = f": hello\r\ndata: {piece(text)}\r\n\r\ndata: [DONE]\r\n\r\n".encode()
        for i in range(len(data)):
            writer.write(b"1\r\n"); await asyncio.sleep(0.001)
            writer.write(data[i:i + 1]); await asyncio.sleep(0.001)
            writer.write(b"\r\n")
        writer.write(b"0\r\n\r\n")
    # JSON escapes what is not ASCII; send the characters themselves.
    found, _ = run(ask(answer, max_tokens=1))
    assert found.text == text and found.error_kind is None


def test_characters_cut_in_two():
    data = 'data: {"choices": [{"text": "𝄞é"}]}\n\ndata: [DONE]\n\n'.encode()
    for cut in range(len(data)):
        async def answer(body, writer):
            start(writer)
            writer.write(data[:cut]); await asyncio.sleep(0.1); writer.write(data[cut:])
        found, _ = run(ask(answer))
        assert found.text == "𝄞é" and found.error_kind is None, cut


def test_a_connection_that_stays_open_after_the_end():
    async def answer(body, writer):
        await whole_answer(body, writer)
        await asyncio.sleep(1e6)
    found, _ = run(ask(answer))
    assert found.error_kind is None and found.total_s < 1


def test_an_end_without_done_is_an_end_if_a_reason_came():
    async def answer(body, writer): start(writer); say(writer, piece("a", "stop"))
    assert run(ask(answer))[0].error_kind is None


# ------------------------------------------------------------------ failures

def raw(*parts):
    "An answer of these bytes; a number between them is a wait in seconds."
    async def answer(body, writer):
        for part in parts:
            if isinstance(part, bytes): writer.write(part)
            else: await asyncio.sleep(part)
    return answer


SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
A = f"data: {piece()}\n\n".encode()
FAILURES = {
    "closes at once": (raw(), "cut", "closed"),
    "closes in the headers": (raw(b"HTTP/1.1 200 OK\r\ncontent-"), "cut", "closed"),
    "closes in a chunk": (raw(SSE + b"transfer-encoding: chunked\r\n\r\nff\r\nabc"), "cut", "252 bytes"),
    "closes between chunks": (raw(SSE + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n"), "cut", "closed"),
    "closes too short": (raw(SSE + b"content-length: 900\r\n\r\n" + A), "cut", "missing"),
    "closes without an end": (raw(SSE + b"\r\n" + A), "cut", "without an end"),
    "ends without an end": (raw(SSE + b"content-length: 0\r\n\r\n"), "cut", "without an end"),
    "says an error": (raw(SSE + b"\r\n" + A + b'data: {"error": {"message": "out of blocks"}}\n\n'),
                      "stream", "out of blocks"),
    "says an error plainly": (raw(SSE + b'\r\ndata: {"error": "dead"}\n\n'), "stream", "dead"),
    "is aborted": (raw(SSE + f"\r\ndata: {piece('', 'abort')}\n\ndata: [DONE]\n\n".encode()), "aborted", "broke it off"),
    "is empty": (raw(SSE + b"\r\ndata: [DONE]\n\n"), "empty", "without a token"),
    "is not HTTP": (raw(b"SSH-2.0-OpenSSH_9.6\r\n"), "protocol", "not HTTP"),
    "is HTTP/2": (raw(b"HTTP/2 200\r\n\r\n"), "protocol", "not HTTP"),
    "is binary": (raw(bytes(range(256)) * 4), "protocol", ""),
    "has an endless header": (raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000), "protocol", "without an end"),
    "has endless headers": (raw(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 300), "protocol", "200 headers"),
    "has a bad status": (raw(b"HTTP/1.1 abc OK\r\n\r\n"), "protocol", "not a length"),
    "has a bad length": (raw(SSE + b"content-length: -5\r\n\r\n"), "protocol", "'-5'"),
    "has a bad chunk": (raw(SSE + b"transfer-encoding: chunked\r\n\r\nxyz\r\n"), "protocol", "xyz"),
    "has a chunk too long": (raw(SSE + b"transfer-encoding: chunked\r\n\r\n1\r\nabc\r\n"), "protocol", "chunk longer"),
    "is no stream": (raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}"), "protocol", "application/json"),
    "says nonsense": (raw(SSE + b"\r\ndata: {nonsense\n\n"), "protocol", "nonsense"),
    "says a list": (raw(SSE + b"\r\ndata: [1, 2]\n\n"), "protocol", "[1, 2]"),
    "says a number of choices": (raw(SSE + b'\r\ndata: {"choices": 1}\n\n'), "protocol", "choices"),
    "says text of a wrong type": (raw(SSE + b'\r\ndata: {"choices": [{"text": 1}]}\n\n'), "protocol", "text"),
    "is not UTF-8": (raw(SSE + b"\r\ndata: \xff\xfe\n\n"), "protocol", "UTF-8"),
    "has an endless event": (raw(SSE + b"\r\ndata: " + b"x" * (1 << 21)), "protocol", "more than"),
    "never answers": (raw(1e9), "timeout", "30 s"),
    "hangs in the headers": (raw(b"HTTP/1.1 200 OK\r\n", 1e9), "timeout", "30 s"),
    "hangs in the answer": (raw(SSE + b"\r\n" + A, 1e9), "timeout", "30 s"),
    "drips headers": (raw(b"HTTP/1.1 200 OK\r\n", *[b"x", 1.0] * 100), "timeout", "30 s"),
    "drips comments": (raw(SSE + b"\r\n", *[b": wait\n\n", 1.0] * 100), "timeout", "30 s"),
}


@pytest.mark.parametrize("answer, kind, words", FAILURES.values(), ids=FAILURES)
def test_every_failure_has_its_kind(answer, kind, words):
    found, server = run(ask(answer))
    assert found.error_kind == kind and words in found.error, (found.error_kind, found.error)
    assert found.total_s <= 30.001
    assert len(server.left_early_s) == (kind == "timeout"), "the connection is dropped when we give up"


@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 500, 503, 307, 204])
@pytest.mark.parametrize("body, words", [
    (b'{"error": {"message": "max_tokens\\nis 0", "type": "x", "code": 400}}', "max_tokens is 0"),
    (b'{"object": "error", "message": "too long"}', "too long"), (b'{"detail": "Not Found"}', "Not Found"),
    (b'{"error": "no"}', "no"), (b"<html>busy</html>", "busy"), (b"\xff\xfe", "\ufffd"), (b"", "no reason"),
    (b"[1]", "[1]"), (b"x" * 3_000_000, "xxx")], ids=lambda x: None if isinstance(x, bytes) else x[:9])
def test_refusals_are_told_in_the_servers_words(status, body, words):
    found, _ = run(ask(raw(f"HTTP/1.1 {status} Oh\r\n\r\n".encode(), body)))
    assert found.error_kind == f"http {status}" and words in found.error and len(found.error) <= 300


def test_a_reset_connection():
    async def answer(body, writer):
        start(writer); say(writer, piece()); await asyncio.sleep(0.1)
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")   # close sends RST
        writer.transport.abort()
    found, _ = run(ask(answer))
    assert found.error_kind == "cut" and "reset" in found.error.lower()


def test_nobody_listens():
    async def work():
        async with FakeServer(whole_answer) as server: client = ApiClient(server.url)
        return [await complete(client, {}), await complete(ApiClient("http://no.such.host.invalid"), {}),
                await complete(ApiClient("http://a..b"), {})]
    found = run(work(), asyncio.new_event_loop)
    assert [a.error_kind for a in found] == ["connect"] * 3 and "127.0.0.1" in found[0].error


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL])
def test_our_own_limit_is_not_the_servers_fault(monkeypatch, number):
    async def none_left(*_, **__): raise OSError(number, os.strerror(number))
    monkeypatch.setattr(asyncio, "open_connection", none_left)
    async def work(): return await complete(ApiClient("http://127.0.0.1:1"), {})
    assert run(work()).error_kind == "no socket"


def test_our_own_mistakes_are_not_counted_but_raised(monkeypatch):
    def broken(*_): raise KeyError("a bug")
    monkeypatch.setattr("minengine.server.client.parse_event", broken)
    with pytest.raises(KeyError, match="a bug"): run(ask(whole_answer))


def test_failures_harm_nobody_else():
    "All kinds at once, among answers that must be whole; the row counts each."
    cases = [(a, k) for a, k, _ in FAILURES.values()]
    async def answer(body, writer):
        number = body["prompt"][0]
        await (whole_answer(body, writer) if number % 2 else cases[number // 2][0](body, writer))
    async def work():
        async with FakeServer(answer) as server:
            plan = [planned(i * 0.01, i, 4) for i in range(2 * len(cases))]
            answers = await send_all(ApiClient(server.url), plan, {}, timeout_s=30.0)
            await asyncio.sleep(1)
            return answers, server.inside
    answers, inside = run(work())
    assert inside == 0
    assert [a.error_kind for a in answers[::2]] == [kind for _, kind in cases]
    assert all(a.text == " 0 1 2 3" and a.output_tokens == 4 for a in answers[1::2])
    row = summarise(answers)
    assert row["failed"] == len(cases) == row["completed"] == sum(row["errors"].values())
    assert set(row["error_examples"]) == {kind for _, kind in cases} == set(row["errors"])
    assert row["whole_request_ms"]["p99"] < 100, "times are those of whole answers"


def test_nothing_was_answered():
    found, _ = run(ask(raw()))
    row = summarise([found]) | {"server": "x", "request_rate": 2.0, "max_concurrency": None}
    assert row["completed"] == 0 and row["first_token_ms"] is None and row["output_tokens_per_s"] == 0
    bench_serve.print_result(row)


def test_cancelling_the_run_hangs_up():
    async def work():
        async with FakeServer(raw(SSE + b"\r\n" + A, 1e9)) as server:
            plan = [planned(None, i, 1) for i in range(20)]
            job = asyncio.ensure_future(send_all(ApiClient(server.url), plan, {}, 5))
            await asyncio.sleep(10)
            assert server.inside == 5
            job.cancel()
            with pytest.raises(asyncio.CancelledError): await job
            await asyncio.sleep(0.1)
            return server.inside, len(server.left_early_s)
    assert run(work()) == (0, 5)


# ------------------------------------------------------------------ properties

@given(st.lists(st.text(max_size=8), max_size=5), st.sampled_from(["\n", "\r\n"]), st.data())
@settings(max_examples=100, deadline=None)
def test_events_do_not_depend_on_cuts(texts, end, data):
    texts = [json.dumps(t, ensure_ascii=False) for t in texts]
    wire = "".join(f"data: {t}{end}{end}" for t in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=6)))
    parser, found = EventParser(), []
    for a, b in zip([0, *cuts], [*cuts, len(wire)]): found += parser.feed(wire[a:b])
    assert found == texts


async def read_all(data):
    reader = asyncio.StreamReader()
    reader.feed_data(data); reader.feed_eof()
    return await (await read_response(reader)).body()


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6))
@settings(max_examples=50, deadline=None)
def test_chunked_bodies(chunks):
    wire = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(c), c) for c in chunks)
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTRANSFER-ENCODING: Chunked\r\n\r\n"
    assert asyncio.run(read_all(head + wire + b"0\r\nTrailer: x\r\n\r\n")) == b"".join(chunks)


@given(st.binary(max_size=200), st.sampled_from([
    b"", b"HTTP/1.1 ", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: "]))
@settings(max_examples=200, deadline=None)
def test_random_bytes_raise_nothing_else(data, head):
    async def work():
        with contextlib.suppress(RequestFailed): await read_all(head + data)
        with contextlib.suppress(RequestFailed):
            for event in EventParser().feed(data): parse_event(event)
        with contextlib.suppress(RequestFailed): parse_event(data.decode("latin-1"))
    asyncio.run(work())


# ------------------------------------------------------------------ plans

def test_a_plan_is_its_seed():
    lengths = read_lengths()
    one, again = (plan_requests(100, lengths, 5.0, seed=1) for _ in range(2))
    assert one == again != plan_requests(100, lengths, 5.0, seed=2)
    other = plan_requests(100, lengths, 5.0, seed=1, level=1)
    assert [(r.due_s, r.prompt_tokens, r.output_tokens) for r in other] == [
        (r.due_s, r.prompt_tokens, r.output_tokens) for r in one]
    # No two prompts have a block of tokens in common that a cache could find.
    starts = {tuple(r.prompt[:16]) for r in one + other if r.prompt_tokens >= 16}
    assert len(starts) == sum(r.prompt_tokens >= 16 for r in one + other)
    assert all(len(r.prompt) == r.prompt_tokens and max(r.prompt) < 256 for r in one)


def test_the_packages_lengths():
    pairs = read_lengths()
    assert len(pairs) == 2000 and pairs[0] == (229, 264) and pairs[-1] == (746, 62)


def test_levels():
    assert load_levels([1.0, 2.0], [4]) == [(1.0, 4), (2.0, 4)]
    for bad in (True, 0, -1, 1.5):
        with pytest.raises(ValueError, match="max_concurrency"): load_levels([], [bad])


def test_an_installed_package_has_the_lengths(tmp_path):
    pytest.importorskip("setuptools")
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT,
                           capture_output=True, text=True, check=True).stdout.split("\n")
    wanted = ("minengine", "setup.py", "settings.ini", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
    for name in names:
        if name.split("/")[0] not in wanted or not (ROOT / name).is_file(): continue
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    # What a wheel is made of; building one would need more than setuptools.
    done = subprocess.run([sys.executable, "setup.py", "-q", "build_py", "--build-lib", "out"],
                          cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    name = "minengine/data/sharegpt_lengths.csv"
    assert (tmp_path / "out" / name).read_bytes() == (ROOT / name).read_bytes()
    code = "import sys; sys.path[0] = 'out'; from minengine.server import traffic as t; print(t.__file__, len(t.read_lengths()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == [str(tmp_path / "out/minengine/server/traffic.py"), "2000"], done.stderr


# ------------------------------------------------------------------ runs

def models(writer, cards=({"id": "tiny", "max_model_len": 64},)):
    start(writer, kind="application/json")
    writer.write(json.dumps({"object": "list", "data": list(cards)}).encode())


async def api(body, writer):
    "A server as a whole: a list of models, and answers."
    if body is None: models(writer)
    else: await whole_answer(body, writer)


def bench(answer=api, **options):
    async def work():
        async with FakeServer(answer) as server:
            options.setdefault("levels", [(None, 2)])
            found = bench_serve.bench_serve(server.url, num_requests=8, **options)
            return [row async for row in found], server
    return run(work())


def test_a_run_over_levels():
    rows, server = bench(levels=load_levels([50.0, 500.0]) + load_levels([], [3]), warmup=2)
    assert [(r["request_rate"], r["max_concurrency"]) for r in rows] == [(50.0, None), (500.0, None), (None, 3)]
    assert all(r["completed"] == 8 and r["model"] == "tiny" and r["server"] == server.url for r in rows)
    assert len({r["output_tokens"] for r in rows}) == 1, "all levels have the same work"
    asked = [b for b in server.bodies if b is not None]
    assert len(asked) == 2 + 3 * 8 and len({tuple(b["prompt"]) for b in asked}) == len(asked)
    for body in asked:
        assert len(body["prompt"]) + body["max_tokens"] <= 64, "the server's limit is kept"
        assert body["model"] == "tiny" and body["temperature"] == 0 and body["ignore_eos"] is True
    assert json.loads(json.dumps(rows)) == rows


def test_options_of_a_run():
    rows, server = bench(api_key="secret", stop_at_eos=True, text=True, prompt_tokens=6, output_tokens=4,
                         temperature=0.5, model_name="mine", server_name="v9", warmup=0)
    assert all("\r\nAuthorization: Bearer secret\r\n" in head for head in server.heads)
    for body in server.bodies[1:]:
        assert len(body["prompt"].split()) == 6 and body["max_tokens"] == 4 and body["model"] == "mine"
        assert "ignore_eos" not in body and body["temperature"] == 0.5
    assert rows[0]["server"] == "v9" and rows[0]["model"] == "mine"


def test_servers_without_a_list_of_models():
    async def bare(body, writer):
        if body is None: start(writer, "404 Not Found")
        else: await whole_answer(body, writer)
    with pytest.raises(RequestFailed, match="http 404"): bench(bare)
    assert bench(bare, model_name="gpt", output_tokens=3)[0][0]["model"] == "gpt"
    async def odd(body, writer):
        if body is None: start(writer); writer.write(b'{"data": 3}')
        else: await whole_answer(body, writer)
    with pytest.raises(ValueError, match="data"): bench(odd)
    assert bench(odd, model_name="gpt", output_tokens=3)[0][0]["completed"] == 8
    async def none(body, writer): models(writer, [])
    with pytest.raises(ValueError, match="lists no model"): bench(none)


def test_a_run_that_cannot_begin():
    async def refuse(body, writer):
        if body is None: models(writer)
        else: start(writer, "401 No"); writer.write(b'{"error": {"message": "no key"}}')
    with pytest.raises(RequestFailed, match="http 401: the first request failed: no key"): bench(refuse)
    with pytest.raises(ValueError, match="the server takes 64"): bench(prompt_tokens=60, output_tokens=5)
    with pytest.raises(TimeoutError): bench(raw(1e9), timeout_s=9.0)


# ------------------------------------------------------------------ command line

@contextlib.contextmanager
def served(answer=api):
    "A fake server in a thread, for code with an event loop of its own."
    import threading
    ready, box = threading.Event(), {}
    async def work():
        async with FakeServer(answer) as server:
            box.update(server=server, loop=asyncio.get_running_loop(), stop=asyncio.Event())
            ready.set()
            await box["stop"].wait()
    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    assert ready.wait(10)
    try: yield box["server"]
    finally:
        box["loop"].call_soon_threadsafe(box["stop"].set)
        thread.join(10)


def test_main(tmp_path, capsys):
    path, picture = tmp_path / "rows.json", tmp_path / "curve.svg"
    with served() as server:
        assert main(["--base-url", server.url + "/v1/", "--max-concurrency", "1", "4", "--num-requests", "6",
                     "--output-tokens", "5", "--json", str(path), "--plot", str(picture)]) == 0
    report = json.loads(path.read_text())
    assert report["bench"] == "serve" and report["device"] and report["versions"]["minengine"]
    assert [r["max_concurrency"] for r in report["rows"]] == [1, 4]
    assert all(r["output_tokens"] == 30 for r in report["rows"])
    assert "<svg" in picture.read_text()
    printed = capsys.readouterr().out
    assert "closed loop, 4 at a time: 6 of 6 requests" in printed and "between pieces" in printed


def test_main_says_when_nothing_was_answered(capsys):
    async def fails_later(body, writer):
        if body is None: models(writer)
        else: start(writer, "503 Sorry")
    with served(fails_later) as server:
        words = ["--base-url", server.url, "--max-concurrency", "2", "--num-requests", "3", "--warmup", "0"]
        assert main(words) == 1
    assert "failed 3: http 503" in capsys.readouterr().out


def test_main_refuses_before_it_measures(tmp_path):
    cases = [(["--request-rate", "nan"], "request_rate"), (["--max-concurrency", "0"], "max_concurrency"),
             (["--base-url", "localhost:8000"], "must be like http"), (["--", "--seed", "1"], "without --model"),
             (["--model", "x", "--engine", "v3"], "'v3'"), (["--plot", "/no/where/x.svg"], "no such folder"),
             (["--model", "--base-url", "http://x"], "give either"),
             (["--lengths", str(tmp_path / "none.csv")], "none.csv"), (["--num-requests", "0"], "num_requests")]
    with served() as server:
        for words, what in cases:
            base = [] if {"--base-url", "--model", "--"} & set(words) else ["--base-url", server.url]
            with pytest.raises((ValueError, OSError), match=what): main(base + words)
    with pytest.raises(SystemExit): main(["--request-rate", "fast"])


def test_an_interrupted_run_keeps_its_rows(tmp_path):
    "Ctrl-C in the second level: the first one is written, connections are dropped."
    count, path = iter(range(10_000)), tmp_path / "rows.json"
    async def answer(body, writer):
        if body is None: return models(writer)
        if next(count) < 5: return await whole_answer(body, writer)
        start(writer); say(writer, piece())
        await asyncio.sleep(1e6)
    with served(answer) as server:
        code = "import sys; from minengine.bench_serve import main; sys.exit(main())"
        process = subprocess.Popen(
            [sys.executable, "-c", code, "--base-url", server.url, "--max-concurrency", "1", "3", "--num-requests",
             "4", "--json", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
        try:
            for _ in range(600):
                if server.inside == 3 or process.poll() is not None: break
                signal.sigtimedwait([], 0.05)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=30)
        finally: process.kill()
        assert process.returncode != 0 and "KeyboardInterrupt" in output, output
        for _ in range(100):
            if not server.inside: break
            signal.sigtimedwait([], 0.05)
        assert server.inside == 0
    assert [r["max_concurrency"] for r in json.loads(path.read_text())["rows"]] == [1]


# ------------------------------------------------------------------ a server of our own

STUB = """#!{python}
import http.server, json, os, signal, sys, time
port, way = int(sys.argv[sys.argv.index("--port") + 1]), sys.argv[4]
if way == "stubborn": signal.signal(signal.SIGTERM, signal.SIG_IGN)
if way == "hangs": print("still loading", flush=True); time.sleep(1000)
print(" ".join(sys.argv[3:]), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps([os.environ.get("MINENGINE_API_KEY"), sys.argv]).encode())
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    "Something that starts like `minengine serve`, quicker."
    path = tmp_path / "stub"
    path.write_text(STUB.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(path))


def port_is_free(url):
    with socket.socket() as probe: return probe.connect_ex(("127.0.0.1", int(url.rsplit(":", 1)[1]))) != 0


@pytest.mark.parametrize("way", ["willing", "stubborn"])
def test_the_server_is_stopped(stub, way):
    async def work():
        async with running_server([way], stop_limit_s=0.5) as url:
            assert await bench_serve.is_healthy(ApiClient(url))
        assert port_is_free(url)
        with pytest.raises(KeyError):
            async with running_server([way], stop_limit_s=0.5) as url: raise KeyError("in the middle")
        assert port_is_free(url)
    asyncio.run(work())


def test_a_key_is_given_to_the_server_but_shown_to_nobody(stub):
    async def work():
        async with running_server(["willing"], api_key="secret") as url:
            return await ApiClient(url).get_json("/")
    key, arguments = asyncio.run(work())
    assert key == "secret" and "secret" not in " ".join(arguments)


def test_a_server_that_never_gets_well(stub):
    async def work():
        async with running_server(["hangs"], start_limit_s=1.5): pass
    with pytest.raises(RuntimeError, match="not healthy within 1.5 s: still loading"): asyncio.run(work())


def test_a_server_that_does_not_start():
    async def work():
        async with running_server(["--no-such-option"]): pass
    with pytest.raises(RuntimeError, match="ended with 2"): asyncio.run(work())


TINY = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=264, hidden_size=32,
            intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=128)


@pytest.mark.slow
def test_both_engines_behind_our_own_server(tmp_path, capsys):
    "The real thing, with a tiny model: every token is counted."
    signal.alarm(240)   # two servers have to start
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    path = tmp_path / "rows.json"
    assert main(["--model", str(tmp_path), "--engine", "v0", "v1", "--max-concurrency", "8", "--num-requests", "24",
                 "--request-rate", "50", "--output-tokens", "9", "--api-key", "secret", "--json", str(path), "--",
                 "--load-format", "dummy", "--tokenizer", "byte", "--num-gpu-blocks-override", "64"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["server"] for row in rows] == ["v0", "v1"] and "v1, open loop, 50 requests/s" in capsys.readouterr().out
    planned = plan_requests(24, [(p, 9) for p, _ in read_lengths() if p + 9 <= 128], 50.0)
    for row in rows:
        assert (row["completed"], row["errors"], row["tokens_counted_by"]) == (24, {}, "server")
        assert row["output_tokens"] == 24 * 9 and row["cached_prompt_tokens"] == 0
        assert row["prompt_tokens"] == sum(r.prompt_tokens for r in planned), "the server's limit was asked for"


# ------------------------------------------------------------------ addresses

def test_a_name_is_looked_up_once(monkeypatch):
    names, true = [], asyncio.open_connection
    async def spy(host, *args, **more):
        names.append(host)
        return await true(host, *args, **more)
    monkeypatch.setattr(asyncio, "open_connection", spy)
    async def work():
        async with FakeServer(whole_answer) as server:
            client = ApiClient(server.url.replace("127.0.0.1", "localhost") + "/some/where/v1")
            for _ in range(3): assert (await complete(client, {"prompt": [1], "max_tokens": 1})).error_kind is None
            return server.heads
    heads = run(work(), asyncio.new_event_loop)
    assert names == ["localhost", "127.0.0.1", "127.0.0.1"]
    assert all(h.startswith("POST /some/where/v1/completions HTTP/1.1\r\nHost: localhost:") for h in heads)


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl to make a certificate")
def test_https(tmp_path, monkeypatch):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days",
                    "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
                   check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    async def work():
        async with FakeServer(whole_answer, context) as server:
            client = ApiClient(f"https://localhost:{server.port}")
            return [await complete(client, {"prompt": [1], "max_tokens": 3}) for _ in range(2)]
    for found in run(work(), asyncio.new_event_loop):
        assert found.error_kind == "connect" and "certificate" in found.error
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    for found in run(work(), asyncio.new_event_loop):
        assert found.error_kind is None and found.text == " 0 1 2", found.error
