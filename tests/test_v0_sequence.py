"""V0's sequences and groups: every row of the reference's own checks."""
import pytest

from minengine.outputs import Logprob
from minengine.sampling_params import SamplingParams
from minengine.v0.sequence import (
    CompletionSequenceGroupOutput, ExecuteModelRequest, Sequence, SequenceData, SequenceGroup,
    SequenceGroupMetadata, SequenceOutput, SequenceStage, SequenceStatus)


def sequence(seq_id=0, prompt=(1, 2, 3, 4), block_size=4, **kwargs):
    return Sequence(seq_id, {"prompt": None, "prompt_token_ids": list(prompt)}, block_size, **kwargs)


def group(num_seqs=1, prompt=(1, 2, 3, 4), **params):
    return SequenceGroup("r", [sequence(i, prompt) for i in range(num_seqs)], 0.0, SamplingParams(**params))


def sample(seq, token, logprob=-1.0):
    seq.append_token_id(token, {token: Logprob(logprob)})


def test_status_numbers_and_reasons():
    assert [(s.name, int(s)) for s in SequenceStatus] == [
        ("WAITING", 0), ("RUNNING", 1), ("SWAPPED", 2), ("FINISHED_STOPPED", 3),
        ("FINISHED_LENGTH_CAPPED", 4), ("FINISHED_ABORTED", 5), ("FINISHED_IGNORED", 6)]
    assert [SequenceStatus.is_finished(s) for s in SequenceStatus] == [False] * 3 + [True] * 4
    assert [SequenceStatus.get_finished_reason(s) for s in SequenceStatus] == [
        None, None, None, "stop", "length", "abort", "length"]


@pytest.mark.parametrize("prompt_len, chunk", [(1, 1), (6, 5), (17, 16), (40, 1)])
def test_stages(prompt_len, chunk):
    "[T] prefill, in pieces, decode, and prefill again after a preemption."
    g = group(prompt=range(prompt_len))
    seq = g.first_seq
    assert g.is_prefill() and g.get_num_uncomputed_tokens() == prompt_len
    if chunk < prompt_len:
        g.update_num_computed_tokens(chunk)
        assert g.is_prefill() and g.get_num_uncomputed_tokens() == prompt_len - chunk
        assert seq.get_num_new_tokens() == prompt_len - chunk
    g.update_num_computed_tokens(g.get_num_uncomputed_tokens())
    assert not g.is_prefill() and g.get_num_uncomputed_tokens() == 0
    sample(seq, 7)
    assert not g.is_prefill() and g.get_num_uncomputed_tokens() == 1 == seq.get_num_new_tokens()
    seq.reset_state_for_recompute()
    assert g.is_prefill() and g.get_num_uncomputed_tokens() == prompt_len + 1 == seq.get_num_new_tokens()
    assert seq.get_output_token_ids() == [7] and seq.output_logprobs  # outputs stay


def test_computed_never_passes_the_length():
    data = SequenceData([1, 2, 3])
    with pytest.raises(ValueError, match="4 tokens computed of 3"): data.update_num_computed_tokens(4)
    assert data.get_num_computed_tokens() == 0 and data.stage is SequenceStage.PREFILL


def test_sequence_data():
    with pytest.raises(ValueError, match="0 prompt tokens"): SequenceData([])
    data = SequenceData([5, 6])
    assert data.get_last_token_id() == 6                     # no output yet: the prompt's last
    data.append_token_id(9, -0.5)
    data.append_token_id(8, -0.25)
    assert data.get_last_token_id() == 8 and data.get_token_ids() == [5, 6, 9, 8]
    assert (data.get_len(), data.get_prompt_len(), data.get_output_len()) == (4, 2, 2)
    assert data.cumulative_logprob == -0.75
    copy = data.copy()
    copy.append_token_id(1, 0)
    assert data.get_len() == 4 and data.prompt_token_ids == [5, 6]


def test_token_without_logprob_is_refused():
    seq = sequence()
    with pytest.raises(ValueError, match=r"no logprob for token 3, only for \[4, 5\]"):
        seq.append_token_id(3, {5: Logprob(0.0), 4: Logprob(0.0)})
    assert seq.get_output_len() == 0 and seq.output_logprobs == []


def test_blocks_and_adapter():
    assert [sequence(prompt=range(n)).n_blocks for n in (1, 4, 5)] == [1, 1, 2]
    adapter = type("Adapter", (), {"lora_int_id": 3})()
    assert sequence().extra_hash() is None and sequence().lora_int_id == 0
    assert sequence(lora_request=adapter).extra_hash() == ("lora", 3)


def test_fork_is_a_copy_with_another_id():
    parent = sequence()
    sample(parent, 7)
    parent.output_text, parent.detokenizer = "x", object()
    child = parent.fork(1)
    sample(child, 8)
    assert (child.seq_id, child.output_text, child.detokenizer) == (1, "x", None)
    assert parent.get_output_token_ids() == [7] and child.get_output_token_ids() == [7, 8]
    assert len(parent.output_logprobs) == 1 and len(child.output_logprobs) == 2


def test_delta_and_cumulative_text():
    "V0 holds back what may be the start of a stop string, until the end."
    seq = sequence()
    seq.output_text = "hello"
    assert seq.get_output_text_to_return(0, delta=False) == "hello"
    assert seq.get_output_text_to_return(2, delta=False) == "hel"
    assert seq.get_output_text_to_return(2, delta=True) == "hel"
    assert seq.get_output_text_to_return(2, delta=True) == ""
    seq.output_text = "hello wo"
    assert seq.get_output_text_to_return(2, delta=True) == "lo "
    seq.output_text, seq.status = "hello", SequenceStatus.FINISHED_STOPPED   # cut by a stop string
    assert seq.get_output_text_to_return(2, delta=True) == ""                # never takes back
    sample(seq, 7), sample(seq, 8)
    assert seq.get_output_token_ids_to_return(delta=False) == [7, 8]
    assert seq.get_output_token_ids_to_return(delta=True) == [7, 8]
    sample(seq, 9)
    assert seq.get_output_token_ids_to_return(delta=True) == [9]
    assert seq.get_output_token_ids_to_return(delta=True) == []


def test_group_of_one():
    g = group()
    assert g.is_single_seq and g.get_max_num_running_seqs() == 1
    assert g.get_seqs(SequenceStatus.RUNNING) == [] and g.get_seqs(SequenceStatus.WAITING) == [g.first_seq]
    g.first_seq.status = SequenceStatus.FINISHED_STOPPED
    assert g.is_finished() and g.get_max_num_running_seqs() == 0


def test_group_seats_its_children_before_they_are_there():
    g = group(n=3, temperature=1.0)
    assert g.get_max_num_running_seqs() == 3 and g.num_seqs() == 1
    for i in (1, 2): g.add(g.first_seq.fork(i))
    assert g.get_max_num_running_seqs() == 3 and not g.is_single_seq
    with pytest.raises(ValueError, match="sequence 2 is here already"): g.add(g.first_seq.fork(2))
    g.seqs[1].status = SequenceStatus.FINISHED_STOPPED
    assert g.get_max_num_running_seqs() == 2 == g.num_unfinished_seqs() and not g.is_finished()
    assert g.get_finished_seqs() == [g.seqs[1]] and g.num_finished_seqs() == 1
    assert group(n=2, best_of=5, temperature=1.0).get_max_num_running_seqs() == 5


def test_only_unfinished_sequences_are_counted():
    g = group(2)
    for seq in g.seqs: seq.data.update_num_computed_tokens(4)
    g.seqs[0].status = SequenceStatus.FINISHED_STOPPED
    sample(g.seqs[1], 7)
    g.update_num_computed_tokens(1)
    assert [s.get_num_computed_tokens() for s in g.seqs] == [4, 5]
    assert g.get_num_uncomputed_tokens() == 0


def test_burst():
    g = group()
    g.init_multi_step_from_lookahead_slots(0, 8, is_multi_step=True, enable_chunking=False)
    assert g.state.num_steps == 1                                   # a prompt alone
    with pytest.raises(ValueError, match="3 lookahead slots for 1 steps, 0 are needed"):
        g.init_multi_step_from_lookahead_slots(3, 8, True, False)
    g.init_multi_step_from_lookahead_slots(8, 8, True, enable_chunking=True)
    assert g.state.num_steps == 8                                   # a prompt that decodes on
    g.update_num_computed_tokens(4)
    g.init_multi_step_from_lookahead_slots(7, 8, True, False)
    assert g.state.num_steps == 8 == g.state.remaining_steps
    g.init_multi_step_from_lookahead_slots(2, 1, is_multi_step=False, enable_chunking=False)
    assert g.state.num_steps == 3
    told = SequenceGroupMetadata("r", False, {0: g.first_seq.data}, g.sampling_params, {0: [0]}, state=g.state)
    order = ExecuteModelRequest([told])
    assert order.is_first_multi_step and not order.is_last_step
    for _ in range(2): told.finish_step()
    assert order.current_step == 2 and order.is_last_step and g.state.remaining_steps == 1
    told.finish_step()
    with pytest.raises(ValueError, match="all 3 steps are done"): told.finish_step()


def test_metadata_holds_live_data_and_fills_in_the_chunk():
    seq = sequence()
    told = SequenceGroupMetadata("r", True, {0: seq.data}, SamplingParams(), {0: [0]})
    assert told.token_chunk_size == 4 and told.get_first_seq_id() == 0 and told.is_single_step_prompt
    sample(seq, 7)
    assert told.seq_data[0].get_len() == 5
    assert SequenceGroupMetadata("r", False, {0: seq.data}, SamplingParams(), {0: [0]}).token_chunk_size == 1


def test_work_order_clone_shares_all_but_the_groups():
    order = ExecuteModelRequest([], blocks_to_copy=[(1, 2)], num_lookahead_slots=3)
    other = order.clone([None])
    assert other.blocks_to_copy is order.blocks_to_copy and other.num_lookahead_slots == 3
    assert order.seq_group_metadata_list == [] and other.seq_group_metadata_list == [None]


def test_group_output():
    out = CompletionSequenceGroupOutput([SequenceOutput(0, 7, {7: Logprob(-1.0)})])
    assert out.samples[0].output_token == 7 and out.prompt_logprobs is None
