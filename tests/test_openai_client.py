"""OpenAI's own client, both of its kinds, against server processes with either engine.

Whatever is asked, texts and token ids are those of the offline engine: at once
for the client that waits, in a stream for the one that is awaited. The model
has weights, and its tokens are bytes: many of them are half a character. The
same with SmolLM2 is slow.
"""
import asyncio
import functools
from contextlib import nullcontext

import openai
import pytest
from served import KEY, KINDS, LLM_ARGS, SMOLLM2_ARGS, metrics, smollm2, start_smollm2, wait_idle

from minengine import __version__
from minengine.llm import LLM
from minengine.sampling_params import SamplingParams
from minengine.server.serving import default_params

PROMPT = "Hello, wörld"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "wörld?"}]
LONG_TEXT = "wörld " * 27   # leaves little of the tiny model's window


class Sync:
    "The client that waits."

    def __init__(self, url, key=KEY):
        self.client = openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=60)

    def ask(self, make):
        "What `make(client)` gives; of a stream, all chunks."
        answer = make(self.client)
        return list(answer) if isinstance(answer, openai.Stream) else answer

    def close(self): self.client.close()


class Async:
    "The client that is awaited."

    def __init__(self, url, key=KEY):
        self.runner = asyncio.Runner()
        self.client = openai.AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=60)

    def ask(self, make):
        async def main():
            async with asyncio.timeout(60):
                answer = await make(self.client)
                return [chunk async for chunk in answer] if isinstance(answer, openai.AsyncStream) else answer
        return self.runner.run(main())

    def close(self):
        self.runner.run(self.client.close())
        self.runner.close()


class World:
    "A server process, its clients, and the same engine offline."

    def __init__(self, server, kind, llm, is_tiny):
        self.kind, self.llm, self.url, self.is_tiny = kind, llm, server.url, is_tiny
        self.sync, self.awaited = Sync(server.url), Async(server.url)
        self.max_model_len = llm.vllm_config.model_config.max_model_len
        self.defaults = default_params(llm.vllm_config.model_config.generation_config)
        self.tokenizer = llm.get_tokenizer()
        self.plain = self.offline(**GREEDY).outputs[0]   # for options that need an answer
        self.wanted = functools.cache(self._wanted)

    def params(self, **fields):
        "The wishes of an API call as the offline engine takes them."
        fields = {**self.defaults, **fields, **fields.get("extra_body", {})}
        fields.pop("extra_body", None)
        if "logit_bias" in fields: fields["logit_bias"] = {int(k): v for k, v in fields["logit_bias"].items()}
        return SamplingParams(**fields)

    def offline(self, prompt=PROMPT, **fields):
        return self.llm.generate([prompt], self.params(**fields), use_tqdm=False)[0]

    def offline_chat(self, messages=MESSAGES, **fields):
        return self.llm.chat(messages, self.params(**fields), use_tqdm=False)[0]

    def _wanted(self, option, chat):
        return (self.offline_chat if chat else self.offline)(**for_offline(OPTIONS[option](self.plain)))

    def complete(self, prompt=PROMPT, **fields):
        "The answer at once, and the chunks of the same in a stream."
        def create(stream):
            return lambda c: c.completions.create(model="tiny", prompt=prompt, stream=stream, **fields)
        return self.sync.ask(create(False)), self.awaited.ask(create(True))

    def chat(self, messages=MESSAGES, **fields):
        def create(stream):
            return lambda c: c.chat.completions.create(model="tiny", messages=messages, stream=stream, **fields)
        return self.sync.ask(create(False)), self.awaited.ask(create(True))

    def close(self):
        self.sync.close()
        self.awaited.close()
        self.llm.shutdown()


SMOLLM2 = [pytest.param(f"smollm2-{kind}", marks=pytest.mark.slow) for kind in KINDS]


@pytest.fixture(scope="session", params=KINDS + SMOLLM2)
def world(request, tiny_server):
    kind, is_tiny = request.param[-2:], request.param in KINDS
    with nullcontext(tiny_server(kind)) if is_tiny else start_smollm2(kind, "--api-key", KEY) as server:
        llm = LLM(server.folder, kind, **LLM_ARGS) if is_tiny else LLM(smollm2(), kind, **SMOLLM2_ARGS)
        world = World(server, kind, llm, is_tiny)
        yield world
        wait_idle(server.url)
        world.close()


@pytest.fixture(params=["sync", "awaited"])
def client(world, request): return getattr(world, request.param)


# What the client is told, as (text, token ids, finish reason, stop reason) by choice ------------

def whole(answer):
    "A completion or a chat, not streamed."
    return {c.index: (c.text if hasattr(c, "text") else c.message.content, ids_of(c), c.finish_reason, c.stop_reason)
            for c in answer.choices}


def joined(chunks):
    "All chunks of a stream."
    found = {}
    for chunk in chunks:
        for c in chunk.choices:
            text, ids, reason, stop = found.setdefault(c.index, ("", [], None, None))
            assert reason is None, "something came after the end"
            found[c.index] = (text + ((c.text if hasattr(c, "text") else c.delta.content) or ""), ids + ids_of(c),
                              c.finish_reason, getattr(c, "stop_reason", None))
    return found


def ids_of(choice) -> list[int]:
    if choice.logprobs is None: return []
    names = choice.logprobs.tokens if hasattr(choice.logprobs, "tokens") else [e.token for e in choice.logprobs.content]
    return [int(name.removeprefix("token_id:")) for name in names]


def offline_answers(output):
    return {c.index: (c.text, list(c.token_ids), c.finish_reason, c.stop_reason) for c in output.outputs}


def show_ids(fields, **more):
    "The same wishes, and token ids instead of token texts."
    return {**fields, **more, "extra_body": {**fields.get("extra_body", {}), "return_tokens_as_token_ids": True}}


# Every option: a field of the API, of vLLM's in `extra_body`. Some need an answer to be about.

def letters(answer):
    "Two characters in a row that are whole, from the middle of the answer."
    return next(answer.text[i:i + 2] for i in range(3, len(answer.text)) if "\ufffd" not in answer.text[i:i + 2])


GREEDY = {"temperature": 0, "max_tokens": 14}
RANDOM = {"temperature": 1.0, "max_tokens": 14, "seed": 11}
OPTIONS = {
    "greedy": lambda a: GREEDY,
    "seed": lambda a: RANDOM,
    "one_token": lambda a: {**GREEDY, "max_tokens": 1},
    "many_tokens": lambda a: {**GREEDY, "max_tokens": 70},
    "top_p": lambda a: {**RANDOM, "top_p": 0.6},
    "penalties": lambda a: {**GREEDY, "presence_penalty": 1.5, "frequency_penalty": -0.5},
    "logit_bias": lambda a: {**GREEDY, "logit_bias": {"113": 4.5, "65": -100}},
    "stop": lambda a: {**GREEDY, "stop": letters(a)},
    "stops": lambda a: {**GREEDY, "stop": ["never there", letters(a), letters(a)[0]]},
    "n": lambda a: {**RANDOM, "n": 3},
    "top_k": lambda a: {**RANDOM, "extra_body": {"top_k": 3}},
    "min_p": lambda a: {**RANDOM, "extra_body": {"min_p": 0.2}},
    "repetition_penalty": lambda a: {**GREEDY, "extra_body": {"repetition_penalty": 1.9}},
    "no_defaults": lambda a: {**GREEDY, "extra_body": {"repetition_penalty": 1.0, "top_k": -1}},
    "min_tokens": lambda a: {**GREEDY, "stop": letters(a), "extra_body": {"min_tokens": 11}},
    "stop_token_ids": lambda a: {**GREEDY, "extra_body": {"stop_token_ids": [a.token_ids[8]]}},
    "include_stop_str_in_output": lambda a: {**GREEDY, "stop": [letters(a)], "extra_body": {"include_stop_str_in_output": True}},
    "ignore_eos": lambda a: {**GREEDY, "logit_bias": {"257": 30}, "extra_body": {"ignore_eos": True, "skip_special_tokens": False}},
    "eos": lambda a: {**GREEDY, "logit_bias": {"257": 12}},
    "special_tokens": lambda a: {**GREEDY, "logit_bias": {"258": 30}, "extra_body": {
        "skip_special_tokens": False, "spaces_between_special_tokens": False}},
    "bad_words": lambda a: {**GREEDY, "extra_body": {"bad_words": [letters(a)]}},
    "allowed_token_ids": lambda a: {**GREEDY, "extra_body": {"allowed_token_ids": [97, 195, 182, 98]}},
    "truncate_prompt_tokens": lambda a: {**GREEDY, "extra_body": {"truncate_prompt_tokens": 5}},
    "change_nothing": lambda a: {**GREEDY, "user": "me"},
}


def for_offline(fields): return {k: v for k, v in fields.items() if k != "user"}


@pytest.mark.parametrize("option", OPTIONS)
def test_completions(world, option):
    wanted = world.wanted(option, False)
    answer, chunks = world.complete(**show_ids(OPTIONS[option](world.plain), logprobs=0))
    assert whole(answer) == joined(chunks) == offline_answers(wanted)
    assert answer.usage.prompt_tokens == len(wanted.prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in wanted.outputs)


def check_chat(world, wanted, answer, chunks):
    assert whole(answer) == joined(chunks) == offline_answers(wanted)
    assert answer.usage.prompt_tokens == len(wanted.prompt_token_ids) and answer.choices[0].message.role == "assistant"
    n = len(wanted.outputs)
    assert [c.choices[0].delta.role for c in chunks] == ["assistant"] * n + [None] * (len(chunks) - n)


@pytest.mark.parametrize("option", OPTIONS)
def test_chats(world, option):
    answer, chunks = world.chat(**show_ids(OPTIONS[option](world.plain), logprobs=True))
    check_chat(world, world.wanted(option, True), answer, chunks)


def test_options_of_chats_alone(world):
    answer, chunks = world.chat(temperature=0, max_completion_tokens=9, **show_ids({}, logprobs=True))
    check_chat(world, world.offline_chat(temperature=0, max_tokens=9), answer, chunks)
    change_nothing = {
        "metadata": {"a": "b"}, "parallel_tool_calls": True, "prompt_cache_key": "p", "safety_identifier": "s", "store": False,
        "service_tier": "auto", "response_format": {"type": "text"}, "tool_choice": "none"}
    answer, chunks = world.chat(**show_ids(GREEDY, logprobs=True, **change_nothing))
    check_chat(world, world.wanted("greedy", True), answer, chunks)


def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_window(world):
    messages = [{"role": "user", "content": LONG_TEXT * (1 if world.is_tiny else 8)}]
    rest = world.max_model_len - len(world.offline_chat(messages, temperature=0, max_tokens=1).prompt_token_ids)
    if not world.is_tiny: rest = None   # it ends by itself
    answer, chunks = world.chat(messages, temperature=0, **show_ids({}, logprobs=True))
    check_chat(world, world.offline_chat(messages, temperature=0, max_tokens=rest), answer, chunks)
    assert rest is None or answer.usage.total_tokens == world.max_model_len


@pytest.mark.parametrize("prompt", [
    PROMPT, "€", [72, 228, 98], [[72], [1, 2, 3]], ["one", "twö", "one"]], ids=["text", "one", "ids", "id_lists", "texts"])
def test_prompts(world, prompt):
    fields = {**RANDOM, "n": 2}
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    outputs = [world.offline(p, **fields) for p in prompts]
    wanted = {i * 2 + k: answer for i, o in enumerate(outputs) for k, answer in offline_answers(o).items()}
    answer, chunks = world.complete(prompt, **show_ids(fields, logprobs=0))
    assert whole(answer) == joined(chunks) == wanted
    assert answer.usage.prompt_tokens == sum(len(o.prompt_token_ids) for o in outputs)


def close_to(values): return pytest.approx(values, abs=2e-3)   # others share the steps


@pytest.mark.parametrize("logprobs", [0, 3])
def test_logprobs_of_prompts_and_answers(world, logprobs):
    wanted = world.offline(**GREEDY, logprobs=logprobs, prompt_logprobs=logprobs)
    answer, chunks = world.complete(**show_ids(GREEDY, echo=True, logprobs=logprobs))
    ids = [*wanted.prompt_token_ids, *wanted.outputs[0].token_ids]
    scores = [*wanted.prompt_logprobs, *wanted.outputs[0].logprobs]
    assert whole(answer)[0][:2] == joined(chunks)[0][:2] == (PROMPT + wanted.outputs[0].text, ids)
    found = answer.choices[0].logprobs
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert found.token_logprobs[1:] == close_to([at[t].logprob for t, at in zip(ids[1:], scores[1:])])
    for top, at in zip(found.top_logprobs[1:], scores[1:], strict=True):
        assert top == close_to({f"token_id:{t}": entry.logprob for t, entry in at.items()})
    pieces = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [o for p in pieces for o in p.text_offset] == found.text_offset
    assert [v for p in pieces for v in p.token_logprobs][1:] == close_to(found.token_logprobs[1:])


@pytest.mark.parametrize("logprobs", [0, 3])
def test_prompt_logprobs(world, logprobs):
    wanted = world.offline(**GREEDY, prompt_logprobs=logprobs).prompt_logprobs
    answer = world.sync.ask(lambda c: c.completions.create(
        model="tiny", prompt=PROMPT, **GREEDY, extra_body={"prompt_logprobs": logprobs}))
    found = answer.choices[0].prompt_logprobs
    assert found[0] is None
    for at, entries in zip(wanted[1:], found[1:], strict=True):
        assert {int(t): e["rank"] for t, e in entries.items()} == {t: e.rank for t, e in at.items()}
        assert {int(t): e["logprob"] for t, e in entries.items()} == close_to({t: e.logprob for t, e in at.items()})


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_of_chats(world, num_top):
    wanted = world.offline_chat(**GREEDY, logprobs=num_top).outputs[0]
    answer, chunks = world.chat(logprobs=True, top_logprobs=num_top, **GREEDY)
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    for entries in (answer.choices[0].logprobs.content, streamed):
        for token, entry, at in zip(wanted.token_ids, entries, wanted.logprobs, strict=True):
            assert entry.logprob == close_to(at[token].logprob)
            if world.is_tiny: assert entry.bytes == [token]
            else: assert bytes(entry.bytes).decode(errors="replace") == entry.token
            assert [e.logprob for e in entry.top_logprobs] == close_to(
                sorted((e.logprob for e in at.values()), reverse=True)[:num_top])


@pytest.mark.parametrize("echo", [False, True])
def test_scoring_only(world, echo):
    "max_tokens=0: no token, no wait."
    wanted = {0: (PROMPT if echo else "", world.tokenizer.encode(PROMPT) if echo else [], "length", None)}
    answer, chunks = world.complete(max_tokens=0, echo=echo, **show_ids({}, logprobs=1))
    assert whole(answer) == joined(chunks) == wanted and answer.usage.completion_tokens == 0


@pytest.mark.parametrize("stream_options", [None, {"include_usage": True},
                                            {"include_usage": True, "continuous_usage_stats": True}])
def test_usage_of_streams(world, stream_options):
    "Where it was asked for, and it counts tokens, not chunks."
    fields = {**GREEDY, "stream": True, **({"stream_options": stream_options} if stream_options else {})}
    for create in (lambda c: c.completions.create(model="tiny", prompt=PROMPT, **fields),
                   lambda c: c.chat.completions.create(model="tiny", messages=MESSAGES, **fields)):
        chunks = world.awaited.ask(create)
        if stream_options is None:
            assert all(chunk.usage is None for chunk in chunks)
            continue
        *rest, last = chunks
        assert last.choices == [] and all(chunk.choices for chunk in rest)
        is_chat = rest[0].object == "chat.completion.chunk"
        wanted = world.wanted("greedy", is_chat)
        num_prompt, num_new = len(wanted.prompt_token_ids), len(wanted.outputs[0].token_ids)
        assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (
            num_prompt, num_new, num_prompt + num_new)
        counts = [chunk.usage and chunk.usage.completion_tokens for chunk in rest]
        if "continuous_usage_stats" in stream_options: assert counts == sorted(counts) and counts[-1] == num_new
        else: assert set(counts) == {None}


def test_models_and_answers_name_their_model(world, client):
    models = client.ask(lambda c: c.models.list())
    assert [m.id for m in models.data] == ["tiny"] and models.data[0].owned_by == "minengine"
    card = client.ask(lambda c: c.models.retrieve("tiny"))
    assert (card.id, card.object, card.max_model_len) == ("tiny", "model", world.max_model_len)
    answer = client.ask(lambda c: c.completions.create(model="tiny", prompt="a", max_tokens=1))
    assert (answer.model, answer.object) == ("tiny", "text_completion") and answer.created > 1.7e9


def test_vllms_own_endpoints_with_the_clients_key(world, client):
    root = world.url
    def post(path, body): return client.ask(lambda c: c.post(root + path, body=body, cast_to=object))
    def get(path, kind=object): return client.ask(lambda c: c.get(root + path, cast_to=kind))
    ids = world.tokenizer.encode(PROMPT)
    assert post("/tokenize", {"prompt": PROMPT}) == {"count": len(ids), "tokens": ids, "max_model_len": world.max_model_len}
    chat_ids = post("/tokenize", {"model": "tiny", "messages": MESSAGES})["tokens"]
    assert chat_ids == world.wanted("greedy", True).prompt_token_ids
    assert post("/detokenize", {"tokens": chat_ids})["prompt"] == world.tokenizer.decode(chat_ids)
    assert get("/version") == {"version": __version__, "engine": world.kind}
    assert "vllm:num_requests_running" in get("/metrics", str) and get("/health", str) == ""


def test_messages_of_every_form(world):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "me", "content": [{"type": "text", "text": "how "}, {"type": "text", "text": "warm?"}]},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "18 degrees"}]},
        {"role": "assistant", "content": "It is"}]
    answer, chunks = world.chat(messages, tools=tools, tool_choice="auto", **show_ids(
        {**GREEDY, "extra_body": {"continue_final_message": True}}, logprobs=True))
    rendered = world.sync.ask(lambda c: c.post(world.url + "/tokenize", cast_to=object, body={
        "messages": messages, "tools": tools, "continue_final_message": True}))["tokens"]
    text = world.tokenizer.decode(rendered)
    assert "18 degrees" in text and "how \nwarm?" in text and (world.is_tiny or text.endswith("It is"))
    check_chat(world, world.offline(rendered, **GREEDY), answer, chunks)


def test_what_one_engine_alone_can_do(world):
    "V0 chooses the best of several, V1 keeps caches apart."
    fields = {**RANDOM, "best_of": 3}
    def best(): return world.sync.ask(lambda c: c.completions.create(model="tiny", prompt=PROMPT, **show_ids(fields, logprobs=0)))
    def salted(): return world.complete(**show_ids({**GREEDY, "extra_body": {"cache_salt": "mine"}}, logprobs=0))
    if world.kind == "v0":
        assert whole(best()) == offline_answers(world.offline(**fields))
        with pytest.raises(openai.BadRequestError, match="cache_salt is not supported by engine 'v0'"): salted()
    else:
        answer, chunks = salted()
        assert whole(answer) == joined(chunks) == offline_answers(world.wanted("greedy", False))
        with pytest.raises(openai.BadRequestError, match="best_of"): best()


REFUSED = {
    "suffix": {"suffix": "x"}, "negative": {"temperature": -1}, "string": {"max_tokens": "5"}, "bool": {"n": True},
    "long": {"prompt": [5] * 1100}, "empty": {"prompt": ""}, "id": {"prompt": [1, 999999]},
    "many_logprobs": {"logprobs": 50}, "bias": {"logit_bias": {"x": 1}}, "bias_id": {"logit_bias": {"999999": 1}},
    "stop": {"stop": [""]}, "options": {"stream_options": {"include_usage": True}},
    "field": {"extra_body": {"topp": 1}}, "guided": {"extra_body": {"guided_json": {}}},
    "allowed": {"extra_body": {"allowed_token_ids": [999999]}}, "min": {"max_tokens": 3, "extra_body": {"min_tokens": 4}},
    "equal_answers": {"temperature": 0, "n": 2},
}
PARAMS = {"negative": "temperature", "string": "max_tokens", "bool": "n", "long": "prompt", "empty": "prompt", "id": "prompt",
          "many_logprobs": "logprobs", "bias": "logit_bias", "bias_id": "logit_bias", "options": "stream_options", "field": "topp",
          "guided": "guided_json", "allowed": "allowed_token_ids", "min": "min_tokens", "equal_answers": "n"}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refused_in_the_clients_own_words(world, client, wrong):
    for stream in (False, True):
        if wrong == "options" and stream: continue   # a stream takes them
        fields = {"prompt": PROMPT, "model": "tiny", "stream": stream, **REFUSED[wrong]}
        with pytest.raises(openai.BadRequestError) as caught: client.ask(lambda c: c.completions.create(**fields))
        assert caught.value.param == PARAMS.get(wrong, wrong) and caught.value.type == "invalid_request_error"
        assert caught.value.request_id


def test_other_errors(world, client):
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.ask(lambda c: c.completions.create(model="other", prompt="a", stream=stream))
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            client.ask(lambda c: c.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=stream, tool_choice="required"))
        with pytest.raises(openai.BadRequestError, match="response_format"):
            client.ask(lambda c: c.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=stream, response_format={"type": "json_object"}))
    with pytest.raises(openai.NotFoundError): client.ask(lambda c: c.models.retrieve("other"))
    with pytest.raises(openai.NotFoundError): client.ask(lambda c: c.embeddings.create(model="tiny", input="a"))
    stranger = type(client)(world.url, "another key")
    try:
        with pytest.raises(openai.AuthenticationError): stranger.ask(lambda c: c.models.list())
    finally: stranger.close()
    # Nothing of this has harmed anybody.
    answer, chunks = world.complete(**show_ids(GREEDY, logprobs=0))
    assert whole(answer) == joined(chunks) == offline_answers(world.wanted("greedy", False))


def test_headers_and_raw_answers(world, client):
    raw = client.ask(lambda c: c.completions.with_raw_response.create(
        model="tiny", prompt=PROMPT, extra_headers={"X-Request-Id": "mine"}, **GREEDY))
    parsed = raw.parse()
    assert raw.headers["x-request-id"] == "mine" and parsed.id == "cmpl-mine" and parsed._request_id == "mine"


def test_a_client_that_loses_patience_frees_its_place(world, client):
    "The official client hangs up after `timeout`: nothing of its request stays."
    before = metrics(world.url)
    with pytest.raises(openai.APITimeoutError):
        client.ask(lambda c: c.with_options(timeout=0.05).completions.create(
            model="tiny", prompt=PROMPT, n=8, max_tokens=240, temperature=1, extra_body={"ignore_eos": True}))
    wait_idle(world.url)
    after = metrics(world.url)
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < 8 * 240


def test_helpers_of_the_client(world):
    "Streams that build up the answer, and iteration that ends early."
    client = world.sync.client
    wanted = world.wanted("greedy", True).outputs[0]
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=14) as events:
        content = "".join(e.delta for e in events if e.type == "content.delta")
    assert content == wanted.text
    with client.completions.create(model="tiny", prompt=PROMPT, stream=True, **{**GREEDY, "max_tokens": 200}) as stream:
        first = next(iter(stream))
    assert first.choices[0].finish_reason is None
    wait_idle(world.url)


def test_all_at_once_without_leaks_between_them(world):
    "Every option at the same time, completions and chats, streamed and not: each gets its own answer."
    cases = [(option, chat, stream) for option in OPTIONS for chat in (False, True) for stream in (False, True)]
    async def one(c, option, chat, stream):
        fields = show_ids(OPTIONS[option](world.plain), logprobs=True if chat else 0, stream=stream)
        if chat: answer = await c.chat.completions.create(model="tiny", messages=MESSAGES, **fields)
        else: answer = await c.completions.create(model="tiny", prompt=PROMPT, **fields)
        return joined([chunk async for chunk in answer]) if stream else whole(answer)
    async def all_of(c): return await asyncio.gather(*(one(c, *case) for case in cases))
    for (option, chat, stream), found in zip(cases, world.awaited.ask(all_of)):
        assert found == offline_answers(world.wanted(option, chat)), (option, chat, stream)
    wait_idle(world.url)
