"Options and settings that every test shares."
import contextlib
import os
import signal

import pytest

# One thread for each test process: they run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

# A shell that starts tests in the background ignores Ctrl-C for them, and
# some tests press it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--traces", default=None, metavar="DIR",
                     help="replay the scheduler traces of this folder (tests/test_fidelity.py)")


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory):
    "A function that gives the one server process of an engine with a tiny model: it has `url` and `folder`."
    with contextlib.ExitStack() as stack:
        servers = {}
        def get(kind):
            if kind not in servers:
                import served   # imports torch
                folder = served.make_model(tmp_path_factory.mktemp(kind) / "tiny")
                servers[kind] = stack.enter_context(served.start(
                    folder, kind, "--api-key", served.KEY, **served.FEW_KERNELS))
                servers[kind].folder = folder
            return servers[kind]
        yield get
