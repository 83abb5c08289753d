"What the parts of the GPU check share: rows, clocks, engines, shapes."
import contextlib
import gc
import json
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MARK = "ROW "   # before each row on the standard output of a part


@dataclass
class Settings:
    "How a part runs."
    dry: bool            # on a CPU, tiny
    budget_s: float      # the part may take so long
    seed: int = 0        # of everything random
    started: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> str: return "cpu" if self.dry else "cuda"

    @property
    def left_s(self) -> float: return self.started + self.budget_s - time.monotonic()


def emit(**row):
    "One row of the report; those with `ok` decide about the exit code."
    print(MARK + json.dumps(row), flush=True)


@contextlib.contextmanager
def recorded(what: str, decides: bool = True, **more):
    "A failure inside becomes a row; what comes after it still runs."
    try: yield
    except Exception as error:
        row = dict(what=what, problem=f"{type(error).__name__}: {error}"[:600], **more)
        emit(**row, **({"ok": False} if decides else {}))
        traceback.print_exc()
    gc.collect()   # what the failed call held


def synchronize(device: str):
    import torch
    if device == "cuda": torch.cuda.synchronize()


def write_config(fields: dict) -> str:
    "A folder with a config.json: enough for random weights."
    folder = Path(tempfile.mkdtemp(prefix="minengine-check-"))
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def load_config(name: str, dry: bool) -> dict:
    "A real model's shape; when dry, a small one of the same family."
    fields = json.loads((ROOT / "tests" / "configs" / f"{name}.json").read_text())
    if dry: fields |= dict(bos_token_id=1, eos_token_id=2, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                           num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=264)
    return fields


MODES = {   # what an engine does with its model
    "v1 graphs": dict(engine="v1", compilation_config=dict(level=3, use_cudagraph=True)),
    "v1 compiled": dict(engine="v1", compilation_config=dict(level=3, use_cudagraph=False)),
    "v1 eager": dict(engine="v1", enforce_eager=True),
    "v0 graphs": dict(engine="v0", compilation_config=dict(use_cudagraph=True)),
    "v0 eager": dict(engine="v0", enforce_eager=True),
}


@contextlib.contextmanager
def engine(folder: str, mode: str, settings: Settings, sizes: list[int] | None = None, **args):
    "An `LLM` in one of the modes, with random weights; gone afterwards."
    import torch
    from minengine.llm import LLM
    options = {k: dict(v) if isinstance(v, dict) else v for k, v in MODES[mode].items()}
    if sizes and options.get("compilation_config", {}).get("use_cudagraph"):
        options["compilation_config"]["cudagraph_capture_sizes"] = sizes
    if settings.dry: options |= dict(attention_backend="triton", pack_cpu_weights=False)
    llm = LLM(folder, device=settings.device, load_format="dummy", tokenizer="byte", use_tqdm_on_load=False,
              generation_config="vllm", seed=settings.seed, **options | args)
    try: yield llm
    finally:
        llm.shutdown()
        del llm
        torch._dynamo.reset()   # it holds what it captured
        gc.collect()
        if not settings.dry: torch.cuda.empty_cache()


def worker_of(llm):
    "The object that holds the model: V1's worker, or V0's."
    own = llm.llm_engine
    if llm.engine_name == "v0": return own.executor.driver_worker
    return own.engine_core.engine_core.executor.worker


def model_of(llm): return worker_of(llm).model


def dispatcher_of(llm):
    "Counts replayed and eager steps; None without graphs."
    worker = worker_of(llm)
    found = worker.run_model if llm.engine_name == "v1" else worker.model_runner.decode_graphs
    return getattr(found, "dispatcher", None)


def random_prompts(rng, lens: list[int], vocab_size: int) -> list[list[int]]:
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in lens]


def log(*words): print(*words, file=sys.stderr, flush=True)
