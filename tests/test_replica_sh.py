"""replica.sh ends its engine, ends with it, and ends without a trainer. Its engine is a little program here."""

import itertools
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, wait_for


def run_replica(tmp_path: Path, program: str, **env: str) -> subprocess.Popen:
    """Start replica.sh with a bash program as its engine; the engine's pid is in tmp_path/pid."""
    engine = tmp_path / "engine"
    engine.write_text(f"#!/usr/bin/env bash\ncd {tmp_path}; echo $$ > pid.part; mv pid.part pid\n{program}\n")
    engine.chmod(0o755)
    env = {"MODEL": "none", "ENGINE": "stub", "PYTHON": str(engine), "HEARTBEATS": str(tmp_path / "attempts"), **env}
    command = ["bash", str(ROOT / "replica.sh")]
    return subprocess.Popen(command, env=os.environ | env, stderr=subprocess.PIPE, text=True)


def engine_pid(tmp_path: Path) -> int:
    return int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))


ENDS = [("stub", "exit 7", 7, "the engine ended by itself with code 7"),
        ("stub", "exit 0", 1, "the engine ended by itself with code 0"),  # as vLLM does when its engine died
        ("sglang", "exit 0", 2, "choose vllm or stub")]  # fmt: skip


@pytest.mark.parametrize(("engine", "program", "code", "message"), ENDS)
def test_engine_that_ends_by_itself_is_a_failure_and_an_unknown_one_is_refused(
    tmp_path, engine, program, code, message
):
    replica = run_replica(tmp_path, program, ENGINE=engine)
    assert replica.wait(30) == code
    assert message in replica.stderr.read()


STUBBORN = "trap '' TERM; while :; do sleep 0.2; done"  # it has to be killed


@pytest.mark.parametrize(
    ("number", "code", "program"),
    [(signal.SIGTERM, 143, "exec sleep 600"), (signal.SIGINT, 130, "exec sleep 600"), (signal.SIGTERM, 143, STUBBORN)],
)
def test_signal_to_the_script_ends_the_engine_and_all_that_it_started(tmp_path, number, code, program):
    replica = run_replica(tmp_path, program, GRACE_S="1")
    pid = engine_pid(tmp_path)
    started = psutil.Process(replica.pid).children()  # the engine, and the pause between two looks at the heartbeats
    replica.send_signal(number)
    assert replica.wait(60) == code
    assert not psutil.pid_exists(pid)
    assert not any(child.is_running() for child in started)


def test_changing_heartbeat_keeps_the_replica_and_an_old_one_does_not(tmp_path):
    heartbeat = tmp_path / "attempts" / "1796066416123.heartbeat"
    heartbeat.parent.mkdir()
    heartbeat.write_text("3 running")  # of an earlier trainer
    replica = run_replica(tmp_path, "exec sleep 600", IDLE_SHUTDOWN_MIN="0.02")  # about a second
    pid, until = engine_pid(tmp_path), time.monotonic() + 3
    for count in itertools.takewhile(lambda _: time.monotonic() < until, itertools.count()):
        heartbeat.write_text(f"{count} running")
        os.utime(heartbeat, (0, 0))  # its time says nothing, its content does
        assert replica.poll() is None
        time.sleep(0.1)
    while replica.poll() is None:
        os.utime(heartbeat)  # a new time with the old content is no sign of life
        time.sleep(0.05)
    assert replica.returncode == 0
    assert "no heartbeat of a trainer in" in replica.stderr.read()
    assert not psutil.pid_exists(pid)
