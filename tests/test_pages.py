"Every page runs top to bottom in a fresh process, each as a test of its own."
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "nbs").glob("*.ipynb"))
LIMIT_S = 240  # pages take seconds; this only ends one that hangs

@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_page_runs(page):
    command = [Path(sys.executable).parent / "nbdev_test", "--path", page, "--n_workers", "0",
               "--do_print", "--pause", "0"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, env=env)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    assert "Success" in output, f"nothing ran:\n{output[-2000:]}"
