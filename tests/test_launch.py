"""launch.py and jobs/: what is refused, what is submitted, and that nothing is left running."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx2
import psutil
import pytest
from conftest import free_port, wait_for

import launch
from config import LOCAL, Config, config_from, make_parser
from jobs import hub, local, trainer_job
from jobs.local import LocalJobs
from jobs.log import cause_in

ROOT = Path(__file__).resolve().parent.parent
CFG = dataclasses.replace(Config(), run="r1", max_staleness=4)
LOCAL_CFG = dataclasses.replace(Config(**LOCAL), run="r1")


def run_launch(*flags: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "launch.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **env})


# --- local Jobs ---


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "GRACE_S", 0.2)
    jobs = LocalJobs(str(tmp_path), "r1")
    yield jobs
    assert fleet_of(jobs).cancel_all()


def fleet_of(jobs, **changes) -> launch.Fleet:
    return launch.Fleet(jobs, LOCAL_CFG, dataclasses.replace(launch.LOCAL_PLACE, patience_s=5, poll_s=0.1), **changes)


def run_bash(jobs: LocalJobs, script: str, **changes):
    spec = {"command": ["bash", "-c", script], "env": {}, "labels": {"run": "r1", "role": "replica"}, "secrets": {}}
    return jobs.run_job(**{**spec, **changes})


def stage(jobs: LocalJobs, job) -> str:
    return jobs.inspect_job(job_id=job.id).status.stage


def group_of(jobs: LocalJobs, job) -> int:
    return json.loads((jobs.directory / f"{job.id}.json").read_text())["pid"]


def test_a_local_job_ends_in_the_stage_that_its_exit_code_says_whoever_asks(jobs, tmp_path):
    good, bad, killed = run_bash(jobs, "exit 0"), run_bash(jobs, "exit 3"), run_bash(jobs, "sleep 300")
    wait_for(lambda: stage(jobs, good) == "COMPLETED")
    wait_for(lambda: stage(jobs, bad) == "ERROR")
    assert LocalJobs(str(tmp_path), "r1").inspect_job(job_id=bad.id).status.message == "exit code 3"
    assert stage(jobs, killed) == "RUNNING"
    os.killpg(group_of(jobs, killed), signal.SIGKILL)
    wait_for(lambda: stage(jobs, killed) == "ERROR")


@pytest.mark.parametrize("cancel", [True, False])
def test_a_local_job_that_ends_leaves_no_process(jobs, cancel):
    script = "trap '' TERM; sleep 300 & sleep 300 & echo $!; wait" if cancel else "sleep 300 & echo $!"
    job = run_bash(jobs, script)
    pid = int(wait_for(lambda: [*jobs.fetch_job_logs(job_id=job.id)])[0])
    if cancel:
        assert fleet_of(jobs).cancel_all()
    wait_for(lambda: stage(jobs, job) == ("CANCELED" if cancel else "COMPLETED"))
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


def test_a_followed_log_is_complete_and_ends_with_the_job(jobs):
    job = run_bash(jobs, "for i in $(seq 50); do echo line $i; done; sleep 0.3; printf last")
    assert [*jobs.fetch_job_logs(job_id=job.id, follow=True)] == [*(f"line {i}" for i in range(1, 51)), "last"]


def test_an_exposed_port_becomes_a_free_one_and_jobs_are_listed_by_label(jobs):
    labels = {"run": "r1", "role": "trainer"}
    job = run_bash(jobs, 'echo "$PORT"', expose=[8000], env={"PORT": "8000"}, labels=labels)
    (port,) = jobs.fetch_job_logs(job_id=job.id, follow=True)
    assert job.status.expose_urls == [f"http://127.0.0.1:{port}"]
    assert port != "8000"
    run_bash(jobs, "exit 0")
    assert [found.id for found in jobs.list_jobs(labels={"role": "trainer"})] == [job.id]
    assert (len(jobs.list_jobs(labels={"run": "r1"})), jobs.list_jobs(labels={"run": "other"})) == (2, [])


def test_a_launch_cancels_its_own_jobs_and_stop_cancels_all(jobs):
    mine = run_bash(jobs, "sleep 300", labels={"run": "r1", "role": "replica", "attempt": "2"})
    other = run_bash(jobs, "sleep 300", labels={"run": "r1", "role": "replica", "attempt": "1"})
    assert fleet_of(jobs).cancel_all(attempt="2")
    assert (stage(jobs, mine), stage(jobs, other)) == ("CANCELED", "RUNNING")
    assert fleet_of(jobs).cancel_all()
    assert stage(jobs, other) == "CANCELED"


# --- what is submitted ---


def test_every_job_has_a_timeout_and_a_replica_gets_the_slots_and_the_rank_it_needs():
    # D09: the platform's default is 30 minutes; A08, A21
    replica = launch.replica_job(dataclasses.replace(CFG, lora_rank=12), launch.HF_PLACE, "1", 1)
    trainer = launch.trainer_job(CFG, launch.HF_PLACE, "1")
    assert (trainer["timeout"], replica["timeout"]) == (8 * 3600, 8.5 * 3600)
    env = replica["env"]
    assert (env["MAX_LORA_RANK"], env["MAX_LORAS"], env["HEARTBEATS"]) == ("16", "6", "/lora/r1/attempts")


def test_the_trainer_job_gets_the_flags_that_make_the_same_configuration():
    command = launch.trainer_job(CFG, launch.LOCAL_PLACE, "1")["command"]
    assert config_from(make_parser("").parse_args(command[2:])) == dataclasses.replace(CFG, bucket="")


def test_a_tracked_trainer_job_installs_the_tracker_that_the_tests_use():
    spec = launch.trainer_job(dataclasses.replace(CFG, track="trackio", track_space="s"), launch.HF_PLACE, "1")
    assert f"requirements.txt {launch.TRACKIO} && " in spec["command"][2]
    assert launch.TRACKIO in (ROOT / "requirements-dev.txt").read_text().splitlines()


def test_the_token_is_only_ever_a_secret():
    # D15
    fleet = launch.Fleet(None, CFG, launch.HF_PLACE, {"HF_TOKEN": "hf_SECRET"})
    specs = [launch.replica_job(CFG, fleet.place, "1", 0), launch.trainer_job(CFG, fleet.place, "1")]
    assert "hf_SECRET" not in json.dumps(specs) + repr(fleet)


def test_the_plan_names_the_price_and_the_cost_is_what_ran():
    text = launch.plan(CFG, launch.HF_PLACE, {"h200x2": 10.0, "h200": 5.0})
    assert "$20.00 per hour, $160.00 at most" in text

    def job(flavor, running_secs):  # 30 min at $12/h, 15 min at $6/h; SCHEDULING is free
        return SimpleNamespace(flavor=flavor, durations=SimpleNamespace(running_secs=running_secs))

    ran = [job("h200x2", 1800), job("h200", 900), job("h200", None), SimpleNamespace(flavor=None, durations=None)]
    assert launch.cost(ran, {"h200x2": 12.0, "h200": 6.0}) == 7.5


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
    monkeypatch.setattr(hub, "retry_after_s", lambda error, tried: 0.0)
    spec = {"command": ["sleep", "60"], "env": {}, "labels": {"run": "r1", "role": "replica"}}
    job_id = fleet_of(Flaky(jobs, failures)).submit(spec)
    assert [job.id for job in jobs.list_jobs(labels={"run": "r1"})] == [job_id]


def test_a_replica_that_never_answers_is_given_up_with_its_last_lines(jobs, capsys):
    # D12
    job = run_bash(jobs, "echo loading; exec sleep 300", expose=[8000])
    wait_for(lambda: [*jobs.fetch_job_logs(job_id=job.id)])
    fleet = fleet_of(jobs, replicas={0: job.id})
    fleet.cfg = dataclasses.replace(LOCAL_CFG, ready_wait_min=0.005)
    fleet.tend(0)
    with pytest.raises(launch.LaunchError, match=r"replica 0 .* does not serve after .* 0.005: .*loading"):
        wait_for(lambda: fleet.tend(0))
    assert "  | loading\n" in capsys.readouterr().out


def test_a_cancelled_replica_is_not_replaced(jobs):
    job = run_bash(jobs, "exec sleep 300")
    fleet = fleet_of(jobs, replicas={0: job.id}, urls={0: "http://127.0.0.1:1"}, trainer="t")
    fleet_of(jobs).cancel_all()
    fleet.tend(0)
    assert fleet.replicas == fleet.urls == {}
    assert len(jobs.list_jobs(labels={})) == 1


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (["ValueError: first", "error: rank 8 > 4: raise it", "stopping"], "error: rank 8 > 4: raise it"),
        (["(Core) torch.OutOfMemoryError: no memory", "RuntimeError: dead. See root cause above", "bye"],
         "(Core) torch.OutOfMemoryError: no memory"),
        (["one", "two", ""], "two"),
        ([], "its log is empty"),
    ],
)  # fmt: skip
def test_the_cause_in_a_log_is_its_own_error_or_the_exception_or_the_last_line(log, cause):
    assert cause_in(log) == cause


# --- calls to the Hub ---


class AnswerError(OSError):
    """What the Hub's client raises for an answer that is not good."""

    def __init__(self, status_code: int, **headers: str):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.response = SimpleNamespace(status_code=status_code, headers=named)


def test_waits_between_tries_follow_the_answer():
    # D17
    wait_s = hub.retry_after_s
    assert wait_s(AnswerError(429, Retry_After="3"), 0) == 3.0
    assert wait_s(AnswerError(429), 3) == 8.0
    assert [wait_s(AnswerError(500), tried) for tried in (0, 2, 9)] == [1.0, 4.0, 30.0]
    assert wait_s(AnswerError(403), 0) is None
    assert wait_s(ConnectionError("reset"), 1) == 2.0
    assert wait_s(httpx2.ReadTimeout("slow"), 0) == 1.0


def test_patience_has_an_end_and_is_only_for_what_may_pass():
    for error, patience_s, again in (
        (AnswerError(429, Retry_After="0"), 0.05, True), (AnswerError(404), 60, False), (AnswerError(503), 0.5, False)
    ):  # fmt: skip
        calls = []

        def call(calls=calls, error=error):
            calls.append(1)
            raise error

        with pytest.raises(AnswerError):
            hub.patiently(patience_s, "nothing", call)
        assert (len(calls) > 1) == again


def test_an_error_is_one_line_with_the_cure():
    error = AnswerError(401)
    error.args = ("Client error\n\nfor url",)
    assert hub.one_line(error).startswith("Client error for url (is the token still valid")
    assert len(hub.one_line(OSError("x" * 900))) == 300


# --- jobs/trainer_job.py ---


def test_replicas_of_this_launch_are_believed_and_the_groups_prefix_is_filled_in(tmp_path, monkeypatch):
    # D07: the file is rewritten, so a reader may see an old one
    cfg = dataclasses.replace(LOCAL_CFG, bucket=str(tmp_path))
    (tmp_path / "r1").mkdir()
    monkeypatch.setenv("ATTEMPT", "2")
    monkeypatch.setenv("HF_NETWORK_GROUP_PREFIX", "mine--")
    assert trainer_job.announced_replicas(cfg) == []
    for attempt, found in (("1", []), ("2", ["http://mine--replica-0:8000"])):
        replicas = [{"id": "0", "url": "http://${HF_NETWORK_GROUP_PREFIX}replica-0:8000", "job": "j"}]
        document = {"attempt": attempt, "replicas": replicas, "restarts": 0}
        (tmp_path / "r1/replicas.json").write_text(json.dumps(document))
        assert [replica["url"] for replica in trainer_job.announced_replicas(cfg)] == found


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
        (["--model", "./nothing"], "--model ./nothing"),
        (["--model", "no-one/no-such-model"], "--model no-one/no-such-model"),
        (["--dataset", "./nothing.jsonl"], "--dataset ./nothing.jsonl"),
        (["--dataset", "{data}", "--answer-column", "gold"], "--answer-column gold"),
        (["--bucket", "{data}"], "--bucket"),
        (["--port", "{port}"], "something listens there; leave it out"),  # F29
        (["--network-group", "g"], "--network-group g: is for HF Jobs"),
        (["--reward", "rewards:no_such_function"], "--reward rewards:no_such_function"),
        (["--learnig-rate", "1"], "--learnig-rate: there is no such flag: did you mean --learning-rate?"),  # F21
        (["--engine", "vllm"], "--engine vllm: there is no vllm command here: pip install"),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag_and_starts_nothing(flags, named, dataset, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = [f.format(data=dataset, port=taken.getsockname()[1]) for f in flags]
        bucket = [] if "--bucket" in flags else ["--bucket", str(tmp_path / "runs")]
        ended = run_launch("--local", *bucket, *flags, HF_HUB_OFFLINE="1", PATH="/usr/bin:/bin")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stderr.startswith("error: ")
    assert len(ended.stderr.splitlines()) == 1
    assert named in ended.stderr
    assert not list(tmp_path.glob("runs/*/jobs/*"))


def test_a_trainer_job_whose_proxy_cannot_listen_ends_with_its_error(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port := free_port()))
        taken.listen()
        command = [sys.executable, "-m", "jobs.trainer_job", "--run=r", f"--bucket={tmp_path}", f"--port={port}"]
        env = {**os.environ, "ATTEMPT": "1"}
        ended = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert f"--port {port}: Address already in use" in ended.stderr


def test_without_a_token_it_says_what_to_do_in_one_line(tmp_path):
    ended = run_launch("--replicas", "2", HF_HOME=str(tmp_path), HF_TOKEN="")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert "hf auth login" in ended.stderr
    assert "--local" in ended.stderr


def test_a_dry_run_starts_nothing_and_status_and_stop_of_an_unknown_run_say_so(tmp_path):
    runs = ["--local", f"--bucket={tmp_path / 'runs'}"]
    assert "replica.sh" in run_launch(*runs, "--dry-run").stdout
    assert not (tmp_path / "runs").exists()
    assert "no Jobs" in run_launch(*runs, "--status", "x").stdout
    assert run_launch(*runs, "--stop", "x").returncode == 0


def test_the_launcher_starts_without_torch():
    code = "import sys, launch, proxy; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
