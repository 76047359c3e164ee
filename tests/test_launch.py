"""launch.py and local_jobs.py: what is refused, what is submitted, and that nothing is left running."""

import dataclasses
import email.utils
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx2
import psutil
import pytest
from conftest import wait_for

import hub_jobs
import launch
import trainer_job
from config import LOCAL, Config, config_from, make_parser
from local_jobs import LocalJobs

ROOT = Path(__file__).resolve().parent.parent
CFG = dataclasses.replace(Config(), run="r1", max_staleness=4)
LOCAL_CFG = dataclasses.replace(Config(**LOCAL), run="r1")


def run_launch(*flags: str, timeout_s: float = 60, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "launch.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **env})


# --- local Jobs ---


@pytest.fixture
def jobs(tmp_path):
    jobs = LocalJobs(str(tmp_path), "r1")
    yield jobs
    for job in jobs.list_jobs(labels={}):
        jobs.cancel_job(job_id=job.id, grace_s=1)


def run_bash(jobs: LocalJobs, script: str, **changes):
    spec = {"command": ["bash", "-c", script], "env": {}, "labels": {"run": "r1", "role": "replica"}, "secrets": {}}
    return jobs.run_job(**{**spec, **changes})


def stage(jobs: LocalJobs, job) -> str:
    return jobs.inspect_job(job_id=job.id).status.stage


def test_a_local_job_ends_in_the_stage_that_its_exit_code_says(jobs):
    good, bad = run_bash(jobs, "exit 0"), run_bash(jobs, "exit 3")
    wait_for(lambda: stage(jobs, good) == "COMPLETED")
    wait_for(lambda: stage(jobs, bad) == "ERROR")
    assert jobs.inspect_job(job_id=bad.id).status.message == "exit code 3"


def test_another_process_sees_the_same_stage(jobs, tmp_path):
    job = run_bash(jobs, "exit 3")
    wait_for(lambda: stage(jobs, job) == "ERROR")
    assert LocalJobs(str(tmp_path), "r1").inspect_job(job_id=job.id).status.message == "exit code 3"


def test_cancelling_a_local_job_ends_all_of_its_processes(jobs):
    job = run_bash(jobs, "trap '' TERM; sleep 300 & sleep 300 & wait")
    document = json.loads((jobs.directory / f"{job.id}.json").read_text())
    wait_for(lambda: len(jobs._processes(document)) >= 3)
    pids = [process.pid for process in jobs._processes(document)]
    jobs.cancel_job(job_id=job.id, grace_s=0.2)
    assert stage(jobs, job) == "CANCELED"
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


def test_a_job_killed_from_outside_is_in_error(jobs):
    job = run_bash(jobs, "sleep 300")
    document = json.loads((jobs.directory / f"{job.id}.json").read_text())
    assert stage(jobs, job) == "RUNNING"
    os.killpg(document["pid"], signal.SIGKILL)
    wait_for(lambda: stage(jobs, job) == "ERROR")


def test_an_exposed_port_becomes_a_free_one_of_this_machine(jobs):
    job = run_bash(jobs, 'echo "port $PORT"', expose=[8000], env={"PORT": "8000"})
    wait_for(lambda: stage(jobs, job) == "COMPLETED")
    (line,) = jobs.fetch_job_logs(job_id=job.id)
    assert job.status.expose_urls == [f"http://127.0.0.1:{line.split()[1]}"]
    assert not line.endswith(" 8000")


def test_a_followed_log_is_complete_and_ends_with_the_job(jobs):
    job = run_bash(jobs, "for i in $(seq 50); do echo line $i; done; sleep 0.3; printf last")
    lines = list(jobs.fetch_job_logs(job_id=job.id, follow=True))
    assert lines == [*(f"line {i}" for i in range(1, 51)), "last"]


def test_jobs_are_listed_by_label(jobs):
    job = run_bash(jobs, "exit 0", labels={"run": "r1", "role": "trainer"})
    run_bash(jobs, "exit 0")
    assert [j.id for j in jobs.list_jobs(labels={"role": "trainer"})] == [job.id]
    assert len(jobs.list_jobs(labels={"run": "r1"})) == 2
    assert jobs.list_jobs(labels={"run": "other"}) == []


# --- what is submitted ---


def test_every_job_has_a_timeout_and_replicas_outlive_the_trainer():
    # D09: the platform's default is 30 minutes
    replica = launch.replica_job(CFG, launch.HF_PLACE, "1", 0)
    trainer = launch.trainer_job(CFG, launch.HF_PLACE, "1", [])
    assert trainer["timeout"] == 8 * 3600
    assert replica["timeout"] > trainer["timeout"]


def test_a_replica_gets_the_slots_and_the_rank_it_needs():
    # A08, A21
    env = launch.replica_job(dataclasses.replace(CFG, lora_rank=12), launch.HF_PLACE, "1", 1)["env"]
    assert env["MAX_LORA_RANK"] == "16"
    assert env["MAX_LORAS"] == "6"
    assert env["HEARTBEATS"] == "/lora/r1/attempts"


@pytest.mark.parametrize("num_processes", [1, 2, 8])
def test_the_trainer_gets_its_flags_alone_or_under_torchrun(num_processes):
    from torch.distributed.run import get_args_parser

    command = trainer_job.trainer_command(CFG, num_processes)[1:]
    if num_processes > 1:
        assert command[:2] == ["-m", "torch.distributed.run"]
        torchrun = get_args_parser().parse_args(command[2:])
        assert torchrun.nproc_per_node == str(num_processes)
        command = [torchrun.training_script, *torchrun.training_script_args]
    assert command[0] == str(ROOT / "trainer.py")
    assert config_from(make_parser("").parse_args(command[1:])) == CFG


def test_the_trainer_job_gets_the_flags_that_make_the_same_configuration():
    command = launch.trainer_job(CFG, launch.LOCAL_PLACE, "1", [])["command"]
    again = config_from(make_parser("").parse_args(command[2:]))
    assert again == dataclasses.replace(CFG, bucket=launch.LOCAL_PLACE.bucket)


def test_a_tracked_trainer_job_installs_the_tracker_that_the_tests_use():
    spec = launch.trainer_job(dataclasses.replace(CFG, track="trackio", track_space="s"), launch.HF_PLACE, "1", [])
    (pin,) = [line for line in (ROOT / "requirements-dev.txt").read_text().splitlines() if "trackio" in line]
    assert f"requirements.txt {pin} && " in spec["command"][2]
    assert "trackio" not in launch.trainer_job(CFG, launch.HF_PLACE, "1", [])["command"][2]


def test_tracking_whose_records_would_vanish_with_the_job_is_refused(capsys):
    with pytest.raises(SystemExit):
        launch.check_tracking(dataclasses.replace(CFG, track="trackio"), local=False)
    assert "--track-space" in capsys.readouterr().err


def test_the_token_is_only_ever_a_secret():
    # D15
    fleet = launch.Fleet(None, CFG, launch.HF_PLACE, {"HF_TOKEN": "hf_SECRET"})
    specs = [launch.replica_job(CFG, fleet.place, "1", 0), launch.trainer_job(CFG, fleet.place, "1", [])]
    assert "hf_SECRET" not in json.dumps(specs)
    assert "hf_SECRET" not in repr(fleet)


def test_the_plan_names_the_cost_per_hour():
    text = launch.plan(CFG, launch.HF_PLACE, {"h200x2": 10.0, "h200": 5.0})
    assert "$20.00 per hour" in text
    assert "$160.00 at most" in text


class Flaky:
    """Local Jobs whose next submissions fail, before or after the Job was created."""

    def __init__(self, jobs: LocalJobs, failures: list[str]):
        self.jobs, self.failures = jobs, failures

    def run_job(self, **spec):
        failure = self.failures.pop(0) if self.failures else ""
        job = None if failure == "before" else self.jobs.run_job(**spec)
        if failure:
            raise ConnectionError(f"broken {failure} creating")
        return job

    def __getattr__(self, name):
        return getattr(self.jobs, name)


@pytest.mark.parametrize("failures", [[], ["after"], ["before"], ["before", "after"]])
def test_a_failed_submission_never_makes_two_jobs(jobs, failures, monkeypatch):
    monkeypatch.setattr(hub_jobs, "retry_after_s", lambda error, tried: 0.0)
    fleet = launch.Fleet(Flaky(jobs, list(failures)), LOCAL_CFG, launch.LOCAL_PLACE)
    spec = {"command": ["bash", "-c", "sleep 60"], "env": {}, "labels": {"run": "r1", "role": "replica"}}
    job_id = fleet.submit(spec)
    assert [job.id for job in jobs.list_jobs(labels={"run": "r1"})] == [job_id]


def test_a_job_that_is_refused_is_an_error_that_says_why(jobs):
    class Refusing:
        def run_job(self, **_):
            raise OSError("no such flavor")

        def list_jobs(self, **_):
            return []

    fleet = launch.Fleet(Refusing(), LOCAL_CFG, dataclasses.replace(launch.LOCAL_PLACE, patience_s=0))
    with pytest.raises(launch.LaunchError, match="replica Job was not accepted: no such flavor"):
        fleet.submit({"labels": {"run": "r1", "role": "replica"}})


def test_a_replica_that_dies_at_the_start_is_shown_with_its_last_lines(jobs):
    job = run_bash(jobs, "echo out of memory; exit 1", expose=[8000])
    fleet = launch.Fleet(jobs, LOCAL_CFG, launch.LOCAL_PLACE, replicas={0: job.id})
    with pytest.raises(launch.LaunchError, match=r"replica 0 .* ended: exit code 1\n  \| out of memory"):
        fleet.wait_until_healthy()


def test_a_replica_that_never_answers_is_given_up(jobs):
    # D12
    cfg = dataclasses.replace(LOCAL_CFG, ready_wait_min=0.005)
    job = run_bash(jobs, "echo loading; sleep 300", expose=[8000])
    fleet = launch.Fleet(jobs, cfg, launch.LOCAL_PLACE, replicas={0: job.id})
    with pytest.raises(launch.LaunchError, match=r"replica 0 .* is not healthy after"):
        fleet.wait_until_healthy()


def test_a_lost_replica_is_replaced_and_announced_until_the_restarts_are_used(jobs, tmp_path, monkeypatch):
    spec = {
        "command": ["bash", "-c", "exit 1"],
        "env": {},
        "labels": {"run": "r1", "role": "replica"},
        "expose": [8000],
    }
    monkeypatch.setattr(launch, "replica_job", lambda *_: {**spec, "command": ["bash", "-c", "sleep 300"]})
    first = run_bash(jobs, "exit 1", expose=[8000])
    wait_for(lambda: stage(jobs, first) == "ERROR")
    cfg = dataclasses.replace(LOCAL_CFG, replica_restarts=1)
    fleet = launch.Fleet(jobs, cfg, launch.LOCAL_PLACE, replicas={0: first.id}, urls={0: "http://127.0.0.1:1"})
    fleet.look_after_replicas()
    fleet.look_after_replicas()
    second = fleet.replicas[0]
    announced = json.loads((tmp_path / "r1" / "replicas.json").read_text())
    replicas = [{"id": "0", "url": fleet.urls[0], "job": second}]
    assert announced == {"attempt": fleet.attempt, "replicas": replicas, "restarts": 1}
    assert second != first.id
    os.killpg(json.loads((jobs.directory / f"{second}.json").read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: jobs.inspect_job(job_id=second).status.stage == "ERROR")
    with pytest.raises(launch.LaunchError, match="--replica-restarts are used"):
        fleet.look_after_replicas()


def test_cancel_all_ends_every_job_of_the_run(jobs):
    for _ in range(3):
        run_bash(jobs, "sleep 300")
    fleet = launch.Fleet(jobs, LOCAL_CFG, launch.LOCAL_PLACE)
    assert len(fleet.running()) == 3
    assert fleet.cancel_all() == []
    assert fleet.running() == []


class AnswerError(OSError):
    """What the Hub's client raises for an answer that is not good."""

    def __init__(self, status_code: int, **headers: str):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.response = SimpleNamespace(status_code=status_code, headers=named)


def test_waits_between_tries_follow_the_answer():
    # D17
    wait_s = hub_jobs.retry_after_s
    assert wait_s(AnswerError(429, Retry_After="3"), 0) == 3.0
    assert wait_s(AnswerError(429, RateLimit='"api";r=0;t=55'), 0) == 55.0
    assert wait_s(AnswerError(429, RateLimit='"api";r=9;t=55'), 1) == 2.0
    date = email.utils.formatdate(time.time() + 50, usegmt=True)
    assert 40 < wait_s(AnswerError(429, Retry_After=date), 0) < 51
    assert wait_s(AnswerError(429), 3) == 8.0
    assert [wait_s(AnswerError(500), tried) for tried in (0, 2, 9)] == [1.0, 4.0, 30.0]
    assert wait_s(AnswerError(403), 0) is None
    assert wait_s(ConnectionError("reset"), 1) == 2.0
    assert wait_s(httpx2.ReadTimeout("slow"), 0) == 1.0
    assert wait_s(ValueError("bad flavor"), 0) is None


def test_patience_has_an_end_and_is_only_for_what_may_pass():
    calls = []

    def call(error):
        calls.append(error)
        raise error

    for error, patience_s in (
        (AnswerError(429, Retry_After="0"), 0.05),
        (AnswerError(404), 60),
        (AnswerError(503), 0.5),
    ):
        calls.clear()
        with pytest.raises(AnswerError):
            hub_jobs.patiently(patience_s, lambda error=error: call(error))
        assert (len(calls) > 1) == (error.response.status_code == 429)


def test_an_error_is_one_line_with_the_cure():
    error = AnswerError(401)
    error.args = ("Client error\n\nfor url",)
    assert hub_jobs.one_line(error).startswith("Client error for url (is the token still valid")
    assert len(hub_jobs.one_line(OSError("x" * 900))) == 300


def test_the_cost_is_what_ran():
    # 30 min at $12/h, 15 min at $6/h; SCHEDULING is free
    def job(flavor, running_secs):
        return SimpleNamespace(flavor=flavor, durations=SimpleNamespace(running_secs=running_secs))

    jobs = [job("h200x2", 1800), job("h200", 900), job("h200", None), SimpleNamespace(flavor=None, durations=None)]
    assert launch.cost(jobs, {"h200x2": 12.0, "h200": 6.0}) == 7.5


def test_a_cancelled_replica_is_not_replaced(jobs):
    job = run_bash(jobs, "sleep 300")
    fleet = launch.Fleet(jobs, LOCAL_CFG, launch.LOCAL_PLACE, replicas={0: job.id}, urls={0: "http://127.0.0.1:1"})
    jobs.cancel_job(job_id=job.id, grace_s=1)
    fleet.look_after_replicas()
    assert fleet.replicas == fleet.urls == {}
    assert len(jobs.list_jobs(labels={})) == 1


def test_a_launch_cancels_its_own_jobs_and_stop_cancels_all(jobs):
    mine = run_bash(jobs, "sleep 300", labels={"run": "r1", "role": "replica", "attempt": "2"})
    other = run_bash(jobs, "sleep 300", labels={"run": "r1", "role": "replica", "attempt": "1"})
    fleet = launch.Fleet(jobs, LOCAL_CFG, launch.LOCAL_PLACE, attempt="2")
    assert fleet.cancel_all(attempt="2") == []
    assert (stage(jobs, mine), stage(jobs, other)) == ("CANCELED", "RUNNING")
    assert fleet.cancel_all() == []
    assert stage(jobs, other) == "CANCELED"


# --- trainer_job.py ---


def test_the_prefix_of_the_network_group_is_filled_in(monkeypatch):
    text = json.dumps([{"id": "0", "url": "http://${HF_NETWORK_GROUP_PREFIX}replica-0:8000", "job": "j"}])
    monkeypatch.setenv("HF_NETWORK_GROUP_PREFIX", "mine--")
    assert trainer_job.wanted_replicas(CFG, text)[0]["url"] == "http://mine--replica-0:8000"
    monkeypatch.delenv("HF_NETWORK_GROUP_PREFIX")
    with pytest.raises(SystemExit, match="HF_NETWORK_GROUP_PREFIX is not set"):
        trainer_job.wanted_replicas(CFG, text)


def test_an_earlier_launchs_replicas_json_is_not_believed(tmp_path, monkeypatch):
    # D07: the file is rewritten, so a reader may see an old one
    cfg = dataclasses.replace(LOCAL_CFG, bucket=str(tmp_path))
    (tmp_path / "r1").mkdir()
    assert trainer_job.announced_replicas(cfg) == []
    replicas = [{"id": "0", "url": "http://127.0.0.1:1", "job": "j"}]
    (tmp_path / "r1/replicas.json").write_text(json.dumps({"attempt": "1", "replicas": replicas, "restarts": 0}))
    monkeypatch.setenv("ATTEMPT", "2")
    assert trainer_job.announced_replicas(cfg) == []
    monkeypatch.setenv("ATTEMPT", "1")
    assert trainer_job.announced_replicas(cfg) == replicas


# --- bad input: one line that names the flag, exit code 2, nothing started ---


@pytest.fixture
def dataset(tmp_path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return path


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--replicas", "0"], "--replicas 0"),
        (["--group-size", "1"], "--group-size 1"),
        (["--max-loras", "3"], "--max-loras 3"),
        (["--model", "./nothing"], "--model ./nothing"),
        (["--model", "no-one/no-such-model"], "--model no-one/no-such-model"),
        (["--dataset", "./nothing.jsonl"], "--dataset ./nothing.jsonl"),
        (["--dataset", "{data}", "--answer-column", "gold"], "--answer-column gold"),
        (["--dataset", "{data}", "--prompt-column", "question"], "--prompt-column question"),
        (["--bucket", "{data}"], "--bucket"),
        (["--port", "{port}"], "--port"),
        (["--reward", "no_such_module:f"], "--reward no_such_module:f"),
        (["--reward", "rewards:no_such_function"], "--reward rewards:no_such_function"),
        (["--run", "a b"], "--run a b"),
        (["--max-step", "1"], "--max-step"),
        (["--lora-rank", "x"], "--lora-rank"),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag_and_starts_nothing(flags, named, dataset, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = [f.format(data=dataset, port=taken.getsockname()[1]) for f in flags]
        bucket = [] if "--bucket" in flags else ["--bucket", str(tmp_path / "runs")]
        port = [] if "--port" in flags else ["--port", "0"]
        ended = run_launch("--local", *bucket, *port, *flags, HF_HUB_OFFLINE="1")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stderr.startswith("error: ")
    assert len(ended.stderr.splitlines()) == 1
    assert named in ended.stderr
    assert not list(tmp_path.glob("runs/*/jobs/*"))


def test_a_trainer_job_whose_proxy_cannot_listen_ends_with_its_error(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, str(ROOT / "trainer_job.py"), "--run=r", f"--bucket={tmp_path}", f"--port={port}"]
        env = {**os.environ, "REPLICAS": "[]", "ATTEMPT": "1"}
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert f"--port {port}: Address already in use" in ended.stderr


def test_without_a_vllm_command_its_engine_is_refused_at_once(tmp_path):
    ended = run_launch("--local", "--engine=vllm", "--port=0", f"--bucket={tmp_path}/runs", PATH=str(tmp_path))
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert ended.stderr.startswith("error: --engine vllm: there is no vllm command here: pip install")
    assert not (tmp_path / "runs").exists()


def test_without_a_token_it_says_what_to_do_in_one_line(tmp_path):
    ended = run_launch("--replicas", "2", HF_HOME=str(tmp_path), HF_TOKEN="")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "hf auth login" in ended.stderr
    assert "--local" in ended.stderr


def test_a_dry_run_prints_the_jobs_and_starts_nothing(tmp_path):
    ended = run_launch("--local", "--dry-run", "--bucket", str(tmp_path / "runs"))
    assert ended.returncode == 0, ended.stderr
    assert "replica.sh" in ended.stdout
    assert not (tmp_path / "runs").exists()


def test_status_and_stop_of_an_unknown_run_say_so(tmp_path):
    assert "no Jobs" in run_launch("--local", "--status", "x", "--bucket", str(tmp_path)).stdout
    assert run_launch("--local", "--stop", "x", "--bucket", str(tmp_path)).returncode == 0


def test_the_launcher_starts_without_torch():
    code = "import sys, launch, proxy; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
