"""How an adapter gets to the replicas safely: the lease on a run, publish, retire, checkpoints.

A bucket mount is eventually consistent, has no locks, shows a file only after close() and may lack rename, truncate and
chmod. So safety comes from names: every path a trainer writes carries its attempt (the start time in milliseconds),
nothing is written twice, and the file that makes a directory usable is written last.

    <bucket>/<run>/attempts/<attempt>.json           who claims this run; written once
                   attempts/<attempt>.heartbeat      rewritten by its owner only: "<count> claiming|running|released"
                   adapters/<run>-a<attempt>-v<version>/   adapter_model.safetensors, then adapter_config.json
                   checkpoints/step-<step>-a<attempt>/     the trainer's state, then `complete`

Who is alive is decided by watching heartbeats change, never by comparing clocks of two machines.
"""

import hashlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import requests
import safetensors.numpy

from config import Config

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
COMPLETE = "complete"


class Policy(NamedTuple):
    """A published adapter: requests name it, rollouts remember its version."""

    version: int
    name: str


class LeaseError(Exception):
    """Another trainer owns this run."""


class PublishError(Exception):
    """An adapter did not become live; the old policy stays in service."""


# --- names -----------------------------------------------------------------------------------------------------------


def policy_name(run: str, attempt: int, version: int) -> str:
    """The adapter's name, unique over all attempts of all runs."""
    return f"{run}-a{attempt}-v{version}"


def attempt_of(name: str) -> int | None:
    """The attempt in the name of a policy or of a checkpoint directory; None if there is none."""
    match = re.search(r"-a(\d+)(-v\d+)?$", name)
    return int(match.group(1)) if match else None


def checkpoint_key(name: str) -> tuple[int, int] | None:
    """Order of checkpoints, (attempt, step): a newer attempt continued from what it found. None for other names."""
    match = re.fullmatch(r"step-(\d+)-a(\d+)", name)
    return (int(match.group(2)), int(match.group(1))) if match else None


# --- files on a mount ------------------------------------------------------------------------------------------------


def write_files(directory: Path, files: dict[str, bytes]) -> None:
    """Write new files in this order, each closed and read back before the next; raises if the directory has any."""
    if directory.exists() and any(directory.iterdir()):
        raise PublishError(f"{directory} is not empty: a published directory is never written twice")
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        write_file(directory / name, data)
        if hashlib.sha256((directory / name).read_bytes()).digest() != hashlib.sha256(data).digest():
            raise PublishError(f"{directory / name} reads back differently from what was written: check the bucket")


def write_file(path: Path, data: bytes) -> None:
    """Write and close one file: no rename, no truncate of a longer one by hand, no chmod."""
    with open(path, "wb") as file:
        file.write(data)


def delete_directory(directory: Path, first: str) -> None:
    """Delete a flat directory, the file that makes it usable first; what is already gone is fine."""
    names = sorted((p.name for p in directory.iterdir()), key=lambda n: n != first) if directory.exists() else []
    for name in names:
        (directory / name).unlink(missing_ok=True)
    if directory.exists():
        directory.rmdir()


def read_text(path: Path) -> str:
    """The content of a small file that may be missing or half visible on this mount; '' then."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def with_deadline(action: Callable, timeout_s: float, what: str):
    """Run `action` in a thread and return its result; PublishError if it hangs, as a close() on a mount can."""
    outcome = {}

    def run() -> None:
        try:
            outcome["value"] = action()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise PublishError(f"{what} did not finish within {timeout_s:g} s: the bucket mount hangs")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


# --- the lease -------------------------------------------------------------------------------------------------------


def heartbeat_state(text: str) -> str:
    """claiming, running or released; '' when there is nothing to read yet."""
    words = text.split()
    return words[1] if len(words) == 2 else ""


def superseding(attempt: int, heartbeats: dict[int, str]) -> int | None:
    """The newer attempt that trains this run now, if there is one. heartbeats: attempt -> file content."""
    newer = [other for other, text in heartbeats.items() if other > attempt and heartbeat_state(text) == "running"]
    return max(newer, default=None)


def still_alive(before: dict[int, str], after: dict[int, str]) -> list[int]:
    """Attempts whose heartbeat changed between two looks and was not released."""
    return sorted(a for a, text in after.items() if text != before.get(a) and heartbeat_state(text) != "released")


@dataclass
class Lease:
    """One attempt's hold on a run: its heartbeat, and whether a newer attempt has taken over."""

    directory: Path  # <bucket>/<run>/attempts
    attempt: int
    heartbeat_s: float
    state: str = "claiming"
    superseded_by: int | None = None
    count: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Beat until release()."""
        self.beat()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def beat(self, state: str = "") -> None:
        """Rewrite the heartbeat, in a new state if one is given."""
        with self.lock:
            self.state, self.count = state or self.state, self.count + 1
            write_file(self.directory / f"{self.attempt}.heartbeat", f"{self.count} {self.state}\n".encode())

    def release(self) -> None:
        """Say that this attempt has ended, so that the next one need not wait to find out."""
        self.stopped.set()
        if self.thread:
            self.thread.join(5)
        with_deadline(lambda: self.beat("released"), 5, f"the last heartbeat of attempt {self.attempt}")

    def _run(self) -> None:
        while not self.stopped.wait(self.heartbeat_s):
            try:
                self.beat()
                self.superseded_by = superseding(self.attempt, read_heartbeats(self.directory))
            except OSError as error:  # a mount that fails for a while must not end the heartbeat
                print(f"bucket: heartbeat of attempt {self.attempt} failed, trying again: {error}", flush=True)


def read_heartbeats(directory: Path) -> dict[int, str]:
    """Content of every attempt's heartbeat; '' for a claim without one yet."""
    attempts = [int(p.stem) for p in directory.glob("*.json") if p.stem.isdigit()]
    return {a: read_text(directory / f"{a}.heartbeat") for a in attempts}


def claim(run_dir: Path, cfg: Config, owner: str = "") -> Lease:
    """Claim a run for a new attempt; LeaseError names the owner if another trainer is alive. Blocks for settle_s.

    Of several that claim at the same time the lowest number stays. An older claim counts as alive while its
    heartbeat changes; one that ended without a release is watched for three heartbeats.
    """
    directory = run_dir / "attempts"
    directory.mkdir(parents=True, exist_ok=True)
    known = read_heartbeats(directory)
    attempt = max(int(time.time() * 1000), max(known, default=0) + 1)
    owner = owner or os.environ.get("JOB_ID") or f"{socket.gethostname()} pid {os.getpid()}"
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    document = {"owner": owner, "started": started, "takeover": cfg.takeover, "supersedes": sorted(known)}
    write_file(directory / f"{attempt}.json", json.dumps(document).encode())
    lease = Lease(directory, attempt, cfg.heartbeat_s)
    lease.start()
    time.sleep(cfg.settle_s)
    alive = [] if cfg.takeover else _older_alive(lease, cfg)
    if alive:
        lease.release()
        other = json.loads(read_text(directory / f"{alive[0]}.json") or "{}")
        raise LeaseError(
            f"run {run_dir.name} is being trained by {other.get('owner', 'another trainer')} since "
            f"{other.get('started', '?')} (attempt {alive[0]}, heartbeat fresh): use another --run, or --takeover"
        )
    lease.beat("running")
    return lease


def _older_alive(lease: Lease, cfg: Config) -> list[int]:
    def look() -> dict[int, str]:
        return {a: text for a, text in read_heartbeats(lease.directory).items() if a < lease.attempt}

    before = look()  # after settle_s: what a trainer wrote before it died is visible by now and is no sign of life
    deadline = time.monotonic() + 3 * cfg.heartbeat_s
    while True:
        now = look()
        alive = still_alive(before, now)
        unsure = [a for a, text in now.items() if heartbeat_state(text) != "released"]
        if alive or not unsure or time.monotonic() > deadline:
            return alive
        time.sleep(min(0.1, cfg.heartbeat_s))


# --- publish and retire ----------------------------------------------------------------------------------------------


def check_adapter(tensors: dict[str, np.ndarray], shapes: dict[str, tuple[int, ...]], rank: int) -> None:
    """Raise PublishError unless the adapter is what vLLM would serve: vLLM answers 200 to wrong names, shapes and NaN.

    shapes: name -> shape from the model: lora_A (rank, in), lora_B (out, rank).
    """
    if tensors.keys() != shapes.keys():
        wrong = sorted(tensors.keys() ^ shapes.keys())[:3]
        raise PublishError(f"adapter keys differ from the model's: {', '.join(wrong)}")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise PublishError(f"{name} has shape {tensor.shape}, the model needs {shapes[name]}")
        if tensor.shape[0 if "lora_A" in name else 1] != rank:
            raise PublishError(f"{name} has shape {tensor.shape}, which is not of rank {rank} as in the config")
        if not np.isfinite(tensor).all():
            raise PublishError(f"{name} is not finite: nothing is published")


def adapter_files(tensors: dict[str, np.ndarray], adapter_config: dict) -> dict[str, bytes]:
    """The two files of an adapter in the order they are written: vLLM looks for the config first."""
    weights = safetensors.numpy.save(tensors, metadata={"format": "pt"})
    return {ADAPTER_WEIGHTS: weights, ADAPTER_CONFIG: json.dumps(adapter_config, indent=2).encode()}


class Worker:
    """A thread that runs the newest job it was handed; one that still waits is replaced, so jobs never pile up."""

    def __init__(self, name: str):
        self.condition = threading.Condition()
        self.waiting: Callable | None = None
        self.busy = False
        self.replaced = 0
        self.error: BaseException | None = None  # of a job that raised; the owner looks
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Callable) -> None:
        """Hand over a job; returns at once. What it raises is kept in `error`."""
        with self.condition:
            self.replaced += self.waiting is not None
            self.waiting = job
            self.condition.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits or runs; False if that took too long."""
        with self.condition:
            return self.condition.wait_for(lambda: not self.busy and self.waiting is None, timeout_s)

    def _run(self) -> None:
        while True:
            with self.condition:
                self.condition.wait_for(lambda: self.waiting is not None)
                job, self.waiting, self.busy = self.waiting, None, True
            try:
                job()
            except Exception as error:
                self.error = error
            finally:
                with self.condition:
                    self.busy = False
                    self.condition.notify_all()


class Publisher:
    """Makes adapters live on every replica, in the background, and retires old ones; `policy` is the newest one."""

    def __init__(self, run_dir: Path, lease: Lease, cfg: Config, adapter_config: dict, shapes: dict):
        self.run_dir, self.lease, self.cfg = run_dir.absolute(), lease, cfg
        self.adapter_config, self.shapes = adapter_config, shapes
        self.proxy = f"http://{cfg.host}:{cfg.port}"
        self.policy: Policy | None = None  # moves only after every ready replica confirmed the load
        self.next_version = 0
        self.step_of: dict[int, int] = {}  # version -> optimizer steps that its weights have taken
        self.live: list[Policy] = []  # loaded and not yet unloaded, oldest first
        self.seconds: list[float] = []  # of the publishes that succeeded
        self.failures = 0  # in a row
        self.failed_total = 0
        self.last_error = ""
        self.superseded = False  # the proxy refused us: a newer attempt is in service
        self.worker = Worker("publisher")

    def submit(self, step: int, tensors: dict[str, np.ndarray], canary: dict) -> None:
        """Publish the weights of a step in the background; a snapshot that still waits is replaced by this one."""
        self.worker.submit(lambda: self.publish(step, tensors, canary))

    def publish(self, step: int, tensors: dict[str, np.ndarray], canary: dict) -> bool:
        """Write the adapter, load it everywhere, move `policy`, retire old ones; False (and loud) if it failed.

        The version counts publishes: step / sync_every, so that it continues in a resumed run, or more after failures.
        """
        version = max(self.next_version, step // self.cfg.sync_every)
        policy = Policy(version, policy_name(self.run_dir.name, self.lease.attempt, version))
        self.next_version = version + 1  # also if it fails: a name is never used again
        self.step_of[version] = step
        start = time.monotonic()
        try:
            self._write(policy, tensors)
            self._load(policy, canary)
        except (PublishError, OSError, requests.RequestException) as error:
            self.failures, self.failed_total = self.failures + 1, self.failed_total + 1
            self.last_error = f"{type(error).__name__}: {error}"
            kept = self.policy.name if self.policy else "none"
            print(f"publish of {policy.name} failed, {kept} stays in service: {self.last_error}", flush=True)
            return False
        self.policy, self.failures = policy, 0
        self.live.append(policy)
        self.seconds.append(time.monotonic() - start)
        self.retire(policy.version - self.cfg.max_staleness)
        return True

    def retire(self, oldest_kept: int) -> None:
        """Unload policies older than this version everywhere, then delete their files; what fails is tried again."""
        for policy in [p for p in self.live if p.version < oldest_kept]:
            try:
                answer = self._post("/v1/unload_lora_adapter", {"lora_name": policy.name})
                if answer.status_code not in (200, 404):  # 404: already unknown to every replica
                    print(f"retire of {policy.name} is put off: {answer.text[:300]}", flush=True)
                    continue
                delete_directory(self.run_dir / "adapters" / policy.name, first=ADAPTER_CONFIG)
            except (OSError, requests.RequestException) as error:
                print(f"retire of {policy.name} is put off: {error}", flush=True)
                continue
            self.live.remove(policy)

    def collect_leftovers(self) -> list[str]:
        """Delete the adapters of ended attempts; call it once a policy of this attempt is live. Returns their names.

        The proxy has unloaded them by then: it serves one attempt of a run at a time.
        """
        directory = self.run_dir / "adapters"
        heartbeats = read_heartbeats(self.lease.directory)
        ended = {a for a, text in heartbeats.items() if a < self.lease.attempt and heartbeat_state(text) == "released"}
        ended |= {a for a in heartbeats if a < self.lease.attempt and not self.cfg.takeover}  # claim() found them dead
        gone = [p.name for p in directory.iterdir() if attempt_of(p.name) in ended] if directory.exists() else []
        for name in gone:
            delete_directory(directory / name, first=ADAPTER_CONFIG)
        return gone

    def _write(self, policy: Policy, tensors: dict[str, np.ndarray]) -> None:
        check_adapter(tensors, self.shapes, self.adapter_config["r"])
        files, directory = adapter_files(tensors, self.adapter_config), self.run_dir / "adapters" / policy.name
        with_deadline(lambda: write_files(directory, files), self.cfg.publish_timeout_s, f"writing {directory}")

    def _load(self, policy: Policy, canary: dict) -> None:
        path = str(self.run_dir / "adapters" / policy.name)
        answer = self._post("/v1/load_lora_adapter", {"lora_name": policy.name, "lora_path": path, "canary": canary})
        if answer.status_code == 409:
            self.superseded = True
        if answer.status_code != 200:
            raise PublishError(f"the proxy answered {answer.status_code}: {answer.text[:1000]}")

    def _post(self, route: str, body: dict) -> requests.Response:
        timeout_s = self.cfg.load_deadline_s + self.cfg.control_timeout_s + 30  # the proxy gives up first
        return requests.post(self.proxy + route, json=body, timeout=timeout_s)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def save_checkpoint(run_dir: Path, attempt: int, step: int, files: dict[str, bytes], cfg: Config) -> Path:
    """Write a checkpoint, its `complete` marker last, and delete all but the newest `keep_checkpoints`."""
    directory = run_dir / "checkpoints" / f"step-{step}-a{attempt}"
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    files = {**files, COMPLETE: json.dumps(digests, indent=1).encode()}
    with_deadline(lambda: write_files(directory, files), cfg.publish_timeout_s, f"writing {directory}")
    kept = [p for p in list_checkpoints(run_dir) if not incomplete(p)][-cfg.keep_checkpoints :]
    for old in list_checkpoints(run_dir):
        if kept and checkpoint_key(old.name) < checkpoint_key(kept[0].name):
            delete_directory(old, first=COMPLETE)
    return directory


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint directories, complete or not, oldest first."""
    directory = run_dir / "checkpoints"
    found = [p for p in directory.iterdir() if checkpoint_key(p.name)] if directory.exists() else []
    return sorted(found, key=lambda p: checkpoint_key(p.name))


def incomplete(directory: Path) -> str:
    """Why a checkpoint cannot be resumed from; '' if it can."""
    try:
        digests = json.loads((directory / COMPLETE).read_bytes())
        for name, digest in digests.items():
            if hashlib.sha256((directory / name).read_bytes()).hexdigest() != digest:
                return f"{name} is not what was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    return ""


def newest_checkpoint(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, or None, and a line for each newer one that was skipped and why."""
    skipped = []
    for directory in reversed(list_checkpoints(run_dir)):
        reason = incomplete(directory)
        if not reason:
            return directory, skipped
        skipped.append(f"{directory.name}: {reason}")
    return None, skipped
