"""What several test files need: a free port, the toy model, and threads that leave the other processes room."""

import contextlib
import os
import random
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded: the tests run many processes
os.environ.setdefault("OMP_NUM_THREADS", "1")

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent


PARTS = {"test_interrupted_runs.py": 4, "test_launch_hub.py": 4, "test_proxy.py": 2}  # files that mostly wait


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file share its servers, so they run in one process; long files are cut into parts."""
    for number, item in enumerate(items):
        part = number % PARTS.get(item.path.name, 1)
        item.add_marker(pytest.mark.xdist_group(f"{item.path.name}-{part}"))


def free_port() -> int:
    """A port that nobody listens on, nor will before it is used: none of those that the system gives to connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(condition, timeout_s: float = 60, tell=lambda: ""):
    """What `condition()` returns once that is true; fails after timeout_s with what `tell()` says."""
    until = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < until:
        time.sleep(0.02)
    assert value, f"not within {timeout_s:g} s: {tell()}"
    return value


def is_near(row: dict) -> bool:
    """Whether the rollouts of a step are of a policy a few steps old at most: few of their tokens are clipped.

    One token that was unlikely and is likely now can move the mean ratio far from 1.
    """
    return row["clip_ratio/low"] + row["clip_ratio/high"] < 0.25


@pytest.fixture(scope="session")
def toy_dir() -> Path:
    """The toy model's directory; built once, on all cores, and kept in the cache."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    code = "from offline import toy; print(toy.cached_model())"
    built = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(built.stdout.strip())
