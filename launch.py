"""How the Jobs start, stay up, and stop billing.

    python launch.py --replicas 2                            # on HF Jobs: needs `hf auth login`
    python launch.py --local --replicas 2                    # the same Jobs as local processes: no account, no GPU
    python launch.py --dry-run                               # print the Jobs and what they cost per hour
    python launch.py --replicas 2 --detach                   # leave as soon as the trainer Job runs
    python launch.py --status RUN | --logs RUN | --stop RUN  # from any terminal, any day
    python launch.py --show RUN                              # a few of its newest completions

Everything that can be wrong is checked first (jobs/checks.py). Then N replica Jobs start and, when all are healthy, the
trainer Job, whose log is followed here. Whatever happens, every Job is cancelled at the end; without this machine, by
the trainer Job (jobs/trainer_job.py) or the replicas' dead-man switch (replica.sh). The same --run again resumes the
run. One code path: the calls go to huggingface_hub.HfApi, or to jobs/local.py, which has the same ones.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from config import (
    Config,
    changed_settings,
    config_from,
    demo_settings,
    fail,
    make_parser,
    max_loras,
    served_rank,
    to_flags,
)
from jobs import checks
from jobs.hub import (
    API_ERRORS,
    BUCKET_IN_JOB,
    CODE_IN_JOB,
    clock,
    one_line,
    open_hub,
    patiently,
    say,
    ship_code,
    volumes_of,
)
from jobs.local import TERMINAL, LocalJobs, call_this_machine_directly, with_toy
from jobs.log import TrainerLog, cause_in
from prompts import check_prompts, check_reward

HERE = Path(__file__).resolve().parent
REPLICA_PORT = 8000
TRACKIO = "trackio==0.43.0"  # installed in the trainer Job if --track asks for it


class LaunchError(Exception):
    """The run cannot start or go on: args are why, in one line, and the exit code if it is not 1."""


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
HF_PLACE = Place(False, BUCKET_IN_JOB, CODE_IN_JOB, "python3", 5.0, 300)


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
    # In a network group an alias of its own: the name of a lost replica may still lead to where that one was.
    aliases = {"network_group": cfg.network_group, "network_aliases": [f"replica-{index}-{restart}-{int(attempt):x}"]}
    return {
        "name": f"{cfg.run}-replica-{index}",
        "image": cfg.image,
        "command": ["bash", f"{place.code}/replica.sh"],
        "env": env,
        "flavor": cfg.replica_flavor,
        "timeout": int((cfg.timeout_h + 0.5) * 3600),  # the platform's default is 30 minutes
        "labels": {"run": cfg.run, "role": "replica", "attempt": attempt, "replica": str(index),
                   "restart": str(restart)},
        **(aliases if cfg.network_group else {"expose": [REPLICA_PORT]}),
    }  # fmt: skip


def trainer_job(cfg: Config, place: Place, attempt: str) -> dict:
    """Arguments of run_job for the trainer."""
    flags = to_flags(dataclasses.replace(cfg, bucket=place.bucket))
    command = [place.python, f"{place.code}/jobs/trainer_job.py", *flags]
    env = {"ATTEMPT": attempt, "PYTHONUNBUFFERED": "1", "PYTHONPATH": place.code}
    if place.local:
        env["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    else:
        install = f"{place.python} -m pip install -q -r {place.code}/requirements.txt {TRACKIO if cfg.track else ''}"
        command = ["bash", "-c", f'{install} && cd {place.code} && exec "$@"', "trainer", *command]
        env["PIP_BREAK_SYSTEM_PACKAGES"] = "1"  # the image is the Job's own
    return {
        "name": f"{cfg.run}-trainer",
        "image": cfg.image,
        "command": command,
        "env": env,
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
        here = f"on this machine: 1 trainer, {cfg.replicas} replicas ({cfg.engine}), bucket {cfg.bucket}"
        return f"{run}{here}\n--local brings, unless given: {demo_settings(cfg)}"
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


# --- start, watch, replace, stop -------------------------------------------------------------------------------------


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
    trainer: str = ""  # id of its Job
    log: TrainerLog | None = None
    restarts: int = 0
    jobs: dict[str, Any] = field(default_factory=dict)  # every Job of this launch, as last seen
    since: dict[str, float] = field(default_factory=dict)  # Job -> time.monotonic() at which its stage was new
    submitting: bool = False  # a submission was cut short: its Job may still come to be
    beat_at: float = float("-inf")  # time.monotonic() of the last heartbeat from here

    def ask(self, what: str, call: Callable[[], Any]) -> Any:
        """A call to the Hub, made again while it is busy or broken; LaunchError if it stays so or refuses."""
        try:
            return patiently(self.place.patience_s, f"the Hub to {what}", call)
        except API_ERRORS as error:
            raise LaunchError(f"the Hub did not {what}: {one_line(error)}") from error

    def here(self) -> dict[str, str]:
        """The arguments of every call: Jobs of an organisation are not found under the user."""
        return {"namespace": self.cfg.namespace or None}

    def find(self, **labels: str) -> list[Any]:
        """Jobs of the run with these labels, whoever started them."""
        wanted = {"run": self.cfg.run, **labels}
        return self.ask("list the Jobs", lambda: [*self.api.list_jobs(labels=wanted, **self.here())])

    def spent(self) -> str:
        """What this launch has cost so far, for the end of a line; '' where nothing has a price."""
        return f"  ${cost(list(self.jobs.values()), self.prices):.2f} so far" if self.prices else ""

    def whole(self, spec: dict) -> dict:
        """All arguments of run_job, the secrets too."""
        return {**spec, "secrets": self.secrets, "volumes": self.volumes.get(spec["labels"]["role"], []), **self.here()}

    def submit(self, spec: dict) -> str:
        """Start a Job and return its id; one that a failed call has created all the same is found by its labels."""
        labels = spec["labels"]

        def create() -> Any:
            created = [*self.api.list_jobs(labels=labels, **self.here())]
            return created[0] if created else self.api.run_job(**self.whole(spec))

        self.submitting = True
        job = self.ask(f"accept the {labels['role']} Job", create)
        self.submitting = False
        self.jobs[job.id], self.since[job.id] = job, time.monotonic()
        return job.id

    def start_replica(self, index: int) -> None:
        """Submit the Job of one replica."""
        self.replicas[index] = self.submit(replica_job(self.cfg, self.place, self.attempt, index, self.restarts))
        self.urls.pop(index, None)

    def inspect(self, name: str, job_id: str) -> Any:
        """The Job as the platform sees it; LaunchError if it holds up the start by SCHEDULING for too long."""
        job = self.ask(f"show {name}", lambda: self.api.inspect_job(job_id=job_id, **self.here()))
        if job_id not in self.jobs or self.jobs[job_id].status.stage != job.status.stage:
            self.since[job_id] = time.monotonic()
        self.jobs[job_id] = job
        waits = job.status.stage not in ("RUNNING", *TERMINAL) and self.trainer in ("", job_id)
        if waits and time.monotonic() > self.since[job_id] + 60 * self.cfg.schedule_wait_min:
            raise LaunchError(f"{name} ({job_id}) is still {job.status.stage} after --schedule-wait-min "
                              f"{self.cfg.schedule_wait_min:g}: raise it, or try another flavor")  # fmt: skip
        return job

    def tend(self, index: int) -> None:
        """Note that a replica serves, or replace one whose Job has ended; LaunchError if it cannot be helped."""
        name, job = f"replica {index}", self.inspect(f"replica {index}", self.replicas[index])
        stage, ended = job.status.stage, f"ended ({job.status.message or job.status.stage})"
        if stage == "CANCELED" and self.trainer:  # by hand, or by the trainer Job at its end: somebody wants it gone
            del self.replicas[index]
            self.urls.pop(index, None)
        elif stage in TERMINAL and not self.trainer:
            raise self.failure(name, job, ended)
        elif stage in TERMINAL and self.restarts >= self.cfg.replica_restarts:
            raise self.failure(name, job, f"{ended}, and all {self.restarts} --replica-restarts are used")
        elif stage in TERMINAL:
            self.restarts += 1
            say(f"{name} ({job.id}) {ended}: starting another")
            self.start_replica(index)
        elif stage == "RUNNING" and index not in self.urls:
            self.greet(index, job)

    def greet(self, index: int, job: Any) -> None:
        """Announce a replica that serves: replicas.json in the bucket is the only way to reach the trainer Job."""
        problem = self.sickness(job)
        if not problem:
            self.urls[index] = address(job)
            say(f"replica {index} ({job.id}) {'runs' if self.trainer or self.cfg.network_group else 'serves'}")
            replicas = [{"id": str(i), "url": self.urls[i], "job": self.replicas[i]} for i in sorted(self.urls)]
            document = {"attempt": self.attempt, "replicas": replicas, "restarts": self.restarts}
            self.put("replicas.json", json.dumps(document))
        elif not self.trainer and time.monotonic() > self.since[job.id] + 60 * self.cfg.ready_wait_min:
            late = f"does not serve after --ready-wait-min {self.cfg.ready_wait_min:g}: {problem}"
            raise self.failure(f"replica {index}", job, late)

    def sickness(self, job: Any) -> str:
        """Why a running replica does not serve yet, '' if it does; the token goes to its own URL only."""
        if not address(job):
            return "it has no URL"
        if self.trainer or self.cfg.network_group:
            return ""  # its proxy asks; nothing outside a group can
        headers = {"Authorization": f"Bearer {self.secrets['HF_TOKEN']}"} if self.secrets else {}
        try:
            answer = requests.get(f"{address(job)}/health", headers=headers, timeout=5, allow_redirects=False)
        except requests.RequestException as error:
            return f"/health does not answer ({type(error).__name__})"
        if answer.status_code in (401, 403):
            raise LaunchError(f"{address(job)} refuses the token: it needs read access to the Jobs of "
                              f"{self.cfg.namespace}")  # fmt: skip
        return "" if answer.status_code == 200 else f"/health answers {answer.status_code}"

    def failure(self, name: str, job: Any, problem: str) -> LaunchError:
        """Why the run cannot go on, to be raised: what its log says of the Job's problem; shows where that ends."""
        try:
            log = [*self.api.fetch_job_logs(job_id=job.id, follow=False, tail=100, **self.here())][-100:]
        except API_ERRORS as error:
            log = [f"(no log: {one_line(error)})"]
        if job.id != self.trainer:  # whose log is shown anyway
            say("\n".join(f"  | {line}" for line in log[-15:]))
        say(f"{name} ({job.id}) {problem}")
        code = re.search(r"exit code:? (\d+)", problem) if job.id == self.trainer else None
        own, cause = re.fullmatch(r"error: (.*)", cause_in(log)), f"{name} ({job.id}) {problem}: {cause_in(log)}"
        return LaunchError(own[1] if own else cause, int(code[1]) if code else 1)

    def keep_awake(self) -> None:
        """A heartbeat for replicas that wait for the trainer: without any they stop themselves."""
        if time.monotonic() - self.beat_at > 60 * self.cfg.idle_shutdown_min / 4:
            self.beat_at = time.monotonic()
            self.put(f"attempts/launcher-{self.attempt}.heartbeat", f"{time.time_ns()}\n")

    def put(self, name: str, text: str) -> None:
        """Write a small file into the run's directory in the bucket."""
        add = [(text.encode(), f"{self.cfg.run}/{name}")]
        self.ask(f"write {name} into bucket {self.cfg.bucket}",
                 lambda: self.api.batch_bucket_files(self.cfg.bucket, add=add))  # fmt: skip

    def get(self, name: str) -> str:
        """A small file of the run's directory in the bucket; '' if it is not there."""
        with tempfile.TemporaryDirectory() as directory:
            copy = Path(directory, "copy")
            files = [(f"{self.cfg.run}/{name}", copy)]
            self.ask(f"read {name}", lambda: self.api.download_bucket_files(self.cfg.bucket, files))
            return copy.read_text() if copy.exists() else ""

    def cancel_all(self, **labels: str) -> bool:
        """Cancel the run's Jobs with these labels and wait for their end; if some still run, say which."""
        began, pause_s, asked, why, told = time.monotonic(), self.place.patience_s / 10, dict[str, float](), "", False
        settled_at = began + (pause_s if self.submitting else 0)  # a cut-short submission may make a Job after a look
        left = alive(self.jobs.values())
        with contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < began + 10 * pause_s:
                try:
                    left, why = alive(self.find(**labels)), ""
                except LaunchError as error:  # whatever the Hub says now, it may say something else soon
                    why = f" ({error})"
                if not (left or why) and time.monotonic() >= settled_at:
                    return True
                if not told and time.monotonic() > began + 2:
                    told = not say(f"ending what still runs: it has until {clock(began + 10 * pause_s)}")
                for job_id in left:
                    if time.monotonic() > asked.get(job_id, 0) + pause_s:  # a Job takes a while to end
                        with contextlib.suppress(*API_ERRORS):  # asked again after the next look
                            self.api.cancel_job(job_id=job_id, **self.here())
                            asked[job_id] = time.monotonic()
                time.sleep(self.place.poll_s / 2)
        print(f"may still be running: {', '.join(left)}; end them with --stop {self.cfg.run}{why}", file=sys.stderr)
        return False


def alive(jobs: Iterable[Any]) -> list[str]:
    """Ids of those Jobs that have not ended."""
    return [job.id for job in jobs if job.status.stage not in TERMINAL]


def address(job: Any) -> str:
    """How the proxy reaches a replica; '' if that is not known yet. The trainer Job knows its group's prefix."""
    if job.network:
        return f"http://${{HF_NETWORK_GROUP_PREFIX}}{job.network.aliases[0]}:{REPLICA_PORT}"
    return (job.status.expose_urls or [""])[0].rstrip("/")


# --- one run ---------------------------------------------------------------------------------------------------------


def launch(fleet: Fleet, detach: bool) -> int:
    """Run the Jobs, and cancel all of them at the end whatever happens; the exit code."""
    why, code, keep = "", 1, False
    try:
        run(fleet, detach)
        code, keep = 0, detach
    except LaunchError as error:
        why, code = (*error.args, 1)[:2]
    except KeyboardInterrupt:
        print("\nstopping: cancelling all Jobs", file=sys.stderr)
        code = 130
    finally:
        if fleet.log:
            fleet.log.close(0)
        clean = keep or not (fleet.jobs or fleet.submitting) or fleet.cancel_all(attempt=fleet.attempt)
    if keep:
        say(f"left running: see --status, --logs and --stop {fleet.cfg.run}. The trainer Job cancels the replicas at "
            "its end; one that ends early is not replaced")  # fmt: skip
    if why:
        print(f"error: {why}", file=sys.stderr)  # the cause is the last line
    return code or (0 if clean else 1)


def run(fleet: Fleet, detach: bool) -> None:
    """Start everything, keep the replicas up, and show the trainer's log until it ends or, if `detach`, runs."""
    cfg = fleet.cfg
    if not fleet.place.local:
        fleet.ask("accept bucket and code", lambda: ship_code(cfg, fleet.api, HERE))
    for index in range(cfg.replicas):
        fleet.start_replica(index)
    until = clock(time.monotonic() + 60 * cfg.schedule_wait_min)
    say(f"waiting for the replicas: they are to run by {until} and to serve {cfg.ready_wait_min:g} min later")
    while True:
        for index in list(fleet.replicas):
            fleet.tend(index)
        if not fleet.trainer and fleet.urls.keys() == fleet.replicas.keys():
            fleet.trainer = fleet.submit(trainer_job(cfg, fleet.place, fleet.attempt))
            say(f"trainer: {fleet.jobs[fleet.trainer].url}")
        job = fleet.inspect("the trainer Job", fleet.trainer) if fleet.trainer else None
        if not job or job.status.stage == "SCHEDULING":
            fleet.keep_awake()
        elif detach and job.status.stage == "RUNNING":
            return
        else:
            fleet.log = fleet.log or TrainerLog(fleet)
            if job.status.stage in TERMINAL:
                break
        time.sleep(fleet.place.poll_s)
    fleet.log.close(10)
    if job.status.stage != "COMPLETED":
        raise fleet.failure("the trainer Job", job, f"ended as {job.status.stage}: {job.status.message or 'no reason'}")


def status(fleet: Fleet) -> int:
    """Print the Jobs of a run."""
    for job in (jobs := fleet.find()):
        print(f"{job.id}  {job.labels.get('role', '?'):8} {job.status.stage:11} {job.status.message or ''}  {job.url}")
    if not jobs:
        print(f"no Jobs of run {fleet.cfg.run} are known")
    return 0


def logs(fleet: Fleet) -> int:
    """Follow the log of the run's newest trainer Job."""
    newest = max(fleet.find(role="trainer"), key=lambda job: job.created_at, default=None)
    if not newest:
        fail(f"--logs {fleet.cfg.run}: no trainer Job of this run is known")
    for line in fleet.api.fetch_job_logs(job_id=newest.id, follow=True, **fleet.here()):
        print(line, flush=True)
    return 0


def show(fleet: Fleet) -> int:
    """Print a few completions of the newest step that has kept some."""
    from report.training import show_completions

    rows = [json.loads(line) for line in fleet.get("metrics.jsonl").splitlines()]
    for row in reversed(rows):
        if text := fleet.get(f"completions/step-{row['step']}.jsonl"):
            print(show_completions(text, row["step"]))
            return 0
    fail(f"--show {fleet.cfg.run}: no completions of this run yet; they are kept every --log-completions-every steps")


def stop(fleet: Fleet) -> int:
    """Cancel every Job of a run, whoever started it."""
    if not fleet.cancel_all():
        return 1
    print(f"no Job of run {fleet.cfg.run} is running any more")
    return 0


# --- before anything starts ------------------------------------------------------------------------------------------


def check_resume(fleet: Fleet) -> None:
    """Exit if the run has a checkpoint of a recipe that this one cannot go on from."""
    before = fleet.get("config.json")
    try:
        changed_settings(json.loads(before), fleet.cfg) if before else None
    except ValueError as error:
        fail(str(error))


def open_fleet(cfg: Config, local: bool) -> Fleet:
    """The fleet of a run; on the Hub, under the names that the token's owner may use."""
    if local:
        cfg = dataclasses.replace(cfg, bucket=str(Path(cfg.bucket).absolute()))
        return Fleet(LocalJobs(cfg.bucket, cfg.run), cfg, dataclasses.replace(LOCAL_PLACE, bucket=cfg.bucket))
    api = open_hub()
    fleet = Fleet(api, cfg, HF_PLACE, {"HF_TOKEN": api.token})
    fleet.cfg = checks.with_names(cfg, fleet.ask("say whose token this is", api.whoami))
    fleet.volumes = volumes_of(fleet.cfg)
    return fleet


def start(fleet: Fleet, dry_run: bool, detach: bool) -> int:
    """Check everything, say what will run, and run it."""
    cfg, local = fleet.cfg, fleet.place.local
    check_reward(cfg, None if local else HERE)
    if local:
        if cfg.model != "toy":
            checks.check_model(cfg, None)
        if not dry_run:
            checks.check_machine(cfg)
            cfg = fleet.cfg = with_toy(cfg)
    else:
        fleet.prices = checks.check_flavors(cfg, fleet.ask("list the hardware", fleet.api.list_jobs_hardware))
        checks.check_readable(cfg, fleet.api)
    in_bucket = [name for name in (cfg.model, cfg.dataset) if name.startswith(f"{BUCKET_IN_JOB}/")]  # not looked into
    if not in_bucket and "toy" not in (cfg.model, cfg.dataset):  # the toy is not built in a dry run
        check_prompts(cfg)
    check_resume(fleet)
    print(plan(cfg, fleet.place, fleet.prices), flush=True)
    if dry_run:
        jobs = replica_job(cfg, fleet.place, fleet.attempt, 0), trainer_job(cfg, fleet.place, fleet.attempt)
        for spec in jobs:
            shown = fleet.whole(spec) | {"secrets": dict.fromkeys(fleet.secrets, "***")}
            print(json.dumps(shown, indent=2, default=vars))
        return 0
    still = alive(fleet.find())
    if still and not cfg.takeover:
        fail(f"--run {cfg.run}: its Jobs {', '.join(still)} are running; --stop it first, or supersede them with "
             "--takeover")  # fmt: skip
    return launch(fleet, detach)


def launch_parser() -> argparse.ArgumentParser:
    """The flags of this script: those of config.py, and its own."""
    parser = make_parser(__doc__)
    parser.add_argument("--local", action="store_true", help="run the Jobs as processes of this machine")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and stop")
    parser.add_argument("--detach", action="store_true", help="leave the Jobs alone as soon as the trainer runs")
    for name, text in (("status", "list the Jobs of RUN"), ("logs", "follow the log of RUN's trainer"),
                       ("stop", "cancel all Jobs of RUN"), ("show", "print a few completions of RUN")):  # fmt: skip
        parser.add_argument(f"--{name}", metavar="RUN", help=text)
    return parser


def main() -> int:
    args = launch_parser().parse_args()
    cfg = config_from(args, args.local)
    run = args.status or args.logs or args.stop or args.show or cfg.run or f"grpo-{time.strftime('%m%d-%H%M%S')}"
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup: the run is to outlive the terminal
            signal.signal(number, signal.default_int_handler)  # the same clean-up as Ctrl-C
    call_this_machine_directly()
    try:
        fleet = open_fleet(dataclasses.replace(cfg, run=run), args.local)
        for name, command in (("status", status), ("logs", logs), ("show", show), ("stop", stop)):
            if getattr(args, name):
                return command(fleet)
        return start(fleet, args.dry_run, args.detach)
    except LaunchError as error:
        fail(str(error))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
