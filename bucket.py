"""How an adapter gets to the replicas safely: the lease on a run, publish, retire, checkpoints.

A bucket mount is eventually consistent, has no locks, shows a file only after close(), may refuse rename, truncate and
chmod, may remember for a while that a path was not found, and may hang. So safety comes from names: every path a
trainer writes carries its attempt, nothing is written twice, the file that makes a directory usable is written last,
and what another machine writes is opened only once a listing shows it. Calls that hang are given up.

    <bucket>/<run>/attempts/<attempt>.json           who claims this run; written once
                   attempts/<attempt>.<count>.<state>.heartbeat   its last heartbeat: a listing says it all
                   adapters/<run>-a<attempt>-v<version>/   adapter_model.safetensors, then adapter_config.json
                   checkpoints/step-<step>-a<attempt>/     the trainer's state, then `complete`

An attempt is the start time in microseconds plus up to a second of chance, so no two are alike. It claims, then it is
running, then released. Who is alive is decided by watching heartbeats advance, never by comparing clocks.
"""

import hashlib
import json
import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pebble
import requests
import safetensors.numpy

from config import Config

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
COMPLETE = "complete"
KEEP_CHECKPOINTS = 3
MAX_FAILED_PUBLISHES = 5  # in a row; then the trainer stops
LOAD_RETRY_S = 0.5  # between two tries to reach a proxy that is being restarted
READ_BACK_S = 10.0  # a mount may take this long to show what was written to it


class Policy(NamedTuple):
    """A published adapter: requests name it, rollouts remember its version."""

    version: int
    name: str


def policy_name(run: str, attempt: int, version: int) -> str:
    """The adapter's name, unique over all attempts of all runs."""
    return f"{run}-a{attempt}-v{version}"


def direct_session() -> requests.Session:
    """A session for the proxy, which is on this machine: a variable such as HTTP_PROXY is not for it."""
    session = requests.Session()
    session.trust_env = False
    return session


class LeaseError(Exception):
    """Another trainer owns this run."""


class PublishError(Exception):
    """The bucket or the proxy did not do what was asked; what was there before stays in service."""


# --- files on a mount ------------------------------------------------------------------------------------------------


def with_deadline(action: Callable, timeout_s: float, what: str):
    """What `action` returns; PublishError if a call on the mount fails, or hangs: then its thread is left behind."""
    outcome = pebble.concurrent.thread(action)()
    try:
        return outcome.result(timeout_s)
    except OSError as error:  # a timeout is one, too
        reason = f"failed: {error}" if outcome.done() else f"takes over {timeout_s:g} s: the bucket mount hangs"
        raise PublishError(f"{what} {reason}") from error


def write_file(path: Path, data: bytes) -> None:
    """Write and close one file; where a mount refuses to overwrite, the old one is deleted first."""
    try:
        file = path.open("wb")
    except OSError:
        path.unlink(missing_ok=True)
        file = path.open("wb")
    with file:
        file.write(data)


def write_files(directory: Path, files: dict[str, bytes]) -> None:
    """Write the files of a new directory in this order, each closed and read back before the next; OSError if not."""
    directory.mkdir(parents=True)  # fails if it exists: nothing is written twice
    for name, data in files.items():
        write_file(directory / name, data)
        until = time.monotonic() + READ_BACK_S
        while not (right := reads_as(directory / name, data)) and time.monotonic() < until:
            time.sleep(READ_BACK_S / 20)
        if not right:
            raise OSError(f"{directory / name} reads back differently from what was written: check the bucket")


def reads_as(path: Path, data: bytes) -> bool:
    """Whether a file, opened anew, has this content; a mount may not show at once what was written to it."""
    try:
        return path.read_bytes() == data
    except FileNotFoundError:
        return False


def delete_directory(directory: Path) -> None:
    """Delete a flat directory. What cannot be deleted is said, and stays for the next time."""
    try:
        for path in directory.iterdir():
            path.unlink(missing_ok=True)
        directory.rmdir()
    except FileNotFoundError:
        pass  # it ended with its last file, as on an object store
    except OSError as error:
        print(f"bucket: {directory} stays for now: {error}", flush=True)


# --- the lease -------------------------------------------------------------------------------------------------------


def read_heartbeats(directory: Path) -> dict[int, float]:
    """attempt -> count of its last heartbeat that shows; 0: there is only a claim, infinite: it has ended."""
    counts: dict[int, float] = {}
    for path in directory.iterdir():
        if match := re.fullmatch(r"(\d+)\.(?:json|(\d+)\.(\w+)\.heartbeat)", path.name):
            attempt, count = int(match[1]), math.inf if match[3] == "released" else int(match[2] or 0)
            counts[attempt] = max(count, counts.get(attempt, 0))
    return counts


@dataclass
class Lease:
    """One attempt's hold on a run. Its own thread writes the heartbeats: a mount that hangs stops nobody else."""

    directory: Path  # <bucket>/<run>/attempts
    attempt: int
    cfg: Config
    superseded_by: int | None = None  # a newer attempt has taken over; stays
    may_live: list[int] = field(default_factory=list)  # older attempts that may still need their files
    count: int = 0  # of heartbeats; a name is used once, also if writing it failed
    last: Path | None = None  # the newest one; the one before is deleted
    written_s: float = field(default_factory=time.monotonic)  # when; others take us for dead after some heartbeats
    over: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def release(self, timeout_s: float = 5.0) -> None:
        """Say that this attempt has ended, so that the next one need not find out. Never raises, nor waits longer."""
        self.over.set()
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            print(f"attempt {self.attempt} ended without saying so: the bucket mount hangs", flush=True)

    def beat(self) -> None:
        """Write the next heartbeat, then delete the one before."""
        self.count += 1
        state = "released" if self.over.is_set() else "running"
        path = self.directory / f"{self.attempt}.{self.count}.{state}.heartbeat"
        write_file(path, f"{self.count} {state}\n".encode())
        before, self.last, self.written_s = self.last, path, time.monotonic()
        if before:
            before.unlink(missing_ok=True)

    def look(self) -> dict[int, float]:
        """All heartbeats, as read_heartbeats; whether a newer attempt has taken over."""
        listing = f"listing {self.directory}"
        counts = with_deadline(lambda: read_heartbeats(self.directory), self.cfg.publish_timeout_s, listing)
        newer = [attempt for attempt, count in counts.items() if attempt > self.attempt and count]
        self.superseded_by = max(newer, default=self.superseded_by)
        return counts

    def older_alive(self) -> list[int]:
        """Watch the older attempts until the heartbeat of one advances, or all have ended; those alive, oldest first.

        A heartbeat is dead that does not move for three heartbeats and settle_s, which is how late it may be seen.
        """
        first: dict[int, float] = {}  # attempt -> the count at which it was first seen
        until = time.monotonic() + self.cfg.settle_s + 3 * self.cfg.heartbeat_s
        while True:
            older = {a: count for a, count in self.look().items() if a < self.attempt and count < math.inf}
            first = {a: first.get(a) or count for a, count in older.items()}
            alive = sorted(a for a, count in older.items() if 0 < first[a] < count)
            if alive or not older or time.monotonic() > until:
                return alive
            time.sleep(self.cfg.heartbeat_s / 2)

    def run(self) -> None:
        """Look and beat until released, then once more to say so; what fails is said and tried again."""
        ended = False
        while not ended:
            ended = self.over.wait(self.cfg.heartbeat_s)
            try:
                self.look()
                self.beat()
            except (PublishError, OSError) as error:
                print(f"bucket: a heartbeat of attempt {self.attempt} failed: {error}", flush=True)


def claim(run_dir: Path, cfg: Config, owner: str = "") -> Lease:
    """Claim a run for a new attempt; LeaseError names the owner if another trainer is alive. Blocks for settle_s.

    Of several that claim at the same time the lowest stays. With takeover the older ones are told, by our heartbeat,
    to save their work and end; they get publish_timeout_s for it.
    """
    directory, timeout_s = run_dir.absolute() / "attempts", cfg.publish_timeout_s
    with_deadline(lambda: directory.mkdir(parents=True, exist_ok=True), timeout_s, f"creating {directory}")
    known = with_deadline(lambda: read_heartbeats(directory), timeout_s, f"listing {directory}")
    newest = max(time.time_ns() // 1000, *known, 0)  # above those of clocks that are ahead of ours, too
    lease = Lease(directory, newest + 1 + secrets.randbelow(1_000_000), cfg)
    owner = owner or os.environ.get("JOB_ID") or f"{socket.gethostname()} pid {os.getpid()}"
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    document = json.dumps({"owner": owner, "started": started, "takeover": cfg.takeover}).encode()
    with_deadline(lambda: write_file(directory / f"{lease.attempt}.json", document), timeout_s, "writing a claim")
    time.sleep(cfg.settle_s)
    alive = [] if cfg.takeover else lease.older_alive()
    lease.look()
    if alive or lease.superseded_by:
        other = alive[0] if alive else lease.superseded_by
        raise LeaseError(with_deadline(lambda: withdraw(lease, other), timeout_s, "withdrawing a claim"))
    with_deadline(lease.beat, timeout_s, f"writing a heartbeat to {directory}")
    lease.thread = threading.Thread(target=lease.run, name="heartbeat", daemon=True)
    lease.thread.start()
    until = time.monotonic() + timeout_s
    while cfg.takeover and (alive := lease.older_alive()) and time.monotonic() < until:
        pass  # each round waits for a heartbeat
    lease.may_live = alive
    if any(count == math.inf != known.get(attempt) for attempt, count in lease.look().items()):
        time.sleep(cfg.settle_s)  # until the last checkpoint of one that has just ended is visible too
    return lease


def withdraw(lease: Lease, other: int) -> str:
    """Take a claim back, so that no later one waits for it; why. The claim of the other may not be visible yet."""
    (lease.directory / f"{lease.attempt}.json").unlink(missing_ok=True)
    try:
        owner = "{owner} since {started}".format(**json.loads((lease.directory / f"{other}.json").read_bytes()))
    except (OSError, ValueError):
        owner = "another trainer"
    return (f"run {lease.directory.parent.name} is being trained by {owner} (attempt {other}, heartbeat fresh): "
            "use another --run, or --takeover")  # fmt: skip


# --- publish and retire ----------------------------------------------------------------------------------------------


def check_adapter(tensors: dict[str, np.ndarray], shapes: dict[str, tuple[int, ...]], rank: int) -> None:
    """Raise PublishError unless the adapter is what vLLM would serve: vLLM answers 200 to wrong names, shapes and NaN.

    shapes: name -> shape from the model: lora_A (rank, in), lora_B (out, rank).
    """
    if wrong := tensors.keys() ^ shapes.keys():
        raise PublishError(f"adapter keys differ from the model's, such as {min(wrong)}")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name] or tensor.shape[0 if "lora_A" in name else 1] != rank:
            raise PublishError(f"{name}: shape {tensor.shape}, the model needs {shapes[name]}, the config rank {rank}")
        if not np.isfinite(tensor).all():
            raise PublishError(f"{name} is not finite: nothing is published")


def adapter_files(tensors: dict[str, np.ndarray], adapter_config: dict) -> dict[str, bytes]:
    """The two files of an adapter in the order they are written: vLLM looks for the config first."""
    weights = safetensors.numpy.save(tensors, metadata={"format": "pt"})
    return {ADAPTER_WEIGHTS: weights, ADAPTER_CONFIG: json.dumps(adapter_config, indent=2).encode()}


class Worker:
    """A thread that runs the newest task it was handed; one that still waits is replaced, so tasks never pile up."""

    def __init__(self, name: str):
        self.name, self.busy, self.changed = name, False, threading.Condition()
        self.waiting: Callable | None = None
        self.error: Exception | None = None  # of the last task that raised; the owner looks

    def submit(self, task: Callable) -> None:
        """Hand over a task; returns at once. What it raises is kept in `error`."""
        with self.changed:
            self.waiting = task
            if not self.busy:
                self.busy = True
                threading.Thread(target=self._run, name=self.name, daemon=True).start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits or runs; False if that took too long."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.busy, timeout_s)

    def _run(self) -> None:
        while self.busy:
            with self.changed:
                task, self.waiting = self.waiting, None
            try:
                task()
            except Exception as error:
                self.error = error
            with self.changed:
                self.busy = self.waiting is not None
                self.changed.notify_all()


class Publisher:
    """Makes adapters live on every replica, in the background, and retires old ones; `policy` is the newest one."""

    def __init__(self, run_dir: Path, lease: Lease, cfg: Config, adapter_config: dict, shapes: dict):
        self.adapters, self.lease, self.cfg = run_dir.absolute() / "adapters", lease, cfg
        self.adapter_config, self.shapes = adapter_config, shapes
        self.session = direct_session()
        self.policy: Policy | None = None  # moves only after every ready replica confirmed the load
        self.canary: dict = {}  # of `policy`
        self.loading = threading.Lock()  # a policy is loaded again only while it is the newest
        self.step_of: dict[int, int] = {}  # version -> optimizer steps that its weights have taken
        self.seconds: list[float] = []  # of the publishes that succeeded
        self.failures = self.failed_total = 0  # in a row, and in all
        self.failed_s, self.last_error = 0.0, ""  # when the last one did (monotonic), and why
        self.superseded = False  # the proxy refused us: a newer attempt is in service
        self.worker, self.cleaner = Worker("publisher"), Worker("cleaner")  # old files never delay new ones

    def submit(self, step: int, tensors: dict[str, np.ndarray], canary: dict) -> None:
        """Publish the weights of a step in the background; a snapshot that still waits is replaced by this one."""
        self.worker.submit(lambda: self.publish(step, tensors, canary))

    def publish(self, step: int, tensors: dict[str, np.ndarray], canary: dict) -> bool:
        """Write the adapter, load it everywhere, move `policy`, retire old ones; False (and loud) if it failed.

        The version counts publishes: step / sync_every, so that it continues in a resumed run, or more after failures.
        """
        start, cfg = time.monotonic(), self.cfg
        version = max(step // cfg.sync_every, max(self.step_of, default=-1) + 1)  # also after one that failed
        self.step_of[version] = step
        policy = Policy(version, policy_name(self.adapters.parent.name, self.lease.attempt, version))
        directory = self.adapters / policy.name
        try:
            check_adapter(tensors, self.shapes, self.adapter_config["r"])
            files = adapter_files(tensors, self.adapter_config)
            with_deadline(lambda: write_files(directory, files), cfg.publish_timeout_s, f"writing {directory}")
            with self.loading:
                self._load(policy, canary)
                self.policy, self.canary, self.failures = policy, canary, 0
        except PublishError as error:
            self.failures, self.failed_total = self.failures + 1, self.failed_total + 1
            self.failed_s, self.last_error = time.monotonic(), str(error)
            kept = self.policy.name if self.policy else "none"
            print(f"publish of {policy.name} failed, {kept} stays in service: {error}", flush=True)
            return False
        self.seconds.append(time.monotonic() - start)
        self.collect_leftovers()
        return True

    def reload(self, policy: Policy) -> None:
        """Load the newest policy again if the proxy has lost it; nothing is done while another load is under way."""
        if self.loading.acquire(blocking=False):
            try:
                if policy == self.policy:
                    self._load(policy, self.canary)
            except PublishError as error:
                print(f"{policy.name} could not be loaded again: {error}", flush=True)
            finally:
                self.loading.release()

    def collect_leftovers(self) -> None:
        """Retire, in the background, what nobody asks for any more; every publish that succeeds does."""
        self.cleaner.submit(self._retire)

    def _retire(self) -> None:
        """Unload everywhere, then delete, what the bucket has of versions too old and of attempts that ended.

        Failed publishes are versions, too: a load whose answer was lost may have succeeded. What fails is found again.
        """
        oldest_kept = (self.lease.attempt, self.policy.version - self.cfg.max_staleness)
        try:
            for path in self.adapters.iterdir():
                match = re.search(r"-a(\d+)-v(\d+)$", path.name)
                key = (int(match[1]), int(match[2])) if match else oldest_kept
                if key >= oldest_kept or key[0] in self.lease.may_live:
                    continue
                said = self._ask("/v1/unload_lora_adapter", {"lora_name": path.name})
                if said and "cannot be found" not in said:  # some replica may serve it
                    print(f"retire of {path.name} is put off: {said}", flush=True)
                    continue
                with_deadline(lambda path=path: delete_directory(path), self.cfg.publish_timeout_s, f"deleting {path}")
        except (PublishError, OSError) as error:
            print(f"retire is put off: {error}", flush=True)

    def _load(self, policy: Policy, canary: dict) -> None:
        path = str(self.adapters / policy.name)
        said = self._ask("/v1/load_lora_adapter", {"lora_name": policy.name, "lora_path": path, "canary": canary})
        self.superseded = self.superseded or "taken over" in said
        if said:
            raise PublishError(said)

    def _ask(self, route: str, body: dict) -> str:
        """'' if the proxy says 200, else what is wrong."""
        url, timeout_s = f"http://{self.cfg.host}:{self.cfg.port}{route}", self.cfg.publish_timeout_s
        try:
            answer = self.session.post(url, json=body, timeout=timeout_s)
        except requests.RequestException as error:
            return f"the proxy did not answer: {error}"
        return "" if answer.status_code == 200 else f"the proxy answered {answer.status_code}: {answer.text[:1000]}"


# --- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint_key(name: str) -> tuple[int, int, int] | None:
    """Order of checkpoints, (attempt, step, retry): a newer attempt went on from what it found. None: another name."""
    match = re.fullmatch(r"step-(\d+)-a(\d+)(?:\.(\d+))?", name)
    return (int(match[2]), int(match[1]), int(match[3] or 0)) if match else None


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint directories, complete or not, oldest first."""
    try:
        found = [path for path in (run_dir / "checkpoints").iterdir() if checkpoint_key(path.name)]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda path: checkpoint_key(path.name))


def incomplete(directory: Path) -> str:
    """Why a checkpoint cannot be resumed from; '' if it can."""
    try:
        names = {path.name for path in directory.iterdir()}
        digests = dict(json.loads((directory / COMPLETE).read_bytes())) if COMPLETE in names else {}
        for name, digest in digests.items():
            if name not in names or hashlib.sha256((directory / name).read_bytes()).hexdigest() != digest:
                return f"{name} is not what was written"
    except (OSError, ValueError, TypeError) as error:
        return f"it cannot be read: {error}"
    return "" if digests else f"{COMPLETE} is missing or empty"


def newest_checkpoint(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, or None, and a line for each newer one that was skipped and why."""
    skipped = []
    for directory in reversed(list_checkpoints(run_dir)):
        reason = incomplete(directory)
        if not reason:
            return directory, skipped
        skipped.append(f"{directory.name}: {reason}")
    return None, skipped


def save_checkpoint(run_dir: Path, attempt: int, step: int, files: dict[str, bytes], cfg: Config) -> Path:
    """Write a checkpoint, `complete` last, and delete all but the newest KEEP_CHECKPOINTS; its directory.

    A second one of the same step, as after one that failed, gets another name.
    """
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    files = {**files, COMPLETE: json.dumps(digests, indent=1).encode()}

    def write() -> Path:
        found = [p for p in list_checkpoints(run_dir) if checkpoint_key(p.name)[0] <= attempt]  # newer are not ours
        same = [p for p in found if checkpoint_key(p.name)[:2] == (attempt, step)]
        directory = run_dir / "checkpoints" / (f"step-{step}-a{attempt}" + (f".{len(same)}" if same else ""))
        write_files(directory, files)
        kept = [p for p in found if not incomplete(p)][1 - KEEP_CHECKPOINTS :]
        for old in found[: found.index(kept[0])] if kept else []:
            delete_directory(old)
        return directory

    return with_deadline(write, cfg.publish_timeout_s, f"writing the checkpoint of step {step}")
