"""bucket.py: the lease on a run, write-once names, publish, retire, checkpoints."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import requests
import safetensors.numpy
from conftest import free_port, wait_for
from faulty_mount import Fault, FaultyMount, serve_replica

import bucket
import trainer
from config import Config

CFG = dataclasses.replace(
    Config(), heartbeat_s=0.05, settle_s=0.1, sync_every=1, max_staleness=1, keep_checkpoints=2, publish_timeout_s=5
)
SHAPES = {"q.lora_A.weight": (2, 4), "q.lora_B.weight": (6, 2)}
PEFT_CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


def kill(lease: bucket.Lease) -> None:
    """What is left of a trainer that was killed: its files, and no more heartbeats."""
    lease.state = lease.said = "released"
    with lease.changed:
        lease.changed.notify_all()


def adapter(value: float = 1.0) -> dict[str, np.ndarray]:
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def proxy():
    """A server that answers loads and unloads as told and remembers what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append((self.path, body["lora_name"]))
            if server.drops:
                server.drops -= 1
                self.close_connection = True
                return  # the connection breaks before the answer
            if "load_lora" in self.path and "unload" not in self.path:
                server.bodies.append(body)
            status, text = server.answers.get(self.path, (200, "Success"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.answers, server.bodies, server.drops = [], {}, [], 0
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def publisher(tmp_path, proxy):
    lease = bucket.claim(tmp_path / "run", CFG)
    cfg = dataclasses.replace(CFG, port=proxy.server_port)
    yield bucket.Publisher(tmp_path / "run", lease, cfg, PEFT_CONFIG, SHAPES)
    lease.release()


def publish(publisher: bucket.Publisher, *steps: int) -> None:
    """Publish weights that differ from step to step, and wait until old policies are retired."""
    for step in steps:
        publisher.publish(step, adapter(step), {})
        assert publisher.cleaner.flush(20)


def adapters_in(publisher: bucket.Publisher) -> set[str]:
    return set(bucket.names_in(publisher.run_dir / "adapters"))


# --- names ---


def test_names_carry_the_attempt():
    name = bucket.policy_name("sanity", 1796066416123, 37)
    assert name == "sanity-a1796066416123-v37"
    assert bucket.attempt_of(name) == 1796066416123
    assert bucket.attempt_of("trl-policy-v3") is None


def test_attempts_that_start_at_the_same_instant_or_with_a_clock_that_is_off_differ_and_follow_the_known_ones():
    future = 10**17
    numbers = [bucket.new_attempt([5, future]) for _ in range(2)]
    assert numbers[0] != numbers[1]
    assert min(numbers) > future
    assert abs(bucket.new_attempt([]) - time.time_ns() // 1000) < 5_000_000


def test_checkpoints_are_ordered_by_attempt_then_step():
    names = ["step-9-a2", "step-10-a2", "step-10-a2.1", "step-10-a2.10", "step-1-a3"]
    assert sorted(sorted(names), key=bucket.checkpoint_key) == names
    assert bucket.checkpoint_key("final") is None


# --- the lease ---


def test_a_free_run_is_claimed_and_says_who_owns_it(tmp_path):
    lease = bucket.claim(tmp_path / "run", CFG, owner="job 1")
    claim = json.loads((lease.directory / f"{lease.attempt}.json").read_text())
    assert claim["owner"] == "job 1"
    assert bucket.read_heartbeats(lease.directory)[lease.attempt].state == "running"
    lease.release()


def test_a_run_whose_trainer_is_alive_is_refused_by_name(tmp_path):
    first = bucket.claim(tmp_path / "run", CFG, owner="job 1")
    with pytest.raises(bucket.LeaseError, match=r"job 1 since .*--takeover"):
        bucket.claim(tmp_path / "run", CFG, owner="job 2")
    assert first.superseded_by is None
    first.release()


def test_a_run_whose_trainer_has_released_it_is_claimed(tmp_path):
    first = bucket.claim(tmp_path / "run", CFG)
    first.release()
    second = bucket.claim(tmp_path / "run", CFG)
    assert second.attempt > first.attempt
    second.release()


def test_a_run_whose_trainer_was_killed_is_claimed(tmp_path):
    first = bucket.claim(tmp_path / "run", CFG)
    kill(first)
    second = bucket.claim(tmp_path / "run", CFG)
    second.release()


def test_takeover_waits_for_the_work_of_the_trainer_it_supersedes(tmp_path):
    first = bucket.claim(tmp_path / "run", CFG)

    def train_until_superseded() -> None:
        wait_for(lambda: first.superseded_by)
        bucket.save_checkpoint(tmp_path / "run", first.attempt, 7, {"state.json": b"7"}, CFG)
        first.release()

    trainer = threading.Thread(target=train_until_superseded)
    trainer.start()
    second = bucket.claim(tmp_path / "run", dataclasses.replace(CFG, takeover=True))
    assert bucket.newest_checkpoint(tmp_path / "run")[0].name == f"step-7-a{first.attempt}"
    assert second.may_live == []
    trainer.join()
    assert first.superseded_by == second.attempt
    second.release()


def test_takeover_goes_on_without_a_trainer_that_does_not_end_and_keeps_its_files(tmp_path, proxy):
    cfg = dataclasses.replace(CFG, takeover=True, publish_timeout_s=0.5, port=proxy.server_port)
    first = bucket.claim(tmp_path / "run", CFG)
    bucket.write_files(tmp_path / "run" / "adapters" / f"run-a{first.attempt}-v3", {"adapter_config.json": b"{}"})
    second = bucket.claim(tmp_path / "run", cfg)
    assert second.may_live == [first.attempt]
    assert bucket.Publisher(tmp_path / "run", second, cfg, PEFT_CONFIG, SHAPES).collect_leftovers() == []
    assert (tmp_path / "run" / "adapters" / f"run-a{first.attempt}-v3").exists()
    first.release()
    second.release()


def start_together(mount: FaultyMount, cfg: Config) -> tuple[dict, bucket.Lease]:
    """Three trainers claim a run within the time that the mount is late: what became of them, and who holds it."""
    outcomes = {}

    def start(name: str) -> None:
        time.sleep(mount.lag_s * mount.chance(name, "start"))
        try:
            outcomes[name] = bucket.claim(mount.view(name) / "run", cfg, owner=name)
        except bucket.LeaseError as error:
            outcomes[name] = error

    names = [f"job {i}" for i in range(3)]
    threads = [threading.Thread(target=start, args=(name,), name=f"{mount.seed} {name}") for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leases = [outcome for outcome in outcomes.values() if isinstance(outcome, bucket.Lease)]
    assert len(leases) == 1, f"seed {mount.seed}: {outcomes}"
    return outcomes, leases[0]


def test_of_trainers_that_start_together_exactly_one_trains_on_any_of_100_seeds(monkeypatch):
    """Their clocks differ by up to two hours, and each sees what the others write up to 0.3 s later."""
    cfg = dataclasses.replace(CFG, heartbeat_s=0.2, settle_s=1.0, publish_timeout_s=60)
    clock = SimpleNamespace(**vars(time))

    def skewed_ns() -> int:
        return time.time_ns() + zlib.crc32(threading.current_thread().name.encode()) % 7 * 20 * 60 * 10**9

    clock.time_ns = skewed_ns
    monkeypatch.setattr(bucket, "time", clock)

    def one(seed: int) -> None:
        mount = FaultyMount(seed, lag_s=0.3, negative_s=0.5)
        outcomes, lease = start_together(mount, cfg)
        assert lease.superseded_by is None
        for outcome in outcomes.values():
            assert outcome is lease or "is being trained by job" in str(outcome)
        lease.release()
        assert all(len(mount.writers(path)) <= 1 for path in list(mount.versions)), f"seed {seed}: two writers"

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(one, range(100)))


def test_a_trainer_that_finds_a_newer_one_running_when_it_has_settled_leaves(tmp_path):
    """Its claim became visible so late, or its clock is so far behind, that the other did not see it."""
    directory = tmp_path / "run" / "attempts"
    newer = bucket.Lease(directory, 10**17, heartbeat_s=1, state="running")
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(bucket.claim, tmp_path / "run", dataclasses.replace(CFG, settle_s=1.0))
        wait_for(lambda: list(directory.glob("*.json")))
        newer.beat()
        with pytest.raises(bucket.LeaseError, match=f"attempt {10**17}"):
            outcome.result(20)


def test_a_trainer_whose_heartbeats_fail_still_learns_that_it_is_superseded():
    mount = FaultyMount(1, lag_s=0.05)
    first = bucket.claim(mount.view("a") / "run", CFG)
    mount.faults += [Fault("a", "open", ".heartbeat", "fail") for _ in range(10_000)]
    second = bucket.claim(mount.view("b") / "run", dataclasses.replace(CFG, takeover=True))
    wait_for(lambda: first.superseded_by == second.attempt)
    mount.faults.clear()
    first.release()
    second.release()


def test_a_mount_that_hangs_or_cannot_be_written_does_not_hang_a_claim():
    # D21
    cfg, mount = dataclasses.replace(CFG, publish_timeout_s=0.2), FaultyMount(1)
    mount.faults.append(Fault("a", "close", ".claiming.heartbeat", "hang"))
    with pytest.raises(bucket.PublishError, match=r"no heartbeat could be written .* not writable"):
        bucket.claim(mount.view("a") / "run", cfg)
    mount.faults.append(Fault("b", "iterdir", "attempts", "hang"))
    with pytest.raises(bucket.PublishError, match="the bucket mount hangs"):
        bucket.claim(mount.view("b") / "run", cfg)
    mount.thawed.set()


def test_a_mount_that_hangs_does_not_hang_the_end_of_a_trainer(capsys):
    # D21
    mount = FaultyMount(1)
    lease = bucket.claim(mount.view("a") / "run", CFG)
    mount.faults.append(Fault("a", "close", ".heartbeat", "hang"))
    lease.release()
    assert "ended without saying so" in capsys.readouterr().out
    mount.thawed.set()


def test_the_claim_of_a_living_trainer_that_is_not_visible_yet_refuses_all_the_same(tmp_path):
    first = bucket.claim(tmp_path / "run", CFG)
    (first.directory / f"{first.attempt}.json").write_bytes(b'{"own')
    with pytest.raises(bucket.LeaseError, match="another trainer"):
        bucket.claim(tmp_path / "run", CFG)
    first.release()


def test_only_a_newer_attempt_that_trains_or_has_trained_supersedes():
    beats = {5: (9, "running"), 7: (2, "claiming"), 8: (3, "refused"), 3: (4, "running"), 6: (0, "")}
    beats = {attempt: bucket.Heartbeat(*beat) for attempt, beat in beats.items()}
    assert bucket.superseding(5, beats) is None
    assert bucket.superseding(5, {**beats, 9: bucket.Heartbeat(1, "running")}) == 9
    assert bucket.superseding(5, {**beats, 9: bucket.Heartbeat(4, "released")}) == 9


def test_life_is_a_heartbeat_that_advances_not_a_clock():
    first = {1: (4, "running"), 2: (7, "running"), 3: (0, ""), 4: (1, "running"), 5: (6, "running")}
    now = {1: (4, "running"), 2: (8, "running"), 3: (1, "claiming"), 4: (2, "released"), 5: (5, "running")}
    first, now = ({a: bucket.Heartbeat(*beat) for a, beat in beats.items()} for beats in (first, now))
    assert bucket.advanced(first, now) == [2]


def test_heartbeats_are_read_from_the_listing_alone(tmp_path):
    # D07, D08: nothing is overwritten, so nothing can be read stale or half
    stale = ("3.9.running.heartbeat", "3.10.running.heartbeat")
    for name in ("3.json", *stale, "4.json", "notes.txt", "launcher-3.heartbeat"):
        (tmp_path / name).touch()
    assert bucket.read_heartbeats(tmp_path) == {3: (10, "running"), 4: (0, "")}
    assert bucket.read_heartbeats(tmp_path, after=3) == {4: (0, "")}


def test_an_attempt_leaves_one_heartbeat_behind(tmp_path):
    lease = bucket.claim(tmp_path / "run", CFG)
    wait_for(lambda: lease.count > 5)
    lease.release()
    wait_for(lambda: len(list(lease.directory.iterdir())) == 2)
    assert sorted(p.name.split(".")[-1] for p in lease.directory.iterdir()) == ["heartbeat", "json"]


# --- publish and retire ---


def test_a_policy_moves_only_after_the_proxy_confirmed_the_load(publisher, proxy):
    proxy.answers["/v1/load_lora_adapter"] = (500, "replica 1 is down")
    assert not publisher.publish(0, adapter(), {})
    assert publisher.policy is None
    assert "replica 1 is down" in publisher.last_error
    proxy.answers.clear()
    assert publisher.publish(0, adapter(), {"token_ids": [1, 2], "logprobs": [-0.5]})
    assert publisher.policy.version == 1
    assert proxy.bodies[-1]["canary"] == {"token_ids": [1, 2], "logprobs": [-0.5]}


def test_load_bodies_name_an_absolute_path_and_never_ask_to_load_in_place(publisher, proxy):
    # A16, A25
    publisher.publish(0, adapter(), {})
    assert "load_inplace" not in proxy.bodies[0]
    assert proxy.bodies[0]["lora_path"] == str(publisher.run_dir / "adapters" / publisher.policy.name)
    assert proxy.bodies[0]["lora_path"].startswith("/")


def test_a_name_is_never_used_again_after_a_failure(publisher, proxy):
    # A15, A20
    proxy.answers["/v1/load_lora_adapter"] = (500, "no")
    publisher.publish(0, adapter(), {})
    publisher.publish(0, adapter(), {})
    names = [name for _, name in proxy.asked]
    assert len(set(names)) == len(names) == 2


def test_a_published_directory_is_never_written_twice(tmp_path):
    # A20
    bucket.write_files(tmp_path / "d", {"a": b"1"})
    with pytest.raises(bucket.PublishError, match="never written twice"):
        bucket.write_files(tmp_path / "d", {"a": b"2"})
    assert (tmp_path / "d" / "a").read_bytes() == b"1"


def test_weights_are_written_before_the_config_that_announces_them():
    assert list(bucket.adapter_files(adapter(), PEFT_CONFIG)) == ["adapter_model.safetensors", "adapter_config.json"]


def test_published_files_hold_what_was_handed_over(publisher):
    publisher.publish(0, adapter(3.0), {})
    directory = publisher.run_dir / "adapters" / publisher.policy.name
    tensors = safetensors.numpy.load_file(directory / "adapter_model.safetensors")
    assert all((tensors[name] == 3.0).all() for name in SHAPES)
    assert json.loads((directory / "adapter_config.json").read_text()) == PEFT_CONFIG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q.lora_A.weight": np.full((2, 4), np.nan, np.float32)}, "not finite"),  # A11
        ({"q.lora_B.weight": np.zeros((3, 2), np.float32)}, r"shape \(3, 2\)"),  # A12
        ({"extra.lora_A.weight": np.zeros((2, 4), np.float32)}, "extra.lora_A.weight"),
    ],
)
def test_an_adapter_that_vllm_would_take_wrongly_is_not_published(change, message):
    with pytest.raises(bucket.PublishError, match=message):
        bucket.check_adapter({**adapter(), **change}, SHAPES, rank=2)


def test_an_adapter_of_another_rank_than_its_config_is_not_published():
    # A12
    with pytest.raises(bucket.PublishError, match="rank 1"):
        bucket.check_adapter(adapter(), SHAPES, rank=1)


def test_versions_older_than_max_staleness_are_unloaded_then_deleted(publisher, proxy):
    publish(publisher, 0, 1, 2, 3)
    assert [policy.version for policy in publisher.live] == [2, 3]  # max_staleness 1
    unloaded = [name for path, name in proxy.asked if "unload" in path]
    assert [bucket.attempt_of(name) for name in unloaded] == [publisher.lease.attempt] * 2
    assert adapters_in(publisher) == {policy.name for policy in publisher.live}


def test_files_stay_while_a_replica_has_not_confirmed_the_unload(publisher, proxy):
    # A18
    proxy.answers["/v1/unload_lora_adapter"] = (502, "replica 0 did not answer")
    publish(publisher, 0, 1, 2)
    assert len(publisher.live) == len(adapters_in(publisher)) == 3
    proxy.answers.clear()
    publish(publisher, 3)
    assert len(publisher.live) == len(adapters_in(publisher)) == 2


def test_an_unload_of_a_name_that_is_gone_counts_as_done(publisher, proxy):
    # A17
    proxy.answers["/v1/unload_lora_adapter"] = (404, "cannot be found")
    publish(publisher, 0, 1, 2)
    assert len(publisher.live) == 2


def test_the_newest_waiting_snapshot_replaces_an_older_one():
    worker, entered, go, done = bucket.Worker("w"), threading.Event(), threading.Event(), []

    def first() -> None:
        entered.set()
        go.wait(10)
        done.append(1)

    worker.submit(first)
    entered.wait(10)
    worker.submit(lambda: done.append(2))
    worker.submit(lambda: done.append(3))
    go.set()
    assert worker.flush(10)
    assert done == [1, 3]


@pytest.fixture
def run(publisher, monkeypatch) -> trainer.Run:
    """A run whose "model" is the number that fills its adapter."""
    monkeypatch.setattr(trainer, "numpy_state", adapter)
    monkeypatch.setattr(trainer, "canary", lambda *_: {})
    cfg = dataclasses.replace(CFG, load_retry_s=0.001)
    publish(publisher, 0)
    return trainer.Run(cfg, publisher.run_dir, publisher.lease, publisher, None, [])


def test_a_publish_that_failed_is_tried_again_while_the_trainer_waits_for_fresh_rollouts(run, publisher, proxy):
    proxy.answers["/v1/load_lora_adapter"] = (500, "no")
    run.publish_if_due(1, 1, [])
    assert publisher.worker.flush(20)
    assert (run.version(1), publisher.policy.version) == (1, 0)  # staleness counts from what was trained, live or not
    proxy.answers.clear()
    wait_for(lambda: run.publish_if_due(1, 1, []) or publisher.policy.version > 0)
    assert publisher.policy.version == 2  # under a new name
    # What failed used a number up, and nothing looks fresher for that.
    assert [run.version(step) for step in (1, 2, 3)] == [2, 3, 4]
    assert publisher.failures == 0


def test_a_publish_that_is_due_while_another_runs_is_made_while_the_trainer_waits_for_its_rollouts(run, publisher):
    entered, go = threading.Event(), threading.Event()
    publisher.worker.submit(lambda: entered.set() or go.wait(20))
    assert entered.wait(20)
    run.publish_if_due(1, 1, [])
    go.set()
    wait_for(lambda: run.publish_if_due(1, 1, []) or publisher.policy.version == 1)
    assert publisher.worker.flush(20)
    run.publish_if_due(1, 1, [])
    assert (publisher.worker.busy, publisher.policy.version) == (False, 1)  # once is enough


def test_what_a_background_job_raises_is_kept_for_its_owner():
    worker = bucket.Worker("w")
    worker.submit(lambda: 1 / 0)
    assert worker.flush(10)
    assert isinstance(worker.error, ZeroDivisionError)
    worker.submit(lambda: None)
    assert worker.flush(10)


def test_a_write_that_hangs_is_given_up_and_said():
    # D21
    never = threading.Event()
    with pytest.raises(bucket.PublishError, match="bucket mount hangs"):
        bucket.with_deadline(lambda: never.wait(30), 0.05, "writing x")
    never.set()


def test_an_attempt_that_is_refused_by_the_proxy_knows_that_it_is_superseded(publisher, proxy):
    proxy.answers["/v1/load_lora_adapter"] = (409, "x was used before: load under a new name")
    publisher.publish(0, adapter(), {})
    assert not publisher.superseded
    proxy.answers["/v1/load_lora_adapter"] = (409, "x is of attempt 1, but attempt 2 has taken over")
    publisher.publish(1, adapter(), {})
    assert publisher.superseded


def test_a_version_is_the_number_of_syncs_so_it_continues_after_a_resume(tmp_path, proxy):
    lease = bucket.claim(tmp_path / "run", CFG)
    cfg = dataclasses.replace(CFG, port=proxy.server_port, sync_every=4)
    resumed = bucket.Publisher(tmp_path / "run", lease, cfg, PEFT_CONFIG, SHAPES)
    resumed.publish(50, adapter(), {})
    assert resumed.policy.version == 12
    resumed.publish(52, adapter(), {})
    assert resumed.policy.version == 13
    assert resumed.step_of == {12: 50, 13: 52}
    lease.release()


def test_adapters_left_by_an_ended_attempt_are_unloaded_then_deleted_and_own_ones_kept(publisher, proxy, tmp_path):
    ended = tmp_path / "run" / "attempts" / "17.json"
    ended.write_text("{}")
    left = tmp_path / "run" / "adapters" / "run-a17-v3"
    bucket.write_files(left, {"adapter_model.safetensors": b"w", "adapter_config.json": b"{}"})
    publisher.publish(0, adapter(), {})
    assert publisher.collect_leftovers() == ["run-a17-v3"]
    assert publisher.cleaner.flush(10)
    assert not left.exists()
    assert ("/v1/unload_lora_adapter", "run-a17-v3") in proxy.asked
    assert (publisher.run_dir / "adapters" / publisher.policy.name).exists()


def test_leftovers_stay_while_a_replica_may_serve_them(publisher, proxy, tmp_path):
    # A18
    left = tmp_path / "run" / "adapters" / "run-a17-v3"
    bucket.write_files(left, {"adapter_config.json": b"{}"})
    proxy.answers["/v1/unload_lora_adapter"] = (503, "1 requests that name it are still in flight")
    publisher.collect_leftovers()
    assert publisher.cleaner.flush(10)
    assert left.exists()
    proxy.answers.clear()
    publish(publisher, 0)
    assert not left.exists()


def test_a_failed_publish_is_unloaded_and_deleted_once_another_succeeds(publisher, proxy):
    """The proxy may have loaded it although its answer did not come."""
    proxy.answers["/v1/load_lora_adapter"] = (504, "replica 1 has not loaded it within 120 s")
    publish(publisher, 0)
    failed = proxy.asked[0][1]
    assert adapters_in(publisher) == {failed}
    proxy.answers.clear()
    publish(publisher, 1)
    assert ("/v1/unload_lora_adapter", failed) in proxy.asked
    assert adapters_in(publisher) == {publisher.policy.name}


def test_a_load_whose_connection_broke_is_sent_again(publisher, proxy):
    proxy.drops = 2
    publish(publisher, 0)
    assert publisher.policy.version == 0
    assert proxy.asked == [("/v1/load_lora_adapter", publisher.policy.name)] * 3


def test_a_policy_that_the_proxy_has_lost_is_loaded_again_with_its_canary(publisher, proxy):
    publisher.publish(0, adapter(), {"token_ids": [1, 2], "logprobs": [-0.5]})
    publisher.reload(publisher.policy)
    assert proxy.bodies[0] == proxy.bodies[1]
    publisher.reload(bucket.Policy(9, "run-a1-v9"))
    assert len(proxy.bodies) == 2, "only the newest policy is"


# --- on a mount that lies ---


def publisher_on(mount: FaultyMount, proxy, **changes) -> bucket.Publisher:
    cfg = dataclasses.replace(CFG, port=proxy.server_port, **changes)
    lease = bucket.Lease(mount.view("a") / "run" / "attempts", 17, cfg.heartbeat_s)
    return bucket.Publisher(mount.view("a") / "run", lease, cfg, PEFT_CONFIG, SHAPES)


@pytest.mark.parametrize("name", [bucket.ADAPTER_WEIGHTS, bucket.ADAPTER_CONFIG])
def test_what_reads_back_differently_is_never_announced(proxy, name):
    mount = FaultyMount(1)
    publisher = publisher_on(mount, proxy)
    mount.faults.append(Fault("a", "close", name, "corrupt"))
    assert not publisher.publish(0, adapter(), {})
    assert f"{name} reads back differently" in publisher.last_error
    assert proxy.asked == []


def test_a_write_that_hangs_and_finishes_late_is_never_announced(proxy):
    # D21
    mount = FaultyMount(1)
    publisher = publisher_on(mount, proxy, publish_timeout_s=0.2)
    mount.faults.append(Fault("a", "close", bucket.ADAPTER_WEIGHTS, "hang"))
    assert not publisher.publish(0, adapter(), {})
    mount.thawed.set()
    weights = "/bucket/run/adapters/run-a17-v0/adapter_model.safetensors"
    wait_for(lambda: mount.truth(weights))
    publisher.cfg = dataclasses.replace(publisher.cfg, publish_timeout_s=20)
    publish(publisher, 1)
    assert publisher.policy.version == 1
    assert [name for path, name in proxy.asked if "unload" not in path] == ["run-a17-v1"]
    assert mount.truth(weights) is None


def test_a_delete_that_hangs_delays_no_publish(proxy):
    # D21
    mount = FaultyMount(1)
    publisher = publisher_on(mount, proxy, max_staleness=0, publish_timeout_s=20)
    mount.faults.append(Fault("a", "unlink", bucket.ADAPTER_CONFIG, "hang"))
    assert all(publisher.publish(step, adapter(), {}) for step in range(4))
    assert publisher.policy.version == 3
    mount.thawed.set()
    assert publisher.cleaner.flush(20)
    assert [policy.version for policy in publisher.live] == [3]


def test_files_that_cannot_be_deleted_are_deleted_later(proxy):
    # D04
    mount = FaultyMount(1)
    publisher = publisher_on(mount, proxy, max_staleness=0)
    mount.faults.append(Fault("a", "unlink", bucket.ADAPTER_WEIGHTS, "fail"))
    publish(publisher, 0, 1)
    assert [policy.version for policy in publisher.live] == [0, 1]
    publish(publisher, 2)
    assert [policy.version for policy in publisher.live] == [2]
    assert all(mount.truth(path) is None for path in mount.versions if "-v2/" not in path)


def test_a_mount_that_refuses_to_overwrite_is_written_all_the_same():
    mount = FaultyMount(1)
    mount.overwriting = False
    path = mount.view("a") / "metrics.jsonl"
    bucket.write_file(path, b"1")
    bucket.write_file(path, b"2")
    assert path.read_bytes() == b"2"


def test_replicas_load_a_policy_when_their_mounts_show_it_and_answer_for_it_only_then():
    # D01, D02, A01, A03, A04: two replicas behind the real proxy, each with its own late and half-true view
    mount = FaultyMount(3, lag_s=3.0, negative_s=1.0)
    replicas = [serve_replica(mount.view(f"replica {i}")) for i in range(2)]
    urls, port = ",".join(f"http://127.0.0.1:{server.server_port}" for server in replicas), free_port()
    flags = [f"--replicas={urls}", f"--port={port}", "--bucket=/bucket", "--health-every-s=0.1", "--load-retry-s=0.1"]
    proxy_py = str(Path(bucket.__file__).with_name("proxy.py"))
    running = subprocess.Popen([sys.executable, proxy_py, *flags], env={**os.environ, "HF_TOKEN": ""})
    try:
        publisher = publisher_on(mount, SimpleNamespace(server_port=port), publish_timeout_s=60)
        for step in range(3):
            publisher.publish(step, adapter(step), {"token_ids": [1, 2], "logprobs": [-1.0 - step]})
        assert publisher.cleaner.flush(20)
        assert [policy.version for policy in publisher.live] == [1, 2], publisher.last_error
        assert any(server.refused for server in replicas), "some replica was asked before its mount showed the files"
        wanted = {f"run-a17-v{version}": float(version) for version in (1, 2)}
        for server in replicas:  # one that was down when v0 was retired unloads it before it is ready again
            wait_for(lambda server=server: server.loaded == wanted)
        for version in (1, 2):
            body = {"model": f"run-a17-v{version}", "prompt": [1, 2], "max_tokens": 1, "prompt_logprobs": 0}
            answer = requests.post(f"{publisher.proxy}/v1/completions", json=body, timeout=30).json()
            assert answer["choices"][0]["prompt_logprobs"][1]["2"]["logprob"] == -1.0 - version
        gone = requests.post(f"{publisher.proxy}/v1/completions", json={**body, "model": "run-a17-v0"}, timeout=30)
        assert gone.status_code == 404
    finally:
        running.terminate()
        running.wait(20)
        for server in replicas:
            server.shutdown()
            server.server_close()


# --- checkpoints ---


def test_a_checkpoint_that_cannot_delete_older_ones_is_saved_all_the_same(capsys):
    mount = FaultyMount(1)
    for step in (10, 20):
        save(mount.view("a"), step)
    mount.faults.append(Fault("a", "unlink", "complete", "fail"))
    save(mount.view("a"), 30)
    assert "old checkpoints stay for now" in capsys.readouterr().out
    assert bucket.newest_checkpoint(mount.view("a"))[0].name == "step-30-a1"
    save(mount.view("a"), 40)
    assert [p.name for p in bucket.list_checkpoints(mount.view("a"))] == ["step-30-a1", "step-40-a1"]


@pytest.mark.parametrize(("call", "what"), [("close", "hang"), ("close", "fail"), ("unlink", "hang")])
def test_a_checkpoint_on_a_mount_that_hangs_is_given_up_or_saved_never_waited_for(call, what):
    # D21
    mount, cfg = FaultyMount(1), dataclasses.replace(CFG, publish_timeout_s=0.3, keep_checkpoints=1)
    bucket.save_checkpoint(mount.view("a"), 1, 10, {"state.json": b"10"}, cfg)
    mount.faults.append(Fault("a", call, "complete", what))
    if call == "close":
        with pytest.raises((bucket.PublishError, OSError)):
            bucket.save_checkpoint(mount.view("a"), 1, 20, {"state.json": b"20"}, cfg)
        assert bucket.newest_checkpoint(mount.view("a"))[0].name == "step-10-a1"
    else:
        bucket.save_checkpoint(mount.view("a"), 1, 20, {"state.json": b"20"}, cfg)
        assert bucket.newest_checkpoint(mount.view("a"))[0].name == "step-20-a1"
    mount.thawed.set()


def test_a_checkpoint_of_a_step_is_written_once_and_again_under_another_name_if_that_failed():
    mount = FaultyMount(1)
    mount.faults.append(Fault("a", "close", "optimizer.pt", "fail"))
    with pytest.raises(OSError, match="input/output error"):
        save(mount.view("a"), 10)
    save(mount.view("a"), 10)
    save(mount.view("a"), 10)
    assert [p.name for p in bucket.list_checkpoints(mount.view("a"))] == ["step-10-a1.1"]
    assert mount.writers("/bucket/checkpoints/step-10-a1/complete") == set()


def test_a_superseded_trainer_keeps_its_last_checkpoint_and_touches_none_of_its_successor(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, attempt=2)
    kept = ["step-20-a2", "step-30-a2"]
    save(tmp_path, 99, attempt=1)
    assert [p.name for p in bucket.list_checkpoints(tmp_path)] == ["step-99-a1", *kept]
    assert bucket.newest_checkpoint(tmp_path)[0].name == "step-30-a2"


@pytest.mark.parametrize("marker", [b"", b'{\n "state.js', b"[]", b"7"])
def test_a_marker_that_is_half_written_completes_nothing(tmp_path, marker):
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / "checkpoints" / "step-20-a1" / "complete").write_bytes(marker)
    assert bucket.newest_checkpoint(tmp_path)[0].name == "step-10-a1"


def save(run_dir, step: int, attempt: int = 1) -> None:
    bucket.save_checkpoint(run_dir, attempt, step, {"state.json": b"%d" % step, "optimizer.pt": b"o"}, CFG)


def test_the_newest_complete_checkpoint_is_found_and_skipped_ones_are_explained(tmp_path):
    # D05
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / "checkpoints" / "step-30-a1").mkdir()
    (tmp_path / "checkpoints" / "step-30-a1" / "state.json").write_bytes(b"30")
    (tmp_path / "checkpoints" / "step-20-a1" / "optimizer.pt").write_bytes(b"cut")
    found, skipped = bucket.newest_checkpoint(tmp_path)
    assert found.name == "step-10-a1"
    assert skipped == [
        "step-30-a1: complete is missing",
        "step-20-a1: optimizer.pt is not what was written",
    ]


def test_no_checkpoint_is_no_error(tmp_path):
    assert bucket.newest_checkpoint(tmp_path) == (None, [])


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    assert [p.name for p in bucket.list_checkpoints(tmp_path)] == ["step-20-a1", "step-30-a1"]


def test_incomplete_checkpoints_never_push_out_complete_ones(tmp_path):
    save(tmp_path, 10)
    for step in (20, 30):
        (tmp_path / "checkpoints" / f"step-{step}-a1").mkdir()
    save(tmp_path, 40)
    assert (tmp_path / "checkpoints" / "step-10-a1").exists()


def test_a_newer_attempt_wins_over_more_steps_of_an_older_one(tmp_path):
    save(tmp_path, 50, attempt=1)
    save(tmp_path, 30, attempt=2)
    assert bucket.newest_checkpoint(tmp_path)[0].name == "step-30-a2"
