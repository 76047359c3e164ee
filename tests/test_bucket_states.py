"""bucket.py against everything at once: trainers, replicas and a mount that lies, interleaved by hypothesis.

Trainers run the real code on a FaultyMount, in virtual time: a sleep moves the clock and lets the other trainers beat.
Replicas and proxies are in memory: a load is all or nothing, and a proxy that was restarted knows no policy.

    BUCKET_EXAMPLES=10000 pytest tests/test_bucket_states.py
"""

import contextlib
import dataclasses
import json
import os
import random
import secrets
import time
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from faulty_mount import Fault, FaultyMount, Vanished
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import bucket
from config import Config

CFG = dataclasses.replace(Config(), heartbeat_s=10, settle_s=25, sync_every=1, max_staleness=1, load_deadline_s=60)
SHAPES = {"q.lora_A.weight": (1, 2), "q.lora_B.weight": (2, 1)}
with_deadline = bucket.with_deadline
FAULTS = ("no fault", "fail open", "fail close", "fail mkdir", "fail unlink", "fail rmdir", "corrupt close",
          "vanish any", "vanish close", "vanish unlink")  # fmt: skip


class VirtualTime:
    """What bucket.py uses of the time module, on a clock that moves only when somebody sleeps."""

    strftime, gmtime = staticmethod(time.strftime), staticmethod(time.gmtime)

    def __init__(self, beat):
        self.now_s, self.skew_s, self.beat = 1_000_000.0, 0.0, beat

    def monotonic(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return int((self.now_s + self.skew_s) * 1e9)

    def sleep(self, seconds: float) -> None:
        until = self.now_s + seconds
        while self.now_s < until:
            self.now_s = min(until, self.now_s + CFG.heartbeat_s)
            self.beat()


class Replica:
    """One vLLM: adapters by name, as it read them from its own view of the mount."""

    def __init__(self, mount: FaultyMount, name: str):
        self.adapters, self.loaded = mount.view(name) / "run" / "adapters", {}

    def load(self, name: str, clock: VirtualTime) -> bool:
        """Whether the files showed, whole, before the proxy's deadline."""
        until = clock.now_s + CFG.load_deadline_s
        while name not in self.loaded and clock.now_s < until:
            try:
                json.loads((self.adapters / name / "adapter_config.json").read_bytes())
                weights = safetensors.numpy.load((self.adapters / name / "adapter_model.safetensors").read_bytes())
                self.loaded[name] = float(weights["q.lora_A.weight"][0, 0])
            except (FileNotFoundError, ValueError, safetensors.SafetensorError):
                clock.now_s += 0.5
        return name in self.loaded


class Proxy:
    """The contract of proxy.py, for one trainer. It knows nothing at first, and has replicas unload all else."""

    def __init__(self, replicas: list[Replica], clock: VirtualTime):
        self.replicas, self.clock, self.live, self.busy, self.fault = replicas, clock, [], False, ""
        for replica in replicas:
            replica.loaded.clear()

    def post(self, url: str, json: dict, timeout: float) -> SimpleNamespace:
        """A response, or what requests raises if the connection breaks before it came."""
        status, text = (self.unload if "unload" in url else self.load)(json["lora_name"])
        if self.fault == "lost answer":
            raise bucket.requests.ReadTimeout("the answer was lost")
        return SimpleNamespace(status_code=status, text=text)

    def load(self, name: str) -> tuple[int, str]:
        self.live.append(name)
        if not all(replica.load(name, self.clock) for replica in self.replicas):
            self.forget(name)
            return 504, "not loaded everywhere"
        return 200, "loaded"

    def unload(self, name: str) -> tuple[int, str]:
        if name not in self.live:
            return 404, f"The lora adapter '{name}' cannot be found."
        if self.busy:
            return 503, "requests that name it are in flight"
        self.forget(name)
        return 200, "unloaded"

    def forget(self, name: str) -> None:
        self.live.remove(name)
        for replica in self.replicas:
            replica.loaded.pop(name, None)


def direct(action, *_):
    """What with_deadline does, without a thread: those would cost more time than all the rest."""
    try:
        return action()
    except OSError as error:
        raise bucket.PublishError(str(error)) from error


def has_trainer(machine) -> bool:
    return machine.lease is not None


class BucketMachine(RuleBasedStateMachine):
    lease: bucket.Lease | None = None  # of the trainer whose process lives: there is at most one

    @initialize(seed=st.integers(0, 2**32), overwriting=st.booleans())
    def begin(self, seed, overwriting):
        self.clock = bucket.time = VirtualTime(self.beat)
        bucket.secrets, bucket.with_deadline = SimpleNamespace(randbelow=random.Random(seed).randrange), direct
        self.mount = FaultyMount(seed, clock=self.clock.monotonic)
        self.mount.overwriting = overwriting
        self.replicas = [Replica(self.mount, f"replica {i}") for i in range(2)]
        self.meaning: dict[str, float] = {}  # policy name -> the weights it was published with
        self.saved = (0, 0, 0)  # the newest checkpoint that was reported as saved
        self.started = 0

    def teardown(self):
        if self.lease:
            self.crash_trainer()
        bucket.time, bucket.secrets, bucket.with_deadline = time, secrets, with_deadline

    def beat(self) -> None:
        if self.lease:
            self.lease.beat()
            self.lease.look()
            if self.lease.superseded_by:
                self.stop_trainer()

    def do(self, action, fault: str = "no fault", after: int = 0) -> None:
        """Let the trainer do something while something fails; its machine may vanish on the way."""
        what, call = fault.split()
        if what in ("fail", "corrupt", "vanish"):
            self.mount.faults = [Fault(self.machine, call, "", what, after * (5 if call == "any" else 1))]
        self.proxy.fault = fault
        try:
            action()
        except Vanished:
            self.crash_trainer()
        self.mount.faults, self.proxy.fault = [], ""

    def publish_weights(self) -> None:
        publisher, value = self.publisher, float(len(self.meaning) + 1)
        version = max(self.step, max(publisher.step_of, default=-1) + 1)
        name = f"run-a{self.lease.attempt}-v{version}"
        assert name not in self.meaning, "a name is used once"
        self.meaning[name] = value
        if publisher.publish(self.step, {key: np.full(shape, value, "f") for key, shape in SHAPES.items()}, {}):
            assert publisher.policy == (version, name)
            assert all(replica.loaded[name] == value for replica in self.replicas)

    def save_checkpoint(self) -> None:
        files = {"state.json": b"%d" % self.step, "weights": b"w" * 8}
        with contextlib.suppress(bucket.PublishError):  # then it was not reported as saved
            path = bucket.save_checkpoint(self.root, self.lease.attempt, self.step, files, CFG)
            self.saved = max(self.saved, bucket.checkpoint_key(path.name))

    # --- what happens ---

    @rule(takeover=st.booleans(), skew_s=st.sampled_from([0.0, -3600.0, 3600.0]))
    def start(self, takeover, skew_s):
        self.started, self.clock.skew_s, before = self.started + 1, skew_s, self.lease
        root = self.mount.view(f"trainer {self.started}") / "run"
        cfg = dataclasses.replace(CFG, takeover=takeover)
        if before and not takeover:
            with pytest.raises(bucket.LeaseError, match=f"attempt {before.attempt}, heartbeat fresh"):
                bucket.claim(root, cfg)
            return
        lease = bucket.claim(root, cfg)
        assert not self.lease, "a trainer that was told to end has ended when its work is looked for"
        assert not before or lease.attempt > before.attempt
        found, _ = bucket.newest_checkpoint(root)
        key = bucket.checkpoint_key(found.name) if found else (0, 0, 0)
        assert key >= self.saved
        self.lease, self.machine, self.root, self.step = lease, f"trainer {self.started}", root, key[1]
        self.publisher = bucket.Publisher(root, lease, CFG, {"r": 1}, SHAPES)
        self.publisher.cleaner = SimpleNamespace(submit=lambda task: task())
        self.proxy = self.publisher.session = Proxy(self.replicas, self.clock)
        self.do(self.publish_weights)

    @precondition(has_trainer)
    @rule(fault=st.sampled_from([*FAULTS, "lost answer"]), after=st.integers(0, 2))
    def publish(self, fault, after):
        self.step += 1
        self.do(self.publish_weights, fault, after)

    @precondition(has_trainer)
    @rule(fault=st.sampled_from(FAULTS), after=st.integers(0, 2))
    def save(self, fault, after):
        self.do(self.save_checkpoint, fault, after)

    @precondition(has_trainer)
    @rule()
    def crash_trainer(self):
        self.mount.gone.add(self.machine)
        self.lease.beat = self.lease.look = lambda: None
        self.lease.over.set()
        self.lease = None

    @precondition(has_trainer)
    @rule()
    def stop_trainer(self):
        self.save_checkpoint()
        lease, self.lease = self.lease, None
        lease.release()

    @precondition(has_trainer)
    @rule(restarts=st.booleans(), busy=st.booleans())
    def request(self, restarts, busy):
        """The newest policy is asked for, perhaps after the proxy's restart, and stays in flight or not."""
        if restarts:
            self.proxy = self.publisher.session = Proxy(self.replicas, self.clock)
        self.proxy.busy, policy = busy, self.publisher.policy
        if policy and policy.name not in self.proxy.live:  # answered with 404
            self.publisher.reload(policy)
            assert policy.name in self.proxy.live, "its files are still there"

    @rule(seconds=st.sampled_from([1.0, 5.0, 60.0]))
    def time_passes(self, seconds):
        self.clock.sleep(seconds)

    # --- what always holds ---

    @invariant()
    def a_live_policy_has_its_files_and_every_replica_has_it_and_a_name_means_one_set_of_weights(self):
        for name in self.proxy.live if self.lease else []:
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                assert self.mount.truth(f"/bucket/run/adapters/{name}/{file}"), name
            assert all(replica.loaded[name] == self.meaning[name] for replica in self.replicas)

    @invariant()
    def the_newest_complete_checkpoint_is_not_older_than_what_was_reported(self):
        if hasattr(self, "mount"):
            auditor = FaultyMount(0, lag_s=0, negative_s=0, clock=self.clock.monotonic)
            auditor.versions = self.mount.versions
            found, _ = bucket.newest_checkpoint(auditor.view("auditor") / "run")
            assert (bucket.checkpoint_key(found.name) if found else (0, 0, 0)) >= self.saved

    @invariant()
    def no_file_has_two_writers_and_each_is_written_once(self):
        for path, versions in list(self.mount.versions.items()) if hasattr(self, "mount") else []:
            assert len(self.mount.writers(path)) <= 1, path
            assert sum(version.data is not None for version in versions) == 1, path


TestBucketStates = pytest.mark.timeout(7200)(BucketMachine.TestCase)
TestBucketStates.settings = settings(
    max_examples=int(os.environ.get("BUCKET_EXAMPLES", 400)),
    stateful_step_count=25,
    deadline=None,
    derandomize="BUCKET_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
