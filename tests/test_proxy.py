"""The proxy in front of real little servers (fake_replica.py); letter and number name a failure case."""

import gzip
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_replica
import pytest
import requests
from conftest import ROOT, wait_for

COMPLETIONS, LOAD, UNLOAD = "/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TOKEN = "hf_SECRETSECRETSECRET"
NOT_VISIBLE = {"error": {"message": "Loading lora x failed: No adapter found for <path>", "type": "NotFoundError"}}
DEAD = {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause."}}


class Server:
    """A script of ours as a process; its URL is in the first line that has one."""

    def __init__(self, *command: str, env: dict | None = None):
        env = os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {})
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, **pipes)
        self.lines = []
        while "http://" not in (line := self.process.stdout.readline()):
            self.lines.append(line)
            assert line, f"{command} ended: {self.lines}"
        self.url = line[line.index("http://") :].split()[0]

    def get(self, path: str, **kwargs) -> requests.Response:
        return requests.get(self.url + path, **{"timeout": 60} | kwargs)

    def post(self, path: str, json: dict | None = None, **kwargs) -> requests.Response:
        return requests.post(self.url + path, json=json, **{"timeout": 60} | kwargs)

    def kill(self) -> str:
        """End it, and return what it printed."""
        self.process.kill()
        if not self.process.stdout.closed:
            self.lines.append(self.process.communicate()[0])
        return "".join(self.lines)


class Fake(Server):
    def __init__(self, *args: str):
        super().__init__(str(ROOT / "tests/fake_replica.py"), *args)

    def fault(self, path: str, **fault) -> None:
        self.post("/fake/fault", {"path": path} | fault).raise_for_status()

    def set(self, **state) -> None:
        self.post("/fake/set", state).raise_for_status()

    def wait(self, path: str, count: int) -> None:
        """Until `count` requests to a path have arrived."""
        assert self.get("/fake/wait", params={"path": path, "count": count}).ok, f"{count} requests to {path}"

    def state(self) -> dict:
        return self.get("/fake/state").json()

    def bodies(self, path: str) -> list[dict]:
        """What was posted to a path, without the canaries and probes of the proxy."""
        log = [entry["body"] for entry in self.state()["log"] if entry["path"] == path]
        return [body for body in log if "prompt_logprobs" not in (body or {})]


class Proxy(Server):
    """proxy.py with quick constants; more of them as keywords."""

    def __init__(self, urls: list[str], bucket: Path, *flags: str, env: dict | None = None, **constants: float):
        quick = {"HEALTH_EVERY_S": 0.05, "WATCH_EVERY_S": 0.02, "CONTROL_TIMEOUT_S": 5} | constants
        code = "; ".join(f"proxy.{name} = fleet.{name} = {value}" for name, value in quick.items())
        command = ("-c", f"import proxy; from serving import fleet; {code}; proxy.main()", "--port=0")
        given = (f"--bucket={bucket}", f"--replicas={','.join(urls)}", "--load-deadline-s=10", "--no-replica-wait-s=10")
        super().__init__(*command, *given, "--request-timeout-s=30", *flags, env={"HF_TOKEN": TOKEN} | (env or {}))

    def stats(self) -> dict:
        return self.get("/proxy/stats").json()

    def until(self, true, timeout_s: float = 60) -> dict:
        """The stats once `true(stats)`."""
        wait_for(lambda: true(self.stats()), timeout_s, lambda: str(self.stats()))
        return self.stats()

    def of(self, key: str) -> list:
        """One column of the replicas."""
        return [replica[key] for replica in self.stats()["replicas"]]

    def until_ready(self, num: int) -> dict:
        return self.until(lambda stats: stats["ready"] == num)

    def until_idle(self) -> None:
        self.until(lambda stats: stats["requests"] == 0 and not any(r["inflight"] for r in stats["replicas"]))

    def said(self, words: str) -> bool:
        return any(words in event["text"] for event in self.stats()["events"])

    def load(self, name: str, path: Path, **more) -> requests.Response:
        return self.post(LOAD, {"lora_name": name, "lora_path": str(path)} | more)

    def unload(self, name: str) -> requests.Response:
        return self.post(UNLOAD, {"lora_name": name})

    def complete(self, model: str = "base", prompt=(1, 2, 3), **more) -> requests.Response:
        body = {"model": model, "prompt": list(prompt), "max_tokens": 4, "return_token_ids": True, "logprobs": 0}
        return self.post(COMPLETIONS, body | more)


@pytest.fixture(scope="session")
def pool():
    fakes = [Fake("--model", "base") for _ in range(3)]
    yield fakes
    for fake in fakes:
        fake.kill()


@pytest.fixture
def fakes(pool):
    for fake in pool:
        fake.post("/fake/reset")
    return pool[:2]


@pytest.fixture
def threads():
    with ThreadPoolExecutor(400) as threads:
        yield threads


@pytest.fixture
def start(threads):
    """Starts what a test asks for, and ends it: start(Proxy, ...), start(Fake, ...)."""
    servers = []

    def start(kind, *args, **kwargs):
        servers.append(kind(*args, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def front(fakes, start, tmp_path):
    """A proxy before two ready replicas."""
    front = start(Proxy, [fake.url for fake in fakes], tmp_path)
    front.until_ready(2)
    return front


def adapter(bucket: Path, name: str, config: str = '{"r": 4}', weights: bytes | None = None) -> Path:
    """An adapter directory as PEFT writes it."""
    path = bucket / name
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(config)
    whole = struct.pack("<Q", 2) + b"{}" + name.encode()
    (path / "adapter_model.safetensors").write_bytes(whole if weights is None else weights)
    return path


def canary_for(path: Path, off: float = 0.0) -> dict:
    weights, ids = fake_replica.weights_in(str(path)), [3, 1, 4, 1, 5]
    logprobs = [fake_replica.logprob(weights, ids[: i + 1]) + off for i in range(1, len(ids))]
    return {"token_ids": ids, "logprobs": logprobs}


def answered_by(response: requests.Response, path: Path | None, prompt=(1, 2, 3)) -> bool:
    """Whether a completion was sampled from the weights in `path` (None: the base model's)."""
    weights, choices = fake_replica.weights_in(str(path)) if path else 0, response.json()["choices"]
    return all(c["token_ids"] == fake_replica.sampled(weights, list(prompt), c["index"], 4) for c in choices)


def message_of(answer: requests.Response) -> str:
    return answer.json()["error"]["message"]


def adapters(fakes: list[Fake]) -> list[list[str]]:
    return [sorted(fake.state()["adapters"]) for fake in fakes]


def set_all(fakes: list[Fake], **state) -> None:
    for fake in fakes:
        fake.set(**state)


def running(fakes: list[Fake]) -> Fake:
    """The replica that generates, once one does."""
    return wait_for(lambda: next((fake for fake in fakes if fake.state()["running"]), None))


# Loads


def test_policy_is_loaded_everywhere_and_answers_from_its_own_weights(front, fakes, tmp_path):
    path = adapter(tmp_path, "v1")
    answer = front.load("run-a1-v1", path, canary=canary_for(path, off=0.04))
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'run-a1-v1' added successfully.")
    for fake in fakes:
        assert fake.state()["adapters"] == {"run-a1-v1": str(path)}
        assert fake.bodies(LOAD) == [{"lora_name": "run-a1-v1", "lora_path": str(path)}]  # A16, and no canary
    assert all(answered_by(front.complete("run-a1-v1", n=2), path) for _ in range(4))
    assert answered_by(front.complete("base"), None)


def test_load_is_retried_only_where_the_adapter_is_not_visible_yet(front, fakes, tmp_path):
    """A01, D02"""
    fakes[1].fault(LOAD, status=404, body=NOT_VISIBLE, times=3)
    assert front.load("run-a1-v1", adapter(tmp_path, "v1")).status_code == 200
    assert [len(fake.bodies(LOAD)) for fake in fakes] == [1, 4]


def test_no_request_for_a_policy_reaches_a_replica_before_every_replica_has_it(front, fakes, threads, tmp_path):
    """D02, E22: it is held until then, and answered from the right weights."""
    path = adapter(tmp_path, "v1")
    fakes[1].fault(LOAD, hold=True)
    loading = threads.submit(front.load, "run-a1-v1", path)
    fakes[1].wait(LOAD, 1)
    early = threads.submit(front.complete, "run-a1-v1")
    front.until(lambda stats: stats["requests"] == 1)
    assert [fake.bodies(COMPLETIONS) for fake in fakes] == [[], []]
    fakes[1].post("/fake/release")
    assert loading.result().status_code == 200
    assert answered_by(early.result(), path)


HALF = struct.pack("<Q", 200) + b"{" * 100
HALVES = [(None, None), ('{"r": 4}', None), ('{"r": 4}', HALF), ('{"r": 4}', b""), ('{"r"', None), ("", None)]


def test_half_visible_adapters_are_waited_for_and_given_up_at_the_deadline(fakes, start, threads, tmp_path):
    """A01, A03, A04, A05, A24: rolled back, and the message says that files are missing, not a setting."""
    front = start(Proxy, [fake.url for fake in fakes], tmp_path, "--load-deadline-s=0.5")
    front.until_ready(2)
    for i, (config, weights) in enumerate(HALVES):
        if config is not None:
            path = adapter(tmp_path, f"v{i}", config, weights or b"")
            if weights is None:
                (path / "adapter_model.safetensors").unlink()
        answer = front.load(f"run-a1-v{i}", tmp_path / f"v{i}")
        assert (answer.status_code, f"has not loaded run-a1-v{i} within 0.5 s" in message_of(answer)) == (504, True)
        assert "is the bucket mounted there" in message_of(answer)
        assert "VLLM_ALLOW" not in message_of(answer)
    assert front.of("state") == ["ready", "ready"]
    assert adapters(fakes) == [[], []]
    tries = len(fakes[0].bodies(LOAD))
    loading = threads.submit(front.load, "run-a1-v9", tmp_path / "v9")
    fakes[0].wait(LOAD, tries + 2)
    adapter(tmp_path, "v9")
    assert loading.result().status_code == 200


def test_adapters_that_vllm_cannot_serve_fail_at_once_with_cause_and_cure(front, fakes, tmp_path):
    causes = [
        ('{"r": 32}', "LoRA rank 32 is greater than max_lora_rank 8; start the replicas with --lora-rank 32"),  # A07
        ('{"use_dora": true}', "does not yet support DoRA; train without DoRA"),  # A09
        ('{"modules_to_save": ["lm_head"]}', "only supports modules_to_save being None"),  # A09
        ('{"bias": "all"}', "Adapter bias is not supported; train with bias='none'"),  # A09
    ]
    for i, (config, cause) in enumerate(causes):
        answer = front.load(f"run-a1-v{i}", adapter(tmp_path, f"v{i}", config))
        assert (answer.status_code, cause in message_of(answer)) == (500, True)
    for fake in fakes:
        fake.fault(LOAD, status=404, body={"detail": "Not Found"}, times=-1)
    answer = front.load("run-a1-v4", adapter(tmp_path, "v4"))  # A02
    assert (answer.status_code, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in message_of(answer)) == (404, True)
    assert max(len(fake.bodies(LOAD)) for fake in fakes) <= 5


def test_failed_load_is_rolled_back_everywhere(front, fakes, tmp_path):
    """E01: A loads, B cannot: B's error, the name is nowhere, the version before is still served."""
    old = adapter(tmp_path, "v1")
    assert front.load("run-a1-v1", old).ok
    fakes[1].fault(LOAD, status=500, body={"error": {"message": "LoRA rank 16 is greater than max_lora_rank 8."}})
    answer = front.load("run-a1-v2", adapter(tmp_path, "v2"))
    assert answer.status_code == 500
    assert message_of(answer).startswith(f"replica 1 ({fakes[1].url}) cannot load run-a1-v2: LoRA rank 16")
    assert adapters(fakes) == [["run-a1-v1"]] * 2
    assert front.complete("run-a1-v2").status_code == 404
    assert answered_by(front.complete("run-a1-v1"), old)


def test_replica_that_cannot_be_rolled_back_goes_down_and_returns_without_the_policy(fakes, start, tmp_path):
    """E02"""
    front = start(Proxy, [fake.url for fake in fakes], tmp_path, CONTROL_TIMEOUT_S=0.5)
    front.until_ready(2)
    fakes[0].fault(UNLOAD, status=500, body="no")
    path = adapter(tmp_path, "v1")
    assert front.load("run-a1-v1", path, canary=canary_for(path, off=0.06)).status_code == 500
    front.until_ready(2)
    assert front.said("is down: it did not unload run-a1-v1")
    assert adapters(fakes) == [[], []]


def test_load_that_one_replica_never_answers_ends_at_the_deadline(fakes, start, tmp_path):
    """E03"""
    front = start(Proxy, [fake.url for fake in fakes], tmp_path, "--load-deadline-s=0.5")
    front.until_ready(2)
    fakes[1].fault(LOAD, hang=True, times=-1)
    answer = front.load("run-a1-v1", adapter(tmp_path, "v1"))
    assert (answer.status_code, message_of(answer).startswith("replica 1 ")) == (504, True)
    front.until_ready(2)
    assert adapters(fakes) == [[], []]


def test_replica_that_dies_during_a_load_does_not_fail_it(fakes, start, threads, tmp_path):
    dying = start(Fake)
    front = start(Proxy, [fakes[0].url, dying.url], tmp_path)
    front.until_ready(2)
    dying.fault(LOAD, hold=True)
    loading = threads.submit(front.load, "run-a1-v1", adapter(tmp_path, "v1"))
    dying.wait(LOAD, 1)
    dying.kill()
    assert loading.result().status_code == 200
    assert front.of("state") == ["ready", "down"]


@pytest.mark.parametrize("fault", ["drop_after", "hang", "other path"])
def test_lost_reply_to_a_load_ends_as_success_if_the_right_path_is_there(fakes, start, tmp_path, fault):
    """D20: what counts is the root that the replica shows, not that it knows the name."""
    front = start(Proxy, [fake.url for fake in fakes], tmp_path, CONTROL_TIMEOUT_S=0.5)
    front.until_ready(2)
    path = adapter(tmp_path, "v1")
    if fault == "other path":
        fakes[1].post(LOAD, {"lora_name": "run-a1-v1", "lora_path": str(adapter(tmp_path, "other"))})
    else:
        fakes[1].fault(LOAD, **{fault: True})
    assert front.load("run-a1-v1", path, canary=canary_for(path)).status_code == 200
    front.until_ready(2)
    assert [fake.state()["adapters"] for fake in fakes] == [{"run-a1-v1": str(path)}] * 2
    assert all(answered_by(front.complete("run-a1-v1"), path) for _ in range(4))


@pytest.mark.parametrize("name", ["run-a1-v1", "trl-policy-v1"])
def test_wrong_weights_on_one_replica_fail_the_load(front, fakes, tmp_path, name):
    """A12: vLLM answers 200 to a load that serves the base model; the canary tells, or that the replicas disagree."""
    fakes[1].set(wrong_weights=True)
    path = adapter(tmp_path, "v1")
    answer = front.load(name, path, **({"canary": canary_for(path)} if name.startswith("run") else {}))
    assert (answer.status_code, f"does not serve the weights of {name}" in message_of(answer)) == (500, True)
    assert adapters(fakes) == [[], []]


def test_concurrent_loads_of_one_name_load_it_once(front, fakes, threads, tmp_path):
    """A26"""
    path = adapter(tmp_path, "v1")
    answers = list(threads.map(lambda _: front.load("run-a1-v1", path), range(6)))
    assert {answer.status_code for answer in answers} == {200}
    assert [len(fake.bodies(LOAD)) for fake in fakes] == [1, 1]


def test_older_attempts_and_other_runs_are_refused_and_older_policies_retired(front, fakes, tmp_path):
    old, new = adapter(tmp_path, "old"), adapter(tmp_path, "new")
    assert front.load("run-a1000-v1", old).ok
    assert front.load("trl-policy-v1", old).ok
    assert front.load("run-a2000-v1", new).ok
    front.until(lambda stats: stats["policies"] == ["trl-policy-v1", "run-a2000-v1"] and not stats["retiring"])
    assert adapters(fakes) == [["run-a2000-v1", "trl-policy-v1"]] * 2
    answer = front.load("run-a1000-v2", old)
    assert (answer.status_code, "attempt 2000 has taken over" in message_of(answer)) == (409, True)
    assert front.complete("run-a1000-v1").status_code == 404
    answer = front.load("other-a3000-v1", old)  # F28
    assert (answer.status_code, "serves the run run, not other" in answer.text) == (409, True)
    answer = front.load("trl-policy-v1", old)  # behind TRL's names the weights may have changed
    assert (answer.status_code, "has already been loaded" in answer.text) == (400, True)


# Unloads


def test_unload_waits_for_what_is_in_flight(front, fakes, threads, tmp_path):
    """A17, A22: new requests get 404 at once; replicas are asked to unload when the old ones are answered."""
    path = adapter(tmp_path, "v1")
    assert front.load("run-a1-v1", path).ok
    set_all(fakes, wedged=True)
    asked = threads.submit(front.complete, "run-a1-v1")
    running(fakes)
    unloading = threads.submit(front.unload, "run-a1-v1")
    front.until(lambda stats: stats["retiring"] == ["run-a1-v1"])
    assert front.complete("run-a1-v1").status_code == 404
    assert [len(fake.bodies(UNLOAD)) for fake in fakes] == [0, 0]
    set_all(fakes, wedged=False)
    assert answered_by(asked.result(), path)
    assert unloading.result().text == "Success: LoRA adapter 'run-a1-v1' removed successfully."
    assert adapters(fakes) == [[], []]


def test_unload_of_unknown_names(front, fakes, tmp_path):
    """A17: a replica that does not know the name is done; a name that nobody knows is vLLM's 404."""
    assert front.load("run-a1-v1", adapter(tmp_path, "v1")).ok
    fakes[1].post(UNLOAD, {"lora_name": "run-a1-v1"})
    assert front.unload("run-a1-v1").ok
    assert front.of("state") == ["ready", "ready"]
    answer = front.unload("nobody")
    assert (answer.status_code, "cannot be found" in answer.text) == (404, True)
    assert front.post(UNLOAD, {}).status_code == front.unload("base").status_code == 400
    answer = front.load("base", tmp_path / "v1")  # A13
    assert (answer.status_code, "base model's name" in answer.text) == (400, True)


def test_policy_retired_while_a_replica_is_away_does_not_come_back_with_it(front, fakes, pool, tmp_path):
    """A18: its directory may be deleted then, and a request for it would end the engine."""
    assert front.load("run-a1-v1", adapter(tmp_path, "v1")).ok
    fakes[1].set(dead=True)
    pool[2].fault(LOAD, status=404, body=NOT_VISIBLE, times=10**6)  # still catching up
    front.post("/proxy/replicas", {"url": pool[2].url})
    pool[2].wait(LOAD, 2)
    front.until_ready(1)
    assert front.unload("run-a1-v1").ok
    assert adapters(fakes) == [[], ["run-a1-v1"]]
    fakes[1].set(dead=False)
    front.until_ready(3)
    assert adapters(pool) == [[], [], []]


def test_name_without_an_attempt_may_come_back_after_a_cache_reset(front, fakes, tmp_path):
    """A15: TRL numbers its policies from 1 in every run."""
    path = adapter(tmp_path, "v1")
    for _ in range(2):
        assert front.load("trl-policy-v1", path).ok
        assert front.unload("trl-policy-v1").ok
    for fake in fakes:
        paths = [entry["path"] for entry in fake.state()["log"] if entry["path"] in (LOAD, "/reset_prefix_cache")]
        assert paths == [LOAD, "/reset_prefix_cache", LOAD]


# Pause, resume, TRL


def test_pause_that_fails_on_one_replica_is_taken_back(front, fakes):
    """E04"""
    fakes[1].fault("/pause", status=500, body={"error": {"message": "no"}})
    answer = front.post("/pause?mode=keep")
    assert (answer.status_code, message_of(answer).startswith("replica 1 ")) == (500, True)
    assert [fake.state()["paused"] for fake in fakes] == [False, False]
    assert front.stats()["paused"] is False


def test_replicas_that_join_or_do_not_resume_end_as_the_others_are(front, fakes, pool):
    """E04: pause and resume twice are fine too."""
    assert front.post("/pause?mode=keep").json() == front.post("/pause?mode=keep").json() == {"status": "paused"}
    assert front.post("/proxy/replicas", {"url": pool[2].url}).json() == {"id": "2"}
    front.until_ready(3)
    assert [fake.state()["paused"] for fake in pool] == [True, True, True]
    fakes[1].fault("/resume", status=500, body="no")
    assert front.post("/resume").json() == front.post("/resume").json() == {"status": "resumed"}
    front.until_ready(3)
    assert [fake.state()["paused"] for fake in pool] == [False, False, False]


def test_trl_sees_one_vllm_server(front, fakes, threads, tmp_path):
    """What TRL's client calls, in its order; loads come during a pause and are checked when it ends."""
    assert front.get("/health").status_code == 200
    assert front.get("/v1/models").json()["data"][0]["max_model_len"] == 256
    info = front.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert info["parallel_config"]["data_parallel_size"] == 1
    for version in (1, 2):
        assert front.post("/pause", params={"mode": "keep"}).status_code == 200
        path = adapter(tmp_path, f"v{version}")
        assert front.load(f"trl-policy-v{version}", path, load_inplace=False).status_code == 200
        assert front.post("/resume").status_code == 200
        assert answered_by(front.complete(f"trl-policy-v{version}", n=1), path)
    assert front.post("/pause", params={"mode": "keep"}).ok
    asked = threads.submit(front.complete, "trl-policy-v1")
    running(fakes)
    assert front.unload("trl-policy-v1").ok  # does not wait for requests that are frozen
    assert front.post("/resume").ok
    assert asked.result().ok


def test_replicas_that_disagree_after_a_pause_withdraw_the_policy(front, fakes, threads, tmp_path):
    fakes[1].set(wrong_weights=True)
    assert front.post("/pause?mode=keep").ok
    assert front.load("trl-policy-v1", adapter(tmp_path, "v1")).ok
    held = threads.submit(front.complete, "trl-policy-v1")  # held until the check, never answered from either
    front.until(lambda stats: stats["requests"] == 1)
    answer = front.post("/resume")
    assert (answer.status_code, "does not serve the weights" in answer.text) == (500, True)
    assert held.result().status_code == 404


def test_concurrent_control_calls_leave_all_replicas_alike(front, fakes, threads, tmp_path):
    """E25"""
    assert front.load("run-a1-v1", adapter(tmp_path, "v1")).ok
    v5 = adapter(tmp_path, "v5")
    for _ in range(3):
        loading = threads.submit(front.load, "run-a1-v5", v5)
        paths = ("/pause?mode=keep", "/resume")
        calls = [threads.submit(front.unload, "run-a1-v1"), *(threads.submit(front.post, path) for path in paths)]
        assert loading.result().status_code == 200
        assert all(call.result().status_code in (200, 404) for call in calls)
        states = [fake.state() for fake in fakes]
        assert states[0]["adapters"] == states[1]["adapters"] == {"run-a1-v5": str(v5)}
        assert states[0]["paused"] == states[1]["paused"] == front.stats()["paused"]
        assert front.post("/resume").ok


# Requests


def test_request_without_a_model_or_for_an_unknown_one_reaches_no_replica(front, fakes):
    """A14, A18"""
    answer = front.post(COMPLETIONS, {"prompt": [1, 2]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400)
    for path in (COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/tokenize"):
        answer = front.post(path, {"model": "gone", "prompt": [1]})
        assert (answer.status_code, message_of(answer)) == (404, "The model `gone` does not exist.")
    assert front.post(COMPLETIONS, data="{").status_code == front.post(COMPLETIONS, [1]).status_code == 400
    assert [fake.bodies(COMPLETIONS) for fake in fakes] == [[], []]


def test_errors_of_replicas_are_passed_on_unchanged_and_cost_them_nothing(front, fakes):
    """E13, E21: a prompt that is too long, or that shows a bug, is generated once."""
    for status in (400, 404, 500):
        body = {"error": {"message": "some reason", "type": "T", "param": None, "code": status}}
        set_all(fakes, faults=[])
        for fake in fakes:
            fake.fault(COMPLETIONS, status=status, body=body, headers={"X-Own": "1"}, times=-1)
        for _ in range(5):
            answer = front.complete()
            assert (answer.status_code, answer.json(), answer.headers["X-Own"]) == (status, body, "1")
    assert front.of("state") == ["ready", "ready"]
    assert sum(len(fake.bodies(COMPLETIONS)) for fake in fakes) == 3 * 5
    assert not front.said("is down")


def test_upstream_that_is_too_slow_is_asked_once(fakes, start, tmp_path):
    """E10, E21: 504, one generation, which is stopped."""
    front = start(Proxy, [fake.url for fake in fakes], tmp_path, "--request-timeout-s=0.3")
    front.until_ready(2)
    set_all(fakes, wedged=True)
    assert front.complete().status_code == 504
    assert sum(len(fake.bodies(COMPLETIONS)) for fake in fakes) == 1
    wait_for(lambda: sum(fake.state()["aborted"] for fake in fakes) == 1)


def test_dead_replica_costs_its_requests_a_resend_and_nothing_else(fakes, start, threads, tmp_path):
    dying = start(Fake)
    front = start(Proxy, [fakes[0].url, dying.url], tmp_path)
    front.until_ready(2)
    path = adapter(tmp_path, "v1")
    assert front.load("run-a1-v1", path).ok
    set_all([fakes[0], dying], wedged=True)
    asked = [threads.submit(front.complete, "run-a1-v1", [i, 2, 3]) for i in range(8)]
    wait_for(lambda: front.of("inflight") == [4, 4])
    dying.kill()
    assert front.get("/v1/models").json()["data"][0]["id"] == "base"  # E15: from a living one
    assert front.post("/tokenize", {"prompt": "ab"}).json()["tokens"] == [97, 98]
    fakes[0].set(wedged=False)
    assert all(answered_by(answer.result(), path, [i, 2, 3]) for i, answer in enumerate(asked))
    stats = front.stats()
    assert (stats["replicas"][1]["state"], stats["counts"]["sent again"]) == ("down", 4)
    assert front.of("inflight") == [0, 0]
    assert len(fakes[0].bodies(COMPLETIONS)) == 8


def test_dead_engine_is_down_and_its_requests_are_sent_elsewhere_but_not_for_ever(front, fakes):
    """A18: what a bystander gets when another request killed the engine; one that kills each is given up."""
    fakes[0].fault(COMPLETIONS, status=500, body=DEAD, times=-1)
    fakes[0].fault("/health", status=503, times=-1)
    assert {front.complete().status_code for _ in range(4)} == {200}
    front.until(lambda stats: stats["replicas"][0]["state"] == "down")
    fakes[1].fault(COMPLETIONS, status=500, body=DEAD, times=4)  # MAX_SENDS
    answer = front.complete()
    assert (answer.status_code, "EngineCore" in answer.text) == (500, True)
    front.until_ready(1)


def test_request_that_breaks_is_sent_again_first_to_another_replica(front, fakes):
    """One that fails at once has the least in flight, and may hold the prefix too; it stays, for /health is well."""
    ids = [1] * 64
    owner = fakes[int(front.complete("base", ids).headers["X-Replica"])]
    for fault in ({"drop": True}, {"cut": 50}):
        owner.fault(COMPLETIONS, **fault)
        answer = front.complete("base", ids)
        assert (answer.status_code, answer.headers["X-Replica"]) == (200, str(1 - fakes.index(owner)))
    assert front.of("state") == ["ready", "ready"]


def test_wedged_replica_is_found_by_progress_but_a_pause_is_no_stall(fakes, start, threads, tmp_path):
    """E12: /health is green, nothing finishes."""
    front = start(Proxy, [fake.url for fake in fakes], tmp_path, "--stall-s=0.5", CONTROL_TIMEOUT_S=2)
    front.until_ready(2)
    assert front.post("/pause?mode=keep").ok
    asked = threads.submit(front.complete)
    running(fakes)
    fakes[0].wait("/health", fakes[0].state()["arrived"]["/health"] + 15)
    assert front.post("/resume").ok
    assert asked.result().ok
    assert not front.said("is down")
    fakes[0].set(wedged=True)
    answers = list(threads.map(lambda i: front.complete("base", [i]), range(4)))
    assert {answer.status_code for answer in answers} == {200}
    assert front.said("nothing finished for")
    fakes[0].set(wedged=False)
    front.until_ready(2)


def test_inflight_returns_to_zero_on_every_path(front, fakes, threads):
    """E06: client error, server error, dropped, cut, busy, client gone."""
    faults = [{"status": 400}, {"status": 500, "body": "x"}, {"drop": True}, {"cut": 10},
              *({"status": status, "headers": {"Retry-After": "0"}} for status in (503, 429))]  # fmt: skip
    for fault in faults * 3:
        fakes[0].fault(COMPLETIONS, **fault)
    answers = list(threads.map(lambda i: front.complete("base", [i], n=2), range(60)))
    for i in range(5):
        send_raw(front, {"model": "base", "prompt": [i]}).close()
    assert {answer.status_code for answer in answers} <= {200, 400, 500}
    front.until_idle()
    fakes[0].set(faults=[])
    front.until_ready(2)
    before = front.of("routed")
    assert all(front.complete("base", [i]).ok for i in range(10))
    assert [after - b for after, b in zip(front.of("routed"), before, strict=True)] == [5, 5]


def send_raw(front: Server, body: dict) -> socket.socket:
    """Send a completion request; the connection it went out on."""
    host, port = front.url.removeprefix("http://").split(":")
    sock, data = socket.create_connection((host, int(port)), timeout=30), json.dumps(body).encode()
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    return sock


@pytest.mark.parametrize("stream", [False, True])
def test_generation_stops_when_the_client_leaves(front, fakes, stream):
    set_all(fakes, wedged=not stream, stepwise=stream)
    with send_raw(front, {"model": "base", "prompt": [1], "stream": stream}) as sock:
        one = running(fakes)
        if stream:
            one.post("/fake/release")
            assert b"200 OK" in sock.recv(100)
    wait_for(lambda: sum(fake.state()["aborted"] for fake in fakes) == 1)
    front.until_idle()


def test_many_requests_run_at_once_and_control_calls_pass_them(front, fakes, threads, tmp_path):
    """E11: 300 in flight; a load does not queue behind them."""
    set_all(fakes, wedged=True)
    asked = [threads.submit(front.complete, "base", [i % 500, i // 500]) for i in range(300)]
    wait_for(lambda: [fake.state()["running"] for fake in fakes] == [150, 150])
    assert front.post("/pause?mode=keep").ok
    assert front.load("run-a1-v1", adapter(tmp_path, "v1")).ok
    set_all(fakes, wedged=False)
    assert front.post("/resume").ok
    assert {answer.result().status_code for answer in asked} == {200}
    front.until_idle()


def test_more_requests_than_max_inflight_are_refused(fakes, start, threads, tmp_path):
    front = start(Proxy, [fakes[0].url], tmp_path, "--max-inflight=2")
    front.until_ready(1)
    fakes[0].set(wedged=True)
    asked = [threads.submit(front.complete) for _ in range(2)]
    front.until(lambda stats: stats["requests"] == 2)
    answer = front.complete()
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    fakes[0].set(wedged=False)
    assert all(answer.result().ok for answer in asked)


def stream_from(front: Proxy, fakes: list[Fake], threads, stepwise: bool | str) -> tuple[Fake, requests.Response]:
    """A streaming request whose first chunk was released: the replica that answers, and the answer to read on."""
    set_all(fakes, stepwise=stepwise)
    starting = threads.submit(front.post, COMPLETIONS, {"model": "base", "prompt": [1], "stream": True}, stream=True)
    one = running(fakes)
    one.post("/fake/release")
    return one, starting.result()


def test_stream_passes_through_chunk_by_chunk(front, fakes, threads):
    """E20: each chunk is read before the replica is told to send the next."""
    one, answer = stream_from(front, fakes, threads, True)
    lines = (line for line in answer.iter_lines(chunk_size=1) if line)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    for index in range(5):
        assert json.loads(next(lines).removeprefix(b"data: "))["chunk"] == index
        one.post("/fake/release")
    assert list(lines) == [b"data: [DONE]"]
    front.until_idle()


def test_stream_that_breaks_off_ends_with_an_error(front, fakes, threads):
    """E20"""
    one, answer = stream_from(front, fakes, threads, "break")
    one.post("/fake/release")
    one.post("/fake/release")
    lines = answer.iter_lines(chunk_size=1)
    seen = [json.loads(next(line for line in lines if line).removeprefix(b"data: ")) for _ in range(3)]
    assert [event.get("chunk") for event in seen] == [0, 1, None]
    assert "broke off" in seen[2]["error"]["message"]
    with pytest.raises(requests.exceptions.ChunkedEncodingError):
        list(lines)
    front.until_idle()


def test_no_request_meets_a_connection_that_the_replica_has_closed(start, tmp_path):
    """vLLM closes idle connections; every request is one generation, however long the pause before it."""
    fake = start(Fake, "--keep-alive-s=0.1")
    front = start(Proxy, [fake.url], tmp_path)
    front.until_ready(1)
    for i in range(3):
        assert front.complete("base", [i]).ok
        fake.wait("/health", fake.state()["arrived"]["/health"] + 4)
    assert len(fake.bodies(COMPLETIONS)) == 3
    assert "sent again" not in front.stats()["counts"]


def test_headers_fit_the_bytes_that_are_sent(front, fakes):
    """E07, E08: what comes gzipped stays so and says so; never a length and chunks at once."""
    plain = json.dumps({"choices": ["x" * 1000]})
    for body in ("GZIP" + plain, plain):
        set_all(fakes, faults=[])
        for fake in fakes:
            fake.fault(COMPLETIONS, status=200, body=body)
        answer = front.post(COMPLETIONS, {"model": "base", "prompt": [1]}, stream=True)
        raw, zipped = answer.raw.read(decode_content=False), answer.headers.get("Content-Encoding") == "gzip"
        assert answer.headers["Content-Length"] == str(len(raw))
        assert "Transfer-Encoding" not in answer.headers
        assert (zipped, gzip.decompress(raw) if zipped else raw) == (body.startswith("GZIP"), plain.encode())


@pytest.mark.parametrize("token", [TOKEN, ""])
def test_upstream_gets_the_proxys_token_and_its_own_host(fakes, start, tmp_path, token):
    """E23, D14: one Authorization header, the proxy's or none; not the client's; the Host of the replica."""
    front = start(Proxy, [fakes[0].url], tmp_path, env={"HF_TOKEN": token})
    front.until_ready(1)
    headers = {"Authorization": "Bearer client", "X-Mine": "1", "Connection": "keep-alive, X-Gone", "X-Gone": "1"}
    assert front.post(COMPLETIONS, {"model": "base", "prompt": [1]}, headers=headers).ok
    seen = next(entry["headers"] for entry in fakes[0].state()["log"] if "X-Mine" in entry["headers"])
    assert seen.get("Authorization") == (f"Bearer {token}" if token else None)
    assert seen["Host"] == fakes[0].url.removeprefix("http://")
    assert "X-Gone" not in seen


def test_refused_tokens_and_redirects_end_a_request_at_once(front, fakes, pool, start, tmp_path):
    """D14: no retry storm, no waiting for better times, and the token reaches no other host."""
    refusals = [({"status": 403, "body": "Forbidden"}, 403, "refuses the token (403)"),
                ({"status": 307, "headers": {"Location": pool[2].url + COMPLETIONS}}, 502, "redirect")]  # fmt: skip
    for fault, status, text in refusals:
        set_all(fakes, faults=[])
        for fake in fakes:
            fake.fault(COMPLETIONS, **fault)
        answer = front.complete()
        assert (answer.status_code, text in answer.text) == (status, True)
    assert sum(len(fake.bodies(COMPLETIONS)) for fake in fakes) == 2
    assert pool[2].bodies(COMPLETIONS) == []
    other = start(Proxy, [start(Fake, "--token=another").url], tmp_path)
    other.until(lambda stats: "refuses the token (401)" in stats["replicas"][0]["reason"])
    answer = other.complete()
    assert (answer.status_code, "HF_TOKEN" in message_of(answer)) == (401, True)


def test_certificates_of_https_replicas_are_checked(start, tmp_path):
    """The Jobs gateway speaks https; the token must not go to whoever answers in its place."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert], check=True, capture_output=True,
    )  # fmt: skip
    url = start(Fake, f"--cert={cert}", f"--key={key}").url.replace("http://127.0.0.1", "https://localhost")
    trusting = start(Proxy, [url], tmp_path, "--request-timeout-s=0.5", env={"SSL_CERT_FILE": str(cert)})
    trusting.until_ready(1)
    assert answered_by(trusting.complete(), None)
    requests.post(url + "/fake/set", json={"wedged": True}, verify=str(cert), timeout=60)
    assert trusting.complete().status_code == 504  # a call that takes too long is ended there too
    wary = start(Proxy, [url], tmp_path)
    wary.until(lambda stats: "certificate verify failed" in stats["replicas"][0]["reason"])


@pytest.mark.parametrize("status", [429, 503])
def test_busy_replica_is_left_alone_for_as_long_as_it_asks(front, fakes, status):
    """D17, F18: a loaded server is not a dead one."""
    fakes[0].fault(COMPLETIONS, status=status, headers={"Retry-After": "60"}, times=-1)
    assert {front.complete("base", [i]).status_code for i in range(10)} == {200}
    assert [len(fake.bodies(COMPLETIONS)) for fake in fakes] == [1, 10]
    assert front.of("state") == ["ready", "ready"]


def test_only_replica_that_is_busy_is_asked_again_later(fakes, start, tmp_path):
    """D17, F18: for --no-replica-wait-s; nothing is generated twice meanwhile."""
    front = start(Proxy, [fakes[0].url], tmp_path, "--no-replica-wait-s=1.5")
    front.until_ready(1)
    fakes[0].fault(COMPLETIONS, status=503, headers={"Retry-After": "0.1"}, times=5)
    assert front.complete().status_code == 200
    assert (len(fakes[0].bodies(COMPLETIONS)), fakes[0].state()["finished"]) == (6, 1)
    fakes[0].fault(COMPLETIONS, status=429, headers={"Retry-After": "0.3"}, times=-1)
    answer = front.complete()
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "0.3")
    assert front.of("state") == ["ready"]


def test_busy_control_calls_are_repeated(front, fakes, tmp_path):
    """D17"""
    for path, status in ((LOAD, 429), (UNLOAD, 429), (COMPLETIONS, 503)):
        fakes[1].fault(path, status=status, headers={"Retry-After": "0.1"}, canary=path == COMPLETIONS)
    assert front.load("run-a1-v1", adapter(tmp_path, "v1")).ok
    assert front.unload("run-a1-v1").ok
    assert not front.said("is down")


def test_token_appears_nowhere(fakes, start, tmp_path):
    """D15: every kind of error is provoked, with replicas that echo the token."""
    dying = start(Fake)
    front = start(Proxy, [fakes[0].url, dying.url], tmp_path, "--load-deadline-s=0.3", "--no-replica-wait-s=0.3")
    front.until_ready(2)
    echo, seen = {"error": {"message": f"you sent Bearer {TOKEN}"}}, []
    load = {"lora_name": "run-a1-v1", "lora_path": str(adapter(tmp_path, "v1"))}
    for path, status in ((COMPLETIONS, 500), (COMPLETIONS, 400), (COMPLETIONS, 403), (COMPLETIONS, 307), (LOAD, 500),
                         (LOAD, 404), ("/pause", 500), ("/tokenize", 400)):  # fmt: skip
        for fake in (fakes[0], dying):
            fake.fault(path, status=status, body=echo)
        seen.append(front.post(path, load if path == LOAD else {"model": "base", "prompt": [1]}))
        set_all([fakes[0], dying], faults=[])
    front.until_ready(2)
    fakes[0].fault("/health", status=500, body=echo, times=-1)
    dying.kill()
    front.until_ready(0)
    seen += [front.complete(), *(front.get(path) for path in ("/", "/proxy/stats", "/metrics", "/health"))]
    everything = front.kill() + "".join(answer.text + str(answer.headers) for answer in seen)
    assert TOKEN not in everything
    assert "***" in everything


def test_groups_of_one_prompt_stay_on_one_replica_until_the_caches_are_reset(front, fakes):
    """Eight requests for one prompt, one after the other: the replica that has its blocks answers all of them."""
    for prompt in range(6):
        assert len({front.complete("base", [prompt] * 64).headers["X-Replica"] for _ in range(8)}) == 1
    assert front.stats()["router"] == {"affinity": 42, "spilled": 0, "unmatched": 6, "tracked_blocks": 24}
    assert front.of("routed") == [24, 24]
    assert front.post("/reset_prefix_cache").ok
    assert [fake.state()["arrived"]["/reset_prefix_cache"] for fake in fakes] == [1, 1]
    assert front.stats()["router"]["tracked_blocks"] == 0


# Replicas


def test_replica_that_returns_gets_every_live_policy_before_its_first_request(fakes, start, tmp_path):
    """D19: a restarted vLLM has no adapters."""
    dying = start(Fake)
    front = start(Proxy, [fakes[0].url, dying.url], tmp_path)
    front.until_ready(2)
    paths = {f"run-a1-v{i}": adapter(tmp_path, f"v{i}") for i in (1, 2)}
    for name, path in paths.items():
        assert front.load(name, path, canary=canary_for(path)).ok
    dying.kill()
    front.until_ready(1)
    back = start(Fake, "--port", dying.url.rsplit(":", 1)[1])
    assert front.until_ready(2)["replicas"][1]["policies"] == list(paths)
    assert len(back.bodies(LOAD)) == 2
    for name, path in paths.items():
        assert all(answered_by(front.complete(name), path) for _ in range(4))


def test_replica_that_forgot_a_policy_is_caught_up_and_the_request_sent_elsewhere(front, fakes, tmp_path):
    """D19, E22: it restarted between two probes."""
    path = adapter(tmp_path, "v1")
    assert front.load("run-a1-v1", path).ok
    fakes[0].post(UNLOAD, {"lora_name": "run-a1-v1"})
    assert all(answered_by(front.complete("run-a1-v1"), path) for _ in range(4))
    front.until_ready(2)
    assert adapters(fakes) == [["run-a1-v1"]] * 2


def test_replica_with_wrong_weights_or_several_engines_does_not_become_ready(front, fakes, pool, tmp_path):
    """A23: a load reaches one of the engines."""
    path = adapter(tmp_path, "v1")
    assert front.load("run-a1-v1", path, canary=canary_for(path)).ok
    pool[2].set(wrong_weights=True)
    front.post("/proxy/replicas", {"url": pool[2].url, "id": "late", "job": "68f0"}).raise_for_status()
    late = front.until(lambda stats: "does not serve the weights" in stats["replicas"][2]["reason"])["replicas"][2]
    assert (late["id"], late["job"], front.stats()["ready"]) == ("late", "68f0", 2)
    pool[2].set(engines=2)
    front.until(lambda stats: "data_parallel_size 2" in stats["replicas"][2]["reason"])
    pool[2].set(wrong_weights=False, engines=1)
    front.until_ready(3)


def test_replicas_come_and_go_while_it_runs(fakes, start, threads, tmp_path):
    front = start(Proxy, [], tmp_path)
    assert front.get("/health").status_code == front.get("/ping").status_code == 503
    waiting = threads.submit(front.complete)  # with no replica, requests wait
    front.until(lambda stats: stats["requests"] == 1)
    assert front.post("/proxy/replicas", {"url": fakes[0].url}).json() == {"id": "0"}
    assert waiting.result().ok
    assert front.post("/proxy/replicas", {"url": fakes[1].url, "id": "b"}).json() == {"id": "b"}
    front.until_ready(2)
    set_all(fakes, wedged=True)
    asked = [threads.submit(front.complete) for _ in range(2)]
    wait_for(lambda: [fake.state()["running"] for fake in fakes] == [1, 1])
    assert requests.delete(front.url + "/proxy/replicas/0", timeout=30).json() == {"id": "0", "inflight": 1}
    assert front.of("state") == ["draining", "ready"]
    set_all(fakes, wedged=False)
    assert all(answer.result().ok for answer in asked)
    front.until(lambda stats: [replica["id"] for replica in stats["replicas"]] == ["b"])
    assert {front.complete().headers["X-Replica"] for _ in range(4)} == {"b"}
    assert requests.delete(front.url + "/proxy/replicas/0", timeout=30).status_code == 404


def test_replicas_that_make_no_sense_are_not_added(front, fakes):
    """A web page can post forms and text to 127.0.0.1, and the token would be sent to what it adds: JSON only."""
    for replica in ({"url": "ftp://x"}, {"url": "http://user:pass@x:1"}, {}):
        assert front.post("/proxy/replicas", replica).status_code == 400
    for replica in ({"url": "http://127.0.0.1:1", "id": "0"}, {"url": fakes[0].url}):
        assert front.post("/proxy/replicas", replica).status_code == 409
    text = {"data": '{"url": "http://127.0.0.1:1"}', "headers": {"Content-Type": "text/plain"}}
    assert front.post("/proxy/replicas", **text).status_code == 415
    assert front.of("id") == ["0", "1"]


def test_without_a_ready_replica_requests_get_503_in_the_end(start, tmp_path):
    front = start(Proxy, ["http://127.0.0.1:9"], tmp_path, "--no-replica-wait-s=0.3", "--load-deadline-s=0.3")
    for answer in (front.complete(), front.load("run-a1-v1", adapter(tmp_path, "v1")), front.post("/pause")):
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert "replica 0 (http://127.0.0.1:9) is joining" in message_of(answer)
    health = front.get("/health")
    assert (health.status_code, health.json()["ready"]) == (503, 0)
    assert "Connection refused" in health.json()["others"]["replica 0 (http://127.0.0.1:9)"]


def test_proxy_that_starts_again_unloads_what_nobody_asked_it_for_and_takes_it_again(fakes, start, tmp_path):
    """The publisher, told 404, loads the current policy again."""
    path = adapter(tmp_path, "v2")
    for name in ("run-a1-v9", "run-a2-v2", "trl-policy-v1"):
        fakes[0].post(LOAD, {"lora_name": name, "lora_path": str(path)}).raise_for_status()
    front = start(Proxy, [fake.url for fake in fakes], tmp_path)
    front.until_ready(2)
    assert adapters(fakes) == [[], []]
    assert front.complete("run-a2-v2").status_code == 404
    assert front.load("run-a2-v2", path, canary=canary_for(path)).ok
    assert all(answered_by(front.complete("run-a2-v2"), path) for _ in range(4))


# The process


def test_signals_end_it_at_once_and_quietly(fakes, start, threads, tmp_path):
    for number in (signal.SIGTERM, signal.SIGINT):
        front = start(Proxy, [fakes[0].url], tmp_path)
        front.until_ready(1)
        fakes[0].set(wedged=True)
        asked = threads.submit(front.complete)
        running(fakes)
        front.process.send_signal(number)
        assert front.process.wait(30) == 0
        assert isinstance(asked.exception(), requests.ConnectionError)
        assert "Traceback" not in front.kill()
        fakes[0].post("/fake/reset")


@pytest.mark.parametrize("flag", ["--replicas=nonsense", "--port=99999", "--host=127.0.0.1", "--port={taken}"])
def test_bad_flags_and_a_taken_port_are_one_line_that_names_them(fakes, tmp_path, flag):
    flag = flag.replace("{taken}", fakes[0].url.rsplit(":", 1)[1])
    command = [sys.executable, str(ROOT / "proxy.py"), flag]
    env = os.environ | {"HF_TOKEN": "a b" if "host" in flag else TOKEN}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr
    assert ended.stderr.startswith("error: ")
    assert ("HF_TOKEN" if "host" in flag else flag.split("=")[1]) in ended.stderr


def test_importing_it_starts_nothing_and_loads_no_torch():
    code = "import sys, threading, proxy; print(threading.active_count(), 'torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ended.stdout == "1 False\n"


def test_pages_show_the_replicas_the_policies_and_what_happened(front, fakes, tmp_path):
    assert front.load("run-a1-v1", adapter(tmp_path, "v1")).ok
    assert front.complete("run-a1-v1", n=8).ok
    fakes[1].set(dead=True)
    stats, page, text = front.until_ready(1), front.get("/"), front.get("/metrics").text
    assert page.headers["Content-Type"].startswith("text/html")
    for shown in ("1 of 2 replicas ready", "run-a1-v1", "/health says 503", "is live on 2 replicas"):
        assert shown in page.text
    assert 'proxy_ready{replica="1"} 0.0' in text
    assert 'proxy_routed_total{replica="0"} 8.0' in text or 'proxy_routed_total{replica="1"} 8.0' in text
    assert 'proxy_events_total{kind="loads"} 1.0' in text
    assert set(stats["replicas"][0]) == {"id", "url", "job", "state", "reason", "inflight", "policies", "routed"}
    assert set(stats["router"]) == {"affinity", "spilled", "unmatched", "tracked_blocks"}
