"""bucket.py: the lease on a run, write-once names, publish, retire, checkpoints."""

import dataclasses
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import safetensors.numpy

import bucket
from config import Config

CFG = dataclasses.replace(
    Config(), heartbeat_s=0.05, settle_s=0.1, sync_every=1, max_staleness=1, keep_checkpoints=2, publish_timeout_s=5
)
SHAPES = {"q.lora_A.weight": (2, 4), "q.lora_B.weight": (6, 2)}
PEFT_CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


def adapter(value: float = 1.0) -> dict[str, np.ndarray]:
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def proxy():
    """A server that answers loads and unloads as told and remembers what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append((self.path, body["lora_name"]))
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
    server.asked, server.answers, server.bodies = [], {}, []
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


# --- names ---


def test_names_carry_the_attempt():
    name = bucket.policy_name("sanity", 1796066416123, 37)
    assert name == "sanity-a1796066416123-v37"
    assert bucket.attempt_of(name) == 1796066416123
    assert bucket.attempt_of("step-50-a17") == 17
    assert bucket.attempt_of("trl-policy-v3") is None


def test_checkpoints_are_ordered_by_attempt_then_step():
    assert bucket.checkpoint_key("step-9-a2") < bucket.checkpoint_key("step-10-a2") < bucket.checkpoint_key("step-1-a3")
    assert bucket.checkpoint_key("final") is None


# --- the lease ---


def test_a_free_run_is_claimed_and_says_who_owns_it(tmp_path):
    lease = bucket.claim(tmp_path / "run", CFG, owner="job 1")
    claim = json.loads((lease.directory / f"{lease.attempt}.json").read_text())
    assert claim["owner"] == "job 1"
    assert bucket.heartbeat_state((lease.directory / f"{lease.attempt}.heartbeat").read_text()) == "running"
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
    first.stopped.set()  # as a kill does: no more heartbeats, no release
    first.thread.join()
    second = bucket.claim(tmp_path / "run", CFG)
    second.release()


def test_takeover_supersedes_a_trainer_that_is_alive(tmp_path):
    first = bucket.claim(tmp_path / "run", CFG)
    second = bucket.claim(tmp_path / "run", dataclasses.replace(CFG, takeover=True))
    deadline = time.monotonic() + 10
    while first.superseded_by is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert first.superseded_by == second.attempt
    first.release()
    second.release()


def test_of_trainers_that_start_together_the_lowest_attempt_stays(tmp_path):
    outcomes = {}

    def start(name: str) -> None:
        try:
            outcomes[name] = bucket.claim(tmp_path / "run", CFG, owner=name)
        except bucket.LeaseError as error:
            outcomes[name] = error

    threads = [threading.Thread(target=start, args=(f"job {i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leases = [outcome for outcome in outcomes.values() if isinstance(outcome, bucket.Lease)]
    assert len(leases) == 1
    assert leases[0].attempt == min(int(p.stem) for p in leases[0].directory.glob("*.json"))
    leases[0].release()


def test_only_a_newer_attempt_that_runs_supersedes():
    beats = {5: "9 running", 7: "2 claiming", 8: "3 released", 3: "4 running"}
    assert bucket.superseding(5, beats) is None
    assert bucket.superseding(5, {**beats, 9: "1 running"}) == 9


def test_life_is_a_heartbeat_that_changes_not_a_clock():
    before = {1: "4 running", 2: "7 running", 3: "", 4: "1 running"}
    after = {1: "4 running", 2: "8 running", 3: "1 claiming", 4: "2 released"}
    assert bucket.still_alive(before, after) == [2, 3]


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
    for step in range(4):
        publisher.publish(step, adapter(), {})
    assert [policy.version for policy in publisher.live] == [2, 3]  # max_staleness 1
    unloaded = [name for path, name in proxy.asked if "unload" in path]
    assert [bucket.attempt_of(name) for name in unloaded] == [publisher.lease.attempt] * 2
    left = {path.name for path in (publisher.run_dir / "adapters").iterdir()}
    assert left == {policy.name for policy in publisher.live}


def test_files_stay_while_a_replica_has_not_confirmed_the_unload(publisher, proxy):
    # A18
    proxy.answers["/v1/unload_lora_adapter"] = (502, "replica 0 did not answer")
    for step in range(3):
        publisher.publish(step, adapter(), {})
    assert len(publisher.live) == 3
    assert len(list((publisher.run_dir / "adapters").iterdir())) == 3
    proxy.answers.clear()
    publisher.publish(3, adapter(), {})
    assert len(list((publisher.run_dir / "adapters").iterdir())) == 2


def test_an_unload_of_a_name_that_is_gone_counts_as_done(publisher, proxy):
    # A17
    proxy.answers["/v1/unload_lora_adapter"] = (404, "cannot be found")
    for step in range(3):
        publisher.publish(step, adapter(), {})
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
    assert worker.replaced == 1


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
    proxy.answers["/v1/load_lora_adapter"] = (409, "attempt 2 is in service")
    publisher.publish(0, adapter(), {})
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


def test_adapters_left_by_an_ended_attempt_are_collected_and_own_ones_kept(publisher, tmp_path):
    ended = tmp_path / "run" / "attempts" / "17.json"
    ended.write_text("{}")
    left = tmp_path / "run" / "adapters" / "run-a17-v3"
    bucket.write_files(left, {"adapter_model.safetensors": b"w", "adapter_config.json": b"{}"})
    publisher.publish(0, adapter(), {})
    assert publisher.collect_leftovers() == ["run-a17-v3"]
    assert not left.exists()
    assert (publisher.run_dir / "adapters" / publisher.policy.name).exists()


# --- checkpoints ---


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
