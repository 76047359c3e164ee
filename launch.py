"""How the Jobs start, stay up, and stop billing.

    python launch.py --replicas 2                            # on HF Jobs: needs `hf auth login`
    python launch.py --local --replicas 2                    # the same Jobs as local processes: no account, no GPU
    python launch.py --dry-run                               # print the Jobs and what they cost per hour
    python launch.py --status RUN | --logs RUN | --stop RUN  # from any terminal, any day

Everything that can be wrong is checked first. Then N replica Jobs start and, when all are healthy, the trainer Job,
whose log is followed here. Whatever happens, every Job is cancelled at the end. The same --run again resumes the run.
One code path: the calls go to huggingface_hub.HfApi, or to local_jobs.LocalJobs, which has the same ones.
"""

import dataclasses
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import requests
from tqdm import tqdm

from config import Config, config_from, fail, flag, make_parser, max_loras, served_rank, to_flags
from local_jobs import SHARED_CORES, TERMINAL, LocalJobs

HERE = Path(__file__).resolve().parent
REPLICA_PORT = 8000
SCRIPTS_IN_JOB, BUCKET_IN_JOB = "/code", "/lora"


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


LOCAL_PLACE = Place(True, "", str(HERE), sys.executable, 0.3)
HF_PLACE = Place(False, BUCKET_IN_JOB, SCRIPTS_IN_JOB, "python3", 5.0)


# --- what is run -----------------------------------------------------------------------------------------------------


def replica_job(cfg: Config, place: Place, index: int) -> dict:
    """Arguments of run_job for one replica."""
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
    return {
        "image": cfg.image,
        "command": ["bash", f"{place.code}/replica.sh"],
        "env": env,
        "flavor": cfg.replica_flavor,
        "timeout": int((cfg.timeout_h + 0.5) * 3600),  # the platform's default is 30 minutes
        "labels": {"run": cfg.run, "role": "replica", "replica": str(index)},
        "expose": [REPLICA_PORT],
    }


def trainer_job(cfg: Config, place: Place, replicas: list[dict]) -> dict:
    """Arguments of run_job for the trainer. replicas: [{"id", "url", "job"}, ...]."""
    flags = to_flags(dataclasses.replace(cfg, bucket=place.bucket))
    command = [place.python, f"{place.code}/trainer_job.py", *flags]
    if not place.local:
        install = f"pip install -q -r {place.code}/requirements.txt"
        command = ["bash", "-c", f'{install} && cd {place.code} && exec "$@"', "trainer", *command]
    return {
        "image": cfg.image,
        "command": command,
        "env": {"REPLICAS": json.dumps(replicas), "PYTHONUNBUFFERED": "1"},
        "flavor": cfg.trainer_flavor,
        "timeout": int(cfg.timeout_h * 3600),
        "labels": {"run": cfg.run, "role": "trainer"},
    }


def plan(cfg: Config, place: Place, dollars_per_hour: dict[str, float]) -> str:
    """What will run and what it costs, in plain words. dollars_per_hour: flavor -> price; not needed if local."""
    lines = [
        f"run {cfg.run}: {cfg.max_steps} steps of {cfg.batch_size} completions, {cfg.group_size} per prompt; "
        f"LoRA rank {cfg.lora_rank} on {cfg.model}; prompts of {cfg.dataset}"
    ]
    if place.local:
        return "\n".join(
            [*lines, f"on this machine: 1 trainer, {cfg.replicas} replicas ({cfg.engine}), bucket {cfg.bucket}"]
        )
    trainer, replica = dollars_per_hour[cfg.trainer_flavor], dollars_per_hour[cfg.replica_flavor]
    total = trainer + cfg.replicas * replica
    return "\n".join(
        [
            *lines,
            f"Jobs: 1 trainer on {cfg.trainer_flavor} (${trainer:.2f}/h), {cfg.replicas} replicas on "
            f"{cfg.replica_flavor} (${replica:.2f}/h each), bucket {cfg.bucket}",
            f"${total:.2f} per hour, ${total * cfg.timeout_h:.2f} at most (--timeout-h {cfg.timeout_h:g})",
        ]
    )


# --- checks that cost nothing ----------------------------------------------------------------------------------------


def first_row(path: Path) -> dict:
    """The first row of a local .jsonl or .parquet file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return next(pyarrow.parquet.ParquetFile(path).iter_batches(1)).to_pylist()[0]
    with open(path) as file:
        return json.loads(file.readline())


def check_data(cfg: Config) -> None:
    """Exit unless model and dataset are there and have what is needed; only local ones can be looked into."""
    if is_path(cfg.model) and not Path(cfg.model, "config.json").exists():
        fail(f"--model {cfg.model}: no config.json there; give a model directory or a Hub name")
    if Path(cfg.model, "config.json").exists():
        context = json.loads(Path(cfg.model, "config.json").read_text()).get(
            "max_position_embeddings", cfg.max_model_len
        )
        if context < cfg.max_model_len:
            fail(
                f"--max-model-len {cfg.max_model_len}: {cfg.model} has a context of {context} tokens; use that or less"
            )
    path = Path(cfg.dataset)
    if not is_path(cfg.dataset) and path.suffix not in (".jsonl", ".json", ".parquet"):
        return
    try:
        row = first_row(path)
    except (OSError, ValueError, StopIteration) as error:
        fail(f"--dataset {cfg.dataset}: cannot be read as JSON lines or Parquet: {error}")
    for name in ("prompt_column", "answer_column"):
        column = getattr(cfg, name).split(".")[0]
        if column not in row:
            fail(f"{flag(name)} {getattr(cfg, name)}: {cfg.dataset} has the columns {', '.join(row)}")


def is_path(name: str) -> bool:
    """Whether a model or dataset is meant as a path: Hub names have at most one slash and do not begin with . or ~."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_dir()


def check_reward(cfg: Config) -> None:
    """Exit unless every --reward function can be imported."""
    from rewards import load_rewards

    try:
        load_rewards(cfg.reward)
    except ValueError as error:
        fail(f"--reward {cfg.reward}: {error}")


def check_machine(cfg: Config) -> Config:
    """Exit unless port and bucket directory of a local run can be used; --port 0 becomes a free one."""
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
    return dataclasses.replace(
        cfg,
        model=directory if cfg.model == "toy" else cfg.model,
        dataset=f"{directory}/train.jsonl" if cfg.dataset == "toy" else cfg.dataset,
    )


# --- Jobs of one run -------------------------------------------------------------------------------------------------


@dataclass
class Fleet:
    """The Jobs of one run and the calls that start, watch and cancel them."""

    api: object  # HfApi or LocalJobs
    cfg: Config
    place: Place
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    volumes: dict[str, list] = field(default_factory=dict)  # role -> volumes
    namespace: str | None = None
    replicas: dict[int, str] = field(default_factory=dict)  # index -> id of the Job that serves now
    urls: dict[int, str] = field(default_factory=dict)
    trainer: str = ""
    restarts: int = 0

    def submit(self, spec: dict) -> str:
        """Start a Job and return its id; one that a failed call has created all the same is found by its label."""
        spec = {**spec, "labels": {**spec["labels"], "submission": f"{time.time_ns():x}"}}
        spec |= {"secrets": self.secrets, "volumes": self.volumes.get(spec["labels"]["role"], [])}
        for attempt in range(5):
            try:
                return self.api.run_job(**spec, namespace=self.namespace).id
            except Exception as error:
                created = list(self.api.list_jobs(labels=spec["labels"], namespace=self.namespace))
                if created:
                    return created[0].id
                wait_s = retry_after_s(error, attempt)
                if wait_s is None or attempt == 4:
                    raise LaunchError(f"{spec['labels']['role']} Job was not accepted: {error}") from error
                time.sleep(wait_s)
        raise AssertionError("unreachable")

    def inspect(self, job_id: str) -> SimpleNamespace:
        """The Job as the platform sees it."""
        return self.api.inspect_job(job_id=job_id, namespace=self.namespace)

    def start_replica(self, index: int) -> None:
        """Submit the Job of one replica."""
        self.replicas[index] = self.submit(replica_job(self.cfg, self.place, index))
        self.urls.pop(index, None)

    def wait_until_healthy(self) -> None:
        """Wait for every replica's /health; LaunchError with its last log lines if one ends or takes too long."""
        scheduled_until = time.monotonic() + 60 * self.cfg.schedule_wait_min
        healthy_until = dict.fromkeys(self.replicas, 0.0)
        waiting = set(self.replicas)
        while waiting:
            for index in sorted(waiting):
                job = self.inspect(self.replicas[index])
                if job.status.stage in TERMINAL:
                    raise LaunchError(f"replica {index} ({job.id}) ended: {job.status.message}\n{self.tail(job.id)}")
                if job.status.stage != "RUNNING":
                    if time.monotonic() > scheduled_until:
                        raise LaunchError(f"replica {index} ({job.id}) is still {job.status.stage}: try another "
                                          f"--replica-flavor or raise --schedule-wait-min")  # fmt: skip
                    continue
                healthy_until[index] = healthy_until[index] or time.monotonic() + 60 * self.cfg.ready_wait_min
                if self.is_healthy(job):
                    self.urls[index] = job.status.expose_urls[0].rstrip("/")
                    waiting.discard(index)
                    print(f"replica {index} is healthy ({job.id})", flush=True)
                elif time.monotonic() > healthy_until[index]:
                    raise LaunchError(f"replica {index} ({job.id}) is not healthy after {self.cfg.ready_wait_min:g} min"
                                      f"\n{self.tail(job.id)}")  # fmt: skip
            time.sleep(self.place.poll_s if waiting else 0)

    def is_healthy(self, job: SimpleNamespace) -> bool:
        """Whether the replica answers /health with 200; the token goes to its own URL only."""
        headers = {"Authorization": f"Bearer {self.secrets['HF_TOKEN']}"} if self.secrets else {}
        url = (job.status.expose_urls or [""])[0].rstrip("/")
        try:
            answer = requests.get(f"{url}/health", headers=headers, timeout=5, allow_redirects=False)
        except requests.RequestException:
            return False
        if answer.status_code in (401, 403):
            raise LaunchError(f"replica at {url} refuses the token: it needs read access to the Job's namespace")
        return answer.status_code == 200

    def tail(self, job_id: str, num_lines: int = 15) -> str:
        """The last lines of a Job's log."""
        try:
            lines = list(self.api.fetch_job_logs(job_id=job_id, follow=False, namespace=self.namespace))
        except Exception as error:
            return f"(no log: {error})"
        return "\n".join(f"  | {line}" for line in lines[-num_lines:])

    def known_replicas(self) -> list[dict]:
        """What the proxy is told: id, URL and Job of every replica that has a URL."""
        return [{"id": str(i), "url": self.urls[i], "job": self.replicas[i]} for i in sorted(self.urls)]

    def replace_ended(self) -> None:
        """Start a new Job for every replica whose Job has ended, and tell the trainer Job through the bucket."""
        for index, job_id in list(self.replicas.items()):
            job = self.inspect(job_id)
            if job.status.stage in TERMINAL:
                if self.restarts >= self.cfg.replica_restarts:
                    raise LaunchError(f"replica {index} ({job_id}) ended ({job.status.message}) and all "
                                      f"{self.restarts} --replica-restarts are used\n{self.tail(job_id)}")  # fmt: skip
                self.restarts += 1
                tqdm.write(f"replica {index} ({job_id}) ended ({job.status.message}): starting another")
                self.start_replica(index)
            elif index not in self.urls and job.status.stage == "RUNNING" and job.status.expose_urls:
                self.urls[index] = job.status.expose_urls[0].rstrip("/")
                self.announce()

    def announce(self) -> None:
        """Write replicas.json into the bucket: the only way to reach the trainer Job from outside."""
        document = {"replicas": self.known_replicas(), "restarts": self.restarts}
        files = [(json.dumps(document).encode(), f"{self.cfg.run}/replicas.json")]
        self.api.batch_bucket_files(self.cfg.bucket, add=files)

    def running(self) -> list[SimpleNamespace]:
        """Jobs of this run that have not ended, whoever started them."""
        jobs = self.api.list_jobs(labels={"run": self.cfg.run}, namespace=self.namespace)
        return [job for job in jobs if job.status.stage not in TERMINAL]

    def cancel_all(self) -> list[str]:
        """Cancel every Job of the run that has not ended, the replicas too; returns what could not be cancelled."""
        for attempt in range(3):
            left = self.running()
            threads = [threading.Thread(target=self._cancel, args=(job.id,)) for job in left]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            if not left:
                return []
            time.sleep(attempt)
        return [job.id for job in self.running()]

    def _cancel(self, job_id: str) -> None:
        try:
            self.api.cancel_job(job_id=job_id, namespace=self.namespace)
        except Exception as error:
            print(f"could not cancel {job_id}: {error}", flush=True)


def retry_after_s(error: Exception, attempt: int) -> float | None:
    """Seconds to wait before a call is tried again: 429 says so, 5xx and broken connections back off; else None."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status == 429:
        return float(response.headers.get("Retry-After", 2**attempt))
    broken = status is None and isinstance(error, OSError)
    return 2.0**attempt if broken or (status or 0) >= 500 else None


# --- follow ----------------------------------------------------------------------------------------------------------

STEP = re.compile(r"step (\d+)/(\d+)  (.*)")  # what trainer.py prints after every step


class Follower:
    """Reads the trainer's log in a thread and shows it: a progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, fleet: Fleet):
        self.fleet, self.lines, self.ended = fleet, queue.Queue(), threading.Event()
        self.bar = tqdm(total=fleet.cfg.max_steps, unit="step", disable=None, dynamic_ncols=True)
        threading.Thread(target=self._read, daemon=True).start()

    def show_new_lines(self) -> None:
        """Show what has come since the last call."""
        while not self.lines.empty():
            line = self.lines.get()
            step = STEP.match(line)
            if step and not self.bar.disable:
                self.bar.n = int(step.group(1))
                self.bar.set_postfix_str(step.group(3))
            elif not line.startswith("proxy:"):
                tqdm.write(line)

    def _read(self) -> None:
        """A log stream that ends is not a Job that ended: read on, past what was seen, until it has."""
        seen = 0
        while not self.ended.is_set():
            try:
                fleet = self.fleet
                logs = fleet.api.fetch_job_logs(job_id=fleet.trainer, follow=True, namespace=fleet.namespace)
                for number, line in enumerate(logs):
                    if number >= seen:
                        self.lines.put(line)
                        seen = number + 1
                if fleet.inspect(fleet.trainer).status.stage in TERMINAL:
                    self.ended.set()
            except Exception as error:
                self.lines.put(f"(log stream broke, reading on: {error})")
                self.ended.wait(5)


def follow(fleet: Fleet) -> int:
    """Show the trainer's log and keep the replicas up until it ends; its exit code (1 if the platform does not say)."""
    follower = Follower(fleet)
    scheduled_until = time.monotonic() + 60 * fleet.cfg.schedule_wait_min
    try:
        while True:
            follower.show_new_lines()
            job = fleet.inspect(fleet.trainer)
            if job.status.stage in TERMINAL:
                follower.ended.wait(10)  # the last lines may still be on their way
                follower.show_new_lines()
                break
            if job.status.stage == "SCHEDULING" and time.monotonic() > scheduled_until:
                raise LaunchError(f"the trainer Job ({job.id}) is still SCHEDULING: try another --trainer-flavor")
            fleet.replace_ended()
            time.sleep(fleet.place.poll_s)
    finally:
        follower.ended.set()
        follower.bar.close()
    if job.status.stage == "COMPLETED":
        return 0
    code = re.search(r"exit code:? (\d+)", job.status.message or "")
    print(f"the trainer Job ({job.id}) ended as {job.status.stage}: {job.status.message or 'no reason given'}")
    return int(code.group(1)) if code else 1


# --- main ------------------------------------------------------------------------------------------------------------


def hub(cfg: Config) -> tuple[Fleet, dict[str, float]]:
    """A fleet on HF Jobs, and dollars per hour by flavor; exits where token or flavors are not what is needed."""
    from huggingface_hub import HfApi, Volume, get_token

    token = get_token()
    if not token:
        fail("no Hugging Face token: run `hf auth login` or set HF_TOKEN; without an account: launch.py --local")
    api = HfApi(token=token)
    try:
        namespace = cfg.namespace or api.whoami()["name"]
        prices = {h.name: h.unit_cost_usd * {"minute": 60, "hour": 1, "second": 3600}[h.unit_label]
                  for h in api.list_jobs_hardware()}  # fmt: skip
    except Exception as error:
        fail(f"the Hub does not accept the token: {error}; run `hf auth login`")
    for name in ("trainer_flavor", "replica_flavor"):
        if getattr(cfg, name) not in prices:
            fail(f"{flag(name)} {getattr(cfg, name)}: choose from {', '.join(prices)}")
    bucket = cfg.bucket if "/" in cfg.bucket else f"{namespace}/{cfg.bucket}"
    cfg = dataclasses.replace(cfg, namespace=namespace, bucket=bucket)
    mount = {"type": "bucket", "source": bucket, "mount_path": BUCKET_IN_JOB}
    volumes = {"trainer": [Volume(**mount)], "replica": [Volume(**mount, read_only=True)]}
    return Fleet(api, cfg, HF_PLACE, {"HF_TOKEN": token}, volumes, namespace), prices


def ship_scripts(fleet: Fleet) -> None:
    """Create the bucket and copy the scripts to where Jobs mount them."""
    if fleet.place.local:
        return
    fleet.api.create_bucket(fleet.cfg.bucket, private=True, exist_ok=True)
    code = fleet.api.sync_job_volume(str(HERE), SCRIPTS_IN_JOB, namespace=fleet.namespace)
    for volumes in fleet.volumes.values():
        volumes.append(code)


def launch(fleet: Fleet) -> int:
    """Start everything, follow the trainer to its end, and cancel everything whatever happens."""
    code = 1
    try:
        ship_scripts(fleet)
        for index in range(fleet.cfg.replicas):
            fleet.start_replica(index)
        fleet.wait_until_healthy()
        fleet.announce()
        fleet.trainer = fleet.submit(trainer_job(fleet.cfg, fleet.place, fleet.known_replicas()))
        code = follow(fleet)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nstopping: cancelling all Jobs", file=sys.stderr)
        code = 130
    finally:
        left = cancel_or_say(fleet)
    return code or bool(left)


def cancel_or_say(fleet: Fleet) -> list[str]:
    """Cancel every Job; if that fails or is interrupted, say which are still running."""
    try:
        left = fleet.cancel_all()
    except BaseException as error:
        left = [*fleet.replicas.values(), *([fleet.trainer] if fleet.trainer else [])]
        print(f"cleaning up was interrupted: {type(error).__name__}", file=sys.stderr)
    if left:
        print(f"still running: {', '.join(left)}; end them with --stop {fleet.cfg.run}", file=sys.stderr)
    return left


def show_status(fleet: Fleet) -> int:
    """Print the Jobs of a run."""
    jobs = list(fleet.api.list_jobs(labels={"run": fleet.cfg.run}, namespace=fleet.namespace))
    for job in jobs:
        print(f"{job.id}  {job.labels.get('role', '?'):8} {job.status.stage:11} {job.status.message or ''}")
    if not jobs:
        print(f"no Jobs of run {fleet.cfg.run} are known")
    return 0


def show_logs(fleet: Fleet) -> int:
    """Follow the log of the run's newest trainer Job."""
    jobs = list(fleet.api.list_jobs(labels={"run": fleet.cfg.run, "role": "trainer"}, namespace=fleet.namespace))
    if not jobs:
        fail(f"--logs {fleet.cfg.run}: no trainer Job of this run is known")
    for line in fleet.api.fetch_job_logs(job_id=jobs[-1].id, follow=True, namespace=fleet.namespace):
        print(line, flush=True)
    return 0


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--local", action="store_true", help="run the Jobs as processes of this machine")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and stop")
    for name, text in (("status", "list the Jobs of RUN"), ("logs", "follow the log of RUN's trainer"),
                       ("stop", "cancel all Jobs of RUN")):  # fmt: skip
        parser.add_argument(f"--{name}", metavar="RUN", help=text)
    args = parser.parse_args()
    cfg = config_from(args, args.local)
    run = args.status or args.logs or args.stop or cfg.run or f"grpo-{time.strftime('%m%d-%H%M%S')}"
    cfg = dataclasses.replace(cfg, run=run)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # the same clean-up as Ctrl-C
    if args.local:
        place = dataclasses.replace(LOCAL_PLACE, bucket=str(Path(cfg.bucket).absolute()))
        fleet, prices = Fleet(LocalJobs(cfg.bucket, run), cfg, place), {}
    else:
        fleet, prices = hub(cfg)
    if args.status:
        return show_status(fleet)
    if args.logs:
        return show_logs(fleet)
    if args.stop:
        return len(cancel_or_say(fleet))
    return start(fleet, prices, args.dry_run)


def start(fleet: Fleet, prices: dict[str, float], dry_run: bool) -> int:
    """Check everything, say what will run, and run it."""
    check_reward(fleet.cfg)
    check_data(fleet.cfg)
    if dry_run:
        print(plan(fleet.cfg, fleet.place, prices))
        for spec in (replica_job(fleet.cfg, fleet.place, 0), trainer_job(fleet.cfg, fleet.place, [])):
            print(json.dumps({**spec, "secrets": dict.fromkeys(fleet.secrets, "***")}, indent=2))
        return 0
    still = fleet.running()
    if still:
        fail(f"--run {fleet.cfg.run}: its Jobs {', '.join(job.id for job in still)} are running; --stop it first")
    if fleet.place.local:
        fleet.cfg = with_toy(check_machine(fleet.cfg))
        check_data(fleet.cfg)
    print(plan(fleet.cfg, fleet.place, prices), flush=True)
    return launch(fleet)


if __name__ == "__main__":
    sys.exit(main())
