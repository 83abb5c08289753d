"""Workers in processes that are started once and lent to one engine after the other.

Shared by the tests of tensor parallel engines; no test by itself.
"""
from minengine.llm import LLM
from minengine.sampling_params import SamplingParams
from minengine.v1.executor import Executor
from minengine.v1.multiproc_executor import MultiprocExecutor


def adopt(worker, vllm_config):
    "In the worker's process: be the worker of another engine."
    worker.vllm_config = vllm_config
    worker.load_model()


def lender_class(lender: MultiprocExecutor) -> type[Executor]:
    "An executor whose workers are `lender`'s, with another model."

    class Borrowed(Executor):
        def _start_workers(self):
            self.vllm_config.parallel_config.distributed_executor_backend = None   # this class cannot travel
            lender.collective_rpc(adopt, args=(self.vllm_config,))

        def collective_rpc(self, *args, **kwargs): return lender.collective_rpc(*args, **kwargs)
        def execute_model(self, output): return lender.execute_model(output)
        def check_health(self): lender.check_health()
        def shutdown(self): pass

    return Borrowed


def answers(folder: str, prompts, params: list[SamplingParams], executor=None, **args):
    "What an engine says to all prompts at once, and how often it has preempted one."
    llm = LLM(folder, skip_tokenizer_init=True, use_tqdm_on_load=False, dtype="float32",
              distributed_executor_backend=executor, **args)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    scheduler.check_invariants()
    pool = scheduler.kv_cache_manager
    assert pool.num_free_blocks == pool.num_gpu_blocks, "blocks leaked"
    preempted = scheduler.num_preempted
    llm.shutdown()
    return outputs, preempted
