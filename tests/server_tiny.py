"""Tiny engines behind the real server, in a thread of this process or in a process of their own.

Shared by the tests of the server; no test by itself.
"""
import asyncio
import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import front_tiny
import v0_front

from minengine.server.api_server import build_app
from minengine.server.launcher import ApiServer, ServerArgs, base_url, bind
from minengine.tokenizer import ByteTokenizer
from minengine.v0.async_llm_engine import AsyncLLMEngine
from minengine.v1.engine.async_llm import AsyncLLM

WORDS = ["--load-format", "dummy", "--tokenizer", "byte", "--num-gpu-blocks-override", "64", "--max-num-seqs", "8",
         "--no-use-tqdm-on-load", "--served-model-name", "tiny", "--port", "0"]


def make_v0(step_s=0.0):
    inner = v0_front.make_engine(log_stats=True)
    slow_down(inner.executor, step_s)
    return AsyncLLMEngine(inner)


def make_v1(step_s=0.0):
    llm = AsyncLLM(front_tiny.make_config(), front_tiny.ToyExecutor, True, ByteTokenizer())
    slow_down(llm.engine_core.engine_core.executor, step_s)
    return llm


def slow_down(executor, step_s):
    real = executor.execute_model
    executor.execute_model = lambda order: time.sleep(step_s) or real(order)
    executor.check_health = lambda: None


ENGINES = {"v0": make_v0, "v1": make_v1}


def executor_of(engine):
    return engine.engine.executor if engine.engine_name == "v0" else engine.engine_core.engine_core.executor


def is_at_rest(engine) -> bool:
    "Nothing runs, nothing is remembered, every block is free."
    if engine.engine_name == "v0":
        if engine.engine.has_unfinished_requests() or engine.tracker._aborted_requests: return False
        v0_front.assert_at_rest(engine.engine)
        return not engine.tracker._request_streams
    scheduler = engine.engine_core.engine_core.scheduler
    if scheduler.has_unfinished_requests() or engine.streams.collectors: return False
    scheduler.check_invariants()
    return scheduler.kv_cache_manager.usage == 0 and not engine.output_processor.request_states


class Answer(SimpleNamespace):
    "What came back: status, headers, body."
    def json(self):
        import json
        return json.loads(self.body)


async def ask(app, method="GET", path="/", body=b"", headers=None, pieces=None, leave_after=None) -> Answer:
    """One request without a network; `leave_after`: the client hangs up after so many pieces of the answer.

    0: before anything has come.
    """
    incoming, sent, gone = asyncio.Queue(), [], asyncio.Event()
    pieces = [body] if pieces is None else list(pieces)
    for i, piece in enumerate(pieces):
        incoming.put_nowait({"type": "http.request", "body": piece, "more_body": i + 1 < len(pieces)})
    if leave_after == 0: asyncio.get_running_loop().call_later(0.05, gone.set)

    async def receive():
        if not incoming.empty(): return incoming.get_nowait()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        num_pieces = sum("body" in m for m in sent)
        if leave_after and num_pieces >= leave_after: gone.set()
        await asyncio.sleep(0)

    path, _, query = path.partition("?")
    head = {"content-type": "application/json"} if body or len(pieces) > 1 else {}
    head |= {"content-length": str(len(body))} if body else {}
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
             "path": path, "raw_path": path.encode(), "query_string": query.encode(), "scheme": "http", "root_path": "",
             "server": ("test", 80), "client": ("test", 1),
             "headers": [(k.encode(), v if isinstance(v, bytes) else v.encode())
                         for k, v in (head | {k.lower(): v for k, v in (headers or {}).items()}).items() if v is not None]}
    async with asyncio.timeout(20): await app(scope, receive, send)
    if not sent: return Answer(status=None, headers={}, body=b"")
    return Answer(status=sent[0]["status"], body=b"".join(m.get("body", b"") for m in sent[1:]),
                  headers={k.decode(): v.decode() for k, v in sent[0]["headers"]})


@contextlib.contextmanager
def serve_in_thread(engine, limit_s=60, api_key=None, names=("tiny",), media=None, **args):
    "The real server in a thread; gives an object with `url`, `server`, `thread`."
    args, sock = ServerArgs(port=0, **args), bind("127.0.0.1", 0)
    server = ApiServer(build_app(engine, list(names), api_key, media=media), args, base_url(sock))
    def run(): asyncio.run(server.serve([sock]))
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    deadline = time.monotonic() + limit_s
    while not server.started and thread.is_alive():
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.005)
    try: yield SimpleNamespace(url=server.url, server=server, thread=thread, engine=engine)
    finally:
        server.should_exit = True
        thread.join(20)
        engine.shutdown()
        assert not thread.is_alive(), "the server did not stop"


class ServerProcess:
    "`minengine serve` as a user starts it."

    def __init__(self, folder, *words, limit_s=90, **env):
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from minengine.cli import main; raise SystemExit(main())",
             "serve", folder, *WORDS, *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **env})
        self.lines, self.log = queue.Queue(), []
        threading.Thread(target=self._read, daemon=True).start()
        self.url = self._wait_for(r"ready at (\S+)", limit_s)

    def _read(self):
        for line in self.process.stderr: self.lines.put(line)
        self.lines.put(None)

    def _wait_for(self, pattern, limit_s):
        deadline = time.monotonic() + limit_s
        while True:
            line = self.lines.get(timeout=max(0.01, deadline - time.monotonic()))
            assert line is not None, f"the server ended: {''.join(self.log)}"
            self.log.append(line)
            if found := re.search(pattern, line): return found[1]

    def children(self) -> list[int]:
        "Processes that this one has started, theirs included."
        found, pending = [], [self.process.pid]
        while pending:
            parent = pending.pop()
            with contextlib.suppress(OSError):
                for task in os.listdir(f"/proc/{parent}/task"):
                    with open(f"/proc/{parent}/task/{task}/children") as f:
                        new = [int(pid) for pid in f.read().split()]
                    found += new
                    pending += new
        return found

    def wait(self, limit_s) -> int: return self.process.wait(limit_s)

    def __enter__(self): return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try: self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
