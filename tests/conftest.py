"Options and settings that every test shares."
import os
import signal

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
