__version__ = "0.1.0"

# `from minengine import LLM, SamplingParams`, as a script for vLLM does it.
# Each is imported when asked for: PyTorch comes with LLM and takes seconds.
_HOMES = {
    "LLM": "llm", "SamplingParams": "sampling_params", "EngineArgs": "config",
    "RequestOutput": "outputs", "CompletionOutput": "outputs",
}


def __getattr__(name: str):
    if name not in _HOMES: raise AttributeError(f"minengine has no {name!r}")
    from importlib import import_module
    return getattr(import_module(f"minengine.{_HOMES[name]}"), name)
