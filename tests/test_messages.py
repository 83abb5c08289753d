"""The V1 messages: plain data, cheap to import, whole after a round trip."""
import subprocess
import sys
import time

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from minengine.sampling_params import RequestOutputKind, SamplingParams
from minengine.v1.core import scheduler_output as S
from minengine.v1 import messages as M

quick = settings(max_examples=50, deadline=None, derandomize=True)
ids = st.lists(st.integers(0, 2**32), max_size=5)
floats = st.floats(allow_nan=False)
logprobs = st.builds(M.LogprobsLists, st.lists(ids, max_size=3),
                     st.lists(st.lists(floats, max_size=3), max_size=3), ids)
maybe = lambda strategy: st.none() | strategy
events = st.builds(M.EngineCoreEvent, st.sampled_from(M.EngineCoreEventType), floats)
outputs = st.builds(
    M.EngineCoreOutput, st.text(), ids, maybe(logprobs), maybe(logprobs),
    maybe(st.sampled_from(M.FinishReason)), maybe(st.integers(0, 2**32) | st.text()),
    maybe(st.lists(events, max_size=3)), st.integers(0, 2**20))
params = st.builds(
    SamplingParams, n=st.integers(1, 4), temperature=st.floats(0.5, 2), seed=maybe(st.integers(0, 2**40)),
    stop=st.lists(st.text(min_size=1), max_size=2), logprobs=maybe(st.integers(0, 5)),
    logit_bias=maybe(st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3)),
    output_kind=st.sampled_from(RequestOutputKind))
requests = st.builds(
    M.EngineCoreRequest, st.text(), maybe(st.text()), ids, params, maybe(st.integers(0, 2**32)), floats,
    mm_hashes=maybe(st.lists(st.text(), max_size=2)),
    mm_placeholders=maybe(st.lists(st.builds(M.PlaceholderRange, st.integers(0, 99), st.integers(1, 99)), max_size=2)),
    cache_salt=maybe(st.text()), mm_evict=maybe(st.lists(st.text(), max_size=2)))


def round_trip(message):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


@quick
@given(requests)
def test_a_request_survives_a_round_trip(request): assert round_trip(request) == request


@quick
@given(st.lists(outputs, max_size=3), maybe(st.builds(M.SchedulerStats, st.integers(0, 9), kv_cache_usage=st.floats(0, 1))))
def test_outputs_survive_a_round_trip(outs, stats):
    message = M.EngineCoreOutputs(outs, stats)
    assert round_trip(message) == message


@quick
@given(st.lists(ids, max_size=3), maybe(logprobs))
def test_a_runners_output_survives_a_round_trip(sampled, lists):
    names = [f"r{i}" for i in range(len(sampled))]
    message = M.ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled, None, lists, {"r0": lists})
    assert round_trip(message) == message


def test_a_work_order_survives_a_round_trip():
    message = S.SchedulerOutput(
        [S.NewRequestData("a", [1, 2], None, [], [], [M.PlaceholderRange(0, 2)], SamplingParams(), [4], 0)],
        [S.CachedRequestData("b", True, [7], [5, 6], 0)],
        {"a": 2, "b": 2}, 4, {"b": [9]}, {"a": [0]}, 0, {"c"}, [("c", 1)])
    back = round_trip(message)
    back.scheduled_new_reqs[0].mm_positions = message.scheduled_new_reqs[0].mm_positions   # typed by its user
    assert back == message
    message.check_invariants()


def test_finish_reasons_print_as_openai_spells_them():
    assert [str(r) for r in M.FinishReason] == ["stop", "length", "abort"]
    assert f"{M.FinishReason.STOP}" == "stop" and M.FinishReason.ABORT == 2


def test_rows_of_one_request():
    lists = M.LogprobsLists([[1], [2], [3]], [[.1], [.2], [.3]], [1, 1, 2])
    assert lists.slice(1, 3) == M.LogprobsLists([[2], [3]], [[.2], [.3]], [1, 2])


def test_fields_travel_without_their_names():
    # One token of one request, the message that is sent most.
    assert len(msgspec.msgpack.encode(M.EngineCoreOutput("r", [1]))) == 11


def test_times_are_the_cores_own_clock():
    before = time.monotonic()
    assert before <= M.EngineCoreOutputs().timestamp <= time.monotonic()
    assert M.EngineCoreOutputs(timestamp=1.0).timestamp == 1.0
    assert M.EngineCoreEvent.new_event(M.EngineCoreEventType.QUEUED).timestamp >= before
    assert M.EngineCoreEvent.new_event(M.EngineCoreEventType.QUEUED, 2.0).timestamp == 2.0
    assert M.EngineCoreOutputs().outputs is not M.EngineCoreOutputs().outputs


@pytest.mark.parametrize("module", ["messages", "core.scheduler_output", "core.encoder_cache_manager"])
def test_importing_is_cheap(module):
    heavy = "torch", "numpy", "transformers", "tokenizers"
    code = (f"import sys, minengine.v1.{module}\n"
            f"print([m for m in {heavy} if m in sys.modules])")
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout.strip() == "[]"


# --- the work order's own check ---------------------------------------------

def order(**changes):
    cached = [S.CachedRequestData("b", False, [7], [], 3)]
    return S.SchedulerOutput(**{**dict(
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={"b": 1},
        total_num_scheduled_tokens=1, scheduled_spec_decode_tokens={}, scheduled_encoder_inputs={},
        num_common_prefix_blocks=0, finished_req_ids=set(), free_encoder_input_ids=[]), **changes})


@pytest.mark.parametrize("changes, message", [
    (dict(total_num_scheduled_tokens=2), "total 2, sum 1"),
    (dict(num_scheduled_tokens={"b": 0}, total_num_scheduled_tokens=0), "b is scheduled with 0"),
    (dict(num_scheduled_tokens={"c": 1}), "described"),
    (dict(scheduled_cached_reqs=order().scheduled_cached_reqs * 2), "twice"),
    (dict(scheduled_spec_decode_tokens={"b": [1]}), "1 drafts in 1 tokens"),
    (dict(scheduled_encoder_inputs={"z": [0]}), "unscheduled"),
    (dict(finished_req_ids={"b"}), "finished")])
def test_a_work_order_that_contradicts_itself_is_noticed(changes, message):
    order().check_invariants()
    with pytest.raises(AssertionError, match=message): order(**changes).check_invariants()


def test_an_id_may_be_finished_and_new_in_one_order():
    # Aborted and sent again under the same id: workers forget first.
    new = S.NewRequestData("b", [1], None, [], [], [], SamplingParams(), [4], 0)
    order(scheduled_new_reqs=[new], scheduled_cached_reqs=[], finished_req_ids={"b"}).check_invariants()
