"""An executor that writes down what its thread does: the thread of the core's loop.

Shared by the tests of the overlap; no test by itself.
"""
import json
import sys
import time
from collections import Counter
from pathlib import Path

from minengine.v1.executor import UniProcExecutor


class TracedExecutor(UniProcExecutor):
    "Counts calls by module from the first step on; `shutdown` writes them to `download_dir`."

    def __init__(self, vllm_config):
        super().__init__(vllm_config)
        self.calls, self.steps = Counter(), []

    def _see(self, frame, event, arg):
        if event == "call": self.calls[str(frame.f_globals.get("__name__"))] += 1
        elif event == "c_call":
            owner = getattr(arg, "__module__", None) or type(getattr(arg, "__self__", None)).__module__
            self.calls[str(owner)] += 1

    def execute_model(self, order):
        if not self.steps: sys.setprofile(self._see)   # of this thread alone
        start = time.monotonic()
        output = super().execute_model(order)
        self.steps.append((start, time.monotonic()))
        return output

    def shutdown(self):
        sys.setprofile(None)
        if self.steps:
            path = Path(self.vllm_config.load_config.download_dir) / "trace.json"
            path.write_text(json.dumps({"calls": self.calls, "steps": self.steps}))
            self.steps = []
        super().shutdown()
