"""The official client against the real server, both engines: every endpoint, streaming and not.

What comes over the network equals what the offline engine says, token by token.
"""
import asyncio
import json
import urllib.request

import openai
import pytest
from front_tiny import ARGS, make_folder
from server_tiny import serve_in_thread

from minengine.config import EngineArgs
from minengine.llm import LLM
from minengine.sampling_params import SamplingParams
from minengine.server.launcher import make_async_engine

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
LETTERS = list(range(97, 123))   # so that texts can be compared
WORDS = dict(max_tokens=8, temperature=0, extra_body={"ignore_eos": True, "allowed_token_ids": LETTERS})
OFFLINE = dict(max_tokens=8, temperature=0, ignore_eos=True, allowed_token_ids=LETTERS)


@pytest.fixture(scope="module", params=["v0", "v1"])
def world(request, tmp_path_factory):
    "A server, a client of it, and the same engine offline."
    folder = make_folder(tmp_path_factory.mktemp("openai") / "tiny")
    args = EngineArgs(folder, engine=request.param, disable_log_stats=False,
                      enable_multiprocessing=False, **ARGS)
    llm = LLM(folder, engine=request.param, **ARGS)
    with serve_in_thread(make_async_engine(args), api_key="secret") as server:
        server.client = openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0, timeout=30)
        server.llm, server.kind = llm, request.param
        yield server
        server.client.close()
    llm.shutdown()


def offline(world, prompt, **params):
    output, = world.llm.generate([prompt], SamplingParams(**{**OFFLINE, **params}), use_tqdm=False)
    return output


def merged(fields): # OFFLINE's words in the client's terms
    body = {**WORDS["extra_body"], **fields.pop("extra_body", {})}
    return {**WORDS, **fields, "extra_body": body}


def complete(world, prompt="hello", **fields):
    return world.client.completions.create(model="tiny", prompt=prompt, **merged(fields))


def chat(world, messages=MESSAGES, **fields):
    return world.client.chat.completions.create(model="tiny", messages=messages, **merged(fields))


def streamed_texts(chunks, n=1):
    texts, ends = [""] * n, [None] * n
    for chunk in chunks:
        for c in chunk.choices:
            piece = c.text if hasattr(c, "text") else c.delta.content
            texts[c.index] += piece or ""
            ends[c.index] = c.finish_reason or ends[c.index]
    return texts, ends


def test_models(world):
    assert [m.id for m in world.client.models.list()] == ["tiny"]
    assert world.client.models.retrieve("tiny").max_model_len == 256
    with pytest.raises(openai.NotFoundError): world.client.models.retrieve("other")


@pytest.mark.parametrize("fields", [
    {}, {"max_tokens": 1}, {"stop": ["q", "x"]}, {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"logit_bias": {"113": 100}}, {"temperature": 1, "seed": 7}, {"temperature": 0.7, "top_p": 0.8, "seed": 1},
    {"extra_body": {"top_k": 3, "min_p": 0.01, "seed": 5}, "temperature": 1},
    {"extra_body": {"repetition_penalty": 1.3, "min_tokens": 3, "stop_token_ids": [101, 105]}},
    {"extra_body": {"bad_words": ["a", "b"], "include_stop_str_in_output": True}, "stop": "e"}],
    ids=lambda f: "-".join([*f, *f.get("extra_body", {})]) or "plain")
def test_completions_equal_the_offline_engine(world, fields):
    flat = {**fields, **fields.get("extra_body", {})}
    flat.pop("extra_body", None)
    if "logit_bias" in flat: flat["logit_bias"] = {int(k): v for k, v in flat["logit_bias"].items()}
    wanted = offline(world, "hello", logprobs=1, **flat).outputs[0]
    answer = complete(world, **json.loads(json.dumps(fields)))
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (wanted.text, wanted.finish_reason)
    assert answer.usage.completion_tokens == len(wanted.token_ids) and answer.usage.prompt_tokens == 5
    texts, ends = streamed_texts(complete(world, stream=True, **json.loads(json.dumps(fields))))
    assert (texts[0], ends[0]) == (wanted.text, wanted.finish_reason)
    body = {**fields.get("extra_body", {}), "return_tokens_as_token_ids": True}
    by_id = complete(world, logprobs=1, **{**fields, "extra_body": body}).choices[0].logprobs
    assert by_id.tokens == [f"token_id:{t}" for t in wanted.token_ids]
    assert by_id.token_logprobs == pytest.approx([at[t].logprob for t, at in zip(wanted.token_ids, wanted.logprobs)], abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_every_form(world, stream):
    for prompt, plain in (("hello", ["hello"]), (["hello", "abc"], ["hello", "abc"]),
                          ([104, 105], ["hi"]), ([[104, 105], [97]], ["hi", "a"])):
        wanted = [offline(world, p).outputs[0].text for p in plain]
        answer = complete(world, prompt, stream=stream)
        texts = streamed_texts(answer, len(plain))[0] if stream else [c.text for c in answer.choices]
        assert texts == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers(world, stream):
    wanted = [c.text for c in offline(world, "hello", n=3, temperature=1, seed=3).outputs]
    answer = complete(world, n=3, temperature=1, seed=3, stream=stream)
    assert (streamed_texts(answer, 3)[0] if stream else [c.text for c in answer.choices]) == wanted
    answer = chat(world, n=2, temperature=1, seed=3, stream=stream)
    if not stream: assert len({c.message.content for c in answer.choices}) == 2
    else: assert all(streamed_texts(answer, 2)[1])


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_field_vllm1992_echo_logprobs_stream(world, echo, logprobs, max_tokens):
    fields = dict(echo=echo, logprobs=logprobs, max_tokens=max_tokens)
    choice = complete(world, **fields).choices[0]
    wanted = "hello" * echo + offline(world, "hello", max_tokens=max_tokens).outputs[0].text
    assert choice.text == wanted and (choice.logprobs is None) == (logprobs is None)
    chunks = list(complete(world, stream=True, **fields))
    assert streamed_texts(chunks)[0] == [wanted]
    if logprobs is None: return
    pieces = [c.logprobs for chunk in chunks for c in chunk.choices if c.logprobs]
    for name in ("tokens", "text_offset"):
        assert [x for p in pieces for x in getattr(p, name)] == getattr(choice.logprobs, name)
    assert "".join(choice.logprobs.tokens) == wanted
    assert [wanted[o] for o in choice.logprobs.text_offset] == list(wanted)


def test_chats_equal_the_offline_engine(world):
    output, = world.llm.chat(MESSAGES, SamplingParams(**OFFLINE, logprobs=2), use_tqdm=False)
    wanted = output.outputs[0]
    answer = chat(world, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (wanted.text, "assistant", "length")
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    assert [e.token for e in choice.logprobs.content] == list(wanted.text)
    assert [len(e.top_logprobs) for e in choice.logprobs.content] == [2] * 8
    assert choice.logprobs.content[0].bytes == list(wanted.text[0].encode())
    chunks = list(chat(world, stream=True, stream_options={"include_usage": True}))
    assert streamed_texts(chunks)[0] == [wanted.text]
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices == []
    assert chunks[-1].usage == answer.usage.model_copy(update={
        "prompt_tokens_details": chunks[-1].usage.prompt_tokens_details})
    assert chat(world, max_completion_tokens=3, max_tokens=openai.NOT_GIVEN).usage.completion_tokens == 3


def test_parts_tools_and_helpers_of_the_client(world):
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    assert chat(world, parts).choices[0].message.content
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    assert chat(world, tools=tools, tool_choice="auto").choices[0].message.tool_calls is None
    with pytest.raises(openai.BadRequestError, match="tool_choice"): chat(world, tools=tools, tool_choice="required")
    with world.client.chat.completions.stream(model="tiny", messages=MESSAGES, max_tokens=5) as stream:
        for _ in stream: pass
        with pytest.raises(openai.LengthFinishReasonError): stream.get_final_completion()   # it has read the reason
    raw = world.client.with_raw_response.completions.create(
        model="tiny", prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "mine"})
    assert raw.headers["x-request-id"] == "mine" and raw.parse().id == "cmpl-mine"


def test_best_of_is_v0s(world):
    ask = lambda: complete(world, n=1, best_of=3, temperature=1, seed=3)
    if world.kind == "v0":
        wanted = offline(world, "hello", n=1, best_of=3, temperature=1, seed=3).outputs[0].text
        assert ask().choices[0].text == wanted
    else:
        with pytest.raises(openai.BadRequestError, match="best_of") as error: ask()
        assert error.value.body["param"] == "best_of"


def test_errors_are_the_clients_own(world):
    with pytest.raises(openai.NotFoundError) as error:
        world.client.completions.create(model="other", prompt="a")
    assert error.value.code == "model_not_found" and error.value.param == "model"
    for wrong, param in ((dict(temperature=-1), "temperature"), (dict(max_tokens=-1), "max_tokens"),
                         (dict(logprobs=99), "logprobs"), (dict(prompt="a" * 300), "prompt"), (dict(n=0), "n"),
                         (dict(extra_body={"no_such_field": 1}), "no_such_field")):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as error: complete(world, stream=stream, **wrong)
            assert error.value.param == param, (wrong, error.value)
    wrong_key = openai.OpenAI(base_url=world.url + "/v1", api_key="other", max_retries=0)
    with pytest.raises(openai.AuthenticationError): wrong_key.models.list()
    wrong_key.close()
    with pytest.raises(openai.NotFoundError): world.client.embeddings.create(model="tiny", input="a")


def test_tokenizer_endpoints(world):
    def post(path, data):
        request = urllib.request.Request(world.url + path, json.dumps(data).encode(), {
            "Content-Type": "application/json", "Authorization": "Bearer secret"})
        with urllib.request.urlopen(request, timeout=10) as response: return json.load(response)
    ids = post("/tokenize", {"model": "tiny", "prompt": "héllo"})
    assert ids == {"count": 6, "max_model_len": 256, "tokens": list("héllo".encode())}
    assert post("/detokenize", {"tokens": ids["tokens"]}) == {"prompt": "héllo"}
    chat_ids = post("/tokenize", {"messages": MESSAGES})["tokens"]
    assert len(chat_ids) == chat(world).usage.prompt_tokens


def test_many_at_once_and_some_leave(world):
    prompts = [chr(97 + i % 26) * (1 + i % 7) for i in range(48)]
    wanted = [o.outputs[0].text for o in world.llm.generate(prompts, SamplingParams(**OFFLINE), use_tqdm=False)]

    async def one(client, i):
        stream = await client.completions.create(model="tiny", prompt=prompts[i], stream=True, **WORDS)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if i % 3 == 0: return await stream.close()
        assert text == wanted[i]

    async def main():
        async with openai.AsyncOpenAI(base_url=world.url + "/v1", api_key="secret", max_retries=0, timeout=60) as client:
            await asyncio.gather(*(one(client, i) for i in range(len(prompts))))
    asyncio.run(asyncio.wait_for(main(), 60))
    assert complete(world).choices[0].text == offline(world, "hello").outputs[0].text
