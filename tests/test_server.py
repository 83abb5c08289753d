"""The server: endpoints, gates, errors; clients who leave or never read; how it starts, and how it ends.

Endpoints run without a network where one does not matter. Real processes are few: they start slowly.
"""
import asyncio
import concurrent.futures
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest
from front_tiny import make_folder
from server_tiny import ENGINES, ServerProcess, ask, executor_of, is_at_rest, serve_in_thread

from minengine import __version__
from minengine.server import launcher
from minengine.server.api_server import build_app
from minengine.server.launcher import ServerArgs, base_url, bind, read_template

both = pytest.mark.parametrize("kind", ["v0", "v1"])
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
GOOD = {"/v1/completions": {"model": "tiny", "prompt": "abc", "max_tokens": 4},
        "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
        "/tokenize": {"prompt": "abc"}, "/detokenize": {"tokens": [97, 98]}}


def run(kind, main, step_s=0.0, limit_s=30, **options):
    "Run `main(app, engine)` with a new engine behind a new app; at the end nothing may be left."
    async def limited():
        engine = ENGINES[kind](step_s)
        try:
            async with asyncio.timeout(limit_s):
                result = await main(build_app(engine, ["tiny", "alias"], **options), engine)
                if not engine.errored: await at_rest(engine)
                return result
        finally: engine.shutdown()
    return asyncio.run(limited())


async def at_rest(engine):
    while not is_at_rest(engine): await asyncio.sleep(0.005)


def post(app, path, data, **more): return ask(app, "POST", path, json.dumps(data).encode(), **more)


def check_error(answer, status, param=None, code=None):
    assert answer.status == status, answer
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert error["param"] == param and (code is None or error["code"] == code), error
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
    return error["message"]


def stream_of(answer) -> list:
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done, rest = answer.body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "") and "content-length" not in answer.headers
    return [json.loads(c.removeprefix("data: ")) for c in chunks]


# Endpoints

@both
def test_every_endpoint(kind):
    async def main(app, engine):
        answer = await post(app, "/v1/completions", {"model": "tiny", "prompt": "abc", "max_tokens": 4})
        assert answer.status == 200 and answer.json()["choices"][0]["text"] == "defg"
        assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"
        chunks = stream_of(await post(app, "/v1/completions", {
            "model": "alias", "prompt": [97, 98, 99], "max_tokens": 4, "stream": True}))
        assert "".join(c["choices"][0]["text"] for c in chunks) == "defg"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length" and chunks[0]["model"] == "alias"
        answer = await post(app, "/v1/chat/completions", GOOD["/v1/chat/completions"])
        assert answer.json()["object"] == "chat.completion" and answer.json()["usage"]["completion_tokens"] == 4
        chunks = stream_of(await post(app, "/v1/chat/completions", {
            **GOOD["/v1/chat/completions"], "stream": True, "stream_options": {"include_usage": True}}))
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant" and chunks[-1]["usage"]["completion_tokens"] == 4
        assert (await post(app, "/tokenize", GOOD["/tokenize"])).json()["tokens"] == [97, 98, 99]
        assert (await post(app, "/detokenize", GOOD["/detokenize"])).json()["prompt"] == "ab"
        models = (await ask(app, path="/v1/models")).json()
        assert [m["id"] for m in models["data"]] == ["tiny", "alias"] and models["data"][0]["max_model_len"] == 64
        assert (await ask(app, path="/v1/models/alias")).json()["id"] == "alias"
        assert (await ask(app, path="/version")).json() == {"version": __version__, "engine": kind}
        assert ((await ask(app, path="/health")).status, (await ask(app, path="/health")).body) == (200, b"")
    run(kind, main)


@both
def test_metrics_add_up(kind):
    async def main(app, engine):
        for n in (4, 6): await post(app, "/v1/completions", {"model": "tiny", "prompt": "abc", "max_tokens": n})
        stream_of(await post(app, "/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 3, "stream": True}))
        answer = await ask(app, path="/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        text = answer.body.decode()
        def value(name, label=""):
            start = f'vllm:{name}{{{label}model_name="tiny"}} '
            return next(float(line[len(start):]) for line in text.splitlines() if line.startswith(start))
        assert value("prompt_tokens_total") == 3 + 3 + 5 and value("generation_tokens_total") == 13
        assert value("request_success_total", 'finished_reason="length",') == 3
        assert value("time_to_first_token_seconds_count") == 3 and value("time_per_output_token_seconds_count") == 10
        assert value("e2e_request_latency_seconds_count") == 3 and value("request_queue_time_seconds_count") == 3
        assert value("num_requests_running") == value("num_requests_waiting") == value("gpu_cache_usage_perc") == 0
        for name in ("prefill", "decode", "inference"):
            assert value(f"request_{name}_time_seconds_count") == 3
    run(kind, main)


@both
def test_gauges_come_down_when_a_client_leaves(kind):
    async def main(app, engine):
        await post(app, "/v1/completions", {"model": "tiny", "prompt": "abc", "max_tokens": 50, "stream": True}, leave_after=2)
        await at_rest(engine)
        assert b'vllm:num_requests_running{model_name="tiny"} 0.0' in (await ask(app, path="/metrics")).body
    run(kind, main, step_s=0.003)


def test_the_description_is_whole():
    async def main(app, engine):
        told = (await ask(app, path="/openapi.json")).json()
        assert set(PATHS) <= set(told["paths"])
        def look(node):
            if isinstance(node, dict):
                if isinstance(ref := node.get("$ref"), str):
                    assert ref.removeprefix("#/components/schemas/") in told["components"]["schemas"], ref
                for child in node.values(): look(child)
            if isinstance(node, list):
                for child in node: look(child)
        look(told)
        body = told["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": "#/components/schemas/CompletionRequest"}
        assert all("422" not in route["responses"] for path in told["paths"].values() for route in path.values())
        assert (await ask(app, path="/docs")).status == 404   # nothing from foreign servers
    run("v1", main)


# Errors

@both
def test_errors_have_one_shape(kind):
    async def main(app, engine):
        check_error(await ask(app, path="/nothing"), 404)
        check_error(await ask(app, path="/v1/completions/"), 404)
        answer = await ask(app, path="/v1/completions")
        check_error(answer, 405)
        assert answer.headers["allow"] == "POST"
        check_error(await ask(app, path="/v1/models/other"), 404, "model", "model_not_found")
        check_error(await post(app, "/v1/completions", {"model": "other", "prompt": "a"}), 404, "model")
        check_error(await post(app, "/v1/completions", {"model": "tiny", "prompt": "a" * 100}), 400, "prompt")
        check_error(await post(app, "/v1/completions", {"model": "tiny", "prompt": [300]}), 400, "prompt")
        check_error(await post(app, "/v1/completions", {"model": "tiny", "prompt": "a", "suffix": "b"}), 400, "suffix")
        check_error(await post(app, "/v1/completions", {"model": "tiny", "prompt": "a", "maxtokens": 5}), 400, "maxtokens")
    run(kind, main)


BODIES = {
    "empty": b"", "no json": b"{", "a word": b"hello", "two": b"{} {}", "a list": b"[]", "null": b"null",
    "invalid utf-8": b'{"model": "tiny", "prompt": "\xff\xfe"}', "half a surrogate": b'{"prompt": "\\ud800"}',
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nan": b'{"model": "tiny", "temperature": NaN}',
    "digits": b'{"model": "tiny", "seed": ' + b"9" * 10_000 + b"}", "utf-16": '{"model": "tiny"}'.encode("utf-16"),
    "nul": b"\0" * 100}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_no_requests(name):
    async def main(app, engine):
        for path in PATHS:
            answer = await ask(app, "POST", path, BODIES[name], {"content-type": "application/json"})
            assert answer.status == 400, (path, answer)
            assert answer.json()["error"]["message"]
    run("v1", main)


def test_every_field_with_a_wrong_type():
    async def main(app, engine):
        schemas = (await ask(app, path="/openapi.json")).json()["components"]["schemas"]
        names = {"/v1/completions": "CompletionRequest", "/v1/chat/completions": "ChatCompletionRequest",
                 "/tokenize": "TokenizeRequest", "/detokenize": "DetokenizeRequest"}
        asked = 0
        for path in PATHS:
            for field in schemas[names[path]]["properties"]:
                for wrong in ({"a": [{}]}, [[{}]], "\0", -1.5, [None], True):
                    answer = await post(app, path, {**GOOD[path], field: wrong})
                    assert answer.status in (200, 400, 404), (path, field, wrong, answer)
                    if answer.status != 200: assert answer.json()["error"]["message"], (path, field, wrong)
                    asked += 1
        assert asked > 500
        assert (await post(app, "/v1/completions", GOOD["/v1/completions"])).json()["choices"][0]["text"] == "defg"
    run("v1", main, limit_s=60)


def test_content_types():
    async def main(app, engine):
        body = json.dumps(GOOD["/v1/completions"]).encode()
        for kind, status in (("application/json", 200), ("Application/JSON; charset=utf-8", 200),
                             ("text/plain", 415), ("application/x-www-form-urlencoded", 415), ("", 415)):
            answer = await ask(app, "POST", "/v1/completions", body, {"Content-Type": kind})
            assert answer.status == status, (kind, answer)
    run("v1", main)


def test_a_failure_of_ours_is_500_and_tells_nothing():
    async def main(app, engine):
        real = engine.processor.process_inputs
        def fails(*args): raise RuntimeError("secret path /root")
        engine.processor.process_inputs = fails
        answer = await post(app, "/v1/completions", GOOD["/v1/completions"])
        assert "secret" not in check_error(answer, 500)
        engine.processor.process_inputs = real
        assert (await post(app, "/v1/completions", GOOD["/v1/completions"])).status == 200
    run("v1", main)


# Gates

def test_api_key():
    async def main(app, engine):
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            for headers in ({}, {"Authorization": "secret"}, {"Authorization": "Bearer secre"},
                            {"Authorization": "Basic secret"}, {"Authorization": b"Bearer \xff"}):
                check_error(await ask(app, path=path, headers=headers), 401, code="invalid_api_key")
        answer = await ask(app, path="/v1/models", headers={"Authorization": "Bearer secret"})
        assert answer.status == 200
        assert [(await ask(app, path=p)).status for p in ("/health", "/version")] == [200, 200]
    run("v1", main, api_key="secret")


def test_bodies_that_are_too_long():
    async def main(app, engine):
        said = await ask(app, "POST", "/v1/completions", headers={"content-length": "100000000"})
        check_error(said, 413, code="body_too_long")
        num_read = 0
        def pieces():
            nonlocal num_read
            for _ in range(1000):
                num_read += 1
                yield b"x" * 100
        answer = await ask(app, "POST", "/v1/completions", pieces=pieces(), headers={"content-type": "application/json"})
        check_error(answer, 413, code="body_too_long")
        just = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 1, "user": ""})
        just = just[:-2] + "u" * (1000 - len(just)) + '"}'
        assert len(just) == 1000
        assert (await ask(app, "POST", "/v1/completions", just.encode())).status == 200
        check_error(await ask(app, "POST", "/v1/completions", just.encode() + b" "), 413)
    run("v1", main, max_body_bytes=1000)


@both
def test_two_requests_of_one_name_do_not_meet(kind):
    async def main(app, engine):
        asked = [post(app, "/v1/completions", {"model": "tiny", "prompt": p, "max_tokens": 5, "stream": s},
                      headers={"X-Request-Id": "same"}) for p in ("abc", "klm") for s in (False, True)]
        answers = await asyncio.gather(*asked)
        assert {a.headers["x-request-id"] for a in answers} == {"same"}
        texts = [a.json()["choices"][0]["text"] if i % 2 == 0 else
                 "".join(c["choices"][0]["text"] for c in stream_of(a)) for i, a in enumerate(answers)]
        assert texts == ["defgh", "defgh", "nopqr", "nopqr"]
    run(kind, main, step_s=0.002)


# Clients who leave

@both
@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("stream,leave_after", [(True, 0), (True, 2), (False, 0)])
def test_field_vllm9428_a_client_that_leaves_ends_its_request(kind, path, stream, leave_after):
    async def main(app, engine):
        stays = asyncio.create_task(post(app, "/v1/completions", {"model": "tiny", "prompt": "abc", "max_tokens": 40}))
        asked = GOOD[path] | {"max_tokens": 20, "n": 2, "temperature": 1.0, "stream": stream}
        answer = await post(app, path, asked, leave_after=leave_after)
        if stream and leave_after: assert b"[DONE]" not in answer.body
        done = await stays
        assert done.json()["usage"]["completion_tokens"] == 40   # unharmed
        await at_rest(engine)
        assert app.state.running.names == set()
    run(kind, main, step_s=0.01)


@both
def test_many_clients_a_third_of_which_leave(kind):
    async def main(app, engine):
        async def one(i):
            stream = i % 2 == 0
            leaves = i % 3 == 0
            answer = await post(app, "/v1/completions", {
                "model": "tiny", "prompt": chr(97 + i % 10) * 3, "max_tokens": 20, "stream": stream},
                leave_after=3 if leaves and stream else 0 if leaves else None)
            if leaves: return
            text = "".join(c["choices"][0]["text"] for c in stream_of(answer)) if stream \
                else answer.json()["choices"][0]["text"]
            assert text == "".join(chr((98 + i % 10 + k) % 256) for k in range(20)), (i, text)
        await asyncio.gather(*(one(i) for i in range(60)))
    run(kind, main, step_s=0.001, limit_s=60)


# An engine that dies or hangs

@both
def test_a_step_that_fails(kind):
    async def main(app, engine):
        tasks = [asyncio.create_task(post(app, path, GOOD[path] | {"max_tokens": 40, "stream": stream}))
                 for path in PATHS[:2] for stream in (False, True)]
        executor = executor_of(engine)
        while len(app.state.running.names) < 4: await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        executor.fail_with = RuntimeError("out of memory")
        async with asyncio.timeout(3): answers = await asyncio.gather(*tasks)
        for answer in answers[::2]: check_error(answer, 503, code="engine_dead")
        for answer in answers[1::2]: assert stream_of(answer)[-1]["error"]["code"] == "engine_dead"
        check_error(await ask(app, path="/health"), 503)
        check_error(await post(app, "/v1/completions", GOOD["/v1/completions"]), 503)
        assert (await ask(app, path="/version")).status == 200
    run(kind, main, step_s=0.01)


def test_an_engine_that_does_not_answer():
    async def main(app, engine):
        async def stuck(): raise TimeoutError
        engine.check_health = stuck
        check_error(await ask(app, path="/health"), 503)
    run("v1", main)


# The real server, in a thread

def connect(url, limit_s=20):
    address = urlsplit(url)
    return http.client.HTTPConnection(address.hostname, address.port, timeout=limit_s)


def call(url, method, path, data=None, **headers):
    connection = connect(url)
    try:
        body = json.dumps(data) if data is not None else None
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.read()
    finally: connection.close()


@both
def test_a_body_of_100_megabytes(kind):
    with serve_in_thread(ENGINES[kind]()) as s:
        for chunked in (False, True):
            connection = connect(s.url)
            start = time.monotonic()
            piece = b" " * (1 << 20)
            pieces = iter([piece] * 100)
            try:
                headers = {"Content-Type": "application/json"} | ({} if chunked else {"Content-Length": str(100 << 20)})
                try: connection.request("POST", "/v1/completions", pieces, headers, encode_chunked=chunked)
                except (BrokenPipeError, ConnectionResetError): pass   # the answer is there nevertheless
                response = connection.getresponse()
                assert response.status == 413 and json.loads(response.read())["error"]["code"] == "body_too_long"
            finally: connection.close()
            assert time.monotonic() - start < 15
        assert call(s.url, "POST", "/v1/completions", GOOD["/v1/completions"])[0] == 200


@both
def test_clients_that_never_read_and_others_that_do(kind):
    with serve_in_thread(ENGINES[kind](0.002)) as s:
        address, sockets = urlsplit(s.url), []
        body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 60, "stream": True, "logprobs": 1}).encode()
        head = (f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n").encode()
        for _ in range(6):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((address.hostname, address.port))
            sock.sendall(head + body)
            sockets.append(sock)
        for _ in range(3):
            status, answer = call(s.url, "POST", "/v1/completions", GOOD["/v1/completions"])
            assert status == 200 and json.loads(answer)["choices"][0]["text"] == "defg"
        deadline = time.monotonic() + 10
        while not is_at_rest(s.engine):   # their requests end although nobody reads
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for sock in sockets: sock.close()


def test_a_request_that_is_sent_slowly_or_never_ends():
    with serve_in_thread(ENGINES["v1"]()) as s:
        address = urlsplit(s.url)
        with socket.create_connection((address.hostname, address.port), 10) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
            assert call(s.url, "POST", "/v1/completions", GOOD["/v1/completions"])[0] == 200
        with socket.create_connection((address.hostname, address.port), 10) as sock:
            sock.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 400")


@both
def test_shutdown_lets_answers_end(kind):
    with serve_in_thread(ENGINES[kind](0.01), shutdown_timeout_s=20) as s:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(call, s.url, "POST", "/v1/completions", {
                "model": "tiny", "prompt": "abc", "max_tokens": 40, "stream": stream}) for stream in (False, True)]
            while len(s.server.running.names) < 2: time.sleep(0.005)
            s.server.should_exit = True
            (status, body), (streamed, chunks) = (a.result(20) for a in asked)
        assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 40
        assert streamed == 200 and chunks.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in chunks
        s.thread.join(10)
        assert not s.thread.is_alive()
        with pytest.raises(OSError): call(s.url, "GET", "/health")


@both
def test_shutdown_ends_answers_that_take_too_long(kind):
    with serve_in_thread(ENGINES[kind](0.1), shutdown_timeout_s=0.3) as s:
        start = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(call, s.url, "POST", "/v1/completions", {
                "model": "tiny", "prompt": "abc", "max_tokens": 60, "stream": stream}) for stream in (False, True)]
            while len(s.server.running.names) < 2: time.sleep(0.005)
            s.server.should_exit = True
            (status, body), (streamed, chunks) = (a.result(20) for a in asked)
        assert status == 200 and json.loads(body)["choices"][0]["finish_reason"] == "abort"
        assert streamed == 200 and chunks.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"abort"' in chunks
        s.thread.join(5)
        assert not s.thread.is_alive() and time.monotonic() - start < 5


@both
def test_a_dead_engine_ends_the_server(kind, monkeypatch, capfd):
    monkeypatch.setattr(launcher, "DEAD_LINGER_S", 0.5)
    with serve_in_thread(ENGINES[kind](0.01)) as s:
        executor_of(s.engine).fail_with = RuntimeError("out of memory")
        assert call(s.url, "POST", "/v1/completions", GOOD["/v1/completions"])[0] == 503
        assert call(s.url, "GET", "/health")[0] == 503
        s.thread.join(10)
        assert not s.thread.is_alive() and s.server.died_at is not None
    assert "out of memory" in capfd.readouterr().err


def test_two_servers_side_by_side():
    with serve_in_thread(ENGINES["v0"](), names=["old"]) as a, serve_in_thread(ENGINES["v1"](), names=["new"]) as b:
        for s, name, other in ((a, "old", "new"), (b, "new", "old")):
            assert call(s.url, "POST", "/v1/completions", {"model": name, "prompt": "abc", "max_tokens": 4})[0] == 200
            assert call(s.url, "POST", "/v1/completions", {"model": other, "prompt": "abc"})[0] == 404
            text = call(s.url, "GET", "/metrics")[1].decode()
            assert f'vllm:generation_tokens_total{{model_name="{name}"}} 4.0' in text and other not in text


# Starting

def test_addresses():
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    assert base_url(sock) == f"http://127.0.0.1:{port}"
    sock.listen()
    with pytest.raises(ValueError, match=f"127.0.0.1, port {port}: .*in use"): bind("127.0.0.1", port)
    sock.close()
    with pytest.raises(ValueError, match="cannot listen on 'no such host'"): bind("no such host", 0)
    with pytest.raises(ValueError, match="cannot listen on 192.0.2.1"): bind("192.0.2.1", 0)


def test_server_args():
    for wrong in (dict(port=70000), dict(port=-1), dict(max_body_bytes=0), dict(shutdown_timeout_s=-1), dict(api_key="")):
        with pytest.raises(ValueError, match=next(iter(wrong))): ServerArgs(**wrong)
    assert ServerArgs().model_names(None) == ["SmolLM2-135M-Instruct"]
    assert ServerArgs().model_names("some/model") == ["some/model"]
    assert ServerArgs(served_model_name=["a", "b"]).model_names("some/model") == ["a", "b"]


def test_templates(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages }} é", encoding="utf-8")
    assert read_template(str(tmp_path / "t.jinja")) == "{{ messages }} é"
    assert read_template("{{ messages }}") == "{{ messages }}" and read_template(None) is None
    with pytest.raises(ValueError, match="neither a file nor a template"): read_template("nowhere.jinja")


def test_an_address_in_use_is_told_before_a_model_is_loaded(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = ["serve", str(tmp_path / "no model"), "--port", str(taken.getsockname()[1])]
        done = subprocess.run([sys.executable, "-c", "from minengine.cli import main; raise SystemExit(main())", *words],
                              capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "cannot listen on 127.0.0.1, port" in done.stderr and done.stderr.count("\n") == 1


# Processes

def load(url, num=6, **fields):
    "Requests under way, half of them streams; each future gives (status, body) or an error."
    pool = concurrent.futures.ThreadPoolExecutor(num)
    futures = [pool.submit(call, url, "POST", "/v1/completions", {
        "model": "tiny", "prompt": "abc", "max_tokens": 200, "ignore_eos": True, "n": 1, "stream": i % 2 == 0, **fields})
        for i in range(num)]
    pool.shutdown(wait=False)
    return futures


def until(condition, limit_s=10):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def gone(pid):
    try: return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError: return True


def num_generated(url):
    text = call(url, "GET", "/metrics")[1].decode()
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:generation_tokens_total"))


def test_field_vllm21728_the_engine_process_is_killed_under_load(tmp_path):
    with ServerProcess(make_folder(tmp_path / "tiny", max_position_embeddings=8192)) as server:
        futures = load(server.url, max_tokens=900)
        until(lambda: num_generated(server.url) > 20)
        cores = [pid for pid in server.children() if b"spawn_main" in open(f"/proc/{pid}/cmdline", "rb").read()]
        assert len(cores) == 1
        start = time.monotonic()
        os.kill(cores[0], signal.SIGKILL)
        results = [f.result(10) for f in futures]
        assert time.monotonic() - start < 3
        for i, (status, body) in enumerate(results):
            if i % 2: assert status == 503 and json.loads(body)["error"]["code"] == "engine_dead"
            else: assert status == 200 and b"engine_dead" in body and body.endswith(b"data: [DONE]\n\n")
        assert call(server.url, "GET", "/health")[0] == 503
        assert server.wait(15) == 1 and time.monotonic() - start < 15


@pytest.mark.slow
@both
def test_sigterm_under_load(tmp_path, kind):
    words = ["--engine", kind, "--shutdown-timeout", "0.5"]
    with ServerProcess(make_folder(tmp_path / "tiny", max_position_embeddings=8192), *words) as server:
        futures = load(server.url, max_tokens=2000)
        until(lambda: num_generated(server.url) > 20)
        children, start = server.children(), time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0 and time.monotonic() - start < 10
        for i, future in enumerate(futures):
            status, body = future.result(10)
            assert status == 200 and any(b'"finish_reason":"%s"' % why in body for why in (b"abort", b"length"))
        until(lambda: all(map(gone, children)))


@pytest.mark.slow
def test_ctrl_c_while_it_starts_leaves_nobody(tmp_path):
    folder = make_folder(tmp_path / "tiny")
    process = subprocess.Popen(
        [sys.executable, "-c", "from minengine.cli import main; raise SystemExit(main())", "serve", folder, "--port", "0",
         "--load-format", "dummy", "--tokenizer", "byte", "--num-gpu-blocks-override", "64"],
        stderr=subprocess.PIPE, text=True)
    def children(): return open(f"/proc/{process.pid}/task/{process.pid}/children").read().split()
    try:
        until(children, 60)   # the core has been started, and is not ready
        started = children()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130)
        until(lambda: all(map(gone, started)))
    finally:
        if process.poll() is None: process.kill()
        process.stderr.close()
        process.wait(10)


def test_command_line(capsys, monkeypatch):
    from minengine import bench_serve, cli
    with pytest.raises(SystemExit) as ended: cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and all(w in text for w in ("--api-key", "--served-model-name", "--max-num-seqs", "[MODEL]"))
    assert cli.main(["serve", "a", "--model", "b"]) == 2 and "two models" in capsys.readouterr().err
    monkeypatch.setattr(bench_serve, "main", lambda words: words)
    assert cli.main(["bench", "serve", "--seed", "1"]) == ["--seed", "1"]
    seen = []
    monkeypatch.setattr(launcher, "run_server", lambda *args: seen.extend(args) or 1)
    monkeypatch.setenv("MINENGINE_API_KEY", "from the environment")
    assert cli.main(["serve", "m", "--port", "1", "--engine", "v0"]) == 1
    assert seen[0].model == "m" and seen[0].engine == "v0" and not seen[0].disable_log_stats
    assert (seen[1].port, seen[1].api_key) == (1, "from the environment")
    assert cli.main(["serve", "--api-key", "k", "--disable-log-stats"]) == 1
    assert seen[2].disable_log_stats and seen[2].model is None and seen[3].api_key == "k"
