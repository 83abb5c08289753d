"Shared by V0's scheduler tests: build one, make requests, run a step without a model."
from itertools import count

from minengine.config import CacheConfig, SchedulerConfig
from minengine.outputs import Logprob
from minengine.sampling_params import SamplingParams
from minengine.v0.scheduler import Scheduler
from minengine.v0.scheduling_budget import SchedulingBudget, StepPlan
from minengine.v0.sequence import Sequence, SequenceGroup, SequenceStatus

SEQ_IDS = count()


def make_scheduler(budget=64, max_seqs=64, max_model_len=None, num_gpu=8, num_cpu=8, block_size=4,
                   chunked=False, caching=False, lora_config=None, callback=None, **config):
    if max_model_len is None: max_model_len = budget
    return Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=budget, max_num_seqs=max_seqs, max_model_len=max_model_len,
            enable_chunked_prefill=chunked, **config),
        CacheConfig(block_size=block_size, num_gpu_blocks=num_gpu, num_cpu_blocks=num_cpu,
                    enable_prefix_caching=caching),
        lora_config, callback)


def make_group(name, prompt, block_size=4, arrival=0.0, priority=0, lora=None, **params):
    "`prompt` is token ids or a length, then with tokens of its own."
    seq_id = next(SEQ_IDS)
    if isinstance(prompt, int): prompt = [1000 * seq_id + i for i in range(prompt)]
    seq = Sequence(seq_id, {"prompt_token_ids": prompt}, block_size, lora_request=lora)
    return SequenceGroup(str(name), [seq], arrival, SamplingParams(**params), lora, priority)


def add(scheduler, *groups):
    for group in groups: scheduler.add_seq_group(group)
    return groups[0] if len(groups) == 1 else groups


def append(seq, token=1): seq.append_token_id(token, {token: Logprob(0.0)})


def schedule(scheduler):
    "One `schedule()`: what the worker is told, and what was decided."
    metadata, outputs, _ = scheduler.schedule()
    check_step(scheduler, metadata, outputs)
    return metadata, outputs


def check_step(scheduler, metadata, outputs):
    config, n = scheduler.scheduler_config, outputs.num_prefill_groups
    assert [m.is_prompt for m in metadata] == [True] * n + [False] * (len(metadata) - n), "prefills first"
    assert sum(len(m.seq_data) for m in metadata) <= config.max_num_seqs
    assert outputs.running_queue_size == len(scheduler.running)


def finish_step(scheduler, metadata, outputs):
    "Pretend that the model ran: a token for each sequence that samples."
    for told, scheduled in zip(metadata, outputs.scheduled_seq_groups):
        group = scheduled.seq_group
        group.update_num_computed_tokens(scheduled.token_chunk_size)
        if not told.do_sample: continue
        for seq in group.get_seqs(SequenceStatus.RUNNING):
            append(seq)
            if seq.get_output_len() == group.sampling_params.max_tokens:
                seq.status = SequenceStatus.FINISHED_LENGTH_CAPPED
    scheduler.free_finished_seq_groups()
    scheduler.check_invariants()


def step(scheduler):
    metadata, outputs = schedule(scheduler)
    finish_step(scheduler, metadata, outputs)
    return metadata, outputs


def fork(scheduler, group):
    "A second sequence from the first, as after a prompt with n = 2."
    parent = group.first_seq
    group.add(child := parent.fork(next(SEQ_IDS)))
    scheduler.fork_seq(parent, child)
    return child


def chunks(outputs): return [(s.seq_group.request_id, s.token_chunk_size) for s in outputs.scheduled_seq_groups]


def names(groups): return [g.request_id for g in groups]


def make_plan(tokens=10_000, seqs=10_000, **rules): return StepPlan(SchedulingBudget(tokens, seqs), **rules)


def tables(metadata): return {m.request_id: list(next(iter(m.block_tables.values()))) for m in metadata}
