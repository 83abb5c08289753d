"""A model with weights, `minengine serve` around it in processes of its own, and what can be seen of it from outside.

Shared by the tests of the server under load and with OpenAI's client; no test by itself.
"""
import functools
import json
import time
import urllib.request
from pathlib import Path

import torch
from front_tiny import ARGS, CONFIG
from server_tiny import ServerProcess
from transformers import LlamaConfig, LlamaForCausalLM

KINDS = ["v0", "v1"]
DEFAULTS = {"repetition_penalty": 1.2, "top_k": 50}   # what the model's makers recommend
KEY = "secret"
# For `LLM`: what `start` and `start_smollm2` say by their words.
LLM_ARGS = {**ARGS, "load_format": "auto"}
SMOLLM2_ARGS = dict(num_gpu_blocks_override=2048, max_model_len=1024, max_num_seqs=8, use_tqdm_on_load=False)


def make_model(folder: Path, **fields) -> str:
    "A folder with weights so large that each token depends on all before it."
    fields = {k: v for k, v in (CONFIG | fields).items() if k != "architectures"}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(initializer_range=0.3, **fields)).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS | {"eos_token_id": 257}))
    return str(folder)


@functools.cache
def smollm2() -> str:
    "Folder of the default model."
    from minengine.model.checkpoint import resolve_model
    return str(resolve_model(None).path)


def start(folder: str, kind: str, *words: str, **options) -> ServerProcess:
    "A server with weights; words that come later win."
    return ServerProcess(folder, "--load-format", "auto", "--engine", kind, *words, **options)


# Few kernels are kept: a process is as large as it gets after a few requests.
FEW_KERNELS = {"LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}


def start_smollm2(kind: str, *words: str, **env: str) -> ServerProcess:
    "The same with the default model and its tokenizer."
    return start(smollm2(), kind, "--tokenizer", smollm2(), "--num-gpu-blocks-override", "2048",
                 "--max-model-len", "1024", *words, limit_s=300, **env)


def call(url: str, path: str, data=None, limit_s=20, key=KEY, raw=False):
    "GET, or POST of JSON: what comes back, read as JSON or text; `raw`: as text."
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(url + path, body, {
        "Content-Type": "application/json", "Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=limit_s) as response: text = response.read().decode()
    return json.loads(text) if response.headers.get_content_type() == "application/json" and not raw else text


def metrics(url: str) -> dict[str, float]:
    "Values by name; of a metric with several labels, their sum."
    found: dict[str, float] = {}
    for line in call(url, "/metrics").splitlines():
        if line.startswith("#"): continue
        name, value = line.split("{")[0].removeprefix("vllm:"), float(line.split()[-1])
        found[name] = found.get(name, 0) + value
    return found


def wait_until(condition, limit_s=20.0):
    "What `condition()` says once it is true; fails if that takes too long."
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.02)
    return found


def wait_idle(url: str, limit_s=20.0):
    "Until nothing runs, nothing waits and no block is in use, by the server's own account."
    names = "num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc"
    wait_until(lambda: not any(metrics(url)[name] for name in names), limit_s)


def core_pid(server: ServerProcess) -> int:
    "The process of V1's core, or of the whole engine with V0."
    cores = [pid for pid in server.children() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(cores) <= 1, cores
    return cores[0] if cores else server.process.pid


def rss_bytes(pid: int) -> int:
    "Memory of a process that is its own: without files that it has mapped."
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"): return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory")


def is_alive(pid: int) -> bool:
    try: return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError: return False
