"""The wire: whole after a round trip, loud about what is not a message."""
import math
import pickle
import subprocess
import sys
import threading
import typing

import msgspec
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from minengine.outputs import SpecDecodingStats
from minengine.sampling_params import RequestOutputKind, SamplingParams
from minengine.v1 import messages as M
from minengine.v1.engine import packing as P, wire as W
from minengine.v1.engine.wire import FrameType, WireError, decode, encode

quick = settings(max_examples=60, deadline=None, derandomize=True)
maybe = lambda strategy: st.none() | strategy
flag = st.booleans()
ids = st.lists(st.integers(0, 2**32), max_size=5)
text = st.text(max_size=8)
words = st.lists(st.text(min_size=1, max_size=5), max_size=2)
floats = st.floats(allow_nan=False)


def round_trip(kind, message):
    back_kind, back = decode(encode(kind, message))
    assert back_kind is kind and type(back) is type(message)
    return back


def same(a, b) -> bool:
    "Equal in type and value, tensors and arrays included."
    if type(a) is not type(b): return False
    if isinstance(a, torch.Tensor): return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray): return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict): return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, msgspec.Struct): return all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    return a == b or a != a and b != b


# --- every field of every message --------------------------------------------

dtypes = [getattr(torch, name) for name in P._TENSOR_DTYPES]
shapes = st.lists(st.integers(0, 5), max_size=4)
tensors = st.builds(lambda shape, dtype: (torch.arange(math.prod(shape)) % 2).reshape(shape).to(dtype),
                    shapes, st.sampled_from(dtypes))
arrays = hnp.arrays(st.sampled_from(sorted(P._ARRAY_DTYPES)).map(np.dtype), hnp.array_shapes(min_dims=0, max_side=4))
plain = st.none() | flag | st.integers(-2**63, 2**64 - 1) | floats | text | st.binary(max_size=8)
hashable = st.recursive(plain, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=4)
keys = st.none() | flag | st.integers(-2**63, 2**64 - 1) | text | st.binary(max_size=4)
anything = st.recursive(
    plain | tensors | arrays | st.sets(hashable, max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(keys, inner, max_size=3), max_leaves=8)

params = st.builds(
    SamplingParams, n=st.integers(1, 4), best_of=maybe(st.integers(4, 9)), presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2), repetition_penalty=st.floats(0.1, 2), temperature=st.floats(0.5, 2),
    top_p=st.floats(0.1, 1), top_k=st.integers(-1, 99), min_p=st.floats(0, 1),
    seed=maybe(st.integers(-2**63, 2**63 - 1)), stop=maybe(words), stop_token_ids=maybe(ids), bad_words=maybe(words),
    ignore_eos=flag, max_tokens=maybe(st.integers(5, 99)), min_tokens=st.integers(0, 5),
    logprobs=maybe(st.integers(0, 5)), prompt_logprobs=maybe(st.integers(0, 5)), detokenize=st.just(True),
    skip_special_tokens=flag, spaces_between_special_tokens=flag, include_stop_str_in_output=flag,
    truncate_prompt_tokens=maybe(st.integers(1, 99)), num_speculative_tokens=maybe(st.integers(0, 9)),
    output_kind=st.sampled_from(RequestOutputKind),
    logits_processors=st.none(), guided_decoding=maybe(st.dictionaries(text, text, max_size=2)),
    logit_bias=maybe(st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3)),
    allowed_token_ids=maybe(st.lists(st.integers(0, 99), min_size=1, max_size=3)),
    bad_words_token_ids=maybe(st.lists(ids, max_size=2)), eos_token_ids=ids)
places = st.builds(M.PlaceholderRange, st.integers(0, 99), st.integers(1, 99))
requests = st.builds(
    M.EngineCoreRequest, text, maybe(text), ids, params, maybe(st.integers(0, 2**32)), floats,
    mm_inputs=maybe(st.lists(anything, max_size=2)), mm_hashes=maybe(st.lists(text, max_size=2)),
    mm_placeholders=maybe(st.lists(places, max_size=2)), lora_request=maybe(anything), cache_salt=maybe(text),
    priority=st.integers(-9, 9), mm_evict=maybe(st.lists(text, max_size=2)))
logprobs = st.builds(M.LogprobsLists, st.lists(ids, max_size=3), st.lists(st.lists(floats, max_size=3), max_size=3), ids)
events = st.builds(M.EngineCoreEvent, st.sampled_from(M.EngineCoreEventType), floats)
output = st.builds(
    M.EngineCoreOutput, text, ids, maybe(logprobs), maybe(logprobs), maybe(st.sampled_from(M.FinishReason)),
    maybe(st.integers(0, 2**32) | text), maybe(st.lists(events, max_size=3)), st.integers(0, 2**20))
count = st.integers(0, 2**40)
drafts = st.builds(SpecDecodingStats, count, count, count, st.lists(count, max_size=3))
stats = st.builds(M.SchedulerStats, count, count, st.floats(0, 1), count, count, count, maybe(drafts))
outputs = st.builds(M.EngineCoreOutputs, st.lists(output, max_size=3), maybe(stats), floats)
kinds = {
    FrameType.ADD: requests,
    FrameType.ABORT: st.lists(text, max_size=3),
    FrameType.UTILITY: st.builds(W.UtilityCall, count, text, st.lists(anything, max_size=3)),
    FrameType.READY: st.builds(W.Ready, st.dictionaries(text, plain, max_size=3), count, count, count),
    FrameType.OUTPUTS: outputs,
    FrameType.UTILITY_OUTPUT: st.builds(W.UtilityResult, count, anything, maybe(text), maybe(text)),
    FrameType.REFUSED: st.builds(W.Refused, text, text, text),
    FrameType.DEAD: st.builds(W.Dead, text, text),
}
any_message = st.one_of(*(st.tuples(st.just(k), s) for k, s in kinds.items()))


@pytest.mark.parametrize("kind", FrameType, ids=lambda k: k.name)
def test_every_field_survives_a_round_trip(kind):
    @quick
    @given(kinds[kind])
    def check(message): assert same(round_trip(kind, message), message)
    check()


@quick
@given(params)
def test_sampling_params_survive_in_every_field(params):
    message = M.EngineCoreRequest("r", None, [1], params, None, 0.0)
    assert round_trip(FrameType.ADD, message).sampling_params == params


def built_with(strategy): return set(strategy.wrapped_strategy.kwargs)


def test_no_field_is_left_out_here():
    # Whoever adds a field to a message adds it to the strategies above too.
    assert built_with(params) == set(SamplingParams.__struct_fields__)
    assert len(M.EngineCoreRequest.__struct_fields__) == 13
    assert len(M.EngineCoreOutput.__struct_fields__) == 8
    assert len(M.EngineCoreOutputs.__struct_fields__) == 3
    assert len(M.SchedulerStats.__struct_fields__) == 7
    assert set(kinds) == set(FrameType) == set(W._TYPES)


def mentions_any(hint) -> bool:
    return hint is typing.Any or any(map(mentions_any, typing.get_args(hint)))


def structs(hint, found=None):
    found = set() if found is None else found
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct) and hint not in found:
        found.add(hint)
        for inner in typing.get_type_hints(hint).values(): structs(inner, found)
    for inner in typing.get_args(hint): structs(inner, found)
    return found


def test_every_field_that_may_hold_anything_is_known():
    for struct in set().union(*map(structs, W._TYPES.values())):
        hints = typing.get_type_hints(struct)
        open_fields = {n for n, h in hints.items() if mentions_any(h) or structs(h) & set(W._OPEN_FIELDS)}
        assert open_fields == set(W._OPEN_FIELDS.get(struct, ())), struct


def test_a_message_is_not_changed_by_sending_it():
    image = torch.ones(3, 40, 40)
    message = M.EngineCoreRequest("r", None, [1], SamplingParams(), None, 0.0, mm_inputs=[(image, {1})])
    before = message.mm_inputs
    encode(FrameType.ADD, message)
    assert message.mm_inputs is before and before[0][0] is image


def test_values_that_constructors_would_refuse_are_refused_on_arrival():
    request = M.EngineCoreRequest("r7", None, [1], SamplingParams(), None, 0.0)
    request.sampling_params.top_p = 7.0
    with pytest.raises(WireError, match="ADD of .* top_p") as e: decode(encode(FrameType.ADD, request))
    assert e.value.request_id == "r7"


# --- numbers ------------------------------------------------------------------

def test_numpy_scalars_become_plain_numbers():
    lists = M.LogprobsLists([[np.int32(1)]], [[np.float32(0.5)]], [np.int64(1)])
    out = M.EngineCoreOutput("r", [np.int64(3)], lists, stop_reason=np.int64(3), num_cached_tokens=np.uint8(2))
    back = round_trip(FrameType.OUTPUTS, M.EngineCoreOutputs([out], timestamp=np.float64(1.5)))
    assert back == M.EngineCoreOutputs([M.EngineCoreOutput(
        "r", [3], M.LogprobsLists([[1]], [[0.5]], [1]), stop_reason=3, num_cached_tokens=2)], timestamp=1.5)
    assert type(back.outputs[0].new_token_ids[0]) is int
    params = SamplingParams()
    params.logit_bias = {np.int64(4): np.float64(1.5)}
    request = M.EngineCoreRequest("r", None, [1], params, np.int64(2), 0.0)
    assert round_trip(FrameType.ADD, request).sampling_params.logit_bias == {4: 1.5}
    call = round_trip(FrameType.UTILITY, W.UtilityCall(1, "f", [np.bool_(True), {np.int8(1): np.float16(2)}]))
    assert call.args == [True, {1: 2.0}] and type(call.args[0]) is bool


@pytest.mark.parametrize("value", [np.datetime64("2020"), np.longdouble(1), np.complex64(1)], ids=repr)
def test_numpy_scalars_without_a_plain_number_are_refused(value):
    with pytest.raises(WireError, match=r"args\[0\]: a numpy"): encode(FrameType.UTILITY, W.UtilityCall(1, "f", [value]))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 5e-324, 2**64 - 1, -2**63, True])
def test_odd_numbers(value):
    back = round_trip(FrameType.UTILITY_OUTPUT, W.UtilityResult(1, value)).result
    assert same(back, value) and math.copysign(1, back) == math.copysign(1, value)


# --- tensors and arrays ---------------------------------------------------------

def send(value): return encode(FrameType.UTILITY, W.UtilityCall(1, "f", [value]))
def receive(frames): return decode(frames)[1].args[0]


@pytest.mark.parametrize("dtype", dtypes, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (5, 700)], ids=str)
def test_tensors_of_every_dtype(dtype, shape):
    tensor = (torch.arange(math.prod(shape)) % 2 == 1).reshape(shape).to(dtype)
    assert same(receive(send(tensor)), tensor)


@pytest.mark.parametrize("tensor", [
    torch.arange(9000).reshape(90, 100).T, torch.arange(9000)[::3], torch.ones(1, 5).expand(1000, 5),
    torch.nn.Parameter(torch.ones(40, 50)), torch.ones(2000)[7:]],
    ids=["transposed", "strided", "expanded", "parameter", "offset"])
def test_tensors_laid_out_otherwise(tensor):
    assert torch.equal(receive(send(tensor)), tensor.detach())


def test_special_values_of_bfloat16_keep_their_bits():
    bits = torch.arange(-2**15, 2**15, dtype=torch.int16)
    assert torch.equal(receive(send(bits.view(torch.bfloat16))).view(torch.int16), bits)


@pytest.mark.parametrize("array", [
    np.arange(9000).reshape(90, 100).T, np.arange(9000)[::3], np.zeros((3, 0)), np.ones(()),
    np.arange(3000, dtype=">i4"), np.broadcast_to(np.ones(5), (1000, 5))],
    ids=["transposed", "strided", "empty", "scalar", "big-endian", "broadcast"])
def test_arrays_laid_out_otherwise(array): assert same(receive(send(array)), array)


def test_many_bytes_travel_beside_the_message_and_few_inside():
    few, many = torch.zeros(P.INLINE_BYTES, dtype=torch.uint8), torch.zeros(P.INLINE_BYTES + 1, dtype=torch.uint8)
    assert [len(send(few)), len(send(many))] == [2, 3]
    assert len(encode(FrameType.UTILITY, W.UtilityCall(1, "f", [many, few, {"x": (many, [many])}]))) == 5


def test_sending_does_not_copy():
    tensor, array = torch.zeros(5000), np.zeros(5000)
    for value, start in ((tensor, tensor.data_ptr()), (array, array.ctypes.data)):
        assert np.frombuffer(send(value)[2], np.uint8).ctypes.data == start


def address(value): return value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data


def numbers(value): return value.flatten().tolist()


@pytest.mark.parametrize("make", [torch.arange, np.arange], ids=["tensor", "array"])
def test_receiving_does_not_copy_from_a_writable_frame(make):
    *rest, raw = send(make(5000))
    frame = bytearray(raw)
    value = receive([*rest, memoryview(frame)])
    assert address(value) == np.frombuffer(frame, np.uint8).ctypes.data
    value[0] = 7
    assert frame[0] == 7


def test_from_a_read_only_frame_an_array_is_a_view_and_a_tensor_a_copy():
    *rest, raw = send(np.arange(5000))
    frame = bytes(raw)
    array = receive([*rest, frame])
    assert not array.flags.writeable and array.ctypes.data == np.frombuffer(frame, np.uint8).ctypes.data
    sent = torch.arange(5000)
    tensor = receive(send(sent))   # our own frames are read-only views of `sent`
    tensor[0] = 7
    assert sent[0] == 0


def test_a_frame_at_an_odd_address_is_copied_to_an_even_one():
    for make in torch.arange, np.arange:
        *rest, raw = send(make(5000))
        odd = memoryview(bytearray(1) + bytearray(raw))[1:]
        value = receive([*rest, odd])
        assert address(value) % 8 == 0 and numbers(value) == list(range(5000))


@pytest.mark.parametrize("value, what", [
    (torch.ones(3).to_sparse(), "sparse"), (torch.ones(3, device="meta"), "meta tensor"),
    (torch.ones(3, dtype=torch.complex64), "complex64"),
    (np.array(["a"]), "<U1"), (np.array([object()]), "object"), (np.zeros(3, [("a", "i4")]), r"\('a'"),
    (np.ma.masked_array([1]), "MaskedArray")])
def test_arrays_that_are_not_plain_numbers_are_refused(value, what):
    with pytest.raises(WireError, match=rf"^UTILITY: args\[0\]: .*{what}"): send(value)


def test_through_a_socket():
    values = [torch.arange(n, dtype=torch.float32) for n in (10, 300, 5000, 100_000)] + [np.arange(5000.0)]
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        port = push.bind_to_random_port("tcp://127.0.0.1")
        pull.connect(f"tcp://127.0.0.1:{port}")
        pull.rcvtimeo = 10_000
        for copy in (True, False):
            push.send_multipart(encode(FrameType.UTILITY, W.UtilityCall(1, "f", values)), copy=copy)
            kind, message = decode(pull.recv_multipart(copy=copy))
            assert kind is FrameType.UTILITY and same(message.args, values)
            for value in message.args[:4]: value += 1   # all ours to write to


# --- what cannot be sent ----------------------------------------------------------

def request(**changes):
    return M.EngineCoreRequest(**{**dict(
        request_id="r7", prompt=None, prompt_token_ids=[1], sampling_params=SamplingParams(),
        eos_token_id=None, arrival_time=0.0), **changes})


class Odd: pass


@pytest.mark.parametrize("changes, what", [
    (dict(prompt="\ud800"), "prompt: .*surrogates"),
    (dict(prompt_token_ids=[1, Odd()]), r"prompt_token_ids\[1\]: a .*Odd cannot be sent"),
    (dict(prompt_token_ids=np.arange(3)), "prompt_token_ids: a numpy.ndarray cannot be sent"),
    (dict(prompt_token_ids=[2**64]), r"prompt_token_ids\[0\]: .*ints"),
    (dict(mm_inputs=[{"x": (1, Odd())}]), r"mm_inputs\[0\]\['x'\]\[1\]: a .*Odd cannot be sent"),
    (dict(mm_inputs=[{"x": 2**70}]), r"mm_inputs\[0\]\['x'\]: .*ints"),
    (dict(mm_inputs=[torch.zeros(3), ("\ud800",)]), r"mm_inputs\[1\]: .*surrogates"),
    (dict(mm_inputs=[{Odd(): 1}]), r"a key of mm_inputs\[0\]: a .*Odd"),
    (dict(lora_request=M.FinishReason.STOP), "lora_request: a .*FinishReason"),
    (dict(sampling_params=SamplingParams(logits_processors=[len])),
     r"sampling_params.logits_processors\[0\]: a builtin_function_or_method cannot be sent"),
    (dict(sampling_params=SamplingParams(guided_decoding=Odd())), "sampling_params.guided_decoding: a .*Odd")])
def test_what_cannot_be_sent_is_named(changes, what):
    with pytest.raises(WireError, match="^ADD: " + what) as e: encode(FrameType.ADD, request(**changes))
    assert e.value.request_id == "r7"


def test_a_list_that_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(WireError, match="recursion"): send(loop)
    output = M.EngineCoreOutput("r", loop)
    with pytest.raises(WireError, match=r"OUTPUTS: outputs\[0\].new_token_ids"):
        encode(FrameType.OUTPUTS, M.EngineCoreOutputs([output]))


@pytest.mark.parametrize("kind, message", [
    (FrameType.ADD, ["r"]), (FrameType.ABORT, ("r",)), (FrameType.OUTPUTS, M.EngineCoreOutput("r", [])),
    (FrameType.DEAD, None)])
def test_a_message_of_another_kind_is_refused(kind, message):
    with pytest.raises(WireError, match=rf"{kind.name} takes a .*, got a .*{type(message).__name__}"): encode(kind, message)


# --- what is no message -------------------------------------------------------------

add = encode(FrameType.ADD, request())
image = encode(FrameType.ADD, request(mm_inputs=[torch.zeros(2000), np.zeros(3)]))


@pytest.mark.parametrize("frames, what", [
    ([], "2 frames or more, got 0"),
    ([b"\x00"], "2 frames or more, got 1"),
    ([b"", add[1]], "unknown tag b''"),
    ([b"\x07", add[1]], r"unknown tag b'\\x07' before 1 frames"),
    ([b"\x00\x00", add[1]], "unknown tag"),
    ([b"x" * 10**6, add[1]], "^.{0,80}$"),
    ([b"\x00", b""], "ADD of 0 bytes: .*truncated"),
    ([b"\x00", add[1][:-1]], rf"ADD of {len(add[1]) - 1} bytes: .*truncated"),
    ([b"\x00", bytes(add[1]) + b"\x00"], "trailing"),
    ([b"\x00", add[1], b"more"], rf"ADD of {len(add[1])} \+ 4 bytes: 1 raw frames too many"),
    ([b"\x11", add[1]], "OUTPUTS of .*Expected"),
    (image[:2], "raw frame 0 is missing"),
    ([*image[:2], image[2][:-4]], "ADD of .*"),
    ([*image[:2], b""], "no bytes for shape"),
    ([*image, image[2]], "1 raw frames too many"),
    ([b"\x13", msgspec.msgpack.encode(["r", "E", "m", 1])], "REFUSED of"),
    ([b"\x01", msgspec.msgpack.encode(["r", 1])], r"ABORT of .*Expected `str`, got `int` - at `\$\[1\]`"),
    ([b"\x02", b"\x93\x01\xa1f" + b"\x91" * 10**5 + b"\x01"], "recursion")])
def test_what_is_no_message_is_named(frames, what):
    with pytest.raises(WireError, match=what): decode(frames)


def blocks(*contents, code=1):
    ext = msgspec.msgpack.Ext(code, msgspec.msgpack.encode(contents))
    return [b"\x02", msgspec.msgpack.encode([1, "f", [ext]])]


NAMES = {1: "float32", 2: "<f4"}


@pytest.mark.parametrize("code", NAMES, ids=["tensor", "array"])
@pytest.mark.parametrize("contents", [
    ([3], b"x" * 8), ([1], b"x" * 8), ([-1], b"x" * 8), ([2], b"x" * 7), ([2**62, 4], b"x" * 8),
    ([2**64 - 1], b"x"), ([2**63, 0], b""), ([1], b""), ([], b""), ([1], 0), ([1], -1), ([1], b"xxxx", 1), ([1],),
    (1, b"xxxx"), (["1"], b"xxxx"), ([1], "xxxx"), ([1], [0])], ids=repr)
def test_tensors_that_contradict_themselves_are_refused(contents, code):
    with pytest.raises(WireError): decode(blocks(NAMES[code], *contents, code=code))


@pytest.mark.parametrize("code", NAMES, ids=["tensor", "array"])
@pytest.mark.parametrize("dtype", [
    "object", "|O", "O", "O8", "|V8", "<U2", "<M8[s]", "<f4,<f4", "(2,)<f4", "", "qint8", "Tensor", "dtype", "__name__",
    "complex64", "f4", "=f4", "int", 4, None], ids=repr)
def test_dtypes_that_are_never_sent_are_refused(dtype, code):
    with pytest.raises(WireError, match="dtype|Expected"): decode(blocks(dtype, [1], b"x" * 8, code=code))


@pytest.mark.parametrize("code, dtype", [(1, "bool"), (2, "|b1")])
def test_a_bool_is_0_or_1(code, dtype):
    assert numbers(receive(blocks(dtype, [2], b"\x00\x01", code=code))) == [False, True]
    with pytest.raises(WireError, match="neither"): decode(blocks(dtype, [1], b"\x02", code=code))


def test_two_tensors_may_not_share_a_frame():
    block = msgspec.msgpack.Ext(1, msgspec.msgpack.encode(["uint8", [4], 0]))
    with pytest.raises(WireError, match="missing"):
        decode([b"\x02", msgspec.msgpack.encode([1, "f", [block, block]]), b"xxxx"])


@pytest.mark.parametrize("value, what", [
    (msgspec.msgpack.Ext(9, b""), "extension type 9"), (msgspec.msgpack.Ext(3, b"\x01"), "array"),
    (msgspec.msgpack.Ext(4, b"\x91\x90"), "unhashable"), (msgspec.msgpack.Ext(3, b"\x90\x00"), "trailing"),
    (msgspec.msgpack.Ext(-1, b"\x00\x00\x00\x00"), "datetime")], ids=lambda x: x if isinstance(x, str) else f"code {x.code}")
def test_extension_types_that_are_never_sent_are_refused(value, what):
    with pytest.raises(WireError, match=what): decode([b"\x02", msgspec.msgpack.encode([1, "f", [value]])])


def test_extensions_inside_extensions_have_an_end():
    inner = b"\x90"
    for _ in range(2000): inner = b"\x91" + msgspec.msgpack.encode(msgspec.msgpack.Ext(3, inner))
    with pytest.raises(WireError, match="recursion"): decode([b"\x02", b"\x93\x01\xa1f" + inner])


def test_nothing_is_ever_unpickled():
    ran = []
    class Program:
        def __reduce__(self): return ran.append, ("ran",)
    for code in range(-128, 128):
        with pytest.raises(WireError):
            decode([b"\x02", msgspec.msgpack.encode([1, "f", [msgspec.msgpack.Ext(code, pickle.dumps(Program()))]])])
    with pytest.raises(WireError): send(Program())
    assert ran == []


# --- random bytes -----------------------------------------------------------------

def only_wire_errors(frames):
    try: decode(frames)
    except WireError as e:
        assert len(str(e)) < 1000
        return False
    return True


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(st.sampled_from(FrameType) | st.binary(max_size=2), st.lists(st.binary(max_size=60), max_size=3))
def test_random_bytes_raise_nothing_else(tag, frames): only_wire_errors([tag, *frames])


@settings(max_examples=600, deadline=None, derandomize=True)
@given(any_message, st.data())
def test_damaged_messages_raise_nothing_else(message, data):
    frames = [bytes(f) for f in encode(*message)]
    i = data.draw(st.integers(0, len(frames) - 1))
    frame, where = frames[i], data.draw(st.integers(0, len(frames[i])))
    damage = data.draw(st.sampled_from(["cut", "drop", "twice", "change", "insert"]))
    if damage == "cut":
        frames[i] = frame[:where]
        if where < len(frame): assert not only_wire_errors(frames), "a cut frame was taken for a message"
    if damage == "drop": del frames[i]
    if damage == "twice": frames.insert(i, frame)
    if damage == "change": frames[i] = frame[:where] + data.draw(st.binary(min_size=1, max_size=2)) + frame[where + 1:]
    if damage == "insert": frames[i] = frame[:where] + data.draw(st.binary(min_size=1, max_size=4)) + frame[where:]
    only_wire_errors(frames)


@quick
@given(any_message, st.binary(min_size=1, max_size=4))
def test_trailing_bytes_and_frames_are_refused(message, more):
    frames = encode(*message)
    assert not only_wire_errors([frames[0], bytes(frames[1]) + more, *frames[2:]])
    assert not only_wire_errors([*frames, more])


# --- and the rest ---------------------------------------------------------------------

def test_a_frame_is_never_used_twice():
    # vllm#15207: what was handed to the socket must not change under it.
    first = encode(FrameType.ABORT, ["a" * 50])
    kept = bytes(first[1])
    encode(FrameType.ABORT, ["b" * 50])
    assert first[1] == kept and type(first[1]) is bytes


def test_threads_do_not_disturb_each_other():
    wrong = []
    def work(name):
        for n in range(300):
            message = request(request_id=f"{name}-{n}", mm_inputs=[np.full(300, n)])
            if not same(round_trip(FrameType.ADD, message), message): wrong.append(name)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads: t.start()
    for t in threads: t.join(30)
    assert not wrong and not any(t.is_alive() for t in threads)


def test_one_token_of_one_request_is_small():
    outs = M.EngineCoreOutputs([M.EngineCoreOutput("r", [1])], timestamp=1.0)
    assert sum(map(len, encode(FrameType.OUTPUTS, outs))) < 25


def test_importing_is_cheap():
    code = "import sys, minengine.v1.engine.wire; print([m for m in ('torch', 'transformers', 'zmq') if m in sys.modules])"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert got.stdout.strip() == "[]"
