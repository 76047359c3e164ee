"""bucket.py: the lease on a run, write-once names, publish, retire, checkpoints."""

import dataclasses
import json
import math
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from conftest import wait_for
from faulty_mount import Fault, FaultyMount

import bucket
import trainer
from config import Config

CFG = dataclasses.replace(Config(), heartbeat_s=0.05, settle_s=0.1, sync_every=1, max_staleness=1, publish_timeout_s=5)
TAKEOVER = dataclasses.replace(CFG, takeover=True)
SHAPES = {"q.lora_A.weight": (2, 4), "q.lora_B.weight": (6, 2)}
PEFT_CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def adapter(value: float = 1.0) -> dict[str, np.ndarray]:
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


class Proxy(ThreadingHTTPServer):
    """A server that answers loads and unloads as told, and remembers what it was asked."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict]] = []
        self.answers: dict[str, tuple[int, str]] = {}
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def names(self, route: str) -> list[str]:
        return [body["lora_name"] for asked, body in self.asked if asked == route]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        status, text = self.server.answers.get(self.path, (200, "Success"))
        if status:  # else the connection breaks before the answer
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def proxy():
    server = Proxy()
    yield server
    server.shutdown()
    server.server_close()


def publisher_in(run_dir: Path, proxy: Proxy, **changes) -> bucket.Publisher:
    cfg = dataclasses.replace(CFG, port=proxy.server_port, **changes)
    return bucket.Publisher(run_dir, bucket.Lease(run_dir / "attempts", 17, cfg), cfg, PEFT_CONFIG, SHAPES)


@pytest.fixture
def publisher(tmp_path, proxy):
    return publisher_in(tmp_path / "run", proxy)


def publish(publisher: bucket.Publisher, *steps: int) -> None:
    """Publish weights that differ from step to step, and wait until old policies are retired."""
    for step in steps:
        publisher.publish(step, adapter(step), {"logprobs": [-step]})
        assert publisher.cleaner.flush(20)


def kept(publisher: bucket.Publisher) -> list[str]:
    return sorted(path.name for path in publisher.adapters.iterdir())


def names_v(*versions: int) -> list[str]:
    return [f"run-a17-v{version}" for version in versions]


# --- the lease ---


def kill(lease: bucket.Lease) -> None:
    """What is left of a trainer that was killed: its files, and no more heartbeats."""
    lease.beat = lambda: None
    lease.release()


def test_a_free_run_is_claimed_and_says_who_owns_it(tmp_path):
    lease = bucket.claim(tmp_path / "run", CFG, owner="job 1")
    assert json.loads((lease.directory / f"{lease.attempt}.json").read_text())["owner"] == "job 1"
    wait_for(lambda: lease.count > 5)
    names = {path.name.split(".", 1)[1] for path in lease.directory.iterdir()}
    assert names <= {"json", *(f"{count}.running.heartbeat" for count in range(5, 1000))}, "old heartbeats go"
    lease.release()
    assert sorted(path.name for path in lease.directory.iterdir())[0].endswith(".released.heartbeat")


def test_a_run_whose_trainer_is_alive_is_refused_by_name_and_nothing_of_the_claim_stays(tmp_path):
    first = bucket.claim(tmp_path / "run", CFG, owner="job 1")
    with pytest.raises(bucket.LeaseError, match=r"job 1 since 20.*--takeover"):
        bucket.claim(tmp_path / "run", CFG, owner="job 2")
    assert len(list(first.directory.glob("*.json"))) == 1
    (first.directory / f"{first.attempt}.json").write_bytes(b'{"own')  # as if it were not all visible yet
    with pytest.raises(bucket.LeaseError, match="another trainer"):
        bucket.claim(tmp_path / "run", CFG)
    assert first.superseded_by is None
    first.release()


@pytest.mark.parametrize("end", [bucket.Lease.release, kill])
def test_a_run_whose_trainer_has_ended_is_claimed(tmp_path, end):
    end(first := bucket.claim(tmp_path / "run", CFG))
    second = bucket.claim(tmp_path / "run", CFG)
    assert second.attempt > first.attempt
    second.release()


def test_takeover_waits_for_the_work_of_the_trainer_it_supersedes(tmp_path):
    first = bucket.claim(tmp_path / "run", CFG)

    def train_until_superseded() -> None:
        wait_for(lambda: first.superseded_by)
        bucket.save_checkpoint(tmp_path / "run", first.attempt, 7, {"state.json": b"7"}, CFG)
        first.release()

    with ThreadPoolExecutor(1) as pool:
        trainer = pool.submit(train_until_superseded)
        second = bucket.claim(tmp_path / "run", TAKEOVER)
        assert bucket.newest_checkpoint(tmp_path / "run")[0].name == f"step-7-a{first.attempt}"
        trainer.result(20)
    assert first.superseded_by == second.attempt
    second.release()


def test_takeover_goes_on_without_a_trainer_that_does_not_end_and_keeps_its_files(tmp_path, publisher):
    first = bucket.claim(tmp_path / "run", CFG)
    left = publisher.adapters / f"run-a{first.attempt}-v3"
    bucket.write_files(left, {"adapter_config.json": b"{}"})
    publisher.lease = bucket.claim(tmp_path / "run", dataclasses.replace(TAKEOVER, publish_timeout_s=0.5))
    assert publisher.lease.may_live == [first.attempt]
    publish(publisher, 0)
    assert left.exists()
    first.release()
    publisher.lease.release()


def test_of_trainers_that_start_together_exactly_one_trains_on_any_of_60_seeds(monkeypatch):
    """Three each; their clocks differ by up to two hours, and each sees what the others write up to 0.3 s later."""
    cfg = dataclasses.replace(CFG, heartbeat_s=0.2, settle_s=1.0, publish_timeout_s=60)
    clock = SimpleNamespace(**vars(time))

    def skewed_ns() -> int:
        return time.time_ns() + zlib.crc32(threading.current_thread().name.encode()) % 7 * 20 * 60 * 10**9

    clock.time_ns = skewed_ns
    monkeypatch.setattr(bucket, "time", clock)

    def start(mount: FaultyMount, name: str) -> bucket.Lease | str:
        time.sleep(mount.lag_s * mount.chance(name, "start"))
        try:
            return bucket.claim(mount.view(name) / "run", cfg, owner=name)
        except bucket.LeaseError as error:
            return str(error)

    with ThreadPoolExecutor(180) as pool:
        mounts = [FaultyMount(seed, lag_s=0.3, negative_s=0.5) for seed in range(60)]
        started = [[pool.submit(start, mount, f"job {i}") for i in range(3)] for mount in mounts]
        for mount, three in zip(mounts, started, strict=True):
            outcomes = [future.result(60) for future in three]
            (lease,) = [outcome for outcome in outcomes if isinstance(outcome, bucket.Lease)]
            refused = [outcome for outcome in outcomes if outcome is not lease]
            assert lease.superseded_by is None
            assert all("is being trained by job" in why for why in refused), refused
            lease.release()
            assert all(len(mount.writers(path)) <= 1 for path in list(mount.versions)), f"seed {mount.seed}"


def test_a_trainer_that_finds_a_newer_one_running_when_it_has_settled_leaves(tmp_path):
    """Its claim became visible so late, or its clock is so far behind, that the other did not see it."""
    newer = bucket.Lease(tmp_path / "run" / "attempts", 10**17, CFG)
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(bucket.claim, tmp_path / "run", dataclasses.replace(CFG, settle_s=1.0))
        wait_for(lambda: list(newer.directory.glob("*.json")))
        newer.beat()
        with pytest.raises(bucket.LeaseError, match=f"attempt {10**17}"):
            outcome.result(20)


def test_a_trainer_whose_heartbeats_fail_still_learns_that_it_is_superseded():
    mount = FaultyMount(1, lag_s=0.05)
    first = bucket.claim(mount.view("a") / "run", CFG)
    mount.faults += [Fault("a", "open", ".heartbeat", "fail") for _ in range(10_000)]
    second = bucket.claim(mount.view("b") / "run", TAKEOVER)
    wait_for(lambda: first.superseded_by == second.attempt)
    mount.faults.clear()
    first.release()
    second.release()


@pytest.mark.parametrize("fault", [("iterdir", "hang"), ("mkdir", "fail"), ("close", "hang"), ("open", "fail")])
def test_a_mount_that_hangs_or_cannot_be_written_does_not_hang_a_claim(fault):
    # D21
    mount = FaultyMount(1)
    mount.faults = [Fault("a", fault[0], "", fault[1]) for _ in range(2)]
    message = "the bucket mount hangs" if fault[1] == "hang" else "input/output error"
    with pytest.raises(bucket.PublishError, match=message):
        bucket.claim(mount.view("a") / "run", dataclasses.replace(CFG, publish_timeout_s=0.2))
    mount.thawed.set()


def test_a_mount_that_hangs_does_not_hang_the_end_of_a_trainer(capsys):
    # D21
    mount = FaultyMount(1)
    lease = bucket.claim(mount.view("a") / "run", CFG)
    mount.faults.append(Fault("a", "close", ".heartbeat", "hang"))
    lease.release(timeout_s=0.2)
    assert "ended without saying so" in capsys.readouterr().out
    mount.thawed.set()


def test_heartbeats_are_read_from_the_listing_alone_and_the_newest_attempt_that_trains_supersedes(tmp_path):
    # D07, D08: nothing is overwritten, so nothing can be read stale or half
    stale = ("3.9.running.heartbeat", "3.10.running.heartbeat")
    for name in ("2.json", "2.8.released.heartbeat", "3.json", *stale, "4.json", "notes.txt", "launcher-3.heartbeat"):
        (tmp_path / name).touch()
    assert bucket.read_heartbeats(tmp_path) == {2: math.inf, 3: 10, 4: 0}
    for attempt, newer in ((1, 3), (2, 3), (3, None)):  # 4 has only claimed
        lease = bucket.Lease(tmp_path, attempt, CFG)
        lease.look()
        assert lease.superseded_by == newer


# --- publish and retire ---


def test_a_policy_moves_only_after_the_proxy_confirmed_it_and_a_failed_one_uses_up_its_name(publisher, proxy):
    # A15, A20
    for answer in ((500, "replica 1 is down"), (0, ""), (409, "attempt 18 has taken over")):
        assert not publisher.superseded
        proxy.answers[LOAD] = answer
        assert not publisher.publish(0, adapter(), {})
        assert publisher.policy is None
    assert (publisher.failures, publisher.failed_total, publisher.superseded) == (3, 3, True)
    proxy.answers.clear()
    assert publisher.publish(0, adapter(), {"logprobs": [-0.5]})
    assert publisher.policy == (3, "run-a17-v3")
    assert (publisher.failures, publisher.failed_total, publisher.step_of) == (0, 3, {0: 0, 1: 0, 2: 0, 3: 0})
    assert proxy.names(LOAD) == names_v(0, 1, 2, 3)
    # A16, A25: the path is absolute, the adapter is never loaded in place
    path = str(publisher.adapters / "run-a17-v3")
    assert path.startswith("/")
    assert proxy.asked[-1][1] == {"lora_name": "run-a17-v3", "lora_path": path, "canary": {"logprobs": [-0.5]}}


def test_the_proxy_is_asked_directly_whatever_the_environment_says(publisher, monkeypatch):
    # F31
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    assert publisher.publish(0, adapter(), {})


def test_a_published_directory_is_never_written_twice(tmp_path):
    # A20
    bucket.write_files(tmp_path / "d", {"a": b"1"})
    with pytest.raises(FileExistsError):
        bucket.write_files(tmp_path / "d", {"a": b"2"})
    assert (tmp_path / "d" / "a").read_bytes() == b"1"


def test_published_files_hold_what_was_handed_over_and_the_config_that_announces_them_comes_last(publisher):
    publisher.publish(0, adapter(3.0), {})
    weights, config = list(bucket.adapter_files(adapter(3.0), PEFT_CONFIG))
    tensors = safetensors.numpy.load_file(publisher.adapters / publisher.policy.name / weights)
    assert all((tensors[name] == 3.0).all() for name in SHAPES)
    assert json.loads((publisher.adapters / publisher.policy.name / config).read_text()) == PEFT_CONFIG
    assert (weights, config) == ("adapter_model.safetensors", "adapter_config.json")


@pytest.mark.parametrize(
    ("change", "rank", "message"),
    [
        ({"q.lora_A.weight": np.full((2, 4), np.nan, np.float32)}, 2, "not finite"),  # A11
        ({"q.lora_B.weight": np.zeros((3, 2), np.float32)}, 2, r"shape \(3, 2\)"),  # A12
        ({"extra.lora_A.weight": np.zeros((2, 4), np.float32)}, 2, "extra.lora_A.weight"),
        ({}, 1, "rank 1"),  # A12
    ],
)
def test_an_adapter_that_vllm_would_take_wrongly_is_never_announced(publisher, proxy, change, rank, message):
    publisher.adapter_config = {**PEFT_CONFIG, "r": rank}
    assert not publisher.publish(0, {**adapter(), **change}, {})
    assert message.replace("\\", "") in publisher.last_error
    assert proxy.asked == []


def test_versions_older_than_max_staleness_are_unloaded_then_deleted(publisher, proxy):
    publish(publisher, 0, 1, 2, 3)
    assert proxy.names(UNLOAD) == names_v(0, 1)
    assert kept(publisher) == names_v(2, 3)  # max_staleness 1


def test_a_failed_publish_is_unloaded_and_deleted_in_its_turn(publisher, proxy):
    """The proxy may have loaded it although its answer did not come."""
    proxy.answers[LOAD] = (504, "replica 1 has not loaded it within 120 s")
    publish(publisher, 0)
    assert kept(publisher) == names_v(0)
    proxy.answers.clear()
    publish(publisher, 1, 2)
    assert proxy.names(UNLOAD) == names_v(0)
    assert kept(publisher) == names_v(1, 2)


def test_files_stay_while_a_replica_may_serve_them_and_go_when_the_name_is_unknown(publisher, proxy):
    # A17, A18
    left, not_ours = "run-a16-v9", ["run-a99-v0", "someone's notes"]  # of an older attempt, and of a newer one
    for name in (left, *not_ours):
        bucket.write_files(publisher.adapters / name, {"adapter_config.json": b"{}"})
    proxy.answers[UNLOAD] = (503, "1 requests that name it are still in flight")
    publish(publisher, 0, 1, 2)
    assert kept(publisher) == [left, *names_v(0, 1, 2), *not_ours]
    proxy.answers[UNLOAD] = (404, "The lora adapter cannot be found")
    publish(publisher, 3)
    assert kept(publisher) == [*names_v(2, 3), *not_ours]


def test_the_newest_waiting_snapshot_replaces_an_older_one_and_errors_are_kept_for_the_owner():
    worker, entered, go, done = bucket.Worker("w"), threading.Event(), threading.Event(), []
    worker.submit(lambda: entered.set() or (go.wait(10) and done.append(1)))
    assert entered.wait(10)
    worker.submit(lambda: done.append(2))
    worker.submit(lambda: done.append(3))
    assert worker.busy
    go.set()
    assert worker.flush(10)
    assert (done, worker.error) == ([1, 3], None)
    worker.submit(lambda: 1 / 0)
    assert worker.flush(10)
    assert isinstance(worker.error, ZeroDivisionError)


def test_a_version_is_the_number_of_syncs_so_it_continues_after_a_resume(tmp_path, proxy):
    resumed = publisher_in(tmp_path / "run", proxy, sync_every=4)
    publish(resumed, 50, 52)
    assert resumed.step_of == {12: 50, 13: 52}


def test_a_policy_that_the_proxy_has_lost_is_loaded_again_with_its_canary(publisher, proxy):
    publish(publisher, 0)
    publisher.reload(publisher.policy)
    assert proxy.asked[0] == proxy.asked[1]
    publisher.reload(bucket.Policy(9, "run-a1-v9"))
    assert len(proxy.asked) == 2, "only the newest policy is"


# --- when the trainer publishes ---


@pytest.fixture
def run(publisher, monkeypatch) -> trainer.Run:
    """A run whose "model" is the number that fills its adapter, at step 1."""
    monkeypatch.setattr(trainer, "adapter_state", adapter)
    monkeypatch.setattr(trainer, "canary", lambda *_: {})
    monkeypatch.setattr(bucket, "LOAD_RETRY_S", 0.001)
    publish(publisher, 0)
    nothing = dict.fromkeys(("tokenizer", "optimizer", "sampler", "saved"))
    return trainer.Run(CFG, Path("."), publisher.lease, model=1.0, publisher=publisher, rows=[], before={}, step=1,
                       snapshot_step=0, **nothing)  # fmt: skip


def test_a_publish_that_failed_is_tried_again_while_the_trainer_waits_for_fresh_rollouts(run, publisher, proxy):
    proxy.answers[LOAD] = (500, "no")
    run.publish_if_due(None)
    assert publisher.worker.flush(20)
    assert (run.version(), publisher.policy.version) == (1, 0)  # staleness counts from what was trained, live or not
    proxy.answers.clear()
    wait_for(lambda: run.publish_if_due(None) or publisher.policy.version > 0)
    assert publisher.policy.version == 2  # under a new name
    assert run.version() == 2  # what failed used a number up, and nothing looks fresher for that
    assert publisher.failures == 0


def test_a_publish_that_is_due_while_another_runs_is_made_while_the_trainer_waits(run, publisher):
    entered, go = threading.Event(), threading.Event()
    publisher.worker.submit(lambda: entered.set() or go.wait(20))
    assert entered.wait(20)
    run.publish_if_due(None)
    go.set()
    wait_for(lambda: run.publish_if_due(None) or publisher.policy.version == 1)
    assert publisher.worker.flush(20)
    run.publish_if_due(None)
    assert (publisher.worker.busy, publisher.policy.version) == (False, 1)  # once is enough


# --- on a mount that lies ---


@pytest.mark.parametrize("name", [bucket.ADAPTER_WEIGHTS, bucket.ADAPTER_CONFIG])
def test_what_reads_back_differently_is_never_announced(proxy, name, monkeypatch):
    monkeypatch.setattr(bucket, "READ_BACK_S", 0.1)
    mount = FaultyMount(1)
    publisher = publisher_in(mount.view("a") / "run", proxy)
    mount.faults.append(Fault("a", "close", name, "corrupt"))
    assert not publisher.publish(0, adapter(), {})
    assert f"{name} reads back differently" in publisher.last_error
    assert proxy.asked == []


def test_a_write_that_hangs_and_finishes_late_is_never_announced_and_goes(proxy):
    # D21
    mount = FaultyMount(1)
    publisher = publisher_in(mount.view("a") / "run", proxy, publish_timeout_s=0.2, max_staleness=0)
    mount.faults.append(Fault("a", "close", bucket.ADAPTER_WEIGHTS, "hang"))
    assert not publisher.publish(0, adapter(), {})
    assert "the bucket mount hangs" in publisher.last_error
    mount.thawed.set()
    config = "/bucket/run/adapters/run-a17-v0/adapter_config.json"
    wait_for(lambda: mount.truth(config))
    publisher.cfg = dataclasses.replace(publisher.cfg, publish_timeout_s=20)
    publish(publisher, 1)
    assert proxy.names(LOAD) == names_v(1)
    assert mount.truth(config) is None


@pytest.mark.parametrize("what", ["hang", "fail"])
def test_a_delete_that_hangs_or_fails_delays_no_publish_and_is_made_up_for(proxy, what):
    # D04, D21
    mount = FaultyMount(1)
    publisher = publisher_in(mount.view("a") / "run", proxy, max_staleness=0, publish_timeout_s=20)
    mount.faults.append(Fault("a", "unlink", bucket.ADAPTER_CONFIG, what))
    assert all(publisher.publish(step, adapter(), {}) for step in range(4))
    mount.thawed.set()
    publish(publisher, 4)
    assert kept(publisher) == names_v(4)


def test_a_mount_that_refuses_to_overwrite_is_written_all_the_same():
    mount = FaultyMount(1)
    mount.overwriting = False
    path = mount.view("a") / "metrics.jsonl"
    bucket.write_file(path, b"1")
    bucket.write_file(path, b"2")
    assert path.read_bytes() == b"2"


# --- checkpoints ---


def save(run_dir, *steps: int, attempt: int = 1, cfg: Config = CFG) -> None:
    for step in steps:
        bucket.save_checkpoint(run_dir, attempt, step, {"state.json": b"%d" % step, "optimizer.pt": b"o"}, cfg)


def saved(run_dir) -> list[str]:
    return [path.name for path in bucket.list_checkpoints(run_dir)]


def test_only_the_newest_checkpoints_are_kept_and_incomplete_ones_do_not_count(tmp_path):
    assert bucket.newest_checkpoint(tmp_path) == (None, [])
    save(tmp_path, 10, 20, 30, 40)
    assert saved(tmp_path) == ["step-20-a1", "step-30-a1", "step-40-a1"]
    for step in (50, 60):
        (tmp_path / "checkpoints" / f"step-{step}-a1").mkdir()
    save(tmp_path, 70)
    assert saved(tmp_path)[0] == "step-30-a1"


def test_the_newest_complete_checkpoint_is_found_and_skipped_ones_are_explained(tmp_path):
    # D05
    save(tmp_path, 9, 10, 20)
    (tmp_path / "checkpoints" / "step-30-a1").mkdir()
    (tmp_path / "checkpoints" / "step-30-a1" / "state.json").write_bytes(b"30")
    (tmp_path / "checkpoints" / "step-20-a1" / "optimizer.pt").write_bytes(b"cut")
    found, skipped = bucket.newest_checkpoint(tmp_path)
    assert found.name == "step-10-a1"
    assert skipped == [
        "step-30-a1: complete is missing or empty",
        "step-20-a1: optimizer.pt is not what was written",
    ]


@pytest.mark.parametrize("marker", [b"", b'{\n "state.js', b"[]", b"7"])
def test_a_marker_that_is_half_written_completes_nothing(tmp_path, marker):
    save(tmp_path, 10, 20)
    (tmp_path / "checkpoints" / "step-20-a1" / "complete").write_bytes(marker)
    assert bucket.newest_checkpoint(tmp_path)[0].name == "step-10-a1"


def test_a_superseded_trainer_keeps_its_last_checkpoint_and_the_newer_attempt_wins(tmp_path):
    save(tmp_path, 10, 20, 30, attempt=2)
    save(tmp_path, 99, attempt=1)
    assert saved(tmp_path) == ["step-99-a1", "step-10-a2", "step-20-a2", "step-30-a2"]
    assert bucket.newest_checkpoint(tmp_path)[0].name == "step-30-a2"


@pytest.mark.parametrize(("call", "what"), [("close", "hang"), ("close", "fail"), ("unlink", "fail")])
def test_a_checkpoint_on_a_mount_that_hangs_is_given_up_or_saved_never_waited_for(call, what):
    # D21
    mount = FaultyMount(1)
    save(mount.view("a"), 10, 20, 30)
    mount.faults.append(Fault("a", call, "complete", what))
    if call == "close":
        with pytest.raises(bucket.PublishError, match="the checkpoint of step 40"):
            save(mount.view("a"), 40, cfg=dataclasses.replace(CFG, publish_timeout_s=0.3))
        assert bucket.newest_checkpoint(mount.view("a"))[0].name == "step-30-a1"
        mount.thawed.set()
    save(mount.view("a"), 40)  # under another name if it was tried before
    assert bucket.newest_checkpoint(mount.view("a"))[0].name == ("step-40-a1.1" if call == "close" else "step-40-a1")
    save(mount.view("a"), 50, 60)
    assert len(saved(mount.view("a"))) == 3, "what could not be deleted was deleted later"
