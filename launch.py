"""How the Jobs start, stay up, and stop billing.

    python launch.py --replicas 2                            # on HF Jobs: needs `hf auth login`
    python launch.py --local --replicas 2                    # the same Jobs as local processes: no account, no GPU
    python launch.py --dry-run                               # print the Jobs and what they cost per hour
    python launch.py --replicas 2 --detach                   # leave as soon as the trainer Job runs
    python launch.py --status RUN | --logs RUN | --stop RUN  # from any terminal, any day

Everything that can be wrong is checked first. Then N replica Jobs start and, when all are healthy, the trainer Job,
whose log is followed here. Whatever happens, every Job is cancelled at the end; without this machine, by the trainer
Job (trainer_job.py) or the replicas' dead-man switch (replica.sh). The same --run again resumes the run.
One code path: the calls go to huggingface_hub.HfApi, or to local_jobs.LocalJobs, which has the same ones.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from tqdm import tqdm

import hub_jobs
from config import Config, config_from, fail, flag, make_parser, max_loras, served_rank, to_flags
from hub_jobs import API_ERRORS, BUCKET_IN_JOB, SCRIPTS_IN_JOB, one_line, patiently
from local_jobs import SHARED_CORES, TERMINAL, LocalJobs

HERE = Path(__file__).resolve().parent
REPLICA_PORT = 8000
TRACKIO = "trackio==0.43.0"  # installed in the trainer Job if --track asks for it


class LaunchError(Exception):
    """The run cannot start or go on; everything is cancelled."""


@dataclass(frozen=True)
class Place:
    """Where Jobs run: what their commands and paths look like there."""

    local: bool
    bucket: str  # the bucket's directory as Jobs see it
    code: str  # the scripts' directory as Jobs see it
    python: str
    poll_s: float  # between two looks at the Jobs
    patience_s: float  # how long calls are made again while the Hub is busy or broken, and Jobs may take to end


LOCAL_PLACE = Place(True, "", str(HERE), sys.executable, 0.3, 20)
HF_PLACE = Place(False, BUCKET_IN_JOB, SCRIPTS_IN_JOB, "python3", 5.0, 300)


# --- what is run -----------------------------------------------------------------------------------------------------


def replica_job(cfg: Config, place: Place, attempt: str, index: int, restart: int = 0) -> dict:
    """Arguments of run_job for one replica. attempt: this launch's number; restart: how many replicas were replaced."""
    env = {
        "MODEL": cfg.model,
        "DTYPE": cfg.dtype,
        "ENGINE": cfg.engine,
        "PYTHON": place.python,
        "HOST": "127.0.0.1" if place.local else "0.0.0.0",
        "PORT": str(REPLICA_PORT),
        "MAX_MODEL_LEN": str(cfg.max_model_len),
        "MAX_LORA_RANK": str(served_rank(cfg.lora_rank)),
        "MAX_LORAS": str(max_loras(cfg)),
        "HEARTBEATS": f"{place.bucket}/{cfg.run}/attempts",
        "IDLE_SHUTDOWN_MIN": f"{cfg.idle_shutdown_min:g}",
    }
    reached = {"expose": [REPLICA_PORT]}
    if cfg.network_group:  # an alias of its own: the name of a lost replica may still lead to where that one was
        alias = f"replica-{index}-{restart}-{int(attempt):x}"
        reached = {"network_group": cfg.network_group, "network_aliases": [alias]}
    return {
        "name": f"{cfg.run}-replica-{index}",
        "image": cfg.image,
        "command": ["bash", f"{place.code}/replica.sh"],
        "env": env,
        "flavor": cfg.replica_flavor,
        "timeout": int((cfg.timeout_h + 0.5) * 3600),  # the platform's default is 30 minutes
        "labels": {"run": cfg.run, "role": "replica", "attempt": attempt, "replica": str(index),
                   "restart": str(restart)},
        **reached,
    }  # fmt: skip


def trainer_job(cfg: Config, place: Place, attempt: str, replicas: list[dict]) -> dict:
    """Arguments of run_job for the trainer. replicas: [{"id", "url", "job"}, ...]."""
    flags = to_flags(dataclasses.replace(cfg, bucket=place.bucket))
    command = [place.python, f"{place.code}/trainer_job.py", *flags]
    if not place.local:
        install = f"{place.python} -m pip install -q -r {place.code}/requirements.txt {TRACKIO if cfg.track else ''}"
        command = ["bash", "-c", f'{install} && cd {place.code} && exec "$@"', "trainer", *command]
    env = {"REPLICAS": json.dumps(replicas), "ATTEMPT": attempt, "PYTHONUNBUFFERED": "1"}
    return {
        "name": f"{cfg.run}-trainer",
        "image": cfg.image,
        "command": command,
        "env": env if place.local else env | {"PIP_BREAK_SYSTEM_PACKAGES": "1"},  # the image is the Job's own
        "flavor": cfg.trainer_flavor,
        "timeout": int(cfg.timeout_h * 3600),
        "labels": {"run": cfg.run, "role": "trainer", "attempt": attempt},
        **({"network_group": cfg.network_group} if cfg.network_group else {}),
    }


def plan(cfg: Config, place: Place, dollars_per_hour: dict[str, float]) -> str:
    """What will run and what it costs, in plain words. dollars_per_hour: flavor -> price; not needed if local."""
    run = (
        f"run {cfg.run}: {cfg.max_steps} steps of {cfg.batch_size} completions, {cfg.group_size} per prompt; "
        f"LoRA rank {cfg.lora_rank} on {cfg.model}; prompts of {cfg.dataset}\n"
    )
    if place.local:
        return f"{run}on this machine: 1 trainer, {cfg.replicas} replicas ({cfg.engine}), bucket {cfg.bucket}"
    trainer, replica = dollars_per_hour[cfg.trainer_flavor], dollars_per_hour[cfg.replica_flavor]
    total = trainer + cfg.replicas * replica
    return (
        f"{run}Jobs of {cfg.namespace}: 1 trainer on {cfg.trainer_flavor} (${trainer:.2f}/h), {cfg.replicas} replicas "
        f"on {cfg.replica_flavor} (${replica:.2f}/h each), bucket {cfg.bucket}\n"
        f"${total:.2f} per hour, ${total * cfg.timeout_h:.2f} at most (--timeout-h {cfg.timeout_h:g})"
    )


def cost(jobs: list[Any], dollars_per_hour: dict[str, float]) -> float:
    """Dollars that these Jobs have cost so far; time in SCHEDULING is free."""
    ran = [(job.flavor, job.durations.running_secs or 0) for job in jobs if job.durations]
    return sum(dollars_per_hour.get(flavor, 0.0) * seconds / 3600 for flavor, seconds in ran)


# --- checks that cost nothing ----------------------------------------------------------------------------------------


def first_row(path: Path) -> dict:
    """The first row of a local .jsonl or .parquet file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return next(pyarrow.parquet.ParquetFile(path).iter_batches(1)).to_pylist()[0]
    with open(path) as file:
        return json.loads(file.readline())


def check_local_data(cfg: Config) -> None:
    """Exit unless model and dataset can be had on this machine and have what is needed."""
    if cfg.model != "toy":
        hub_jobs.check_context(cfg, config_of(cfg.model))
    if not hub_jobs.is_path(cfg.dataset):
        return
    try:
        row = first_row(Path(cfg.dataset))
    except (OSError, ValueError, StopIteration) as error:
        fail(f"--dataset {cfg.dataset}: cannot be read as JSON lines or Parquet: {error}")
    for name in ("prompt_column", "answer_column"):
        column = getattr(cfg, name).split(".")[0]
        if column not in row:
            fail(f"{flag(name)} {getattr(cfg, name)}: {cfg.dataset} has the columns {', '.join(row)}")


def config_of(model: str) -> Path:
    """The config.json of a model directory or a Hub name; exits if there is none."""
    if hub_jobs.is_path(model):
        if not Path(model, "config.json").exists():
            fail(f"--model {model}: no config.json there; give a model directory or a Hub name")
        return Path(model, "config.json")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except API_ERRORS as error:
        fail(f"--model {model}: neither a directory nor a model that the Hub gives to this machine: {one_line(error)}")


def check_reward(cfg: Config) -> None:
    """Exit unless every --reward function can be imported."""
    from rewards import load_rewards

    try:
        load_rewards(cfg.reward)
    except ValueError as error:
        fail(f"--{error}")  # it begins with "reward" and the name


def check_tracking(cfg: Config, local: bool) -> None:
    """Exit unless what --track needs is there."""
    if cfg.track and local and not importlib.util.find_spec("trackio"):
        fail(f"--track {cfg.track}: it is not installed: pip install {TRACKIO}")
    if cfg.track and not local and not cfg.track_space:
        fail(f"--track {cfg.track}: what it keeps would vanish with the Job: name a Space with --track-space")


def check_machine(cfg: Config) -> Config:
    """Exit unless engine, port and bucket directory of a local run can be used; --port 0 becomes a free one."""
    if cfg.engine == "vllm" and not shutil.which("vllm"):
        fail("--engine vllm: there is no vllm command here: pip install -r requirements-replica.txt, or --engine stub")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((cfg.host, cfg.port))
        except OSError as error:
            fail(f"--port {cfg.port}: cannot listen on {cfg.host} ({error.strerror}); use another, or 0 for any")
        port = probe.getsockname()[1]
    try:
        run_dir = Path(cfg.bucket, cfg.run)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / ".writable").write_bytes(b"")
        (run_dir / ".writable").unlink()
    except OSError as error:
        fail(f"--bucket {cfg.bucket}: cannot write there ({error.strerror}); name a directory you own")
    return dataclasses.replace(cfg, port=port, bucket=str(Path(cfg.bucket).absolute()))


def with_toy(cfg: Config) -> Config:
    """The configuration with `toy` replaced by the directory of the toy model, built if it is not there yet."""
    if "toy" not in (cfg.model, cfg.dataset):
        return cfg
    code = "import toy; print(toy.cached_model())"  # in a process of its own: this one does not load torch
    env = {**os.environ, **SHARED_CORES}
    built = subprocess.run([sys.executable, "-c", code], cwd=HERE, env=env, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        raise LaunchError("the toy model could not be built: see above")
    directory = built.stdout.strip().splitlines()[-1]
    toy = {"model": directory, "dataset": f"{directory}/train.jsonl"}
    return dataclasses.replace(cfg, **{name: path for name, path in toy.items() if getattr(cfg, name) == "toy"})


@dataclass
class Fleet:
    """The Jobs of one launch of a run, and the calls that start, watch and cancel them."""

    api: Any  # HfApi or LocalJobs
    cfg: Config
    place: Place
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    volumes: dict[str, list] = field(default_factory=dict)  # role -> volumes
    prices: dict[str, float] = field(default_factory=dict)  # flavor -> dollars per hour
    attempt: str = field(default_factory=lambda: str(time.time_ns() // 1_000_000))
    replicas: dict[int, str] = field(default_factory=dict)  # index -> id of the Job that serves now
    urls: dict[int, str] = field(default_factory=dict)  # index -> how the proxy reaches it
    trainer: str = ""
    restarts: int = 0
    jobs: dict[str, Any] = field(default_factory=dict)  # every Job of this launch, as last seen
    submitting: bool = False  # a submission was cut short: its Job may still come to be
    beat_at: float = float("-inf")  # time.monotonic() of the last heartbeat from here

    def ask(self, complaint: str, call: Callable[[], Any]) -> Any:
        """A call to the Hub, made again while it is busy or broken; LaunchError if it stays so or refuses."""
        try:
            return patiently(self.place.patience_s, call)
        except API_ERRORS as error:
            raise LaunchError(f"{complaint}: {one_line(error)}") from error

    def here(self) -> dict[str, str]:
        """The arguments of every call: Jobs of an organisation are not found under the user."""
        return {"namespace": self.cfg.namespace or None}

    def find(self, **labels: str) -> list[Any]:
        """Jobs of the run with these labels, whoever started them."""
        wanted = {"run": self.cfg.run, **labels}
        return self.ask("the Jobs cannot be listed", lambda: [*self.api.list_jobs(labels=wanted, **self.here())])

    def inspect(self, job_id: str) -> Any:
        """The Job as the platform sees it."""
        complaint = f"Job {job_id} cannot be looked at"
        self.jobs[job_id] = self.ask(complaint, lambda: self.api.inspect_job(job_id=job_id, **self.here()))
        return self.jobs[job_id]

    def whole(self, spec: dict) -> dict:
        """All arguments of run_job, the secrets too."""
        return {**spec, "secrets": self.secrets, "volumes": self.volumes.get(spec["labels"]["role"], []), **self.here()}

    def submit(self, spec: dict) -> str:
        """Start a Job and return its id; one that a failed call has created all the same is found by its labels."""
        labels, first = spec["labels"], True

        def create() -> Any:
            nonlocal first
            created = [] if first else [*self.api.list_jobs(labels=labels, **self.here())]
            first = False
            return created[0] if created else self.api.run_job(**self.whole(spec))

        self.submitting = True
        job = self.ask(f"the {labels['role']} Job was not accepted", create)
        self.submitting = False
        self.jobs[job.id] = job
        return job.id

    def start_replica(self, index: int) -> None:
        """Submit the Job of one replica."""
        self.replicas[index] = self.submit(replica_job(self.cfg, self.place, self.attempt, index, self.restarts))
        self.urls.pop(index, None)

    def wait_until_healthy(self) -> None:
        """Wait until every replica serves; LaunchError with its last log lines if one ends or takes too long."""
        scheduled_until = time.monotonic() + 60 * self.cfg.schedule_wait_min
        healthy_until: dict[int, float] = {}
        while waiting := sorted(self.replicas.keys() - self.urls.keys()):
            for index in waiting:
                job = self.inspect(self.replicas[index])
                if job.status.stage == "RUNNING":
                    healthy_until.setdefault(index, time.monotonic() + 60 * self.cfg.ready_wait_min)
                self.greet(index, job, healthy_until.get(index, scheduled_until))
            self.keep_awake()
            time.sleep(self.place.poll_s if waiting else 0)

    def greet(self, index: int, job: Any, until: float) -> None:
        """Note a replica's URL if it is healthy; LaunchError if it has ended, or is not healthy until `until`."""
        name, stage = f"replica {index} ({job.id})", job.status.stage
        if stage in TERMINAL:
            raise LaunchError(f"{name} ended: {job.status.message or stage}\n{self.tail(job.id)}")
        problem = self.sickness(job) if stage == "RUNNING" else stage
        if not problem:
            self.urls[index] = address(job)
            print(f"{name} is {'running' if self.cfg.network_group else 'healthy'}", flush=True)
        elif time.monotonic() > until and stage == "RUNNING":
            raise LaunchError(f"{name} is not healthy after {self.cfg.ready_wait_min:g} min: {problem}\n"
                              f"{self.tail(job.id)}")  # fmt: skip
        elif time.monotonic() > until:
            raise LaunchError(f"{name} is still {stage} after {self.cfg.schedule_wait_min:g} min: try another "
                              "--replica-flavor or raise --schedule-wait-min")  # fmt: skip

    def sickness(self, job: Any) -> str:
        """Why a running replica does not serve yet, '' if it does; the token goes to its own URL only."""
        if self.cfg.network_group:
            return ""  # nothing outside the group can ask: the proxy does
        if not address(job):
            return "it has no URL"
        headers = {"Authorization": f"Bearer {self.secrets['HF_TOKEN']}"} if self.secrets else {}
        try:
            answer = requests.get(f"{address(job)}/health", headers=headers, timeout=5, allow_redirects=False)
        except requests.RequestException as error:
            return f"/health does not answer ({type(error).__name__})"
        if answer.status_code in (401, 403):
            raise LaunchError(f"{address(job)} refuses the token: it needs read access to the Jobs of "
                              f"{self.cfg.namespace}")  # fmt: skip
        return "" if answer.status_code == 200 else f"/health answers {answer.status_code}"

    def tail(self, job_id: str, num_lines: int = 15) -> str:
        """The last lines of a Job's log."""
        try:
            lines = list(self.api.fetch_job_logs(job_id=job_id, follow=False, tail=num_lines, **self.here()))
        except API_ERRORS as error:
            return f"  (no log: {one_line(error)})"
        return "\n".join(f"  | {line}" for line in lines[-num_lines:])

    def known_replicas(self) -> list[dict]:
        """What the proxy is told: id, URL and Job of every replica that has a URL."""
        return [{"id": str(i), "url": self.urls[i], "job": self.replicas[i]} for i in sorted(self.urls)]

    def look_after_replicas(self) -> None:
        """Start a new Job for every replica whose Job has ended, and tell the trainer Job through the bucket."""
        for index, job_id in list(self.replicas.items()):
            job = self.inspect(job_id)
            if job.status.stage == "CANCELED":  # by hand, or by the trainer Job at its end: somebody wants it gone
                del self.replicas[index]
                self.urls.pop(index, None)
            elif job.status.stage in TERMINAL:
                self.replace(index, job)
            elif index not in self.urls and job.status.stage == "RUNNING" and address(job):
                self.urls[index] = address(job)
                self.announce()

    def replace(self, index: int, job: Any) -> None:
        """Start another Job for a replica whose Job has ended; LaunchError if there were too many."""
        ended = f"replica {index} ({job.id}) ended ({job.status.message or job.status.stage})"
        if self.restarts >= self.cfg.replica_restarts:
            raise LaunchError(f"{ended} and all {self.restarts} --replica-restarts are used\n{self.tail(job.id)}")
        self.restarts += 1
        tqdm.write(f"{ended}: starting another")
        self.start_replica(index)

    def announce(self) -> None:
        """Write replicas.json into the bucket: the only way to reach the trainer Job from outside."""
        document = {"attempt": self.attempt, "replicas": self.known_replicas(), "restarts": self.restarts}
        self.put("replicas.json", json.dumps(document))

    def keep_awake(self) -> None:
        """A heartbeat for replicas that wait for the trainer: without any they stop themselves."""
        if time.monotonic() - self.beat_at > 60 * self.cfg.idle_shutdown_min / 4:
            self.beat_at = time.monotonic()
            self.put(f"attempts/launcher-{self.attempt}.heartbeat", f"{time.time_ns()}\n")

    def put(self, name: str, text: str) -> None:
        """Write a small file into the run's directory in the bucket."""
        add = [(text.encode(), f"{self.cfg.run}/{name}")]
        self.ask(f"{name} cannot be written into bucket {self.cfg.bucket}",
                 lambda: self.api.batch_bucket_files(self.cfg.bucket, add=add))  # fmt: skip

    def running(self, **labels: str) -> list[Any]:
        """Jobs of the run with these labels that have not ended."""
        return [job for job in self.find(**labels) if job.status.stage not in TERMINAL]

    def cancel_all(self, **labels: str) -> list[str]:
        """Cancel the run's Jobs with these labels and wait for their end; ids of those that run after patience_s."""
        began, asked, left = time.monotonic(), dict[str, float](), None
        # A submission that was cut short may make a Job after the first look.
        settled_s = self.place.patience_s / 10 if self.submitting else 0
        while (passed_s := time.monotonic() - began) < self.place.patience_s:
            with contextlib.suppress(LaunchError):  # whatever the Hub says now, it may say something else soon
                left = [job.id for job in self.running(**labels)]
            if left == [] and passed_s >= settled_s:
                return []
            again = time.monotonic() - self.place.patience_s / 10  # a Job takes a while to end
            due = [job_id for job_id in left or [] if asked.get(job_id, again) <= again]
            asked |= dict.fromkeys(self.cancel(due), time.monotonic())
            time.sleep(self.place.poll_s / 2)
        return self.last_seen_alive() if left is None else left

    def last_seen_alive(self) -> list[str]:
        """Ids of this launch's Jobs that had not ended when they were last looked at."""
        return [job.id for job in self.jobs.values() if job.status.stage not in TERMINAL]

    def cancel(self, job_ids: list[str]) -> list[str]:
        """Ask for the end of these Jobs, all at once; ids of those that the Hub will end."""
        accepted = []

        def ask(job_id: str) -> None:
            try:
                self.api.cancel_job(job_id=job_id, **self.here())
                accepted.append(job_id)
            except API_ERRORS as error:
                print(f"could not cancel {job_id}, trying again: {one_line(error)}", flush=True)

        threads = [threading.Thread(target=ask, args=(job_id,), daemon=True) for job_id in job_ids]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return accepted


def address(job: Any) -> str:
    """How the proxy reaches a replica; '' if that is not known yet. The trainer Job knows its group's prefix."""
    if job.network:
        return f"http://${{HF_NETWORK_GROUP_PREFIX}}{job.network.aliases[0]}:{REPLICA_PORT}"
    return (job.status.expose_urls or [""])[0].rstrip("/")


# --- follow ----------------------------------------------------------------------------------------------------------

STEP = re.compile(r"step (\d+)/(\d+)  (.*)")  # what trainer.py prints after every step, the time left at its end


class Follower:
    """Reads the trainer's log in a thread and shows it: a progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, fleet: Fleet):
        self.fleet, self.lines, self.ended = fleet, queue.Queue(), threading.Event()
        self.bar = tqdm(total=fleet.cfg.max_steps, disable=None, dynamic_ncols=True,
                        bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}")  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def show_new_lines(self) -> None:
        """Show what has come since the last call."""
        fleet = self.fleet
        spent = f"  ${cost(list(fleet.jobs.values()), fleet.prices):.2f} so far" if fleet.prices else ""
        while not self.lines.empty():
            line = self.lines.get()
            step = STEP.match(line)
            if step and not self.bar.disable:
                self.bar.n = int(step.group(1))
                self.bar.set_postfix_str(step.group(3) + spent)
            elif not line.startswith("proxy:"):
                tqdm.write(line + (spent if step else ""))

    def _read(self) -> None:
        """A log stream that ends is not a Job that ended: read on, past what was seen, until it has."""
        seen, complaint, fleet = 0, "", self.fleet
        while not self.ended.is_set():
            try:
                logs = fleet.api.fetch_job_logs(job_id=fleet.trainer, follow=True, **fleet.here())
                for line in itertools.islice(logs, seen, None):
                    self.lines.put(line)
                    seen += 1
                if fleet.inspect(fleet.trainer).status.stage in TERMINAL:
                    self.ended.set()
            except (*API_ERRORS, LaunchError) as error:
                if one_line(error) != complaint:
                    complaint = one_line(error)
                    self.lines.put(f"(the log stream broke, reading on: {complaint})")
                self.ended.wait(fleet.place.poll_s)


def follow(fleet: Fleet, detach: bool = False) -> int:
    """Show the trainer's log and keep the replicas up until it ends (if `detach`: runs); returns its exit code."""
    follower, scheduled_until = None, time.monotonic() + 60 * fleet.cfg.schedule_wait_min
    try:
        while (job := fleet.inspect(fleet.trainer)).status.stage not in TERMINAL:
            waits = job.status.stage == "SCHEDULING"
            if waits and time.monotonic() > scheduled_until:
                raise LaunchError(f"the trainer Job ({job.id}) is still SCHEDULING after "
                                  f"{fleet.cfg.schedule_wait_min:g} min: try another --trainer-flavor")  # fmt: skip
            if waits:
                fleet.keep_awake()
            elif detach:
                return 0
            else:
                follower = follower or Follower(fleet)
                follower.show_new_lines()
            fleet.look_after_replicas()
            time.sleep(fleet.place.poll_s)
        follower = follower or Follower(fleet)
        follower.ended.wait(10)  # the last lines may still be on their way
        follower.show_new_lines()
    finally:
        if follower:
            follower.ended.set()
            follower.bar.close()
    if job.status.stage == "COMPLETED":
        return 0
    code = re.search(r"exit code:? (\d+)", job.status.message or "")
    print(f"error: the trainer Job ({job.id}) ended as {job.status.stage}: {job.status.message or 'no reason given'}",
          file=sys.stderr)  # fmt: skip
    return int(code.group(1)) if code else 1


# --- main ------------------------------------------------------------------------------------------------------------


def open_fleet(cfg: Config, local: bool) -> tuple[Fleet, dict]:
    """The fleet of a run, and what the Hub says of the token's owner; exits if it says nothing."""
    if local:
        for name in ("namespace", "network_group"):
            if getattr(cfg, name):
                fail(f"{flag(name)} {getattr(cfg, name)}: is for HF Jobs; leave it out with --local")
        place = dataclasses.replace(LOCAL_PLACE, bucket=str(Path(cfg.bucket).absolute()))
        return Fleet(LocalJobs(cfg.bucket, cfg.run), cfg, place), {}
    api = hub_jobs.open_hub()
    fleet = Fleet(api, cfg, HF_PLACE, {"HF_TOKEN": api.token})
    user = fleet.ask("the Hub does not say whose token this is", api.whoami)
    fleet.cfg = hub_jobs.with_names(cfg, user)
    fleet.volumes = hub_jobs.volumes_of(fleet.cfg)
    return fleet, user


def check_hub(fleet: Fleet, user: dict) -> None:
    """Exit unless Jobs can be run as asked; notes the prices."""
    hub_jobs.check_token(user)
    hardware = fleet.ask("the hardware cannot be listed", fleet.api.list_jobs_hardware)
    fleet.prices = hub_jobs.check_flavors(fleet.cfg, hardware)
    hub_jobs.check_readable(fleet.cfg, fleet.api)


def launch(fleet: Fleet, detach: bool) -> int:
    """Start everything, follow the trainer to its end, and cancel everything whatever happens."""
    code, keep = 1, False
    try:
        if not fleet.place.local:
            fleet.ask("bucket and scripts were not accepted", lambda: hub_jobs.ship_scripts(fleet.cfg, fleet.api, HERE))
        for index in range(fleet.cfg.replicas):
            fleet.start_replica(index)
        fleet.wait_until_healthy()
        fleet.announce()
        fleet.trainer = fleet.submit(trainer_job(fleet.cfg, fleet.place, fleet.attempt, fleet.known_replicas()))
        print(f"trainer: {fleet.jobs[fleet.trainer].url}", flush=True)
        code = follow(fleet, detach)
        keep = detach and code == 0 and fleet.jobs[fleet.trainer].status.stage == "RUNNING"
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nstopping: cancelling all Jobs", file=sys.stderr)
        code = 130
    finally:
        left = [] if keep else cancel_or_say(fleet, attempt=fleet.attempt)
    if keep:
        print(f"left running: see --status, --logs and --stop {fleet.cfg.run}. The trainer Job cancels the replicas at "
              "its end; one that ends early is not replaced")  # fmt: skip
    return code or (1 if left else 0)


def cancel_or_say(fleet: Fleet, **labels: str) -> list[str]:
    """Cancel the run's Jobs with these labels; if that fails or is interrupted, say which are still running."""
    try:
        left = fleet.cancel_all(**labels)
    except (LaunchError, KeyboardInterrupt) as error:
        left = fleet.last_seen_alive()
        print(f"cleaning up did not finish: {error or 'interrupted'}", file=sys.stderr)
    if left:
        print(f"may still be running: {', '.join(left)}; end them with --stop {fleet.cfg.run}", file=sys.stderr)
    return left


def show_status(fleet: Fleet) -> int:
    """Print the Jobs of a run."""
    jobs = fleet.find()
    for job in jobs:
        print(f"{job.id}  {job.labels.get('role', '?'):8} {job.status.stage:11} {job.status.message or ''}  {job.url}")
    if not jobs:
        print(f"no Jobs of run {fleet.cfg.run} are known")
    return 0


def show_logs(fleet: Fleet) -> int:
    """Follow the log of the run's newest trainer Job."""
    jobs = fleet.find(role="trainer")
    if not jobs:
        fail(f"--logs {fleet.cfg.run}: no trainer Job of this run is known")
    newest = max(jobs, key=lambda job: job.created_at)
    for line in fleet.api.fetch_job_logs(job_id=newest.id, follow=True, **fleet.here()):
        print(line, flush=True)
    return 0


def start(fleet: Fleet, user: dict, dry_run: bool, detach: bool) -> int:
    """Check everything, say what will run, and run it."""
    check_reward(fleet.cfg)
    check_tracking(fleet.cfg, fleet.place.local)
    check_local_data(fleet.cfg) if fleet.place.local else check_hub(fleet, user)
    if dry_run:
        print(plan(fleet.cfg, fleet.place, fleet.prices))
        for spec in (replica_job(fleet.cfg, fleet.place, fleet.attempt, 0),
                     trainer_job(fleet.cfg, fleet.place, fleet.attempt, [])):  # fmt: skip
            shown = fleet.whole(spec) | {"secrets": dict.fromkeys(fleet.secrets, "***")}
            print(json.dumps(shown, indent=2, default=vars))
        return 0
    still = fleet.running()
    if still and not fleet.cfg.takeover:
        fail(f"--run {fleet.cfg.run}: its Jobs {', '.join(job.id for job in still)} are running; --stop it first, or "
             "supersede them with --takeover")  # fmt: skip
    if fleet.place.local:
        fleet.cfg = with_toy(check_machine(fleet.cfg))
        check_local_data(fleet.cfg)
    print(plan(fleet.cfg, fleet.place, fleet.prices), flush=True)
    return launch(fleet, detach)


def launch_parser() -> argparse.ArgumentParser:
    """The flags of this script: those of config.py, and its own."""
    parser = make_parser(__doc__)
    parser.add_argument("--local", action="store_true", help="run the Jobs as processes of this machine")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and stop")
    parser.add_argument("--detach", action="store_true", help="leave the Jobs alone as soon as the trainer runs")
    for name, text in (("status", "list the Jobs of RUN"), ("logs", "follow the log of RUN's trainer"),
                       ("stop", "cancel all Jobs of RUN")):  # fmt: skip
        parser.add_argument(f"--{name}", metavar="RUN", help=text)
    return parser


def main() -> int:
    args = launch_parser().parse_args()
    cfg = config_from(args, args.local)
    run = args.status or args.logs or args.stop or cfg.run or f"grpo-{time.strftime('%m%d-%H%M%S')}"
    cfg = dataclasses.replace(cfg, run=run)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup: the run is to outlive the terminal
            signal.signal(number, signal.default_int_handler)  # the same clean-up as Ctrl-C
    try:
        fleet, user = open_fleet(cfg, args.local)
        if args.status:
            return show_status(fleet)
        if args.logs:
            return show_logs(fleet)
        if args.stop:
            if cancel_or_say(fleet):
                return 1
            print(f"no Job of run {run} is running any more")
            return 0
        return start(fleet, user, args.dry_run, args.detach)
    except LaunchError as error:
        fail(str(error))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
