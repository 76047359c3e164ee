"""How an adapter gets to the replicas safely: the lease on a run, publish, retire, checkpoints.

A bucket mount is eventually consistent, has no locks, shows a file only after close(), may refuse rename, truncate and
chmod, may remember for a while that a path was not found, and may hang. So safety comes from names: every path a
trainer writes carries its attempt, nothing is written twice, the file that makes a directory usable is written last,
and what another machine writes is opened only once a listing shows it. Calls that hang are given up.

    <bucket>/<run>/attempts/<attempt>.json           who claims this run; written once
                   attempts/<attempt>.<count>.<state>.heartbeat   its last heartbeat: a listing says it all
                   adapters/<run>-a<attempt>-v<version>/   adapter_model.safetensors, then adapter_config.json
                   checkpoints/step-<step>-a<attempt>/     the trainer's state, then `complete`

An attempt is the start time in microseconds plus up to a second of chance, so no two are alike. States: claiming, then
running, then released; or refused. Who is alive is decided by watching heartbeats advance, never by comparing clocks.
"""

import hashlib
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import requests
import safetensors.numpy

from config import Config

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
COMPLETE = "complete"
ENDED = ("released", "refused")  # states of an attempt that writes no more


class Policy(NamedTuple):
    """A published adapter: requests name it, rollouts remember its version."""

    version: int
    name: str


class LeaseError(Exception):
    """Another trainer owns this run."""


class PublishError(Exception):
    """An adapter or a checkpoint was not published; what was there before stays in service."""


# --- names -----------------------------------------------------------------------------------------------------------


def new_attempt(known: Iterable[int]) -> int:
    """A number above all known attempts that no other trainer draws, even one that starts now or whose clock is off."""
    return max(time.time_ns() // 1000, *known, 0) + 1 + secrets.randbelow(1_000_000)


def policy_name(run: str, attempt: int, version: int) -> str:
    """The adapter's name, unique over all attempts of all runs."""
    return f"{run}-a{attempt}-v{version}"


def attempt_of(policy: str) -> int | None:
    """The attempt in a policy's name; None if there is none."""
    match = re.search(r"-a(\d+)-v\d+$", policy)
    return int(match[1]) if match else None


def checkpoint_key(name: str) -> tuple[int, int, int] | None:
    """Order of checkpoints, (attempt, step, retry): a newer attempt went on from what it found. None: another name."""
    match = re.fullmatch(r"step-(\d+)-a(\d+)(?:\.(\d+))?", name)
    return (int(match[2]), int(match[1]), int(match[3] or 0)) if match else None


# --- files on a mount ------------------------------------------------------------------------------------------------


def write_files(directory: Path, files: dict[str, bytes], patience_s: float = 0.0) -> None:
    """Write a new directory's files in this order, each closed and read back before the next; or PublishError.

    patience_s: how long the mount may take to show what was written to it.
    """
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise PublishError(f"{directory} exists: a published directory is never written twice") from None
    for name, data in files.items():
        write_file(directory / name, data)
        if not reads_back(directory / name, data, patience_s):
            raise PublishError(f"{directory / name} reads back differently from what was written: check the bucket")


def write_file(path: Path, data: bytes) -> None:
    """Write and close one file; where a mount refuses to overwrite, the old one is deleted first."""
    try:
        file = path.open("wb")
    except OSError:
        path.unlink(missing_ok=True)
        file = path.open("wb")
    with file:
        file.write(data)


def reads_back(path: Path, data: bytes, patience_s: float) -> bool:
    """Whether the file, opened anew, has exactly this content within patience_s."""
    until = time.monotonic() + patience_s
    while True:
        try:
            if path.read_bytes() == data:
                return True
        except OSError:
            pass  # not visible yet
        if time.monotonic() >= until:
            return False
        time.sleep(min(0.5, patience_s))


def delete_directory(directory: Path, first: str) -> None:
    """Delete a flat directory, the file that makes it usable first; OSError if some of it stays."""
    for name in sorted(names_in(directory), key=lambda name: name != first):
        (directory / name).unlink(missing_ok=True)
    try:
        directory.rmdir()
    except FileNotFoundError:
        pass  # it was gone, or ended with its last file as on an object store


def names_in(directory: Path) -> list[str]:
    """What a directory lists; nothing if it does not exist."""
    try:
        return [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []


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


class Heartbeat(NamedTuple):
    """What an attempt last said; count 0 if only its claim is visible yet."""

    count: int
    state: str


def superseding(attempt: int, beats: dict[int, Heartbeat]) -> int | None:
    """The newest attempt after this one that trains this run, or has done so and ended; None if there is none."""
    return max((a for a, beat in beats.items() if a > attempt and beat.state in ("running", "released")), default=None)


def advanced(first: dict[int, Heartbeat], now: dict[int, Heartbeat]) -> list[int]:
    """Attempts that live: their heartbeat counts on from where it was first seen, and does not say that they ended."""
    return sorted(a for a, b in now.items() if 0 < first[a].count < b.count and b.state not in ENDED)


def read_heartbeats(directory: Path, after: int = 0) -> dict[int, Heartbeat]:
    """The last heartbeat of every attempt after `after`. Of several that a stale listing shows, the highest counts."""
    beats: dict[int, Heartbeat] = {}
    for name in names_in(directory):
        if match := re.fullmatch(r"(\d+)\.(?:json|(\d+)\.(\w+)\.heartbeat)", name):
            attempt, beat = int(match[1]), Heartbeat(int(match[2] or 0), match[3] or "")
            beats[attempt] = max(beat, beats.get(attempt, beat))
    return {attempt: beat for attempt, beat in beats.items() if attempt > after}


@dataclass
class Lease:
    """One attempt's hold on a run. Only its own thread writes the heartbeat: a mount that hangs stops nobody else."""

    directory: Path  # <bucket>/<run>/attempts
    attempt: int
    heartbeat_s: float
    superseded_by: int | None = None  # a newer attempt has taken over; stays
    may_live: list[int] = field(default_factory=list)  # older attempts that may still need their files
    state: str = "claiming"
    said: str = ""  # the state that was last written
    count: int = 0  # heartbeats written
    last: Path | None = None  # the newest one; the one before is deleted
    written_s: float = field(default_factory=time.monotonic)  # when; others take us for dead after some heartbeats
    changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self, timeout_s: float) -> None:
        """Beat until an ending state is entered; PublishError if the first heartbeat is not written in time."""
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()
        self.enter("claiming", timeout_s)

    def enter(self, state: str, timeout_s: float) -> None:
        """Say a new state at once; PublishError if it could not be written within timeout_s."""
        with self.changed:
            self.state = state
            self.changed.notify_all()
            if not self.changed.wait_for(lambda: self.said == state, timeout_s):
                raise PublishError(f"no heartbeat could be written to {self.directory} for {timeout_s:g} s: the bucket "
                                   "mount hangs, or is not writable")  # fmt: skip

    def release(self) -> None:
        """Say that this attempt has ended, so that the next one need not find out. Never raises, 5 s at most."""
        try:
            self.enter("released", 5)
        except PublishError as error:
            print(f"attempt {self.attempt} ended without saying so: {error}", flush=True)

    def beat(self) -> None:
        """Write one heartbeat and look whether a newer attempt has taken over; failures are said and tried again."""
        state, last = self.state, self.last
        path = self.directory / f"{self.attempt}.{self.count + 1}.{state}.heartbeat"
        try:
            write_file(path, f"{self.count + 1} {state}\n".encode())
            with self.changed:
                self.said, self.count, self.last, self.written_s = state, self.count + 1, path, time.monotonic()
                self.changed.notify_all()
            if last:
                last.unlink(missing_ok=True)
        except OSError as error:
            print(f"bucket: a heartbeat of attempt {self.attempt} failed: {error}", flush=True)
        try:
            newer = superseding(self.attempt, read_heartbeats(self.directory, after=self.attempt))
            self.superseded_by = self.superseded_by or newer
        except OSError as error:
            print(f"bucket: attempt {self.attempt} cannot look for newer ones: {error}", flush=True)

    def _run(self) -> None:
        while self.said not in ENDED:
            state = self.state
            self.beat()
            with self.changed:
                self.changed.wait_for(lambda before=state: self.state != before, self.heartbeat_s)


def claim(run_dir: Path, cfg: Config, owner: str = "") -> Lease:
    """Claim a run for a new attempt; LeaseError names the owner if another trainer is alive. Blocks for settle_s.

    Of several that claim at the same time the lowest stays. With takeover the older ones are told, by our heartbeat,
    to save their work and end; they get publish_timeout_s for it.
    """
    directory, timeout_s = run_dir.absolute() / "attempts", cfg.publish_timeout_s
    with_deadline(lambda: directory.mkdir(parents=True, exist_ok=True), timeout_s, f"creating {directory}")
    known = look(directory, cfg)
    lease = Lease(directory, new_attempt(known), cfg.heartbeat_s)
    lease.start(timeout_s)
    owner = owner or os.environ.get("JOB_ID") or f"{socket.gethostname()} pid {os.getpid()}"
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    document = json.dumps({"owner": owner, "started": started, "takeover": cfg.takeover}).encode()
    with_deadline(lambda: write_file(directory / f"{lease.attempt}.json", document), timeout_s, "writing a claim")
    time.sleep(cfg.settle_s)
    alive = [] if cfg.takeover else older_alive(lease, cfg)
    newer = superseding(lease.attempt, look(directory, cfg))
    if alive or newer:
        lease.enter("refused", 5)
        raise LeaseError(refusal(directory, alive[0] if alive else newer))
    lease.enter("running", timeout_s)
    until = time.monotonic() + timeout_s
    while cfg.takeover and (alive := older_alive(lease, cfg)) and time.monotonic() < until:
        pass  # each round waits for a heartbeat
    lease.may_live = alive
    ended = {a for a, beat in look(directory, cfg).items() if a < lease.attempt and beat.state in ENDED}
    if any(a not in known or known[a].state not in ENDED for a in ended):
        time.sleep(cfg.settle_s)  # until the last checkpoint of one that has just ended is visible too
    return lease


def look(directory: Path, cfg: Config) -> dict[int, Heartbeat]:
    """All heartbeats, or PublishError if the mount hangs."""
    return with_deadline(lambda: read_heartbeats(directory), cfg.publish_timeout_s, f"reading {directory}")


def older_alive(lease: Lease, cfg: Config) -> list[int]:
    """Watch the older attempts until one shows a sign of life, all have ended, or none has moved; those alive.

    A heartbeat is dead that does not move for three heartbeats and settle_s, which is how late a mount may show it.
    """
    first, until = {}, time.monotonic() + cfg.settle_s + 3 * cfg.heartbeat_s
    while True:
        now = {a: beat for a, beat in look(lease.directory, cfg).items() if a < lease.attempt}
        first = {**now, **{a: beat for a, beat in first.items() if beat.count}}
        alive = advanced(first, now)
        if alive or all(beat.state in ENDED for beat in now.values()) or time.monotonic() > until:
            return alive
        time.sleep(cfg.heartbeat_s / 2)


def refusal(directory: Path, other: int) -> str:
    """Why a run cannot be claimed. The claim of the other attempt may not be visible yet."""
    try:
        owner = json.loads((directory / f"{other}.json").read_bytes())
    except (OSError, ValueError):
        owner = {"owner": "another trainer", "started": "a moment ago"}
    return (
        f"run {directory.parent.name} is being trained by {owner['owner']} since {owner['started']} "
        f"(attempt {other}, heartbeat fresh): use another --run, or --takeover"
    )


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
    """A thread that runs the newest task it was handed; one that still waits is replaced, so tasks never pile up."""

    def __init__(self, name: str):
        self.name = name
        self.condition = threading.Condition()
        self.waiting: Callable | None = None
        self.busy = False
        self.error: BaseException | None = None  # of the last task that raised; the owner looks

    def submit(self, task: Callable) -> None:
        """Hand over a task; returns at once. What it raises is kept in `error`."""
        with self.condition:
            self.waiting = task
            if not self.busy:
                self.busy = True
                threading.Thread(target=self._run, name=self.name, daemon=True).start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits or runs; False if that took too long."""
        with self.condition:
            return self.condition.wait_for(lambda: not self.busy, timeout_s)

    def _run(self) -> None:
        while True:
            with self.condition:
                task, self.waiting = self.waiting, None
                if task is None:
                    self.busy = False
                    self.condition.notify_all()
                    return
            try:
                task()
            except Exception as error:
                self.error = error


class Publisher:
    """Makes adapters live on every replica, in the background, and retires old ones; `policy` is the newest one."""

    def __init__(self, run_dir: Path, lease: Lease, cfg: Config, adapter_config: dict, shapes: dict):
        self.run_dir, self.lease, self.cfg = run_dir.absolute(), lease, cfg
        self.adapter_config, self.shapes = adapter_config, shapes
        self.proxy = f"http://{cfg.host}:{cfg.port}"
        self.policy: Policy | None = None  # moves only after every ready replica confirmed the load
        self.canary: dict = {}  # of `policy`
        self.next_version = 0
        self.step_of: dict[int, int] = {}  # version -> optimizer steps that its weights have taken
        self.live: list[Policy] = []  # loaded and not yet unloaded, oldest first
        self.rejected: list[str] = []  # names to unload and delete: failed publishes, and what ended attempts left
        self.seconds: list[float] = []  # of the publishes that succeeded
        self.failures = 0  # in a row
        self.failed_total = 0
        self.failed_s = 0.0  # monotonic: when the last one did
        self.last_error = ""
        self.superseded = False  # the proxy refused us: a newer attempt is in service
        self.worker, self.cleaner = Worker("publisher"), Worker("cleaner")  # old files never delay new ones
        self.reloading = threading.Lock()

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
        except (PublishError, OSError) as error:  # requests raises kinds of OSError
            self.failures, self.failed_total = self.failures + 1, self.failed_total + 1
            self.failed_s = time.monotonic()
            self.last_error = f"{type(error).__name__}: {error}"
            self.rejected.append(policy.name)  # a load whose answer was lost may have succeeded
            kept = self.policy.name if self.policy else "none"
            print(f"publish of {policy.name} failed, {kept} stays in service: {self.last_error}", flush=True)
            return False
        self.live.append(policy)
        self.policy, self.canary, self.failures = policy, canary, 0
        self.seconds.append(time.monotonic() - start)
        self.cleaner.submit(lambda: self.retire(version - self.cfg.max_staleness))
        return True

    def reload(self, policy: Policy) -> None:
        """Load the newest policy again if the proxy has lost it: it and every replica that had it were restarted."""
        if policy != self.policy or not self.reloading.acquire(blocking=False):
            return
        try:
            self._load(policy, self.canary)
        except (PublishError, OSError) as error:
            print(f"{policy.name} could not be loaded again: {error}", flush=True)
        finally:
            self.reloading.release()

    def retire(self, oldest_kept: int) -> None:
        """Unload policies older than this version everywhere, then delete their files; what fails is tried again.

        All are unloaded before any is deleted: a mount that hangs must not fill the replicas' slots.
        """
        names = [p.name for p in self.live if p.version < oldest_kept] + self.rejected
        names = [name for name in names if self._unload(name)]
        deleting = f"deleting {', '.join(names)}"
        try:
            gone = with_deadline(lambda: [n for n in names if self._delete(n)], self.cfg.publish_timeout_s, deleting)
        except PublishError as error:
            print(f"retire is put off: {error}", flush=True)
            return
        for policy in [p for p in self.live if p.name in gone]:
            self.live.remove(policy)
        for name in [name for name in self.rejected if name in gone]:
            self.rejected.remove(name)

    def collect_leftovers(self) -> list[str]:
        """Discard, in the background, the adapters of older attempts that have ended; their names.

        Call it once a policy of this attempt is live: then the proxy serves no other attempt.
        """
        adapters = self.run_dir / "adapters"
        try:
            names = with_deadline(lambda: names_in(adapters), self.cfg.publish_timeout_s, f"listing {adapters}")
        except (PublishError, OSError) as error:
            print(f"adapters of older attempts stay: {error}", flush=True)
            return []
        left = {name: attempt_of(name) or self.lease.attempt for name in sorted(names)}
        left = [name for name, a in left.items() if a < self.lease.attempt and a not in self.lease.may_live]
        self.rejected += left
        self.cleaner.submit(lambda: self.retire(0))
        return left

    def _write(self, policy: Policy, tensors: dict[str, np.ndarray]) -> None:
        check_adapter(tensors, self.shapes, self.adapter_config["r"])
        files, directory = adapter_files(tensors, self.adapter_config), self.run_dir / "adapters" / policy.name
        write = partial(write_files, directory, files, self.cfg.settle_s)
        with_deadline(write, self.cfg.publish_timeout_s, f"writing {directory}")

    def _load(self, policy: Policy, canary: dict) -> None:
        path = str(self.run_dir / "adapters" / policy.name)
        answer = self._post("/v1/load_lora_adapter", {"lora_name": policy.name, "lora_path": path, "canary": canary})
        if answer.status_code == 409 and "taken over" in answer.text:
            self.superseded = True
        if answer.status_code != 200:
            raise PublishError(f"the proxy answered {answer.status_code}: {answer.text[:1000]}")

    def _unload(self, name: str) -> bool:
        try:
            answer = self._post("/v1/unload_lora_adapter", {"lora_name": name})
            said = f"{answer.status_code} {answer.text[:300]}"
        except requests.RequestException as error:
            said = str(error)
        done = said.startswith("200") or "cannot be found" in said  # then no replica serves it
        if not done:
            print(f"retire of {name} is put off: {said}", flush=True)
        return done

    def _delete(self, name: str) -> bool:
        try:
            delete_directory(self.run_dir / "adapters" / name, first=ADAPTER_CONFIG)
            return True
        except OSError as error:
            print(f"{name} is unloaded, its files stay for now: {error}", flush=True)
            return False

    def _post(self, route: str, body: dict) -> requests.Response:
        """Ask the proxy; again while it is being restarted, for publish_timeout_s: both calls can be repeated."""
        until = time.monotonic() + self.cfg.publish_timeout_s
        while True:
            try:
                return requests.post(self.proxy + route, json=body, timeout=self.cfg.publish_timeout_s)
            except requests.ConnectionError:
                if time.monotonic() > until:
                    raise
                time.sleep(self.cfg.load_retry_s)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def save_checkpoint(run_dir: Path, attempt: int, step: int, files: dict[str, bytes], cfg: Config) -> Path:
    """Write a checkpoint, `complete` last, and delete all but the newest `keep_checkpoints`; its directory.

    One of the same step that is complete is not written again; if it is not, the new one gets another name.
    """
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    files = {**files, COMPLETE: json.dumps(digests, indent=1).encode()}

    def write() -> Path:
        same = [p for p in list_checkpoints(run_dir) if checkpoint_key(p.name)[:2] == (attempt, step)]
        if same and not incomplete(same[-1]):
            return same[-1]
        retry = f".{checkpoint_key(same[-1].name)[2] + 1}" if same else ""
        directory = run_dir / "checkpoints" / f"step-{step}-a{attempt}{retry}"
        write_files(directory, files, cfg.settle_s)
        return directory

    directory = with_deadline(write, cfg.publish_timeout_s, f"writing the checkpoint of step {step}")
    try:
        delete = partial(delete_old_checkpoints, run_dir, attempt, cfg.keep_checkpoints)
        with_deadline(delete, cfg.publish_timeout_s, "deleting old checkpoints")
    except (PublishError, OSError) as error:
        print(f"bucket: old checkpoints stay for now: {error}", flush=True)
    return directory


def delete_old_checkpoints(run_dir: Path, attempt: int, keep: int) -> None:
    """Delete what is older than the newest `keep` complete ones; those of a newer attempt are not ours to count."""
    found = [p for p in list_checkpoints(run_dir) if checkpoint_key(p.name)[0] <= attempt]
    kept = [p for p in found if not incomplete(p)][-keep:]
    for old in [p for p in found if kept and checkpoint_key(p.name) < checkpoint_key(kept[0].name)]:
        delete_directory(old, first=COMPLETE)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint directories, complete or not, oldest first."""
    directory = run_dir / "checkpoints"
    return [directory / name for name in sorted(filter(checkpoint_key, names_in(directory)), key=checkpoint_key)]


def incomplete(directory: Path) -> str:
    """Why a checkpoint cannot be resumed from; '' if it can."""
    try:
        names = names_in(directory)
        if COMPLETE not in names:
            return f"{COMPLETE} is missing"
        digests = dict(json.loads((directory / COMPLETE).read_bytes()))
        if not digests:
            return f"{COMPLETE} is empty"
        for name, digest in digests.items():
            if name not in names:
                return f"{name} is missing"
            if hashlib.sha256((directory / name).read_bytes()).hexdigest() != digest:
                return f"{name} is not what was written"
    except (OSError, ValueError, TypeError) as error:
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
