"""Part 1b: two workers in processes of their own, on one card, say what one says.

Two ranks on one card are no way to be fast, only to see that the processes, the ring and the parts of a model
work together where a GPU is. Their sums travel by gloo, through the host. NCCL usually refuses two ranks on one
device, and then it is skipped, openly.
"""
import shutil
import tempfile

from common import Settings, emit, recorded

from minengine.v1.multiproc_executor import MultiprocExecutor
from minengine.v1.worker.worker import Worker


class OneCard(Worker):
    "Every rank on device 0."
    def __init__(self, vllm_config, rank, local_rank, distributed_init_method):
        super().__init__(vllm_config, rank, 0, distributed_init_method)


class OverGloo(OneCard):
    def backend(self): return "gloo"


class OneCardExecutor(MultiprocExecutor): worker_class = OneCard


class GlooExecutor(MultiprocExecutor): worker_class = OverGloo


def make_model(seed: int) -> str:
    "A folder with real weights: each rank must read its part of the same ones."
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    folder = tempfile.mkdtemp(prefix="minengine-check-")
    LlamaForCausalLM(LlamaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.2)).save_pretrained(folder)
    return folder


def generate(folder: str, settings: Settings, size: int, executor=None):
    "Greedy tokens and their log-probabilities."
    from minengine.llm import LLM
    from minengine.sampling_params import SamplingParams
    llm = LLM(folder, device=settings.device, dtype="float32", skip_tokenizer_init=True, enforce_eager=True,
              use_tqdm_on_load=False, num_gpu_blocks_override=64, max_num_batched_tokens=32, max_num_seqs=8,
              gpu_memory_utilization=0.2, tensor_parallel_size=size, distributed_executor_backend=executor)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 264 for j in range(n)]} for i, n in enumerate((1, 5, 40, 17))]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, detokenize=False)
    try: outputs = llm.generate(prompts, params, use_tqdm=False)
    finally: llm.shutdown()
    answers = [o.outputs[0] for o in outputs]
    return [a.token_ids for a in answers], [
        row[token].logprob for a in answers for token, row in zip(a.token_ids, a.logprobs)]


def check(what: str, got, wanted):
    tokens, logprobs = got
    worst = max(abs(a - b) for a, b in zip(logprobs, wanted[1]))
    emit(what=what, ok=tokens == wanted[0] and worst < 1e-3, worst_logprob=worst,
         num_tokens=sum(map(len, tokens)))


def run(settings: Settings, share: int, of: int):
    folder = make_model(settings.seed % 2**31)
    try:
        with recorded("one rank"): wanted = generate(folder, settings, 1)
        with recorded("two ranks over gloo"):
            check("two ranks over gloo", generate(folder, settings, 2, GlooExecutor), wanted)
        if settings.dry: return
        try: got = generate(folder, settings, 2, OneCardExecutor)
        except Exception as error:   # "Duplicate GPU detected", and the like
            emit(what="two ranks over NCCL", skipped=f"{type(error).__name__}: {error}"[:600])
        else: check("two ranks over NCCL", got, wanted)
    finally: shutil.rmtree(folder)
