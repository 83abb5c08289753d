"""Completions, chats and the tokenizer's endpoints: on a scripted engine, and on both real ones.

No HTTP here: requests go in as checked models, answers come out as models or as events.
"""
import asyncio
import itertools
import json
from types import SimpleNamespace

import pytest
from front_tiny import ARGS, make_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from minengine.config import EngineArgs
from minengine.llm import LLM
from minengine.outputs import CompletionOutput, EngineDeadError, Logprob, RequestOutput
from minengine.sampling_params import RequestOutputKind, SamplingParams
from minengine.server.chat import Serving
from minengine.server.logprobs import (
    chat_logprobs, completion_logprobs, prompt_offsets, top_by_text)
from minengine.server.fields import RequestError, check_request
from minengine.server.protocol import (
    ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest)
from minengine.server.serving import DONE, ClientGone, EventStream, describe_error, merge, start_all, unless_gone
from minengine.tokenizer import ByteTokenizer, token_bytes
from minengine.v0.async_llm_engine import AsyncLLMEngine
from minengine.v1.engine.async_llm import AsyncLLM

LETTERS = list(range(97, 123))   # so that answers can be read
USER = [{"role": "user", "content": "hi"}]


def limited(coroutine, limit_s=30):
    "Nothing here may hang."
    async def main():
        async with asyncio.timeout(limit_s): return await coroutine
    return main()


def completion(**fields): return check_request(CompletionRequest, {"model": "tiny", **fields})
def chat(**fields): return check_request(ChatCompletionRequest, {"model": "tiny", "messages": USER, **fields})


async def events(stream) -> list:
    "What the events say; the last is [DONE] and is left out."
    assert isinstance(stream, EventStream)
    texts = [text async for text in stream]
    await stream.aclose()
    assert texts[-1] == DONE and DONE not in texts[:-1]
    assert all(t.startswith("data: ") and t.endswith("\n\n") and t.count("\n") == 2 for t in texts)
    return [json.loads(t[6:]) for t in texts[:-1]]


def choices(chunks, index=0):
    return [c for chunk in chunks if "choices" in chunk for c in chunk["choices"] if c["index"] == index]


# A scripted engine

class Script:
    "What the scripted engine does with one prompt: items are texts, errors, or an event to wait for."
    def __init__(self, *items): self.items = items


class ScriptedEngine:
    "AsyncLLM's interface; the answer to prompt p is what `scripts[p]` says."
    engine_name = "scripted"

    def __init__(self, scripts, tokenizer=ByteTokenizer(), generation_config=None):
        self.scripts, self.tokenizer = scripts, tokenizer
        self.live, self.seen, self.num_yielded = set(), [], 0
        model = SimpleNamespace(max_model_len=64, generation_config=generation_config or {}, vocab_size=264)
        self.vllm_config = SimpleNamespace(model_config=model)

    async def get_tokenizer(self): return self.tokenizer

    async def generate(self, prompt, params, request_id, lora_request=None, priority=0):
        self.seen.append((prompt, params, request_id, priority))
        if request_id in self.live: raise ValueError(f"request id {request_id!r} is in use")
        self.live.add(request_id)
        try:
            async for output in self._outputs(prompt, params, request_id): yield output
        finally: self.live.discard(request_id)

    async def _outputs(self, prompt, params, request_id):
        text = prompt.get("prompt")
        ids = prompt.get("prompt_token_ids") or self.tokenizer.encode(text)
        script, done = self.scripts[text], ""
        await asyncio.sleep(0)
        for i, item in enumerate(script):
            if isinstance(item, Exception): raise item
            if isinstance(item, asyncio.Event):
                await item.wait()
                continue
            if isinstance(item, RequestOutput): output = item
            else:
                done += item
                last = not any(isinstance(x, str) for x in script[i + 1:])
                if params.output_kind is RequestOutputKind.FINAL_ONLY:
                    if not last: continue
                    item = done
                output = RequestOutput(request_id, text, ids, None, [CompletionOutput(
                    0, item, list(item.encode()), finish_reason="length" if last else None)], last)
            self.num_yielded += 1
            yield output


def scripted(main, limit_s=10, **scripts):
    "Run `main(serving, engine)`; afterwards nothing may be alive."
    async def run():
        engine = ScriptedEngine(scripts)
        result = await main(Serving(engine, ["tiny", "alias"]), engine)
        for _ in range(3): await asyncio.sleep(0)
        assert not engine.live, engine.live
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return result
    return asyncio.run(limited(run(), limit_s))


def test_content_first_then_an_empty_end():
    async def main(serving, engine):
        chunks = await events(await serving.create_completion(completion(prompt="p", stream=True)))
        assert [(c["text"], c["finish_reason"]) for c in choices(chunks)] == \
            [("ab", None), ("c", None), ("", "length")]
        chunks = await events(await serving.create_chat_completion(chat(
            messages=[{"role": "user", "content": "p"}], stream=True)))
        return [(c["delta"], c["finish_reason"]) for c in choices(chunks)]

    text = ByteTokenizer().apply_chat_template([{"role": "user", "content": "p"}], True, tokenize=False)
    found = scripted(main, p=["ab", "", "c"], **{text: ["ab", "", "c"]})
    assert found == [({"role": "assistant", "content": ""}, None), ({"content": "ab"}, None),
                     ({"content": "c"}, None), ({}, "length")]


@pytest.mark.parametrize("stream", [False, True])
def test_one_refused_prompt_refuses_all(stream):
    async def main(serving, engine):
        never = asyncio.Event()
        engine.scripts = {"good": ["a", never, "b"], "bad": [ValueError("max_tokens is wrong")]}
        with pytest.raises(RequestError, match="^prompt 1: max_tokens is wrong$") as caught:
            await serving.create_completion(completion(prompt=["good", "bad", "good"], stream=stream))
        assert caught.value.param == "max_tokens" and caught.value.status == 400
        with pytest.raises(RequestError, match="^max_tokens"):
            await serving.create_completion(completion(prompt="bad", stream=stream))

    scripted(main)


@pytest.mark.parametrize("stream", [False, True])
def test_engine_failure_before_the_answer_is_raised(stream):
    async def main(serving, engine):
        with pytest.raises(EngineDeadError):
            await serving.create_completion(completion(prompt=["q", "p"], stream=stream))

    scripted(main, p=[EngineDeadError("gone")], q=["a"])


def test_failure_in_mid_stream_is_an_event(caplog):
    async def main(serving, engine):
        dead = await events(await serving.create_completion(completion(prompt=["dies", "p"], stream=True)))
        bad = await events(await serving.create_completion(completion(prompt="refused", stream=True)))
        odd = await events(await serving.create_completion(completion(prompt="odd", stream=True)))
        return dead, bad, odd

    dead, bad, odd = scripted(main, dies=["a", EngineDeadError("secret"), "b"], p=["a", "b"], odd=["a", KeyError("x"), "b"],
                              refused=["a", ValueError("no more"), "b"])
    assert [c["text"] for c in choices(dead)] == ["a"]
    assert dead[-1] == {"error": {"message": "the engine has died", "type": "server_error", "param": None, "code": "engine_dead"}}
    assert bad[-1]["error"]["message"] == "no more" and bad[-1]["error"]["type"] == "invalid_request_error"
    assert odd[-1]["error"]["message"] == "the server has failed" and "x" not in json.dumps(odd[-1])
    assert caplog.text.count("a stream has failed") == 3 and "secret" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_client_leaves_before_the_answer(stream):
    async def main(serving, engine):
        never, gone = asyncio.Event(), asyncio.Event()
        engine.scripts = {"p": [never, "a"], "q": ["a", "b"]}
        call = asyncio.create_task(serving.create_completion(completion(prompt=["p", "q"], stream=stream), gone.wait))
        while len(engine.live) < 2: await asyncio.sleep(0)
        gone.set()
        with pytest.raises(ClientGone): await call
        assert not engine.live

    scripted(main)


def test_client_stays():
    async def main(serving, engine):
        stays = asyncio.Event()
        full = await serving.create_completion(completion(prompt="p"), stays.wait)
        assert full.choices[0].text == "ab"
        assert choices(await events(await serving.create_completion(completion(prompt="p", stream=True), stays.wait)))

        async def broken(): raise OSError("no socket")
        with pytest.raises(OSError): await serving.create_completion(completion(prompt="slow"), broken)

    scripted(main, p=["a", "b"], slow=["a"] * 50)


@pytest.mark.parametrize("num_read", [0, 1, 2])
def test_stream_closed_early_ends_in_the_engine(num_read):
    async def main(serving, engine):
        engine.scripts = {"p": ["a"] * 100 + [asyncio.Event(), "b"]}
        stream = await serving.create_completion(completion(prompt=["p", "p", "p"], stream=True))
        assert len(engine.live) == 3
        for _ in range(num_read): await anext(stream)
        await stream.aclose()
        assert not engine.live
        await stream.aclose()   # a second time changes nothing

    scripted(main)


def test_reader_cancelled_while_it_waits():
    async def main(serving, engine):
        engine.scripts = {"p": ["a", asyncio.Event(), "b"]}
        stream = await serving.create_completion(completion(prompt=["p", "p"], stream=True))

        async def read(): return [e async for e in stream]
        reader = asyncio.create_task(read())
        for _ in range(20): await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError): await reader
        assert not engine.live
        await stream.aclose()

    scripted(main)


def test_call_cancelled_ends_in_the_engine():
    async def main(serving, engine):
        for request in (completion(prompt=["p", "p"]), completion(prompt=["p", "p"], stream=True)):
            engine.scripts = {"p": [asyncio.Event(), "b"]}
            call = asyncio.create_task(serving.create_completion(request, asyncio.Event().wait))
            while len(engine.live) < 2: await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError): await call
            assert not engine.live

    scripted(main)


def test_nothing_is_fetched_ahead_of_a_slow_reader():
    async def main(serving, engine):
        stream = await serving.create_completion(completion(prompt=["p", "p"], stream=True))
        for _ in range(50): await asyncio.sleep(0)
        for num_read in range(1, 30):
            await anext(stream)
            for _ in range(10): await asyncio.sleep(0)
            assert engine.num_yielded <= num_read + 2 * 2
        await stream.aclose()

    scripted(main, p=["a"] * 200)


def test_names_of_calls_never_meet():
    async def main(serving, engine):
        request = completion(prompt="p")
        both = await asyncio.gather(*[serving.create_completion(request, None, "mine") for _ in range(5)])
        assert {r.id for r in both} == {"cmpl-mine"}
        assert len({seen[2] for seen in engine.seen}) == 5

    scripted(main, p=["a"])


def test_prompt_is_scored_before_it_is_echoed():
    "The second answer may begin before the first has scored the prompt they share."
    def out(index, text, scored=None, reason=None, finished=False):
        return RequestOutput("r", "p", [112, 113], scored and [None, {113: Logprob(-1.0, 1)}], [CompletionOutput(
            index, text, list(text.encode()), logprobs=[{t: Logprob(-2.0, 1)} for t in text.encode()],
            finish_reason=reason)], finished)

    async def main(serving, engine):
        return await events(await serving.create_completion(
            completion(prompt="p", echo=True, logprobs=0, n=2, stream=True, temperature=1)))

    chunks = scripted(main, p=[out(1, "x"), out(1, "y"), out(0, "a", True), out(1, "z", None, "length"),
                               out(0, "b", None, "length", True)])
    for index, answer in (0, "ab"), (1, "xyz"):
        told = choices(chunks, index)
        assert "".join(c["text"] for c in told) == "p" + answer
        tokens = [t for c in told if c["logprobs"] for t in c["logprobs"]["tokens"]]
        assert tokens == ["p", "q", *answer]
    # Aborted before it was scored: what there is, is told.
    chunks = scripted(main, p=[out(1, "x"), out(0, "", None, "abort", True)])
    assert "".join(c["text"] for c in choices(chunks, 1)) == "px"


def test_models_and_names():
    async def main(serving, engine):
        assert [card.id for card in serving.list_models().data] == ["tiny", "alias"]
        assert {card.root for card in serving.list_models().data} == {"tiny"}
        assert serving.list_models().data[0].max_model_len == 64
        answer = await serving.create_completion(completion(model="alias", prompt="p"))
        assert answer.model == "alias"
        for call in (serving.create_completion(completion(model="other", prompt="p")),
                     serving.create_chat_completion(chat(model="other")),
                     serving.tokenize(check_request(TokenizeRequest, {"model": "other", "prompt": "p"})),
                     serving.detokenize(check_request(DetokenizeRequest, {"model": "other", "tokens": []}))):
            with pytest.raises(RequestError, match="'other' does not exist.*tiny, alias") as caught: await call
            assert caught.value.status == 404 and caught.value.param == "model"
        with pytest.raises(ValueError, match="served_model_names"): Serving(engine, [])

    scripted(main, p=["a"])


def test_defaults_of_the_model():
    async def main():
        engine = ScriptedEngine({"p": ["a"]}, generation_config={
            "temperature": 0.6, "top_k": 20, "max_new_tokens": 7, "eos_token_id": 257, "top_p": None})
        serving = Serving(engine, ["tiny"])
        await serving.create_completion(completion(prompt="p"))
        await serving.create_completion(completion(prompt="p", temperature=0.0, max_tokens=3, priority=2, cache_salt="s"))
        first, second = [seen[1] for seen in engine.seen]
        assert (first.temperature, first.top_k, first.max_tokens, first.top_p) == (0.6, 20, 7, 1.0)
        assert (second.temperature, second.max_tokens) == (0, 3)
        assert engine.seen[1][3] == 2 and engine.seen[1][0] == {"prompt": "p", "cache_salt": "s"}

    asyncio.run(limited(main()))


def test_without_a_tokenizer():
    async def main():
        engine = ScriptedEngine({None: ["ab"]}, tokenizer=None)
        serving = Serving(engine, ["tiny"])
        answer = await serving.create_completion(completion(prompt=[1, 2], echo=True))
        assert answer.choices[0].text == "ab" and answer.usage.prompt_tokens == 2
        for call in (serving.create_chat_completion(chat()),
                     serving.tokenize(check_request(TokenizeRequest, {"prompt": "p"})),
                     serving.detokenize(check_request(DetokenizeRequest, {"tokens": [1]}))):
            with pytest.raises(RequestError, match="tokenizer"): await call

    asyncio.run(limited(main()))


def test_chat_template_missing_or_failing():
    class Bare(ByteTokenizer): chat_template = None

    async def main():
        engine = ScriptedEngine({}, tokenizer=Bare())
        with pytest.raises(RequestError, match="--chat-template.*v1/completions"):
            await Serving(engine, ["tiny"]).create_chat_completion(chat())
        own = Serving(engine, ["tiny"], "{% for m in messages %}[{{ m.content }}]{% endfor %}")
        tokens = await own.tokenize(check_request(TokenizeRequest, {"messages": USER}))
        assert bytes(tokens.tokens) == b"[hi]"
        picky = Serving(engine, ["tiny"], "{{ messages[0].content + 1 }}")
        with pytest.raises(RequestError) as caught: await picky.create_chat_completion(chat())
        assert caught.value.param == "messages"

    asyncio.run(limited(main()))


# Streams merged, and what they leave behind

@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=5), st.booleans())
def test_merge_keeps_each_streams_order(streams, start_first):
    closed = []

    async def items(i, waits):
        try:
            for k, wait in enumerate(waits):
                if wait: await asyncio.sleep(0)
                yield k
        finally: closed.append(i)

    async def main():
        streams_ = [items(i, [True, *waits]) for i, waits in enumerate(streams)]
        firsts = await start_all(streams_) if start_first else None
        return [pair async for pair in merge(streams_, firsts)]

    found = asyncio.run(limited(main()))
    for i, waits in enumerate(streams):
        assert [k for j, k in found if j == i] == list(range(len(waits) + 1))
    assert sorted(closed) == list(range(len(streams)))


def test_merge_raises_and_closes_all():
    closed = []

    async def items(i, fails):
        try:
            while True:
                await asyncio.sleep(0)
                yield i
                if fails: raise KeyError(i)
        finally: closed.append(i)

    async def main():
        with pytest.raises(KeyError):
            async for _ in merge([items(0, False), items(1, True), items(2, False)]): pass
        assert sorted(closed) == [0, 1, 2]

    asyncio.run(limited(main()))


def test_unless_gone_cancels_the_loser():
    async def main():
        log = []

        async def forever():
            try: await asyncio.Event().wait()
            finally: log.append("ended")

        async def at_once(): return 7
        assert await unless_gone(at_once()) == 7
        assert await unless_gone(at_once(), forever) == 7 and log in ([], ["ended"])
        log.clear()
        with pytest.raises(ClientGone): await unless_gone(forever(), at_once)
        assert log == ["ended"]

    asyncio.run(limited(main()))


def test_errors_say_nothing_of_the_inside():
    assert describe_error(RequestError("m is wrong", "m", 404))[0] == 404
    status, body = describe_error(KeyError("path/of/a/file"))
    assert status == 500 and "path" not in body.to_json()
    assert describe_error(EngineDeadError("x"))[0] == 503


# Tokens and texts

def test_top_logprobs_keep_every_token():
    "Two ids with one text, and an infinity (vllm#44319)."
    tokenizer = ByteTokenizer()
    position = {200: Logprob(-3.0, 3), 201: Logprob(-1.0, 1), 97: Logprob(float("-inf"), 4)}
    assert top_by_text(position, tokenizer) == {"\ufffd": -1.0, "token_id:200": -3.0, "a": float("-inf")}
    found = json.loads(completion_logprobs([97], [position], [0], tokenizer).to_json())
    assert found == {"text_offset": [0], "token_logprobs": [-9999.0], "tokens": ["a"],
                     "top_logprobs": [{"\ufffd": -1.0, "token_id:200": -3.0, "a": -9999.0}]}
    entry = chat_logprobs([200], [position], 2, tokenizer).content[0]
    assert entry.bytes == [200] and [t.bytes for t in entry.top_logprobs] == [[201], [200]]
    assert completion_logprobs([97], [position], [0], None).tokens == ["token_id:97"]


def test_prompt_offsets():
    tokenizer = ByteTokenizer()
    assert prompt_offsets(tokenizer, [256, *b"ab"], "ab") == [0, 0, 1]       # a start token that was added
    assert prompt_offsets(tokenizer, tokenizer.encode("<|bos|>é"), "<|bos|>é") == [0, 7, 7]
    assert prompt_offsets(tokenizer, list(b"abcd"), "x") == [0, 1, 1, 1]     # somebody else's text: no offset past it


def test_token_bytes():
    tokenizer = ByteTokenizer()
    assert [token_bytes(tokenizer, t) for t in (97, 200, 256)] == [b"a", b"\xc8", b"<|bos|>"]


# Both engines, a tiny model

class Stage:
    "An engine, what serves it, and the offline answers, in one event loop."

    def __init__(self, name, folder):
        kind = {"v0": AsyncLLMEngine, "v1": AsyncLLM}[name]
        self.name, self.runner = name, asyncio.Runner()
        self.engine = kind.from_engine_args(EngineArgs(model=folder, engine=name, **ARGS))
        self.serving, self.tokenizer = Serving(self.engine, ["tiny"]), ByteTokenizer()
        self.llm = LLM(folder, engine=name, **ARGS)

    def run(self, coroutine, limit_s=30): return self.runner.run(limited(coroutine, limit_s))

    def complete(self, **fields) -> dict:
        "The answer, in both ways: what the chunks say together must be what the whole says."
        whole = self.run(self.serving.create_completion(completion(**fields)))
        return json.loads(whole.to_json())

    def stream(self, **fields) -> list[dict]:
        async def read(): return await events(await self.serving.create_completion(completion(stream=True, **fields)))
        return self.run(read())

    def chat(self, **fields) -> dict:
        return json.loads(self.run(self.serving.create_chat_completion(chat(**fields))).to_json())

    def stream_chat(self, **fields) -> list[dict]:
        async def read(): return await events(await self.serving.create_chat_completion(chat(stream=True, **fields)))
        return self.run(read())

    async def idle(self):
        "Wait until the engine has nothing left; then the pool must be whole."
        while self.num_unfinished(): await asyncio.sleep(0.005)
        if self.name == "v1":
            core = self.engine.engine_core.engine_core
            core.scheduler.check_invariants()
            assert core.scheduler.kv_cache_manager.num_free_blocks == ARGS["num_gpu_blocks_override"]
            self.engine.streams.check_invariants()
            assert not self.engine.streams.collectors
        else:
            blocks = self.engine.engine.scheduler.block_manager
            assert blocks.get_num_free_gpu_blocks() == ARGS["num_gpu_blocks_override"]

    def num_unfinished(self):
        if self.name == "v0": return self.engine.engine.get_num_unfinished_requests()
        return self.engine.engine_core.engine_core.scheduler.get_num_unfinished_requests()

    def close(self):
        self.engine.shutdown()
        self.runner.close()
        self.llm.shutdown()


@pytest.fixture(scope="module", params=["v0", "v1"])
def stage(request, tmp_path_factory):
    stage = Stage(request.param, make_folder(tmp_path_factory.mktemp("model")))
    yield stage
    stage.run(stage.idle())
    stage.close()


def joined(chunks, index):
    "All chunks of one choice, as one choice."
    told = choices(chunks, index)
    assert all(c["finish_reason"] is None for c in told[:-1]) and told[-1]["finish_reason"]
    assert told[-1]["text"] == "" or len(told) == 1
    logprobs = [c["logprobs"] for c in told if c["logprobs"]]
    return {
        "index": index, "text": "".join(c["text"] for c in told),
        "logprobs": {k: [x for part in logprobs for x in part[k]] for k in logprobs[0]} if logprobs else None,
        "finish_reason": told[-1]["finish_reason"], "stop_reason": told[-1]["stop_reason"]}


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_logprobs_stream(stage, echo, logprobs, n):
    "vllm#1992, vllm#47815: the whole and its pieces agree, for text and token ids."
    fields = dict(prompt=["Hello", "to be"], n=n, echo=echo, max_tokens=6, seed=5, allowed_token_ids=LETTERS,
                  ignore_eos=True)
    if logprobs is not None: fields["logprobs"] = logprobs
    whole, chunks = stage.complete(**fields), stage.stream(**fields)
    assert [c["index"] for c in whole["choices"]] == list(range(2 * n))
    for choice in whole["choices"]:
        assert joined(chunks, choice["index"]) == choice
        prompt = fields["prompt"][choice["index"] // n]
        text, found = choice["text"], choice["logprobs"]
        assert text.startswith(prompt) == echo and len(text) == 6 + echo * len(prompt)
        assert choice["finish_reason"] == "length" and choice["stop_reason"] is None
        if logprobs is None:
            assert found is None
            continue
        assert {len(values) for values in found.values()} == {len(text)}
        assert found["text_offset"] == list(range(len(text)))   # a byte is a character here
        assert "".join(found["tokens"]) == text
        assert [x is None for x in found["token_logprobs"]] == [echo, *[False] * (len(text) - 1)]
        for token, value, top in zip(*(found[k] for k in ("tokens", "token_logprobs", "top_logprobs"))):
            if value is None: assert top is None
            else: assert top[token] == value and logprobs <= len(top) <= logprobs + 1 or logprobs == 0 and len(top) == 1
    same = stage.complete(**{**fields, "prompt": [list(p.encode()) for p in fields["prompt"]]})
    assert same["choices"] == whole["choices"] and same["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] == 10
    assert whole["usage"]["completion_tokens"] == 12 * n


def test_tokens_equal_the_offline_engines(stage):
    prompts = ["Hello", "the quick brown fox", "x"]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = stage.llm.generate(prompts, params, use_tqdm=False)
    fields = dict(prompt=prompts, temperature=0, max_tokens=12, ignore_eos=True, logprobs=0,
                  return_tokens_as_token_ids=True)
    for got in (stage.complete(**fields)["choices"], [joined(stage.stream(**fields), i) for i in range(3)]):
        for want, choice in zip(expected, got):
            assert choice["text"] == want.outputs[0].text
            assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in want.outputs[0].token_ids]


def test_max_tokens_0(stage):
    "vllm#2706, vllm#2995: 0 gives the prompt only."
    for prompt, text in ("abc", "abc"), ([97, 98, 200], "ab\ufffd"), ([97], "a"):
        for logprobs in ({}, {"logprobs": 1}):
            fields = dict(prompt=prompt, echo=True, max_tokens=0, **logprobs)
            whole = stage.complete(**fields)
            choice = whole["choices"][0]
            assert choice["text"] == text and choice["finish_reason"] == "length"
            assert whole["usage"]["completion_tokens"] == 0
            if logprobs: assert len(choice["logprobs"]["tokens"]) == len(prompt)
            assert joined(stage.stream(**fields), 0) == choice


def test_offsets_where_characters_take_several_tokens(stage):
    fields = dict(prompt="é", echo=True, logprobs=0, max_tokens=4, allowed_token_ids=[0xC3, 0xA9], temperature=1.0, seed=1)
    whole = stage.complete(**fields)["choices"][0]
    offsets = whole["logprobs"]["text_offset"]
    assert offsets == sorted(offsets) and offsets[:3] == [0, 0, 1] and max(offsets) <= len(whole["text"])
    assert joined(stage.stream(**fields), 0) == whole


def test_stop_strings(stage):
    "vllm#3574, vllm#2577: the same cut, streamed or not."
    base = dict(prompt="Hello", temperature=0, max_tokens=12, allowed_token_ids=LETTERS)
    text = stage.complete(**base)["choices"][0]["text"]
    stop = text[4:7]
    for include in (False, True):
        fields = dict(base, stop=["no such text", stop], include_stop_str_in_output=include)
        whole = stage.complete(**fields)["choices"][0]
        cut = text.index(stop)
        assert whole["text"] == text[:cut + include * len(stop)]
        assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop)
        assert joined(stage.stream(**fields), 0) == whole
    fields = dict(base, stop_token_ids=[ord(text[3])])
    whole = stage.complete(**fields)["choices"][0]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", ord(text[3]))
    assert joined(stage.stream(**fields), 0) == whole


def test_usage_of_streams(stage):
    "vllm#7262, vllm#6371, vllm#6652, vllm#8625."
    fields = dict(prompt=["Hello", "x"], n=2, max_tokens=5, ignore_eos=True, temperature=1.0)
    assert all("usage" not in chunk for chunk in stage.stream(**fields))
    chunks = stage.stream(**fields, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 20, 26)
    assert stage.complete(**fields)["usage"] | {"prompt_tokens_details": 0} == usage | {"prompt_tokens_details": 0}
    chunks = stage.stream(**fields, stream_options={"include_usage": True, "continuous_usage_stats": True})
    totals = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert totals == sorted(totals) and totals[-1] == 20 and totals[0] < 20
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {6}


def test_cached_tokens(stage):
    if stage.name == "v0": pytest.skip("V0 caches no prefixes unless told to")
    prompt = "a prompt that is long enough to fill two blocks of sixteen tokens"
    for expected in (0, 64):
        usage = stage.complete(prompt=prompt, max_tokens=1, cache_salt="test_cached_tokens")["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": expected}
    chunks = stage.stream(prompt=prompt, max_tokens=1, cache_salt="test_cached_tokens", stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}


def test_best_of(stage):
    fields = dict(prompt="Hello", n=1, best_of=3, temperature=1.0, max_tokens=4, seed=1, logprobs=0)
    if stage.name == "v0":
        assert len(stage.complete(**fields)["choices"]) == 1
        return
    with pytest.raises(RequestError) as caught: stage.complete(**fields)
    assert caught.value.param == "best_of"


def test_what_engines_refuse_is_a_400(stage):
    for fields, param, words in (
            (dict(prompt=[0, 264]), "prompt", "264"), (dict(prompt="a", logprobs=21), "logprobs", "20"),
            (dict(prompt="a", stop_token_ids=[999]), "stop_token_ids", "999"), (dict(prompt=""), "prompt", "empty"),
            (dict(prompt="a", n=2, temperature=0), "n", "temperature 0")):
        for stream in (False, True):
            with pytest.raises(RequestError, match=words) as caught:
                stage.run(stage.serving.create_completion(completion(stream=stream, **fields)))
            assert caught.value.param == param and caught.value.status == 400


def test_prompt_logprobs_and_truncation(stage):
    whole = stage.complete(prompt="Hello", max_tokens=1, prompt_logprobs=1, truncate_prompt_tokens=3, echo=True)
    choice = whole["choices"][0]
    assert choice["text"].startswith("llo") and whole["usage"]["prompt_tokens"] == 3
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == 2
    assert others[0][str(ord("l"))].keys() == {"logprob", "rank", "decoded_token"}
    assert others[0][str(ord("l"))]["decoded_token"] == "l"
    assert "prompt_logprobs" not in stage.complete(prompt="Hello", max_tokens=1)["choices"][0]
    answer = stage.chat(max_tokens=1, prompt_logprobs=0)
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_aborted_elsewhere(stage):
    async def main():
        stream = await stage.serving.create_completion(completion(prompt="Hello", max_tokens=200, ignore_eos=True, stream=True))
        told = [await anext(stream)]
        requests = stage.engine.streams.collectors if stage.name == "v1" else stage.engine.tracker._request_streams
        await stage.engine.abort(next(iter(requests)))
        return told + [text async for text in stream]

    told = stage.run(main())
    assert told[-1] == DONE and json.loads(told[-2][6:])["choices"][0]["finish_reason"] == "abort"


# Chats

def test_chat_reads_as_the_template_writes(stage):
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": [
        {"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "18 degrees"}]}]
    plain = [{"role": "system", "content": "short"}, {"role": "user", "content": "one\ntwo"},
             {"role": "assistant", "content": ""}, {"role": "tool", "content": "18 degrees"}]
    ids = stage.tokenizer.apply_chat_template(plain, add_generation_prompt=True)
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = stage.llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0]
    answer = stage.chat(messages=messages, temperature=0, max_tokens=8)
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": expected.outputs[0].text, "refusal": None}
    assert answer["usage"]["prompt_tokens"] == len(ids) and choice["finish_reason"] == expected.outputs[0].finish_reason
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"


@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("n", [1, 3])
def test_chat_stream_says_what_the_whole_says(stage, logprobs, n):
    fields = dict(n=n, max_tokens=7, seed=3, temperature=1.0, ignore_eos=True)
    if logprobs is not None: fields |= {"logprobs": True, "top_logprobs": logprobs}
    whole = stage.chat(**fields)
    chunks = stage.stream_chat(**fields, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] | {"prompt_tokens_details": 0} == whole["usage"] | {"prompt_tokens_details": 0}
    assert [c["index"] for c in whole["choices"]] == list(range(n))
    for choice in whole["choices"]:
        told = choices(chunks, choice["index"])
        assert told[0]["delta"] == {"role": "assistant", "content": ""}
        assert told[-1]["delta"] == {} and told[-1]["finish_reason"] == choice["finish_reason"] == "length"
        assert all("finish_reason" in c and c["finish_reason"] is None for c in told[:-1])
        assert "".join(c["delta"].get("content", "") for c in told) == choice["message"]["content"]
        found = [entry for c in told if c["logprobs"] for entry in c["logprobs"]["content"]]
        if logprobs is None: assert not found and choice["logprobs"] is None
        else:
            assert found == choice["logprobs"]["content"] and len(found) == 7
            for entry in found:
                assert len(entry["top_logprobs"]) == logprobs
                values = [t["logprob"] for t in entry["top_logprobs"]]
                assert values == sorted(values, reverse=True)
            decoded = bytes(b for entry in found for b in entry["bytes"]).decode(errors="replace")
            assert decoded == choice["message"]["content"]


def test_chat_without_a_limit_uses_the_window(stage):
    answer = stage.chat(messages=[{"role": "user", "content": "x" * 200}], ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 256 and answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_that_are_too_long(stage, stream):
    "V0 would end such a request without a word; a client is told, on both engines."
    with pytest.raises(RequestError, match="prompt has 300 tokens") as caught:
        stage.run(stage.serving.create_completion(completion(prompt="x" * 300, stream=stream)))
    assert caught.value.param == "prompt" and caught.value.status == 400
    with pytest.raises(RequestError, match="^prompt 1: prompt has 300 tokens"):
        stage.run(stage.serving.create_completion(completion(prompt=["x", "x" * 300], stream=stream)))
    with pytest.raises(RequestError, match="prompt has 30[0-9] tokens") as caught:
        stage.run(stage.serving.create_chat_completion(chat(messages=[{"role": "user", "content": "x" * 300}], stream=stream)))
    assert caught.value.param == "messages"
    stage.run(stage.idle())


def test_client_leaves_a_real_engine(stage):
    "vllm#9428: streamed or not, blocks come back, whoever hangs up when."
    fields = dict(prompt=["Hello", "x"], n=2, max_tokens=200, ignore_eos=True, temperature=1.0)

    async def main():
        for stream in (False, True):
            gone = asyncio.Event()
            call = asyncio.create_task(stage.serving.create_completion(completion(stream=stream, **fields), gone.wait))
            while not stage.num_unfinished() and not call.done(): await asyncio.sleep(0)
            if not stream: gone.set()
            if not stream:
                with pytest.raises(ClientGone): await call
            else:
                answer = await call
                await anext(answer)
                await answer.aclose()
            await stage.idle()

    stage.run(main())


def test_tokenize_and_detokenize(stage):
    def tokenize(**fields): return stage.run(stage.serving.tokenize(check_request(TokenizeRequest, fields)))
    def detokenize(ids): return stage.run(stage.serving.detokenize(check_request(DetokenizeRequest, {"tokens": ids}))).prompt
    found = tokenize(prompt="Héllo <|user|>")
    assert found.tokens == stage.tokenizer.encode("Héllo <|user|>") and found.count == len(found.tokens)
    assert found.max_model_len == 256 and detokenize(found.tokens) == "Héllo <|user|>"
    assert tokenize(prompt="").tokens == [] and detokenize([]) == ""
    for add in (True, False):
        ids = tokenize(messages=USER, add_generation_prompt=add).tokens
        assert ids == stage.tokenizer.apply_chat_template(USER, add_generation_prompt=add)
    assert tokenize(prompt="a", add_special_tokens=False).tokens == [97]
    with pytest.raises(RequestError, match=r"tokens\[1\] is 9999") as caught: detokenize([1, 9999])
    assert caught.value.param == "tokens"


def test_many_at_once_and_a_third_leaves(stage):
    "Whoever stays gets its own answer; whoever leaves, leaves nothing."
    prompts = [f"prompt {i}" for i in range(36)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [o.outputs[0].text for o in stage.llm.generate(prompts, params, use_tqdm=False)]

    async def one(i):
        fields = dict(prompt=prompts[i], temperature=0, max_tokens=20, ignore_eos=True)
        if i % 3 == 0:   # leaves after a few events, or at once
            stream = await stage.serving.create_completion(completion(stream=True, **fields))
            for _ in range(i % 4): await anext(stream)
            await stream.aclose()
        elif i % 3 == 1:
            answer = await stage.serving.create_completion(completion(**fields))
            return answer.choices[0].text
        else:
            chunks = await events(await stage.serving.create_completion(completion(stream=True, **fields)))
            return joined(chunks, 0)["text"]

    async def main():
        found = await asyncio.gather(*map(one, range(len(prompts))))
        await stage.idle()
        return found

    for i, (got, want) in enumerate(zip(stage.run(main()), expected)):
        assert got == (want if i % 3 else None), i


def test_two_servings_of_one_engine(stage):
    "Names belong to the server, not to the engine."
    other = Serving(stage.engine, ["other"])
    answer = stage.run(other.create_completion(completion(model="other", prompt="a", max_tokens=1)))
    assert answer.model == "other"
    with pytest.raises(RequestError): stage.complete(model="other", prompt="a")


def test_combinations_do_not_leak_tasks(stage):
    async def main():
        before = asyncio.all_tasks()
        for stream, n in itertools.product((False, True), (1, 2)):
            answer = await stage.serving.create_completion(
                completion(prompt=["a", "b"], n=n, max_tokens=3, stream=stream, temperature=1.0), asyncio.Event().wait)
            if stream: await events(answer)
        await asyncio.sleep(0)
        return asyncio.all_tasks() - before

    names = [task.get_coro().__qualname__ for task in stage.run(main())]
    assert all("loop" in name or "handle_outputs" in name for name in names), names
