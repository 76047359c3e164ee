"""What stands in for huggingface_hub.HfApi on one machine: Jobs are processes, the bucket is a directory.

It has the calls that launch.py makes, with the same arguments and answers, so launch.py has one code path. A Job is a
process group of its own: Ctrl-C reaches only the launcher, and cancelling a Job ends all of its processes.
"""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import psutil

TERMINAL = ("COMPLETED", "CANCELED", "ERROR", "DELETED")  # as on HF Jobs
SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}  # Jobs share few cores here: a thread that waits must not spin


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
        urls = []
        if expose:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                env = {**env, "PORT": str(probe.getsockname()[1])}
            urls = [f"http://127.0.0.1:{env['PORT']}"]
        # bash keeps the exit code for whoever asks later; the trap lets it outlive the SIGTERM that ends the command
        wrapper = ["bash", "-c", 'trap : TERM INT; "$@"; echo $? > "$0"', str(self.directory / f"{job_id}.exit")]
        with open(self.directory / f"{job_id}.log", "wb") as log:
            process = subprocess.Popen(
                [*wrapper, *command], env={**os.environ, **SHARED_CORES, **env, **secrets}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        started = psutil.Process(process.pid).create_time()
        document = {"pid": process.pid, "started": started, "labels": labels, "urls": urls}
        (self.directory / f"{job_id}.json").write_text(json.dumps(document))
        return self.inspect_job(job_id=job_id)

    def inspect_job(self, *, job_id: str, **_) -> SimpleNamespace:
        """Stage and URLs of a Job; time and hardware cost nothing here."""
        document = json.loads((self.directory / f"{job_id}.json").read_text())
        stage, message = self._stage(job_id, document)
        status = SimpleNamespace(stage=stage, message=message, expose_urls=document["urls"])
        return SimpleNamespace(
            id=job_id, labels=document["labels"], status=status, url=str(self.log_of(job_id)), flavor=None,
            created_at=document["started"], durations=None, network=None,
        )  # fmt: skip

    def cancel_job(self, *, job_id: str, grace_s: float = 6.0, **_) -> None:
        """SIGTERM to every process of the Job, SIGKILL to what is left after grace_s."""
        document = json.loads((self.directory / f"{job_id}.json").read_text())
        (self.directory / f"{job_id}.canceled").touch()
        for sig, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 3.0)):
            processes = self._processes(document)
            if processes:
                os.killpg(document["pid"], sig)
            psutil.wait_procs(processes, timeout=wait_s)

    def fetch_job_logs(self, *, job_id: str, follow: bool = False, **_) -> Iterable[str]:
        """Lines of the Job's log, until it has ended if `follow`."""
        with open(self.log_of(job_id), errors="replace") as log:
            part = ""
            while True:
                ended = self.inspect_job(job_id=job_id).status.stage in TERMINAL  # looked at before the last read
                for line in log:
                    part += line
                    if part.endswith("\n"):
                        yield part.rstrip("\n")
                        part = ""
                if ended or not follow:
                    if part:
                        yield part
                    return
                time.sleep(0.1)

    def list_jobs(self, *, labels: dict[str, str], **_) -> list[SimpleNamespace]:
        """Jobs that carry these labels."""
        jobs = [self.inspect_job(job_id=path.stem) for path in sorted(self.directory.glob("*.json"))]
        return [job for job in jobs if labels.items() <= job.labels.items()]

    def batch_bucket_files(self, bucket_id: str, *, add: list[tuple[bytes, str]], **_) -> None:
        """Write small files into the bucket."""
        for data, name in add:
            (self.bucket / name).parent.mkdir(parents=True, exist_ok=True)
            (self.bucket / name).write_bytes(data)

    def log_of(self, job_id: str) -> Path:
        """The file with the Job's output."""
        return self.directory / f"{job_id}.log"

    def _processes(self, document: dict) -> list[psutil.Process]:
        """What lives of the Job's process group; processes that reuse its number are older or not of the group."""
        alive = []
        for pid in psutil.pids():
            try:
                process = psutil.Process(pid) if os.getpgid(pid) == document["pid"] else None
                if process and process.status() != psutil.STATUS_ZOMBIE:
                    alive += [process] if process.create_time() >= document["started"] else []
            except (ProcessLookupError, psutil.NoSuchProcess):
                pass
        return alive

    def _stage(self, job_id: str, document: dict) -> tuple[str, str]:
        exit_file = self.directory / f"{job_id}.exit"
        alive = self._processes(document)
        code = exit_file.read_text().strip() if exit_file.exists() else ""
        if alive and not code:
            return "RUNNING", ""
        if (self.directory / f"{job_id}.canceled").exists():
            return "CANCELED", "canceled"
        return ("COMPLETED" if code == "0" else "ERROR"), f"exit code {code or 'unknown'}"
