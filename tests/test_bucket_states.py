"""bucket.py against everything at once: trainers, replicas and a mount that lies, interleaved by hypothesis.

Trainers run the real code on a FaultyMount, in virtual time: a sleep moves the clock and lets the other trainers beat.
Replicas and proxies are in memory and keep the contract of proxy.py: a load is all or nothing, a replica that joins is
caught up first, a name is loaded once, an attempt older than the newest is refused.

    BUCKET_EXAMPLES=10000 pytest tests/test_bucket_states.py
"""

import dataclasses
import os
import random
import secrets
import threading
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

CFG = dataclasses.replace(
    Config(), heartbeat_s=10, settle_s=25, sync_every=1, max_staleness=1, keep_checkpoints=2, load_deadline_s=60
)
SHAPES = {"q.lora_A.weight": (1, 2), "q.lora_B.weight": (2, 1)}
with_deadline = bucket.with_deadline
FAULTS = ("no fault", "fail open", "fail close", "fail mkdir", "fail unlink", "fail rmdir", "corrupt close",
          "vanish any", "vanish close", "vanish unlink")  # fmt: skip
ADAPTERS = "/bucket/run/adapters"


class VirtualTime:
    """What bucket.py uses of the time module, on a clock that moves only when somebody sleeps."""

    strftime, gmtime = staticmethod(time.strftime), staticmethod(time.gmtime)

    def __init__(self):
        self.now_s, self.skew_s, self.sleepers = 1_000_000.0, 0.0, []

    def monotonic(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return int((self.now_s + self.skew_s) * 1e9)

    def sleep(self, seconds: float) -> None:
        until = self.now_s + seconds
        while self.now_s < until:
            self.now_s = min(until, self.now_s + CFG.heartbeat_s)
            for call in list(self.sleepers):
                call()


class Replica:
    """One vLLM: adapters by name, as it read them from its own view of the mount."""

    def __init__(self, mount: FaultyMount, name: str):
        self.root, self.ready, self.loaded = mount.view(name), True, {}

    def load(self, name: str) -> str:
        """'' or what vLLM says of files that are not all there."""
        directory = self.root / "run" / "adapters" / name
        try:
            if not (directory / "adapter_config.json").read_bytes().endswith(b"}"):
                return "500 Unterminated string"
            tensors = safetensors.numpy.load((directory / "adapter_model.safetensors").read_bytes())
        except FileNotFoundError:
            return "404 No adapter found"
        except safetensors.SafetensorError as error:
            return f"500 {error}"
        self.loaded[name] = float(tensors["q.lora_A.weight"][0, 0])
        return ""


class Proxy:
    """The contract of proxy.py, for one trainer."""

    def __init__(self, replicas: list[Replica], clock: VirtualTime):
        self.replicas, self.clock = replicas, clock
        self.live, self.burned, self.busy, self.lose_answer, self.lose_replica = [], set(), False, False, None
        found = {name for r in self.ready() for name in r.loaded}
        self.newest = max((bucket.attempt_of(name) for name in found), default=0)
        self.live = sorted(name for name in found if bucket.attempt_of(name) == self.newest)
        for replica in self.ready():
            self.catch_up(replica)

    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.ready]

    def post(self, route: str, body: dict) -> SimpleNamespace:
        """A response, or what requests raises if the connection breaks before it came."""
        call = self.unload if "unload" in route else self.load
        status, text = call(body["lora_name"])
        if self.lose_answer:
            self.lose_answer = False
            raise bucket.requests.ReadTimeout("the answer was lost")
        return SimpleNamespace(status_code=status, text=text)

    def load(self, name: str) -> tuple[int, str]:
        attempt = bucket.attempt_of(name)
        if attempt < self.newest:
            return 409, f"attempt {self.newest} has taken over"
        self.newest = attempt
        if name in self.live:
            return 200, "already"
        if name in self.burned:
            return 409, "was used before"
        deadline = self.clock.now_s + CFG.load_deadline_s
        problem = "" if self.ready() else "no replica is ready"
        for replica in self.ready():
            problem = problem or self.give(replica, name, deadline)
            if self.lose_replica is replica:
                replica.ready, self.lose_replica = False, None
        if problem or not self.ready():
            self.burned.add(name)
            for replica in self.ready():
                replica.loaded.pop(name, None)
            return 504, problem or "every replica went down"
        self.live.append(name)
        for older in [n for n in self.live if bucket.attempt_of(n) < attempt]:
            self.unload(older)
        return 200, "loaded"

    def give(self, replica: Replica, name: str, deadline: float) -> str:
        while problem := replica.load(name):
            if self.clock.now_s > deadline:
                return problem
            self.clock.now_s += 0.5
        return ""

    def unload(self, name: str) -> tuple[int, str]:
        if name not in self.live:
            return 404, f"The lora adapter '{name}' cannot be found."
        if self.busy:
            return 503, "requests that name it are in flight"
        self.live.remove(name)
        self.burned.add(name)
        for replica in self.ready():
            replica.loaded.pop(name, None)
        return 200, "unloaded"

    def catch_up(self, replica: Replica) -> None:
        """Ready with every live policy and no other, or down."""
        replica.loaded = {name: value for name, value in replica.loaded.items() if name in self.live}
        deadline = self.clock.now_s + CFG.load_deadline_s
        replica.ready = not any(self.give(replica, n, deadline) for n in self.live if n not in replica.loaded)


@dataclasses.dataclass
class Trainer:
    """One attempt: its machine, its lease, its publisher and proxy, and how far it has come."""

    machine: str
    root: object
    lease: bucket.Lease
    publisher: bucket.Publisher
    step: int = 0

    @property
    def proxy(self) -> Proxy:
        return self.publisher.fake_proxy


class BucketMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32), overwriting=st.booleans())
    def begin(self, seed, overwriting):
        self.clock = bucket.time = VirtualTime()
        bucket.secrets = SimpleNamespace(randbelow=random.Random(seed).randrange)
        bucket.with_deadline = lambda action, *_: action()  # threads would cost more time than all the rest
        self.clock.sleepers.append(self.everyone_beats)
        self.mount = FaultyMount(seed, clock=self.clock.monotonic)
        self.mount.overwriting = overwriting
        self.replicas = [Replica(self.mount, f"replica {i}") for i in range(2)]
        self.trainers: list[Trainer] = []  # those whose process lives, oldest first
        self.meaning: dict[str, float] = {}  # policy name -> the weights it was published with
        self.saved = (0, 0, 0)  # the newest checkpoint that was reported as saved
        self.started = self.values = 0

    def teardown(self):
        bucket.time, bucket.secrets, bucket.with_deadline = time, secrets, with_deadline
        if hasattr(self, "mount"):
            self.mount.thawed.set()
            for trainer in self.trainers:
                self.end_thread(trainer.lease)

    # --- what a trainer does ---

    def everyone_beats(self) -> None:
        for trainer in list(self.trainers):
            trainer.lease.beat()
            if trainer.lease.superseded_by:
                self.stop(trainer)

    def stop(self, trainer: Trainer) -> None:
        """A clean stop, as when superseded: save, release."""
        self.trainers.remove(trainer)
        self.save_of(trainer)
        trainer.lease.release()

    def crash(self, trainer: Trainer) -> None:
        self.trainers = [t for t in self.trainers if t is not trainer]
        self.mount.gone.add(trainer.machine)
        self.end_thread(trainer.lease)

    def end_thread(self, lease: bucket.Lease) -> None:
        with lease.changed:
            lease.said = lease.state = "released"
            lease.changed.notify_all()

    def publish_of(self, trainer: Trainer) -> None:
        self.values += 1
        tensors = {name: np.full(shape, self.values, np.float32) for name, shape in SHAPES.items()}
        publisher = trainer.publisher
        name = f"run-a{trainer.lease.attempt}-v{max(publisher.next_version, trainer.step)}"
        assert name not in self.meaning, "a name is used once"
        self.meaning[name] = float(self.values)
        try:
            if publisher.publish(trainer.step, tensors, {}):
                assert publisher.policy.name == name
                assert name in trainer.proxy.live
                assert all(replica.loaded[name] == self.values for replica in trainer.proxy.ready())
        except Vanished:
            self.crash(trainer)

    def save_of(self, trainer: Trainer) -> None:
        files = {"state.json": b"%d" % trainer.step, "weights": b"w" * 8}
        try:
            path = bucket.save_checkpoint(trainer.root, trainer.lease.attempt, trainer.step, files, CFG)
            self.saved = max(self.saved, bucket.checkpoint_key(path.name))
        except (bucket.PublishError, OSError):
            pass  # said to have failed, so not reported as saved
        except Vanished:
            self.crash(trainer)

    def newest(self) -> Trainer | None:
        return self.trainers[-1] if self.trainers else None

    # --- what happens ---

    @rule(takeover=st.booleans(), skew_s=st.sampled_from([0.0, -3600.0, 3600.0]))
    def start(self, takeover, skew_s):
        self.started += 1
        machine, self.clock.skew_s = f"trainer {self.started}", skew_s
        root = self.mount.view(machine) / "run"
        alive = [t.lease.attempt for t in self.trainers]
        refused = ""
        try:
            lease = bucket.claim(root, dataclasses.replace(CFG, takeover=takeover), owner=machine)
        except bucket.LeaseError as error:
            refused = str(error)
        if refused:
            assert f"(attempt {alive[-1]}, heartbeat fresh)" in refused, "a run without a trainer is free"
            return
        assert takeover or not alive, "a run has one trainer"
        assert all(lease.attempt > attempt for attempt in alive)
        assert not self.trainers, "a trainer that was told to end has ended when its work is looked for"
        found, _ = bucket.newest_checkpoint(root)
        assert (bucket.checkpoint_key(found.name) if found else (0, 0, 0)) >= self.saved
        publisher = bucket.Publisher(root, lease, CFG, {"r": 1}, SHAPES)
        publisher.cleaner = SimpleNamespace(submit=lambda job: job())
        publisher.fake_proxy = Proxy(self.replicas, self.clock)
        publisher._post = lambda route, body: publisher.fake_proxy.post(route, body)
        trainer = Trainer(machine, root, lease, publisher, bucket.checkpoint_key(found.name)[1] if found else 0)
        self.trainers.append(trainer)
        self.publish_of(trainer)
        if publisher.policy:
            publisher.collect_leftovers()

    @precondition(lambda self: self.trainers)
    @rule(fault=st.sampled_from([*FAULTS, "lost answer", "lost replica"]), after=st.integers(0, 2))
    def publish(self, fault, after):
        trainer, (what, call) = self.newest(), fault.split()
        if fault in FAULTS[1:]:
            self.mount.faults.append(Fault(trainer.machine, call, "", what, after * (5 if call == "any" else 1)))
        trainer.proxy.lose_answer = fault == "lost answer"
        trainer.proxy.lose_replica = self.replicas[after % 2] if fault == "lost replica" else None
        trainer.step += 1
        self.publish_of(trainer)
        self.mount.faults.clear()

    @precondition(lambda self: self.trainers)
    @rule(thaw=st.booleans())
    def publish_while_the_mount_hangs(self, thaw):
        trainer, before_it = self.newest(), threading.enumerate()
        self.mount.faults.append(Fault(trainer.machine, "close", ".safetensors", "hang"))
        trainer.publisher.cfg = dataclasses.replace(CFG, publish_timeout_s=0.02)
        before, bucket.with_deadline, direct = trainer.publisher.policy, with_deadline, bucket.with_deadline
        self.publish_of(trainer)
        assert trainer.publisher.policy == before
        trainer.publisher.cfg, bucket.with_deadline = CFG, direct
        if thaw:  # what hung finishes late, and must change nothing
            self.mount.thawed.set()
            for thread in [t for t in threading.enumerate() if t not in before_it and t.name != "heartbeat"]:
                thread.join(20)
            self.mount.thawed = threading.Event()

    @precondition(lambda self: self.trainers)
    @rule(fault=st.sampled_from(FAULTS), after=st.integers(0, 2))
    def save(self, fault, after):
        trainer, (what, call) = self.newest(), fault.split()
        if fault in FAULTS[1:]:
            self.mount.faults.append(Fault(trainer.machine, call, "", what, after * (5 if call == "any" else 1)))
        self.save_of(trainer)
        self.mount.faults.clear()

    @precondition(lambda self: self.trainers)
    @rule()
    def crash_trainer(self):
        self.crash(self.newest())

    @precondition(lambda self: self.trainers)
    @rule()
    def stop_trainer(self):
        self.stop(self.newest())

    @rule(index=st.integers(0, 1), forgets=st.booleans())
    def lose_replica(self, index, forgets):
        self.replicas[index].ready = False
        if forgets:
            self.replicas[index].loaded = {}

    @precondition(lambda self: self.trainers)
    @rule(index=st.integers(0, 1))
    def replica_returns(self, index):
        if not self.replicas[index].ready:
            self.newest().proxy.catch_up(self.replicas[index])

    @precondition(lambda self: self.trainers)
    @rule()
    def proxy_restarts(self):
        self.newest().publisher.fake_proxy = Proxy(self.replicas, self.clock)

    @precondition(lambda self: self.trainers)
    @rule(busy=st.booleans())
    def requests_are_in_flight(self, busy):
        self.newest().proxy.busy = busy

    @precondition(lambda self: self.trainers and self.newest().publisher.policy)
    @rule(older=st.integers(0, 1))
    def request(self, older):
        trainer = self.newest()
        names = [p.name for p in trainer.publisher.live][-1 - CFG.max_staleness :]
        name = names[max(0, len(names) - 1 - older)]
        if name not in trainer.proxy.live:
            trainer.publisher.reload(trainer.publisher.policy)  # 404, and nothing is generated
            return
        for replica in trainer.proxy.ready():
            assert replica.loaded[name] == self.meaning[name]

    @rule(seconds=st.sampled_from([1.0, 5.0, 60.0]))
    def time_passes(self, seconds):
        self.clock.sleep(seconds)

    # --- what always holds ---

    @invariant()
    def a_name_means_one_set_of_weights(self):
        for replica in getattr(self, "replicas", []):
            for name, value in replica.loaded.items():
                assert value == self.meaning[name]

    @invariant()
    def a_live_policy_has_its_files_and_every_ready_replica_has_it(self):
        trainer = self.newest() if hasattr(self, "trainers") else None
        for name in trainer.proxy.live if trainer else []:
            assert self.mount.truth(f"{ADAPTERS}/{name}/adapter_config.json"), name
            assert self.mount.truth(f"{ADAPTERS}/{name}/adapter_model.safetensors"), name
            assert all(name in replica.loaded for replica in trainer.proxy.ready())

    @invariant()
    def the_newest_complete_checkpoint_is_not_older_than_what_was_reported(self):
        if hasattr(self, "mount"):
            auditor = FaultyMount(0, lag_s=0, negative_s=0, clock=self.clock.monotonic)
            auditor.versions, auditor.lock = self.mount.versions, self.mount.lock
            found, _ = bucket.newest_checkpoint(auditor.view("auditor") / "run")
            assert (bucket.checkpoint_key(found.name) if found else (0, 0, 0)) >= self.saved

    @invariant()
    def no_file_has_two_writers_and_published_ones_are_written_once(self):
        for path, versions in list(self.mount.versions.items()) if hasattr(self, "mount") else []:
            assert len(self.mount.writers(path)) <= 1, path
            if "/attempts/" not in path:
                assert sum(version.data is not None for version in versions) == 1, path

    @invariant()
    def at_most_one_trainer_is_not_superseded(self):
        assert sum(not t.lease.superseded_by for t in getattr(self, "trainers", [])) <= 1


TestBucketStates = pytest.mark.timeout(7200)(BucketMachine.TestCase)
TestBucketStates.settings = settings(
    max_examples=int(os.environ.get("BUCKET_EXAMPLES", 500)),
    stateful_step_count=25,
    deadline=None,
    derandomize="BUCKET_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
