"""What stands in for huggingface_hub.HfApi on one machine: Jobs are processes, the bucket is a directory.

It has the calls that launch.py makes, with the same arguments and answers, so launch.py has one code path. A Job is a
process group of its own: Ctrl-C reaches only the launcher, and cancelling a Job ends all of its processes.
"""

import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import psutil

from config import Config, fail

TERMINAL = ("COMPLETED", "CANCELED", "ERROR", "DELETED")  # as on HF Jobs
SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}  # Jobs share few cores here: a thread that waits must not spin
GRACE_S = 6  # a cancelled Job has this long to end
# bash keeps the exit code for whoever asks later, and ends what the command leaves behind.
WRAPPER = 'trap : TERM INT; "$@"; echo $? > "$0"; kill -KILL 0'


def is_taken(port: int) -> bool:
    """Whether something listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A port that nobody listens on, and none of those that the system gives to connections meanwhile."""
    while is_taken(port := random.SystemRandom().randrange(20_000, 32_000)):
        pass
    return port


def call_this_machine_directly() -> None:
    """From now on HTTP_PROXY is not for this machine, in this process and those that it starts."""
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))


def with_toy(cfg: Config) -> Config:
    """The configuration with `toy` replaced by the directory of the toy model, built if it is not there yet."""
    if "toy" not in (cfg.model, cfg.dataset):
        return cfg
    print("looking for the toy model; to build it, once, takes a minute", flush=True)
    code = "from offline import toy; print(toy.cached_model())"  # in a process of its own: the launcher loads no torch
    env, here = {**os.environ, **SHARED_CORES}, Path(__file__).resolve().parent.parent
    built = subprocess.run([sys.executable, "-c", code], cwd=here, env=env, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        fail("the toy model could not be built: see above")
    directory = built.stdout.strip().splitlines()[-1]
    toy = {"model": directory, "dataset": f"{directory}/train.jsonl"}
    return dataclasses.replace(cfg, **{name: path for name, path in toy.items() if getattr(cfg, name) == "toy"})


class LocalJobs:
    """Jobs of one run. What is known of a Job lies in <run>/jobs/<id>.json, its exit code in <id>.exit, its output in
    <id>.log, so any process can inspect, follow and cancel it.
    """

    def __init__(self, bucket: str, run: str):
        self.bucket, self.directory = Path(bucket), Path(bucket, run, "jobs")

    def run_job(self, *, command, env, labels, secrets, expose=(), **platform) -> SimpleNamespace:
        """Start a Job; an exposed port becomes a free one of this machine. `platform`: image, flavor and the like."""
        self.directory.mkdir(parents=True, exist_ok=True)
        job_id = f"{labels['role']}{labels.get('replica', '')}-{time.time_ns() // 1_000_000:x}"
        command = ["bash", "-c", WRAPPER, str(self.directory / f"{job_id}.exit"), *command]
        env = {**os.environ, **SHARED_CORES, **env, **secrets, **({"PORT": str(free_port())} if expose else {})}
        with open(self.log_of(job_id), "wb") as log:
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log,
                                       stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        started = psutil.Process(process.pid).create_time()
        urls = [f"http://127.0.0.1:{env['PORT']}"] if expose else []
        document = {"pid": process.pid, "started": started, "labels": labels, "urls": urls}
        (self.directory / f"{job_id}.json").write_text(json.dumps(document))
        return self.inspect_job(job_id=job_id)

    def inspect_job(self, *, job_id: str, **_) -> SimpleNamespace:
        """Stage and URLs of a Job; time and hardware cost nothing here."""
        document = json.loads((self.directory / f"{job_id}.json").read_text())
        stage, message = self._stage(job_id, document)
        return SimpleNamespace(
            id=job_id, labels=document["labels"], url=str(self.log_of(job_id)), created_at=document["started"],
            status=SimpleNamespace(stage=stage, message=message, expose_urls=document["urls"]),
            flavor=None, durations=None, network=None,
        )  # fmt: skip

    def _stage(self, job_id: str, document: dict) -> tuple[str, str]:
        try:
            wrapper = psutil.Process(document["pid"])  # a process that reuses its number is younger
            if wrapper.status() != psutil.STATUS_ZOMBIE and wrapper.create_time() < document["started"] + 1:
                return "RUNNING", ""
        except psutil.NoSuchProcess:
            pass
        if (self.directory / f"{job_id}.canceled").exists():
            return "CANCELED", "canceled"
        exit_file = self.directory / f"{job_id}.exit"
        code = exit_file.read_text().strip() if exit_file.exists() else "unknown"
        return ("COMPLETED" if code == "0" else "ERROR"), f"exit code {code}"

    def cancel_job(self, *, job_id: str, **_) -> None:
        """SIGTERM to every process of the Job; asked again after GRACE_S, SIGKILL to what is left."""
        document = json.loads((self.directory / f"{job_id}.json").read_text())
        mark = self.directory / f"{job_id}.canceled"
        number = signal.SIGKILL if mark.exists() else signal.SIGTERM
        if mark.exists() and time.time() - mark.stat().st_mtime < GRACE_S:
            return
        if self._stage(job_id, document)[0] == "RUNNING":
            mark.touch()
            os.killpg(document["pid"], number)

    def fetch_job_logs(self, *, job_id: str, follow: bool = False, **_) -> Iterable[str]:
        """Lines of the Job's log, and, if `follow`, those to come until it has ended."""
        with open(self.log_of(job_id), errors="replace") as log:
            part, ended = "", False
            while not ended:
                ended = not follow or self.inspect_job(job_id=job_id).status.stage in TERMINAL  # before the last read
                *lines, part = (part + log.read()).split("\n")
                yield from lines
                time.sleep(0 if ended else 0.1)
            yield from [part] if part else []

    def list_jobs(self, *, labels: dict[str, str], **_) -> list[SimpleNamespace]:
        """Jobs that carry these labels."""
        jobs = [self.inspect_job(job_id=path.stem) for path in sorted(self.directory.glob("*.json"))]
        return [job for job in jobs if labels.items() <= job.labels.items()]

    def download_bucket_files(self, bucket_id: str, files: list[tuple[str, Path]], **_) -> None:
        """Copy files of the bucket to where they are wanted; those that are not there are left out."""
        for name, copy in files:
            if (self.bucket / name).exists():
                shutil.copy(self.bucket / name, copy)

    def batch_bucket_files(self, bucket_id: str, *, add: list[tuple[bytes, str]], **_) -> None:
        """Write small files into the bucket."""
        for data, name in add:
            (self.bucket / name).parent.mkdir(parents=True, exist_ok=True)
            (self.bucket / name).write_bytes(data)

    def log_of(self, job_id: str) -> Path:
        """The file with the Job's output."""
        return self.directory / f"{job_id}.log"
