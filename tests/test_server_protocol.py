"""What may be asked and what is answered: no field of OpenAI's API or of vLLM is forgotten.

The installed `openai` package says which fields there are; its client reads what we write.
"""
import importlib.metadata
import json
import math
import re
import time
import typing
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

import openai.types.chat as chat_types
from minengine.sampling_params import RequestOutputKind, SamplingParams
from minengine.server import responses
from minengine.server.fields import RequestError, check_request, parse_request, request_error
from minengine.server.messages import ChatMessage, ContentPart, FunctionDefinition, Tool, ToolCall
from minengine.server.protocol import (ChatCompletionRequest, CompletionRequest, DetokenizeRequest, StreamOptions,
                                       TokenizeRequest, blame_field)

USER = {"role": "user", "content": "hi"}
TEXT = dict(model="m", prompt="a")
CHAT = dict(model="m", messages=[USER])
KINDS = {CompletionRequest: TEXT, ChatCompletionRequest: CHAT}
BOTH = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
# The newest list we compared with; a newer package may know fields that we cannot know of.
COMPARED_WITH = (3, 57)


def ask(kind, **fields):
    return check_request(kind, {**KINDS.get(kind, {}), **fields})


def refusal(kind, **fields) -> RequestError:
    with pytest.raises(RequestError) as caught: ask(kind, **fields)
    assert caught.value.status == 400 and str(caught.value) == caught.value.message
    return caught.value


def is_refused(field) -> bool:
    "Fields that are known and that nobody serves say so in the API's description."
    extra = json.dumps(field.metadata, default=lambda m: getattr(m, "json_schema", None))
    return "Not supported" in extra


def keys(*typed_dicts) -> set[str]:
    return set().union(*(set(d.__annotations__) for d in typed_dicts))


# --- No field is forgotten ---------------------------------------------------------------------------------

def check_known(theirs: set[str], ours: set[str], what: str):
    missing = theirs - ours
    if tuple(map(int, openai.__version__.split(".")[:2])) > COMPARED_WITH: return
    assert not missing, f"{what}: OpenAI's API has {sorted(missing)}"


def test_fields_of_openai_completions():
    theirs = keys(completion_create_params.CompletionCreateParamsBase,
                  completion_create_params.CompletionCreateParamsNonStreaming)
    assert len(theirs) >= 17
    check_known(theirs, set(CompletionRequest.model_fields), "completions")


def test_fields_of_openai_chats():
    theirs = keys(chat_create_params.CompletionCreateParamsBase,
                  chat_create_params.CompletionCreateParamsNonStreaming)
    assert len(theirs) >= 30
    check_known(theirs, set(ChatCompletionRequest.model_fields), "chats")


def test_fields_of_openai_messages():
    kinds = [m for m in typing.get_args(chat_types.ChatCompletionMessageParam)
             if m.__name__ != "ChatCompletionFunctionMessageParam"]  # an older form of tool messages
    assert len(kinds) == 5
    check_known(keys(*kinds), set(ChatMessage.model_fields), "messages")
    parts = [*typing.get_args(chat_types.ChatCompletionContentPartParam),
             chat_types.ChatCompletionContentPartRefusalParam]
    check_known(keys(*parts), set(ContentPart.model_fields), "content parts")
    check_known(keys(chat_types.ChatCompletionFunctionToolParam), set(Tool.model_fields), "tools")
    check_known(keys(chat_types.ChatCompletionMessageFunctionToolCallParam), set(ToolCall.model_fields), "tool calls")
    check_known(keys(openai.types.shared_params.FunctionDefinition), set(FunctionDefinition.model_fields), "functions")
    check_known(keys(chat_types.ChatCompletionStreamOptionsParam), set(StreamOptions.model_fields), "stream options")


ENGINE_ONLY = {"output_kind", "detokenize", "bad_words_token_ids", "eos_token_ids", "guided_decoding"}


@BOTH
def test_fields_of_sampling_params(kind):
    "Whatever vLLM's SamplingParams adds can be asked for, or is refused by name."
    assert set(SamplingParams.__struct_fields__) - set(kind.model_fields) == ENGINE_ONLY


VLLM_FIELDS = """top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos
    min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens allowed_token_ids
    prompt_logprobs use_beam_search best_of add_special_tokens response_format guided_json guided_regex guided_choice
    guided_grammar guided_decoding_backend guided_whitespace_pattern priority logits_processors request_id
    return_tokens_as_token_ids cache_salt bad_words""".split()
VLLM_CHAT_FIELDS = """echo add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
    mm_processor_kwargs""".split()


def test_fields_of_vllm_requests():
    assert set(VLLM_FIELDS) <= set(CompletionRequest.model_fields)
    assert {*VLLM_FIELDS, *VLLM_CHAT_FIELDS} <= set(ChatCompletionRequest.model_fields)


# Every field does something, changes nothing, or is refused: no fourth kind.
CHANGES_NOTHING = {"user", "metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"}
FOR_SERVING = {"model", "stream", "stream_options", "prompt", "echo", "add_special_tokens", "messages", "tools",
               "tool_choice", "documents", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
               "priority", "cache_salt", "return_tokens_as_token_ids", "max_completion_tokens", "top_logprobs"}


@BOTH
def test_every_field_has_one_fate(kind):
    for name, field in kind.model_fields.items():
        sampling = name in SamplingParams.__struct_fields__
        fates = [is_refused(field), sampling and not is_refused(field), name in CHANGES_NOTHING,
                 name in FOR_SERVING and not (is_refused(field) and name != "tool_choice")]
        if name == "tool_choice": assert is_refused(field)  # but for "none" and "auto"
        else: assert sum(fates) == 1, name


def test_what_is_for_serving_is_read_there():
    "A field that is accepted and that nobody looks at would be a fourth kind."
    own = ("fields", "responses", "client", "traffic")
    source = "".join(path.read_text() for path in Path(responses.__file__).parent.glob("*.py") if path.stem not in own)
    for name in {*FOR_SERVING, "prompt_logprobs"}:
        assert re.search(rf"""(\.|getattr\(\w+, ["']){name}\b""", source), name


# --- What is refused, by name ------------------------------------------------------------------------------

def refused_fields():
    for kind in KINDS:
        for name, field in kind.model_fields.items():
            if is_refused(field): yield pytest.param(kind, name, id=f"{kind.__name__}-{name}")


def harmless(kind, name) -> list:
    return kind.model_json_schema()["properties"][name]["enum"]


@pytest.mark.parametrize("kind,name", list(refused_fields()))
def test_refused_by_name(kind, name):
    for value in ("no such thing", 7, True, {"a": 1}, ["x"], 0):
        if any(value == h and type(value) is type(h) for h in harmless(kind, name)): continue
        error = refusal(kind, **{name: value})
        assert error.param == name and error.message.startswith(f"{name} is not supported: "), error.message
    for value in harmless(kind, name): ask(kind, **{name: value}).to_sampling_params()


def test_false_is_not_zero_among_harmless_values():
    assert ask(ChatCompletionRequest, store=False).store is False
    assert refusal(ChatCompletionRequest, store=0).param == "store"
    ask(CompletionRequest, length_penalty=1)   # but 1 is 1.0
    assert refusal(CompletionRequest, length_penalty=True).param == "length_penalty"


def test_ignored_fields_change_nothing():
    plain = ask(ChatCompletionRequest).to_sampling_params()
    full = ask(ChatCompletionRequest, user="u", metadata={"a": "b"}, store=False, service_tier="auto",
               parallel_tool_calls=True, safety_identifier="s", prompt_cache_key="k", modalities=["text"],
               response_format={"type": "text"}, tool_choice="none", reasoning_effort="none", verbosity="medium",
               prompt_cache_retention="in_memory", function_call="none", functions=[])
    assert full.to_sampling_params() == plain
    assert full.template_kwargs() == {"add_generation_prompt": True}


@BOTH
def test_unknown_field(kind):
    error = refusal(kind, temprature=1)
    assert error.param == "temprature" and "did you mean temperature?" in error.message
    assert refusal(kind, zzz=None).param == "zzz"     # null or not
    assert len(refusal(kind, **{"x" * 10**6: 1}).message) < 200


# --- Types and ranges --------------------------------------------------------------------------------------

JSON_VALUES = [None, True, False, 0, 1, -1, 5, 2**70, 0.5, -0.5, 3.0, "", "5", "text", [], [1], ["a"], [""], [None],
               [[1]], [[]], [True], [1, "a"], {}, {"a": 1}, {"5": 1}, {"5": "1"}, {"5": 1000}, {"5": True}, [{}],
               [USER], {"include_usage": True}, {"include_usage": "yes"}, {"type": "text"}]
PAIRED = {"stream_options", "best_of", "top_logprobs", "messages"}   # rules that look at two fields


@BOTH
def test_description_and_check_agree(kind):
    "The OpenAPI description allows a value if and only if the check does."
    validators = pytest.importorskip("jsonschema_rs")
    schema = kind.model_json_schema()
    validator = validators.Draft202012Validator(schema)
    for name in set(kind.model_fields) - PAIRED:
        for value in JSON_VALUES:
            body = {**KINDS[kind], name: value}
            if value is None and name in KINDS[kind]: continue
            allowed = validator.is_valid(body)
            if type(value) is float and value == int(value): continue   # 3.0 is an integer to JSON schema alone
            if allowed: assert getattr(ask(kind, **{name: value}), name) == (
                {5: 1.0} if name == "logit_bias" and value else value) or name in ("tools", "messages")
            else: assert refusal(kind, **{name: value}).param.startswith(name), (name, value)


@BOTH
def test_no_number_in_quotes_and_no_bool_for_a_number(kind):
    for name in ("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "priority"):
        for value in ("1", True, [1], {"a": 1}):
            assert refusal(kind, **{name: value}).param == name
    for name in ("n", "max_tokens", "seed", "top_k"): assert refusal(kind, **{name: 1.0}).param == name
    for name in ("temperature", "top_p", "min_p"): assert getattr(ask(kind, **{name: 1}), name) == 1.0
    for name in ("stream", "ignore_eos", "skip_special_tokens"):
        for value in (1, 0, "true"): assert refusal(kind, **{name: value}).param == name


@BOTH
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_nan(kind, value):
    for name in ("temperature", "top_p", "presence_penalty", "min_p", "repetition_penalty"):
        assert refusal(kind, **{name: value}).param == name
    assert refusal(kind, logit_bias={"5": value}).param == "logit_bias"


RANGES = dict(n=(1, 1024), temperature=(0, 1e6), top_p=(1e-9, 1), presence_penalty=(-2, 2),
              frequency_penalty=(-2, 2), seed=(-2**63, 2**63 - 1), max_tokens=(0, 2**63 - 1), top_k=(-1, 2**63 - 1),
              min_p=(0, 1), repetition_penalty=(1e-9, 2), prompt_logprobs=(0, 2**63 - 1),
              truncate_prompt_tokens=(1, 2**63 - 1))


@BOTH
@pytest.mark.parametrize("name", RANGES)
def test_ranges_are_those_of_sampling_params(kind, name):
    low, high = RANGES[name]
    for value in (low, high): ask(kind, **{name: value}).to_sampling_params()
    for value in (low - 1, high * 2 + 1): assert refusal(kind, **{name: value}).param == name


@BOTH
def test_null_is_not_given(kind):
    plain = ask(kind)
    for name in set(kind.model_fields) - set(KINDS[kind]):
        request = ask(kind, **{name: None})
        assert request == plain and request.to_sampling_params() == plain.to_sampling_params()
    for name in KINDS[kind]:
        error = refusal(kind, **{name: None})
        assert error.param == name and error.message == f"{name} is required"


def test_prompts():
    def prompts(prompt): return ask(CompletionRequest, prompt=prompt).prompts()
    assert prompts("a") == ["a"] and prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2]) == [[1, 2]] and prompts([[1], [2, 3]]) == [[1], [2, 3]]
    for bad in ([], [[]], [1, "a"], ["a", [1]], [True], [-1], [1.0], 5, {"a": 1}, [None], [["a"]], ["a"] * 2049):
        assert refusal(CompletionRequest, prompt=bad).param == "prompt"


def test_logit_bias_keys_are_ids():
    assert ask(CompletionRequest, logit_bias={"5": -100, "7": 2}).to_sampling_params().logit_bias == {5: -100, 7: 2}
    for bad in ({"a": 1}, {"-1": 1}, {"1.0": 1}, {"": 1}, {"5": 101}, {"5": "1"}, {"5": None}, [5], {"1" * 5000: 1}):
        assert refusal(CompletionRequest, logit_bias=bad).param == "logit_bias"


@BOTH
def test_pairs_of_fields(kind):
    assert refusal(kind, stream_options={}).param == "stream_options"
    assert refusal(kind, stream=False, stream_options={"include_usage": True}).param == "stream_options"
    assert refusal(kind, stream=True, prompt_logprobs=1).param == "prompt_logprobs"
    assert refusal(kind, n=3, best_of=2).param == "best_of"
    assert refusal(kind, stream=True, best_of=2).param == "best_of"
    error = refusal(kind, stream=True, stream_options={"include_usage": 1})
    assert error.param == "stream_options.include_usage"
    request = ask(kind, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert request.include_usage and request.continuous_usage
    assert not ask(kind, stream=True).include_usage and not ask(kind, stream=True).continuous_usage


# --- To sampling parameters --------------------------------------------------------------------------------

WISHES = dict(n=2, best_of=3, temperature=0.7, top_p=0.9, presence_penalty=0.1, frequency_penalty=0.2, seed=3,
              stop=["x"], logit_bias={5: 1.0}, max_tokens=30, top_k=40, min_p=0.01, repetition_penalty=1.1,
              min_tokens=2, stop_token_ids=[7], include_stop_str_in_output=True, ignore_eos=True,
              skip_special_tokens=False, spaces_between_special_tokens=False, bad_words=["b"],
              allowed_token_ids=[1, 2, 5], prompt_logprobs=1, truncate_prompt_tokens=100,
              num_speculative_tokens=2)


@BOTH
def test_every_wish_arrives(kind):
    served = {name for name in kind.model_fields if name in SamplingParams.__struct_fields__
              and not is_refused(kind.model_fields[name])}
    assert served == {*WISHES, "logprobs"}
    asked = {**WISHES, "logit_bias": {"5": 1.0}}
    expected = SamplingParams(**WISHES, logprobs=4, output_kind=RequestOutputKind.FINAL_ONLY)
    logprobs = dict(logprobs=4) if kind is CompletionRequest else dict(logprobs=True, top_logprobs=4)
    assert ask(kind, **asked, **logprobs).to_sampling_params() == expected


def test_defaults():
    assert ask(CompletionRequest).to_sampling_params() == SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    chat = ask(ChatCompletionRequest).to_sampling_params()
    assert chat == SamplingParams(max_tokens=None, output_kind=RequestOutputKind.FINAL_ONLY)
    for kind in KINDS: assert ask(kind, stream=True).to_sampling_params().output_kind is RequestOutputKind.DELTA


@BOTH
def test_the_models_defaults_fill_what_was_not_given(kind):
    defaults = dict(temperature=0.6, top_k=20, max_tokens=50, repetition_penalty=1.1)
    params = ask(kind, top_k=5).to_sampling_params(defaults)
    assert (params.temperature, params.top_k, params.max_tokens, params.repetition_penalty) == (0.6, 5, 50, 1.1)
    assert ask(kind, temperature=0).to_sampling_params(defaults).temperature == 0   # 0 was given
    assert ask(kind, max_tokens=0).to_sampling_params(defaults).max_tokens == 0
    assert defaults == dict(temperature=0.6, top_k=20, max_tokens=50, repetition_penalty=1.1)


def test_best_of_that_chooses_nothing_is_not_asked():
    for kind in KINDS:
        assert ask(kind, best_of=1).to_sampling_params().best_of is None
        assert ask(kind, n=2, best_of=2).to_sampling_params().best_of is None
        assert ask(kind, n=2, best_of=3).to_sampling_params().best_of == 3


def test_echo_with_logprobs_scores_the_prompt():
    params = ask(CompletionRequest, echo=True, logprobs=2, max_tokens=0).to_sampling_params()
    assert (params.logprobs, params.prompt_logprobs, params.max_tokens) == (2, 2, 0)
    assert ask(CompletionRequest, echo=True).to_sampling_params().prompt_logprobs is None
    assert ask(CompletionRequest, logprobs=2).to_sampling_params().prompt_logprobs is None
    assert ask(CompletionRequest, echo=True, logprobs=0, stream=True).to_sampling_params().prompt_logprobs == 0


def test_logprobs_of_a_chat():
    def logprobs(**fields): return ask(ChatCompletionRequest, **fields).to_sampling_params().logprobs
    assert logprobs() is None and logprobs(logprobs=False) is None
    assert logprobs(logprobs=True) == 0 and logprobs(logprobs=True, top_logprobs=3) == 3
    assert logprobs(top_logprobs=0) is None
    assert refusal(ChatCompletionRequest, top_logprobs=3).param == "top_logprobs"
    assert refusal(ChatCompletionRequest, logprobs=5).param == "logprobs"
    assert refusal(CompletionRequest, logprobs=True).param == "logprobs"


def test_max_completion_tokens():
    "vllm#19861: the newer name is the same limit; null means the rest of the window."
    def limit(**fields): return ask(ChatCompletionRequest, **fields).to_sampling_params().max_tokens
    assert limit(max_completion_tokens=7) == limit(max_tokens=7) == limit(max_tokens=7, max_completion_tokens=7) == 7
    assert limit(max_completion_tokens=None) is None and limit(max_completion_tokens=0) == 0
    assert refusal(ChatCompletionRequest, max_tokens=5, max_completion_tokens=7).param == "max_completion_tokens"


def refused_by_sampling(kind, **fields) -> str:
    with pytest.raises(RequestError) as caught: ask(kind, **fields).to_sampling_params()
    return caught.value.param


@BOTH
def test_errors_of_sampling_params_name_the_field(kind):
    assert refused_by_sampling(kind, temperature=0, n=2) == "n"
    assert refused_by_sampling(kind, max_tokens=3, min_tokens=4) == "min_tokens"


def test_blame_field():
    text, chat = ask(CompletionRequest), ask(ChatCompletionRequest)
    def param(error, request): return blame_field(ValueError(error), request).param
    assert param("prompt_token_ids[3] is 999, but …", text) == "prompt"
    assert param("prompt has 9 tokens, but …", text) == "prompt"
    assert param("prompt has 9 tokens, but …", chat) == "messages"
    assert param("logprobs must be at most 20", text) == "logprobs"
    assert param("logprobs must be at most 20", chat) == "top_logprobs"
    assert param("stop_token_ids[0] is 7, but …", text) == "stop_token_ids"
    assert param("best_of is not supported by engine 'v1'", text) == "best_of"
    assert param("bad word 'x' has no tokens", text) is None and param("", text) is None
    own = RequestError("no", "n", status=404)
    assert blame_field(own, text) is own


# --- Conversations -----------------------------------------------------------------------------------------

def messages(*turns): return ask(ChatCompletionRequest, messages=list(turns)).template_messages()


def test_messages_for_templates():
    assert messages({"role": "developer", "content": "d"}) == [{"role": "system", "content": "d"}]
    assert messages({**USER, "name": "bob"}) == [{**USER, "name": "bob"}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages({"role": "user", "content": parts}) == [{"role": "user", "content": "a\nb"}]
    # vllm#25001: also in a tool message, and without an id.
    assert messages(USER, {"role": "tool", "content": [{"type": "text", "text": "18 degrees"}]})[1] == {
        "role": "tool", "content": "18 degrees"}
    assert messages(USER, {"role": "assistant", "content": None, "refusal": "no"})[1]["content"] == "no"
    assert messages(USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]})[1] == {
        "role": "assistant", "content": "no"}
    assert messages({"role": "user", "content": ""}) == [{"role": "user", "content": ""}]
    assert messages({"role": "user", "content": []}) == [{"role": "user", "content": ""}]


def test_tool_calls_for_templates():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turn = messages(USER, {"role": "assistant", "content": None, "tool_calls": [call]})[1]
    assert turn == {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}
    for bad in ("[1]", "{", "5", 5):
        call["function"]["arguments"] = bad
        error = refusal(ChatCompletionRequest, messages=[{"role": "assistant", "tool_calls": [call]}])
        assert error.param == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize("message,param", [
    ({}, "messages[1].role"), ({"role": "bot", "content": "x"}, "messages[1].role"),
    ({"role": "user"}, "messages[1].content"), ({"role": "user", "content": None}, "messages[1].content"),
    ({"role": "assistant"}, "messages[1].content"), ({"role": "user", "content": 5}, "messages[1].content"),
    ({"role": "user", "content": "x", "foo": 1}, "messages[1].foo"), (5, "messages[1]"),
    ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
    ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[1].content[0].type"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0].image_url"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "messages[1].content[0].image_url"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content[0].image_url.url"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]},
     "messages[1].content[0].image_url.url"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}]},
     "messages[1].content[0].image_url.detail"),
    ({"role": "user", "content": [{"type": "text", "text": "x", "image_url": {"url": "x"}}]},
     "messages[1].content[0].image_url"),
    ({"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content"),
    ({"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content"),
    ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, "messages[1].audio"),
    ({"role": "assistant", "function_call": {"name": "f", "arguments": ""}}, "messages[1].function_call"),
    ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0].function"),
    ({"role": "assistant", "tool_calls": []}, "messages[1].content"),
])
def test_wrong_messages_are_named(message, param):
    assert refusal(ChatCompletionRequest, messages=[USER, message]).param == param


def test_images_keep_their_places():
    image, text = {"type": "image_url", "image_url": {"url": "u", "detail": "low"}}, {"type": "text", "text": "t"}
    request = ask(ChatCompletionRequest, messages=[
        USER, {"role": "user", "content": [text, image, text, image | {"image_url": {"url": "v"}}]},
        {"role": "tool", "tool_call_id": "1", "content": [image]}])
    assert request.images() == {"messages[1].content[1].image_url": "u", "messages[1].content[3].image_url": "v",
                                "messages[2].content[0].image_url": "u"}
    contents = [m["content"] for m in request.template_messages()]
    assert contents[1:] == [[text, {"type": "image"}, text, {"type": "image"}], [{"type": "image"}]]
    assert ask(ChatCompletionRequest, messages=[USER]).images() == {}


def test_template_kwargs():
    def kwargs(**fields): return ask(ChatCompletionRequest, **fields).template_kwargs()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": None}}}
    assert kwargs() == {"add_generation_prompt": True}
    assert kwargs(add_generation_prompt=False) == {"add_generation_prompt": False}
    assert kwargs(continue_final_message=True) == {"add_generation_prompt": False, "continue_final_message": True}
    assert kwargs(tools=[tool])["tools"] == [tool]       # parameters as they were sent
    assert kwargs(tools=[tool], tool_choice="auto")["tools"] == [tool]
    assert "tools" not in kwargs(tools=[tool], tool_choice="none") and "tools" not in kwargs(tools=[])
    assert kwargs(documents=[{"title": "t"}])["documents"] == [{"title": "t"}]
    assert kwargs(chat_template_kwargs={"enable_thinking": False}) == {
        "enable_thinking": False, "add_generation_prompt": True}
    for key in ("chat_template", "tokenize", "messages", "tools", "return_tensors"):
        assert refusal(ChatCompletionRequest, chat_template_kwargs={key: 1}).param == "chat_template_kwargs"
    assert refusal(ChatCompletionRequest, chat_template="{{ 1 }}").param == "chat_template"
    error = refusal(ChatCompletionRequest, continue_final_message=True, add_generation_prompt=True)
    assert error.param == "continue_final_message"
    assert refusal(ChatCompletionRequest, tools=[{"type": "custom", "custom": {}}]).param == "tools[0].custom"
    assert refusal(ChatCompletionRequest, tools=[tool | {"type": "x"}]).param == "tools[0].type"
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        assert refusal(ChatCompletionRequest, tools=[tool], tool_choice=choice).param == "tool_choice"


def test_tokenize_and_detokenize():
    assert check_request(TokenizeRequest, {"prompt": ""}).prompt == ""
    chat = check_request(TokenizeRequest, {"messages": [USER], "add_generation_prompt": False})
    assert chat.template_messages() == [USER] and chat.template_kwargs() == {"add_generation_prompt": False}
    assert refusal(TokenizeRequest).param == "prompt"
    assert refusal(TokenizeRequest, prompt="x", messages=[USER]).param == "prompt"
    assert refusal(TokenizeRequest, messages=[USER], add_special_tokens=True).param == "add_special_tokens"
    assert check_request(DetokenizeRequest, {"tokens": [1, 2]}).tokens == [1, 2]
    for bad in ([1.0], [True], ["1"], [-1]): assert refusal(DetokenizeRequest, tokens=bad).param == "tokens[0]"
    assert refusal(DetokenizeRequest).param == "tokens"


# --- Bodies ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("body", [
    b"", b"{", b"\xff", b'{"prompt": "\xff"}', b'{"a": NaN}', b'{"temperature": Infinity}', b"[" * 100_000,
    b'{"prompt": "\\ud800"}', b"{} x", b"\xef\xbb\xbf{}", b"1" * 10_000, "{}".encode("utf-16"), b"null", b"[]", b'"x"'])
def test_bodies_that_are_none(body):
    with pytest.raises(RequestError) as caught: parse_request(CompletionRequest, body)
    assert caught.value.param is None and "the body" in caught.value.message


def test_numbers_beyond_floats_are_refused():
    with pytest.raises(RequestError) as caught:
        parse_request(CompletionRequest, b'{"model": "m", "prompt": "a", "temperature": 1e999}')
    assert caught.value.param == "temperature"


MANY = 200_000
LONG = {
    "ids": (CompletionRequest, dict(prompt=["1"] * MANY)), "mixed": (CompletionRequest, dict(prompt=[1] * MANY + ["a"])),
    "prompts": (CompletionRequest, dict(prompt=["a"] * MANY)), "words": (CompletionRequest, dict(bad_words=[1] * MANY)),
    "stop": (CompletionRequest, dict(stop=[1] * MANY)), "keys": (CompletionRequest, {f"x{i}": 1 for i in range(MANY)}),
    "stop_ids": (CompletionRequest, dict(stop_token_ids=["a"] * MANY)),
    "bias": (CompletionRequest, dict(logit_bias={str(i): "a" for i in range(MANY)})),
    "number": (CompletionRequest, dict(n="9" * MANY)), "messages": (ChatCompletionRequest, dict(messages=[USER] * MANY)),
    "parts": (ChatCompletionRequest, dict(messages=[{"role": "user", "content": [{"type": "x"}] * MANY}])),
    "calls": (ChatCompletionRequest, dict(messages=[{"role": "assistant", "tool_calls": [{}] * MANY}])),
    "tools": (ChatCompletionRequest, dict(tools=[{}] * MANY)), "docs": (ChatCompletionRequest, dict(documents=[1] * MANY)),
    "metadata": (ChatCompletionRequest, dict(metadata={str(i): i for i in range(MANY)})),
}


@pytest.mark.parametrize("name", LONG)
def test_long_lists_of_mistakes_cost_little(name):
    "A million mistakes are not described one by one: the server has other guests."
    kind, fields = LONG[name]
    body = json.dumps({**KINDS[kind], **fields}).encode()
    start = time.process_time()
    with pytest.raises(RequestError) as caught: parse_request(kind, body)
    assert time.process_time() - start < 1 and len(caught.value.message) < 300


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=8)


@BOTH
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_value_is_served_or_refused_by_name(kind, data):
    names = data.draw(st.lists(st.sampled_from(sorted(kind.model_fields)), max_size=4, unique=True))
    fields = {**KINDS[kind], **{name: data.draw(json_values, name) for name in names}}
    try: ask_fully(kind, fields)
    except RequestError as error:
        assert error.param.split(".")[0].split("[")[0] in kind.model_fields, error.message


def ask_fully(kind, fields):
    request = check_request(kind, fields)
    request.to_sampling_params()
    if kind is CompletionRequest: return request.prompts()
    request.template_messages(), request.template_kwargs()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=40) | json_values.map(lambda v: json.dumps(v).encode()))
def test_any_body_is_a_request_error(body):
    for kind in (CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest):
        with pytest.raises(RequestError): parse_request(kind, body)


def test_errors_as_fastapi_reports_them():
    "The same words when FastAPI has checked the body."
    try: CompletionRequest.model_validate({"model": "m", "prompt": "a", "n": "5"})
    except ValueError as error: found = error.errors()
    ours = request_error(found)
    theirs = request_error([{**found[0], "loc": ("body", *found[0]["loc"])}])
    assert (ours.message, ours.param) == (theirs.message, theirs.param) == ("n must be a valid integer, got '5'", "n")


def test_nothing_of_another_request_is_kept():
    first = ask(CompletionRequest, stop=["a"], stop_token_ids=[1], logit_bias={"5": 1})
    first.to_sampling_params().stop_token_ids.append(9)
    assert first.stop_token_ids == [1] and ask(CompletionRequest).to_sampling_params().stop_token_ids == []


# --- Answers -----------------------------------------------------------------------------------------------

USAGE = responses.UsageInfo.of(3, 2, 1)


def test_openai_reads_a_completion():
    logprobs = responses.CompletionLogProbs(text_offset=[0], token_logprobs=[-0.5], tokens=["a"],
                                            top_logprobs=[{"a": -0.5, "b": -math.inf}])
    choice = responses.CompletionResponseChoice(index=0, text="a", logprobs=logprobs, finish_reason="stop")
    ours = responses.CompletionResponse(id="1", model="m", choices=[choice], usage=USAGE)
    theirs = openai.types.Completion.model_validate_json(ours.to_json())
    assert theirs.choices[0].logprobs.top_logprobs == [{"a": -0.5, "b": -9999.0}]
    assert theirs.usage.total_tokens == 5 and theirs.usage.prompt_tokens_details.cached_tokens == 1
    assert abs(theirs.created - time.time()) < 60


def test_openai_reads_a_chat():
    token = responses.ChatCompletionLogProbsContent(token="é", logprob=-0.5, bytes=list("é".encode()), top_logprobs=[
        responses.ChatCompletionLogProb(token="b", logprob=-math.inf)])
    choice = responses.ChatCompletionResponseChoice(
        index=0, message=responses.ChatMessageResponse(content="é"), finish_reason="length",
        logprobs=responses.ChatCompletionLogProbs(content=[token]))
    ours = responses.ChatCompletionResponse(id="1", model="m", choices=[choice], usage=USAGE)
    theirs = chat_types.ChatCompletion.model_validate_json(ours.to_json())
    assert theirs.choices[0].message.content == "é" and theirs.choices[0].message.role == "assistant"
    assert theirs.choices[0].logprobs.content[0].top_logprobs[0].logprob == -9999.0


def test_openai_reads_chunks():
    choice = responses.ChatCompletionResponseStreamChoice(index=0, delta=responses.DeltaMessage(role="assistant"))
    ours = responses.ChatCompletionStreamResponse(id="1", model="m", choices=[choice])
    theirs = chat_types.ChatCompletionChunk.model_validate_json(ours.to_json())
    assert theirs.choices[0].delta.role == "assistant" and theirs.choices[0].finish_reason is None
    # vllm#19662: the key is always there; the usage only where somebody put it.
    raw = json.loads(ours.to_json())
    assert raw["choices"][0]["finish_reason"] is None and "usage" not in raw
    assert raw["choices"][0]["delta"] == {"role": "assistant"}
    with_usage = responses.ChatCompletionStreamResponse(id="1", model="m", choices=[], usage=USAGE)
    assert json.loads(with_usage.to_json())["usage"]["completion_tokens"] == 2
    asked = responses.CompletionStreamResponse(id="1", model="m", choices=[], usage=None)
    assert json.loads(asked.to_json())["usage"] is None
    chunk = responses.CompletionStreamResponse(id="1", model="m", choices=[
        responses.CompletionResponseStreamChoice(index=0, text="a")])
    assert json.loads(chunk.to_json())["choices"][0]["finish_reason"] is None


@pytest.mark.parametrize("ours,theirs", [
    (responses.CompletionResponse, openai.types.Completion),
    (responses.CompletionResponseChoice, openai.types.CompletionChoice),
    (responses.CompletionStreamResponse, openai.types.Completion),
    (responses.CompletionResponseStreamChoice, openai.types.CompletionChoice),
    (responses.ChatCompletionResponse, chat_types.ChatCompletion),
    (responses.ChatCompletionResponseChoice, chat_types.chat_completion.Choice),
    (responses.ChatMessageResponse, chat_types.ChatCompletionMessage),
    (responses.ChatCompletionLogProbs, chat_types.chat_completion.ChoiceLogprobs),
    (responses.ChatCompletionLogProbsContent, chat_types.ChatCompletionTokenLogprob),
    (responses.ChatCompletionStreamResponse, chat_types.ChatCompletionChunk),
    (responses.ChatCompletionResponseStreamChoice, chat_types.chat_completion_chunk.Choice),
    (responses.UsageInfo, openai.types.CompletionUsage), (responses.ModelCard, openai.types.Model),
], ids=lambda k: k.__name__)
def test_every_key_that_openai_requires_is_written(ours, theirs):
    required = {name for name, field in theirs.model_fields.items() if field.is_required()}
    assert required <= set(ours.model_fields) - set(ours.OPTIONAL)


def test_optional_keys_can_be_left_out():
    for kind in vars(responses).values():
        if not (isinstance(kind, type) and issubclass(kind, responses.ApiResponse)): continue
        for name in kind.OPTIONAL: assert not kind.model_fields[name].is_required(), (kind, name)
        json.dumps(kind.model_json_schema(mode="serialization"))


def test_openai_reads_models():
    ours = responses.ModelList(data=[responses.ModelCard(id="m", max_model_len=128)])
    client = openai_client(200, ours.to_json())
    model, = client.models.list().data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("m", "model", "minengine", 128)


def openai_client(status: int, body: str):
    def answer(request): return httpx.Response(status, content=body, headers={"content-type": "application/json"})
    return openai.OpenAI(api_key="k", base_url="http://test/v1", max_retries=0,
                         http_client=httpx.Client(transport=httpx.MockTransport(answer)))


def test_openai_reads_errors():
    error = refusal(CompletionRequest, n="5")
    client = openai_client(400, responses.ErrorResponse.from_error(error).to_json())
    with pytest.raises(openai.BadRequestError) as caught: client.completions.create(model="m", prompt="a")
    assert caught.value.param == "n" and caught.value.type == "invalid_request_error" and caught.value.code is None
    assert caught.value.body["message"] == "n must be a valid integer, got '5'"
    dead = responses.ErrorResponse.of("the engine has died", 503)
    with pytest.raises(openai.InternalServerError) as caught:
        openai_client(503, dead.to_json()).completions.create(model="m", prompt="a")
    assert caught.value.type == "server_error"


def test_what_the_openai_client_sends_is_accepted():
    "Real bodies: the client leaves out what was not given, and names what was."
    sent = []
    def answer(request):
        sent.append(request.content)
        return httpx.Response(400, json={"error": {"message": "x"}})
    client = openai.OpenAI(api_key="k", base_url="http://test/v1", max_retries=0,
                           http_client=httpx.Client(transport=httpx.MockTransport(answer)))
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="m", prompt=[[1, 2], [3]], n=2, stop=["x"], logit_bias={"5": 1}, stream=True,
                                  stream_options={"include_usage": True}, extra_body={"top_k": 3})
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="m", messages=[USER], max_completion_tokens=4, logprobs=True,
                                       top_logprobs=2, tools=[{"type": "function", "function": {"name": "f"}}])
    text, chat = parse_request(CompletionRequest, sent[0]), parse_request(ChatCompletionRequest, sent[1])
    assert text.prompts() == [[1, 2], [3]] and text.top_k == 3 and text.include_usage
    assert chat.to_sampling_params().max_tokens == 4 and chat.template_kwargs()["tools"]


def test_pydantic_is_new_enough():
    assert tuple(map(int, importlib.metadata.version("pydantic").split(".")[:2])) >= (2, 10)
