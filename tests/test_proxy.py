"""The proxy: its rules, worked out by hand, and its behaviour in front of real little servers (fake_replica.py)."""

import email.utils
import gzip
import http.client
import io
import itertools
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_replica
import psutil
import pytest
import requests

import proxy
import vllm_api
from config import Config

HERE = Path(__file__).parent
COMPLETIONS, LOAD, UNLOAD = "/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TOKEN = "hf_SECRETSECRETSECRET"
NOT_VISIBLE = {"error": {"message": "Loading lora x failed: No adapter found for <path>", "type": "NotFoundError"}}
DEAD = {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause."}}


# Pure functions


def test_attempt_is_read_from_our_names_only():
    assert proxy.attempt_of("sanity-a1796066416123-v37") == 1796066416123
    assert proxy.attempt_of("a-b-a12-v3-a7-v0") == 7
    assert proxy.attempt_of("trl-policy-v3") is None
    assert proxy.attempt_of("run-a12-v3-lora") is None


@pytest.mark.parametrize(("num_ids", "num_blocks"), [(0, 0), (15, 0), (16, 1), (135, 8)])
def test_only_full_blocks_are_hashed(num_ids, num_blocks):
    """E19: 15, 16 and 135 tokens are 0, 1 and 8 blocks of 16."""
    assert len(proxy.block_hashes("v3", list(range(num_ids)), 16)) == num_blocks


def test_block_hashes_are_chained_and_seeded_with_the_policy():
    """E18: another policy shares no block; a changed first block changes the equal second one too."""
    ids, changed = list(range(32)), [99, *range(1, 32)]
    assert not set(proxy.block_hashes("v3", ids, 16)) & set(proxy.block_hashes("v4", ids, 16))
    assert not set(proxy.block_hashes("v3", ids, 16)) & set(proxy.block_hashes("v3", changed, 16))
    assert proxy.block_hashes("v3", ids, 16)[0] == proxy.block_hashes("v3", ids[:16] + changed[16:], 16)[0]


def test_prompts_without_token_ids_have_no_blocks():
    """E19: text, a batch, ids that are no ids: no affinity and no crash."""
    for prompt in ("text", ["a", "b"], [[1] * 32, [2] * 32], [], None):
        known = vllm_api.read_completion(json.dumps({"model": "m", "prompt": prompt}).encode())
        assert known["ids"] is None
    assert proxy.block_hashes("m", [-1] * 32, 16) == proxy.block_hashes("m", [1, "x"] * 16, 16) == []


def test_completions_are_counted_not_requests():
    def num(**body):
        return vllm_api.read_completion(json.dumps({"model": "m"} | body).encode())["num"]

    assert num(prompt=[1, 2], n=8) == 8
    assert num(prompt=[1, 2]) == num(prompt="text", n=None) == num(prompt=[1], n=0) == 1
    assert num(prompt=[[1], [2], [3]], n=2) == num(prompt=["a", "b", "c"], n=2) == 6


def replicas(*inflight: int) -> list[proxy.Replica]:
    cfg = Config()
    made = [proxy.Replica(str(i), f"http://127.0.0.1:{i + 1}", "", 1 << i, cfg, "") for i in range(len(inflight))]
    for replica, num in zip(made, inflight, strict=True):
        replica.inflight = num
    return made


def choose(router: proxy.Router, hashes: list[int], fleet: list[proxy.Replica], max_imbalance: int = 8) -> str:
    everyone = sum(replica.bit for replica in fleet)
    replica = router.choose(hashes, fleet, everyone, max_imbalance)
    router.note("v1", hashes, replica.bit)
    return replica.id


def test_owner_is_kept_at_the_limit_and_left_above_it():
    """E17: limit 8; an owner 8 ahead keeps the prompt, 9 ahead it spills to the least loaded."""
    for ahead, wanted in ((8, "0"), (9, "1")):
        router = proxy.Router(1000)
        router.note("v1", [11, 12], 1)
        assert choose(router, [11, 12], replicas(ahead + 3, 3, 5)) == wanted
    assert router.counts == {"affinity": 0, "spilled": 1, "unmatched": 0}


def test_prompts_that_match_nothing_take_turns():
    router, fleet = proxy.Router(1000), replicas(0, 0, 0)
    assert sorted(choose(router, [key], fleet) for key in (1001, 1002, 1003)) == ["0", "1", "2"]
    assert router.counts["unmatched"] == 3


def test_blocks_that_branch_are_common_and_say_nothing():
    """Blocks 10, 11 are a system prompt: followed by 21 and by 31. Only what comes after 11 is a prompt's own."""
    router = proxy.Router(1000)
    router.note("v1", [10, 11, 21, 22], 1)
    assert router.owners([10, 11, 21, 22], 0b11) == 1  # nothing branches yet
    assert router.owners([10, 11, 31], 0b11) == 0  # this prompt makes 11 branch
    router.note("v1", [10, 11, 31], 2)
    assert router.owners([10, 11, 21, 22], 0b111) == 1
    assert router.owners([10, 11, 31], 0b111) == 2
    assert router.owners([10, 11], 0b111) == 0


def test_blocks_that_every_replica_served_say_nothing():
    router = proxy.Router(1000)
    router.note("v1", [1, 2], 1)
    router.note("v1", [1, 2], 2)
    assert router.owners([1, 2], 0b11) == 0
    assert router.owners([1, 2], 0b111) == 0b11  # a third replica that is ready has not served them


def test_a_longer_prompt_follows_its_prefix():
    """Multi-turn: the second turn extends the first, which is no branch."""
    router = proxy.Router(1000)
    router.note("v1", [1, 2, 3], 2)
    assert router.owners([1, 2, 3, 4, 5], 0b11) == 2


def test_routing_table_is_bounded_and_keeps_what_was_used_last():
    router = proxy.Router(4)
    router.note("v1", [1, 2], 1)
    router.note("v1", [3, 4], 1)
    router.note("v1", [1, 2], 1)
    router.note("v1", [5, 6], 1)
    assert list(router.blocks) == [1, 2, 5, 6]


def test_blocks_of_retired_policies_and_lost_replicas_are_dropped():
    router = proxy.Router(1000)
    router.note("v1", [1, 2], 1)
    router.note("v2", [3], 1)
    router.note("v2", [3, 4], 2)
    router.forget_policy("v1")
    assert list(router.blocks) == [3, 4]
    router.forget_replica(2)
    assert {key: block.owners for key, block in router.blocks.items()} == {3: 1}


def test_shared_system_prompt_does_not_pull_everything_to_one_replica():
    """E16: 100 prompts of 64 shared and 80 own tokens, 8 calls each, 2 replicas, 16 completions in flight."""
    router, fleet, inflight, warm = proxy.Router(100_000), replicas(0, 0), [], set()
    load, hits = [0, 0], 0
    for prompt in range(100):
        ids = [*range(64), *(1000 + 80 * prompt + i for i in range(80))]
        for _ in range(8):
            chosen = int(choose(router, proxy.block_hashes("v1", ids, 16), fleet))
            hits += (prompt, chosen) in warm
            warm.add((prompt, chosen))
            load[chosen] += 1
            fleet[chosen].inflight += 1
            inflight.append(chosen)
            if len(inflight) > 16:
                fleet[inflight.pop(0)].inflight -= 1
    assert max(load) / min(load) <= 1.2
    assert hits / 800 >= 0.85


WORKER = "Call to add_lora method failed: Worker failed with error '{}', please check the stack trace above"


@pytest.mark.parametrize(
    ("status", "text", "verdict"),
    [
        (200, "Success: LoRA adapter 'x' added successfully.", "loaded"),
        (404, "Loading lora x failed: No adapter found for <path>", "late"),  # A01
        (404, "Not Found", "final"),  # A02
        (500, WORKER.format("/b/x doesn't contain tensors"), "late"),  # A03
        (500, WORKER.format("Error while deserializing header: header too small"), "late"),  # A04
        (500, WORKER.format("Error while deserializing header: incomplete metadata"), "late"),  # A04
        (500, WORKER.format("Unterminated string starting at: line 1 column 9 (char 8)"), "late"),  # A05
        (500, WORKER.format("Expecting value: line 1 column 1 (char 0)"), "late"),  # A05
        (500, WORKER.format("LoRA rank 32 is greater than max_lora_rank 16."), "final"),  # A07
        (500, WORKER.format("vLLM does not yet support DoRA."), "final"),  # A09
        (400, "The lora adapter 'x' has already been loaded. If you want to load", "already"),
        (500, "EngineCore encountered an issue. See stack trace (above) for the root cause.", "dead"),
        (503, "", "busy"),
        (401, "Invalid username or password.", "final"),
    ],
)
def test_answers_to_a_load_are_told_apart_by_what_they_say(status, text, verdict):
    assert vllm_api.load_verdict(status, text) == verdict


@pytest.mark.parametrize(
    ("status", "text", "verdict"),
    [
        (400, "This model's maximum context length is 256 tokens.", "pass"),  # E13
        (404, "Not Found", "pass"),
        (404, "The model `run-a1-v1` does not exist.", "forgot"),  # D19
        (500, "EngineCore encountered an issue.", "dead"),  # A18
        (500, "some other bug", "doubtful"),
        (502, "Bad Gateway", "doubtful"),
        (429, "", "busy"),  # D17
        (401, "", "token"),  # D14
        (307, "", "moved"),  # D14
    ],
)
def test_answers_to_a_request_are_told_apart(status, text, verdict):
    assert vllm_api.answer_verdict(status, text) == verdict


@pytest.mark.parametrize("form", [WORKER + " for the root cause", "Call to add_lora method failed: {}"])
def test_messages_name_the_cause_and_the_cure(form):
    message = form.format("LoRA rank 32 is greater than max_lora_rank 16.")
    said = vllm_api.said(json.dumps({"error": {"message": message}}).encode())
    assert said == "LoRA rank 32 is greater than max_lora_rank 16."
    assert vllm_api.with_cure(said).endswith("max_lora_rank 16; start the replicas with --lora-rank 32")
    assert vllm_api.said(b'{"detail":"Not Found"}') == "Not Found"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in vllm_api.with_cure("Not Found")
    assert "VLLM_ALLOW" not in vllm_api.with_cure("Loading lora x failed: No adapter found for <path>")  # A24
    assert vllm_api.said(b"<html>Bad\n Gateway</html>") == "<html>Bad Gateway</html>"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("HTTPConnection(host='h', port=1): Failed to establish a new connection: [Errno 111] Connection refused",
         "Connection refused"),
        ("('Connection aborted.', RemoteDisconnected('Remote end closed connection without response'))",
         "Remote end closed connection without response"),
        ("('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))", "Connection reset by peer"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: expired", "certificate verify failed: expired"),
        ("no answer in 5 s", "no answer in 5 s"),
        ("", "OSError"),
    ],
)  # fmt: skip
def test_errors_of_connections_are_cut_to_what_happened(text, wanted):
    assert proxy.short(OSError(text)) == wanted


def test_retry_after_is_read_as_seconds_or_date_and_bounded():
    """D17: 429 with Retry-After 3."""
    now = 1_000_000_000.0
    date = email.utils.formatdate(now + 7, usegmt=True)
    for value, seconds in (("3", 3), (date, 7), ("-5", 0), ("99999", 60), ("soon", 1), ("nan", 60)):
        assert vllm_api.retry_after_s([("retry-after", value)], now) == pytest.approx(seconds, abs=1)
    assert vllm_api.retry_after_s([], now) == 1


def test_hop_by_hop_headers_are_not_passed_on():
    """E08: neither the known ones nor those that Connection names."""
    headers = [("Connection", "keep-alive, X-Secret"), ("Transfer-Encoding", "chunked"), ("x-secret", "1"), ("A", "b")]
    assert vllm_api.end_to_end(headers) == [("A", "b")]
    assert vllm_api.end_to_end([("Host", "h"), ("A", "b")], drop=("host",)) == [("A", "b")]


@pytest.mark.parametrize(
    "head",
    [
        b"Host: x\r\ncontent-length:12\r\nX-A:  b : c \r\n\r\n",
        b"A: 1\r\na: 2\r\nEmpty:\r\nLatin: \xe9\r\n\r\n",
        b"A: folded\r\n here\r\nB: 1\r\n\r\n",
        b"no colon\r\nA: 1\r\n\r\n",
        b"A : 1\r\nB: 1\r\n\r\n",
        b": no name\r\nB: 1\r\n\r\n",
        b"A: 1\rB: 2\r\n\r\n",
        b"A: 1\n\n",
        b"\r\n",
        b"",
    ],
)
def test_headers_are_read_as_pythons_http_client_reads_them(head):
    read, wanted = proxy.plain_headers(io.BytesIO(head)), http.client.parse_headers(io.BytesIO(head))
    assert (read.items(), [type(d) for d in read.defects]) == (wanted.items(), [type(d) for d in wanted.defects])


def test_paths_must_lie_inside_the_bucket():
    """A25"""
    assert vllm_api.lies_in("/bucket/run/adapters/v1", "/bucket")
    for path in ("org/missing", "/other/v1", "/bucket/../etc", "/bucket", "/bucketful/v1"):
        assert not vllm_api.lies_in(path, "/bucket")


def test_newest_attempt_and_names_without_one_survive_a_restart():
    found = [{"r-a5-v1": "/b/1", "trl-policy-v2": "/b/t"}, {"r-a9-v1": "/b/2", "r-a9-v2": "/b/3"}]
    assert proxy.survivors(found) == {"trl-policy-v2": "/b/t", "r-a9-v1": "/b/2", "r-a9-v2": "/b/3"}


def test_canary_gap_is_the_largest_difference_and_infinite_for_nan():
    assert vllm_api.widest_gap([-1.0, -2.0, -3.0], [-1.0, -2.5, -3.25]) == (0.5, 2)
    assert vllm_api.widest_gap([-1.0, -2.0], [float("nan"), -2.0]) == (float("inf"), 1)


def test_canary_logprobs_are_those_of_the_prompt_tokens():
    rows = [None, {"7": {"logprob": -0.5}}, {"3": {"logprob": -9}, "8": {"logprob": -1.5}}]
    body = json.dumps({"choices": [{"prompt_logprobs": rows}]}).encode()
    assert vllm_api.canary_logprobs(body, [5, 7, 8]) == [-0.5, -1.5]
    with pytest.raises(ValueError, match="no prompt_logprobs"):
        vllm_api.canary_logprobs(b'{"choices": [{}]}', [5, 7])


@pytest.mark.parametrize(
    "canary",
    [
        [1, 2],
        {"token_ids": [1, 2]},
        {"token_ids": [1], "logprobs": []},
        {"token_ids": [1, 2], "logprobs": []},
        {"token_ids": [1, "2"], "logprobs": [-1]},
        {"token_ids": [1, 2], "logprobs": [None]},
    ],
)
def test_malformed_canaries_are_refused(canary):
    with pytest.raises(vllm_api.ApiError, match="canary"):
        vllm_api.read_canary(canary)


# Servers


class Server:
    """A script of ours as a process; its URL is in the first line that has one."""

    def __init__(self, *command: str, env: dict | None = None):
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {}),
        )  # fmt: skip
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
        super().__init__(str(HERE / "fake_replica.py"), *args)

    def fault(self, path: str, **fault) -> None:
        self.post("/fake/fault", {"path": path} | fault).raise_for_status()

    def set(self, **state) -> None:
        self.post("/fake/set", state).raise_for_status()

    def release(self) -> None:
        self.post("/fake/release").raise_for_status()

    def wait(self, path: str, count: int) -> None:
        """Until `count` requests to a path have arrived."""
        assert self.get("/fake/wait", params={"path": path, "count": count}).ok, f"{count} requests to {path}"

    def state(self) -> dict:
        return self.get("/fake/state").json()

    def bodies(self, path: str) -> list[dict]:
        """What was posted to a path, without the canaries and probes of the proxy."""
        return [entry["body"] for entry in self.state()["log"]
                if entry["path"] == path and "prompt_logprobs" not in (entry["body"] or {})]  # fmt: skip


class Proxy(Server):
    def __init__(self, urls: list[str], bucket: Path, *flags: str, env: dict | None = None):
        quick = {"--health-every-s": 0.1, "--load-retry-s": 0.05, "--load-deadline-s": 10, "--control-timeout-s": 5,
                 "--no-replica-wait-s": 10, "--request-timeout-s": 30}  # fmt: skip
        given = {flag.split("=")[0] for flag in flags}
        flags += tuple(f"{flag}={value}" for flag, value in quick.items() if flag not in given)
        super().__init__(
            str(HERE.parent / "proxy.py"), "--replicas", ",".join(urls), "--port=0", f"--bucket={bucket}", *flags,
            env={"HF_TOKEN": TOKEN} | (env or {}),
        )  # fmt: skip

    def stats(self) -> dict:
        return self.get("/proxy/stats").json()

    def until(self, true, timeout_s: float = 60) -> dict:
        """The stats once `true(stats)`."""
        deadline = time.monotonic() + timeout_s
        while not true(stats := self.stats()):
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)
        return stats

    def states(self) -> dict[str, str]:
        return {replica["id"]: replica["state"] for replica in self.stats()["replicas"]}

    def until_ready(self, num: int) -> dict:
        return self.until(lambda stats: stats["ready"] == num)

    def load(self, name: str, path: Path, **more) -> requests.Response:
        return self.post(LOAD, {"lora_name": name, "lora_path": str(path)} | more)

    def complete(self, model: str, prompt=(1, 2, 3), **more) -> requests.Response:
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
def start(tmp_path):
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


def adapter(bucket: Path, name: str, config: dict | str | None = None, weights: bytes | None = None) -> Path:
    """An adapter directory as PEFT writes it; `config` and `weights` stand in for its files' contents."""
    path = bucket / name
    path.mkdir()
    whole = struct.pack("<Q", 2) + b"{}" + name.encode()
    config = {"r": 4} if config is None else config
    (path / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (path / "adapter_model.safetensors").write_bytes(whole if weights is None else weights)
    return path


def canary_for(path: Path, off: float = 0.0) -> dict:
    weights, ids = fake_replica.weights_in(str(path)), [3, 1, 4, 1, 5]
    logprobs = [fake_replica.logprob(weights, ids[: i + 1]) + off for i in range(1, len(ids))]
    return {"token_ids": ids, "logprobs": logprobs}


def answered_by(response: requests.Response, path: Path | None, prompt=(1, 2, 3)) -> bool:
    """Whether a completion was sampled from the weights in `path` (None: the base model's)."""
    weights = fake_replica.weights_in(str(path)) if path else 0
    choices = response.json()["choices"]
    return all(c["token_ids"] == fake_replica.sampled(weights, list(prompt), c["index"], 4) for c in choices)


# Loads


def test_policy_is_loaded_everywhere_and_answers_from_its_own_weights(front, fakes, tmp_path):
    path = adapter(tmp_path, "v1")
    answer = front.load("run-a1-v1", path, canary=canary_for(path))
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'run-a1-v1' added successfully.")
    for fake in fakes:
        assert fake.state()["adapters"] == {"run-a1-v1": str(path)}
        assert fake.bodies(LOAD) == [{"lora_name": "run-a1-v1", "lora_path": str(path)}]  # A16, and no canary
    answers = [front.complete("run-a1-v1", n=2) for _ in range(4)]
    assert all(answered_by(answer, path) for answer in answers)
    assert answered_by(front.complete("base"), None)


def test_load_is_retried_only_where_the_adapter_is_not_visible_yet(front, fakes, tmp_path):
    """A01, D02"""
    fakes[1].fault(LOAD, status=404, body=NOT_VISIBLE, times=3)
    assert front.load("run-a1-v1", adapter(tmp_path, "v1")).status_code == 200
    assert [len(fake.bodies(LOAD)) for fake in fakes] == [1, 4]


def test_policy_is_unknown_until_every_replica_has_it(front, fakes, tmp_path):
    """D02, E22: no completion for the new name before the slower replica has loaded it, and never a 404 afterwards."""
    fakes[1].fault(LOAD, hold=True)
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(front.load, "run-a1-v1", adapter(tmp_path, "v1"))
        fakes[1].wait(LOAD, 1)
        assert front.complete("run-a1-v1").status_code == 404
        fakes[1].release()
        assert loading.result().status_code == 200
    assert {front.complete("run-a1-v1").status_code for _ in range(8)} == {200}
    assert [len(fake.bodies(COMPLETIONS)) for fake in fakes] == [4, 4]


def test_route_that_does_not_exist_is_final_and_names_the_setting(front, fakes, tmp_path):
    """A02"""
    for fake in fakes:
        fake.fault(LOAD, status=404, body={"detail": "Not Found"}, times=-1)
    answer = front.load("run-a1-v1", adapter(tmp_path, "v1"))
    assert answer.status_code == 404
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in answer.json()["error"]["message"]
    assert max(len(fake.bodies(LOAD)) for fake in fakes) == 1


HALVES = {
    "A01 no directory": None,
    "A03 config without weights": ("config", None),
    "A03 weights without config": (None, "weights"),
    "A04 weights cut": ("config", "half"),
    "A04 weights empty": ("config", ""),
    "A05 config cut": ("half", "weights"),
    "A05 config empty": ("", "weights"),
}


def half_adapter(path: Path, what: tuple | None) -> None:
    whole = {"config": '{"r": 4, "peft_type": "LORA"}', "weights": struct.pack("<Q", 200) + b"{" * 200}
    for file, kind in zip(("adapter_config.json", "adapter_model.safetensors"), what or (), strict=False):
        path.mkdir(exist_ok=True)
        content = whole["config" if "config" in file else "weights"]
        if kind is not None:
            content = content[: {"half": len(content) // 2, "": 0}.get(kind, len(content))]
            (path / file).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("what", HALVES.values(), ids=HALVES.keys())
def test_half_visible_adapter_is_waited_for(front, fakes, tmp_path, what):
    path = tmp_path / "v1"
    half_adapter(path, what)
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(front.load, "run-a1-v1", path)
        fakes[0].wait(LOAD, 2)
        half_adapter(path, ("config", "weights"))
        assert loading.result().status_code == 200
    assert answered_by(front.complete("run-a1-v1"), path)


@pytest.mark.parametrize("what", HALVES.values(), ids=HALVES.keys())
def test_adapter_that_never_becomes_whole_fails_at_the_deadline(fakes, start, tmp_path, what):
    """A03, A04, A05, A24: bounded, rolled back, and the message says that files are missing, not a setting."""
    front = start(Proxy, [fake.url for fake in fakes], tmp_path, "--load-deadline-s=0.5")
    front.until_ready(2)
    half_adapter(tmp_path / "v1", what)
    answer = front.load("run-a1-v1", tmp_path / "v1")
    assert answer.status_code == 504
    message = answer.json()["error"]["message"]
    assert "has not loaded run-a1-v1 within 0.5 s" in message
    assert "is the bucket mounted there" in message
    assert "VLLM_ALLOW" not in message
    assert set(front.states().values()) == {"ready"}
    assert [fake.state()["adapters"] for fake in fakes] == [{}, {}]


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        ({"r": 32}, "LoRA rank 32 is greater than max_lora_rank 8; start the replicas with --lora-rank 32"),  # A07
        ({"use_dora": True}, "does not yet support DoRA; train without DoRA"),  # A09
        ({"modules_to_save": ["lm_head"]}, "only supports modules_to_save being None"),  # A09
        ({"bias": "all"}, "Adapter bias is not supported; train with bias='none'"),  # A09
    ],
)
def test_adapter_that_vllm_cannot_serve_fails_at_once(front, fakes, tmp_path, config, cause):
    answer = front.load("run-a1-v1", adapter(tmp_path, "v1", config))
    assert answer.status_code == 500
    assert cause in answer.json()["error"]["message"]
    assert max(len(fake.bodies(LOAD)) for fake in fakes) == 1


def test_failed_load_is_rolled_back_everywhere(front, fakes, tmp_path):
    """E01: A loads, B cannot: B's error, the name is nowhere, the version before is still served."""
    old = adapter(tmp_path, "v1")
    assert front.load("run-a1-v1", old).ok
    fakes[1].fault(LOAD, status=500, body={"error": {"message": "LoRA rank 16 is greater than max_lora_rank 8."}})
    answer = front.load("run-a1-v2", adapter(tmp_path, "v2"))
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert message.startswith(f"replica 1 ({fakes[1].url}) cannot load run-a1-v2: LoRA rank 16")
    assert [list(fake.state()["adapters"]) for fake in fakes] == [["run-a1-v1"]] * 2
    assert front.complete("run-a1-v2").status_code == 404
    assert answered_by(front.complete("run-a1-v1"), old)


def test_replica_that_cannot_be_rolled_back_goes_down_and_returns_without_the_policy(fakes, start, tmp_path):
    """E02"""
    front = start(Proxy, [fake.url for fake in fakes], tmp_path, "--control-timeout-s=0.5")
    front.until_ready(2)
    fakes[1].fault(LOAD, status=500, body={"error": {"message": "Adapter bias is not supported."}})
    fakes[0].fault(UNLOAD, hang=True)
    assert front.load("run-a1-v1", adapter(tmp_path, "v1")).status_code == 500
    events = [event["text"] for event in front.until_ready(2)["events"]]
    assert any("is down: it did not unload run-a1-v1" in event for event in events)
    assert [fake.state()["adapters"] for fake in fakes] == [{}, {}]
    again = front.load("run-a1-v1", tmp_path / "v1")  # A15: a name is never used twice
    assert (again.status_code, "new name" in again.text) == (409, True)
    assert front.load("run-a1-v2", adapter(tmp_path, "v2")).ok


def test_load_that_one_replica_never_answers_ends_at_the_deadline(fakes, start, tmp_path):
    """E03"""
    front = start(Proxy, [f.url for f in fakes], tmp_path, "--control-timeout-s=0.4", "--load-deadline-s=1")
    front.until_ready(2)
    fakes[1].fault(LOAD, hang=True, times=-1)
    answer = front.load("run-a1-v1", adapter(tmp_path, "v1"))
    assert answer.status_code == 504
    assert answer.json()["error"]["message"].startswith("replica 1 ")
    front.until_ready(2)
    assert [fake.state()["adapters"] for fake in fakes] == [{}, {}]


def test_replica_that_dies_during_a_load_does_not_fail_it(fakes, start, tmp_path):
    dying = start(Fake)
    front = start(Proxy, [fakes[0].url, dying.url], tmp_path)
    front.until_ready(2)
    dying.fault(LOAD, hold=True)
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(front.load, "run-a1-v1", adapter(tmp_path, "v1"))
        dying.wait(LOAD, 1)
        dying.kill()
        assert loading.result().status_code == 200
    assert front.states() == {"0": "ready", "1": "down"}
    assert front.complete("run-a1-v1").ok


@pytest.mark.parametrize("fault", ["drop_after", "hang"])
def test_lost_reply_to_a_load_ends_as_success(fakes, start, tmp_path, fault):
    """D20: the replica has loaded it, but the answer was lost or too late; what counts is the root it shows."""
    front = start(Proxy, [fake.url for fake in fakes], tmp_path, "--control-timeout-s=0.5")
    front.until_ready(2)
    fakes[1].fault(LOAD, **{fault: True})
    assert front.load("run-a1-v1", adapter(tmp_path, "v1")).status_code == 200
    assert set(front.states().values()) == {"ready"}
    assert len(fakes[1].bodies(LOAD)) == 2


def test_adapter_of_the_same_name_from_another_path_is_not_taken_for_loaded(front, fakes, tmp_path):
    fakes[1].post(LOAD, {"lora_name": "run-a1-v1", "lora_path": str(adapter(tmp_path, "other"))})
    answer = front.load("run-a1-v1", adapter(tmp_path, "v1"))
    assert answer.status_code == 400
    assert "already been loaded" in answer.text
    assert [fake.state()["adapters"] for fake in fakes] == [{}, {}]


def test_wrong_weights_on_one_replica_fail_the_load(front, fakes, tmp_path):
    """A12: vLLM answers 200 to a load that serves the base model; the canary tells."""
    fakes[1].set(wrong_weights=True)
    path = adapter(tmp_path, "v1")
    answer = front.load("run-a1-v1", path, canary=canary_for(path))
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].startswith(f"replica 1 ({fakes[1].url}) does not serve the weights")
    assert [fake.state()["adapters"] for fake in fakes] == [{}, {}]


def test_without_a_canary_replicas_must_agree(front, fakes, tmp_path):
    fakes[1].set(wrong_weights=True)
    assert front.load("trl-policy-v1", adapter(tmp_path, "v1")).status_code == 500
    assert [fake.state()["adapters"] for fake in fakes] == [{}, {}]


def test_canary_tolerance_is_the_configured_one(front, tmp_path):
    """canary_atol is 0.05"""
    near, far = adapter(tmp_path, "v1"), adapter(tmp_path, "v2")
    assert front.load("run-a1-v1", near, canary=canary_for(near, off=0.04)).status_code == 200
    assert front.load("run-a1-v2", far, canary=canary_for(far, off=0.06)).status_code == 500


def test_adapter_that_gives_nan_fails_the_load(front, fakes, tmp_path):
    """A11"""
    body = {"error": {"message": "Out of range float values are not JSON compliant: nan"}}
    fakes[0].fault(COMPLETIONS, status=400, body=body, canary=True)
    answer = front.load("run-a1-v1", adapter(tmp_path, "v1"))
    assert answer.status_code == 500
    assert "Out of range float values" in answer.text


def test_concurrent_loads_of_one_name_load_it_once(front, fakes, tmp_path):
    """A26"""
    path = adapter(tmp_path, "v1")
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: front.load("run-a1-v1", path), range(6)))
    assert {answer.status_code for answer in answers} == {200}
    assert [len(fake.bodies(LOAD)) for fake in fakes] == [1, 1]


def test_reload_of_a_name_without_an_attempt_is_refused_as_vllm_does(front, tmp_path):
    """Behind TRL's names the weights may have changed; vLLM's own answer is an error."""
    path = adapter(tmp_path, "v1")
    assert front.load("trl-policy-v1", path).ok
    again = front.load("trl-policy-v1", path)
    assert (again.status_code, "has already been loaded" in again.text) == (400, True)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"lora_path": "{bucket}/v1"}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "org/missing"}, "absolute"),  # A25
        ({"lora_name": "x", "lora_path": "/etc"}, "inside the bucket"),
        ({"lora_name": "x", "lora_path": "{bucket}/../v1"}, "inside the bucket"),
        ({"lora_name": "base", "lora_path": "{bucket}/v1"}, "base model"),  # A13
        ({"lora_name": "x", "lora_path": "{bucket}/v1", "load_inplace": True}, "load_inplace"),  # A16
        ({"lora_name": "x", "lora_path": "{bucket}/v1", "canary": {"token_ids": [1]}}, "canary"),
    ],
)
def test_loads_that_make_no_sense_reach_no_replica(front, fakes, tmp_path, body, why):
    body = {key: value.replace("{bucket}", str(tmp_path)) if isinstance(value, str) else value
            for key, value in body.items()}  # fmt: skip
    adapter(tmp_path, "v1")
    answer = front.post(LOAD, body)
    assert (answer.status_code, why in answer.text) == (400, True)
    assert [fake.bodies(LOAD) for fake in fakes] == [[], []]


def test_older_attempt_is_refused_and_its_policies_are_retired(front, fakes, tmp_path):
    old, new = adapter(tmp_path, "old"), adapter(tmp_path, "new")
    assert front.load("run-a1000-v1", old).ok
    assert front.load("trl-policy-v1", old).ok
    assert front.load("run-a2000-v1", new).ok
    front.until(lambda stats: stats["policies"] == ["trl-policy-v1", "run-a2000-v1"] and not stats["retiring"])
    assert [sorted(fake.state()["adapters"]) for fake in fakes] == [["run-a2000-v1", "trl-policy-v1"]] * 2
    answer = front.load("run-a1000-v2", old)
    assert answer.status_code == 409
    assert "attempt 2000 has taken over" in answer.json()["error"]["message"]
    assert front.complete("run-a1000-v1").status_code == 404


# Unloads


def test_unload_waits_for_what_is_in_flight(front, fakes, tmp_path):
    """A17, A22: new requests get 404 at once; replicas are asked to unload when the old ones are answered."""
    path = adapter(tmp_path, "v1")
    assert front.load("run-a1-v1", path).ok
    for fake in fakes:
        fake.fault(COMPLETIONS, hold=True)
    before = [fake.state()["arrived"][COMPLETIONS] for fake in fakes]
    with ThreadPoolExecutor() as pool:
        running = pool.submit(front.complete, "run-a1-v1")
        front.until(lambda stats: stats["requests"] == 1)
        unloading = pool.submit(front.post, UNLOAD, {"lora_name": "run-a1-v1"})
        front.until(lambda stats: stats["retiring"] == ["run-a1-v1"])
        assert front.complete("run-a1-v1").status_code == 404
        assert [len(fake.bodies(UNLOAD)) for fake in fakes] == [0, 0]
        one = next(f for f, n in zip(fakes, before, strict=True) if f.state()["arrived"][COMPLETIONS] > n)
        one.release()
        assert answered_by(running.result(), path)
        assert (unloading.result().status_code, unloading.result().text) == (
            200, "Success: LoRA adapter 'run-a1-v1' removed successfully.")  # fmt: skip
    assert [fake.state()["adapters"] for fake in fakes] == [{}, {}]


def test_unload_of_a_busy_policy_gives_up_waiting_but_not_unloading(fakes, start, tmp_path):
    front = start(Proxy, [fakes[0].url], tmp_path, "--control-timeout-s=0.5")
    front.until_ready(1)
    assert front.load("run-a1-v1", adapter(tmp_path, "v1")).ok
    fakes[0].fault(COMPLETIONS, hold=True)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(front.complete, "run-a1-v1")
        front.until(lambda _: fakes[0].state()["running"] == 1)
        answer = front.post(UNLOAD, {"lora_name": "run-a1-v1"})
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        fakes[0].release()
        assert running.result().ok
    front.until(lambda stats: not stats["retiring"])
    assert fakes[0].state()["adapters"] == {}


def test_unload_of_unknown_names(front, fakes, tmp_path):
    """A17: a replica that does not know the name is done; a name that nobody knows is vLLM's 404."""
    assert front.load("run-a1-v1", adapter(tmp_path, "v1")).ok
    fakes[1].post(UNLOAD, {"lora_name": "run-a1-v1"})
    assert front.post(UNLOAD, {"lora_name": "run-a1-v1"}).ok
    assert set(front.states().values()) == {"ready"}
    answer = front.post(UNLOAD, {"lora_name": "nobody"})
    assert (answer.status_code, "cannot be found" in answer.text) == (404, True)
    assert front.post(UNLOAD, {}).status_code == front.post(UNLOAD, {"lora_name": "base"}).status_code == 400


def test_policy_retired_while_a_replica_was_down_does_not_come_back_with_it(front, fakes, tmp_path):
    """A18: its directory may be deleted then, and a request for it would end the engine."""
    assert front.load("run-a1-v1", adapter(tmp_path, "v1")).ok
    fakes[1].set(dead=True)
    front.until_ready(1)
    assert front.post(UNLOAD, {"lora_name": "run-a1-v1"}).ok
    assert list(fakes[1].state()["adapters"]) == ["run-a1-v1"]
    fakes[1].set(dead=False)
    front.until_ready(2)
    assert fakes[1].state()["adapters"] == {}


def test_replica_stops_waiting_for_a_policy_that_is_retired_while_it_catches_up(front, fakes, start, pool, tmp_path):
    front.load("run-a1-v1", adapter(tmp_path, "v1"))
    late = pool[2]
    late.fault(LOAD, status=404, body=NOT_VISIBLE, times=10**6)
    front.post("/proxy/replicas", {"url": late.url})
    late.wait(LOAD, 2)
    assert front.post(UNLOAD, {"lora_name": "run-a1-v1"}).status_code == 200
    front.until_ready(3)
    assert not any("is down" in event["text"] for event in front.stats()["events"])


def test_name_without_an_attempt_may_come_back_after_a_cache_reset(front, fakes, tmp_path):
    """A15: TRL numbers its policies from 1 in every run."""
    path = adapter(tmp_path, "v1")
    assert front.load("trl-policy-v1", path).ok
    assert front.post(UNLOAD, {"lora_name": "trl-policy-v1"}).ok
    assert front.load("trl-policy-v1", path).ok
    for fake in fakes:
        paths = [entry["path"] for entry in fake.state()["log"]]
        assert paths.index("/reset_prefix_cache") < len(paths) - 1 - paths[::-1].index(LOAD)


# Pause, resume, TRL


def test_pause_that_fails_on_one_replica_is_taken_back(front, fakes):
    """E04"""
    fakes[1].fault("/pause", status=500, body={"error": {"message": "no"}})
    answer = front.post("/pause?mode=keep")
    assert (answer.status_code, answer.json()["error"]["message"].startswith("replica 1 ")) == (500, True)
    assert [fake.state()["paused"] for fake in fakes] == [False, False]
    assert front.stats()["paused"] is False


def test_pause_and_resume_twice_are_fine(front, fakes):
    """E04"""
    for path in ("/pause?mode=keep", "/pause?mode=keep", "/resume", "/resume"):
        paused = path != "/resume"
        answer = front.post(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "paused" if paused else "resumed"})
        assert [fake.state()["paused"] for fake in fakes] == [paused, paused]


def test_replica_that_does_not_resume_goes_down_and_comes_back_resumed(front, fakes):
    assert front.post("/pause?mode=keep").ok
    fakes[1].fault("/resume", status=500, body="no")
    assert front.post("/resume").ok
    front.until_ready(2)
    assert [fake.state()["paused"] for fake in fakes] == [False, False]


def test_request_during_a_pause_is_answered_after_it(front, fakes):
    """E24"""
    assert front.post("/pause?mode=keep").ok
    with ThreadPoolExecutor() as pool:
        running = pool.submit(front.complete, "base")
        front.until(lambda stats: stats["requests"] == 1)
        assert front.post("/resume").ok
        assert answered_by(running.result(), None)


def test_second_pause_in_abort_mode_ends_the_request_as_vllm_does(front, fakes):
    """E24: 200, no tokens, finish_reason abort."""
    assert front.post("/pause?mode=keep").ok
    with ThreadPoolExecutor() as pool:
        running = pool.submit(front.complete, "base")
        front.until(lambda stats: stats["requests"] == 1)
        next(fake for fake in itertools.cycle(fakes) if fake.state()["running"])
        assert front.post("/pause?mode=abort").ok
        choice = running.result().json()["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])


def test_replica_that_joins_during_a_pause_is_paused(front, fakes, pool):
    assert front.post("/pause?mode=keep").ok
    assert front.post("/proxy/replicas", {"url": pool[2].url}).json() == {"id": "2"}
    front.until_ready(3)
    assert pool[2].state()["paused"]
    assert front.post("/resume").ok
    assert not pool[2].state()["paused"]


def test_trl_sees_one_vllm_server(front, fakes, tmp_path):
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
    assert front.post(UNLOAD, {"lora_name": "trl-policy-v1"}).ok
    assert front.post("/resume").ok


def test_unload_during_a_pause_does_not_wait_for_frozen_requests(front, fakes, tmp_path):
    assert front.load("trl-policy-v1", adapter(tmp_path, "v1")).ok
    assert front.post("/pause?mode=keep").ok
    with ThreadPoolExecutor() as pool:
        running = pool.submit(front.complete, "trl-policy-v1")
        front.until(lambda stats: stats["requests"] == 1)
        next(fake for fake in itertools.cycle(fakes) if fake.state()["running"])
        assert front.post(UNLOAD, {"lora_name": "trl-policy-v1"}).ok
        assert front.post("/resume").ok
        assert running.result().ok


def test_replicas_that_disagree_after_a_pause_withdraw_the_policy(front, fakes, tmp_path):
    fakes[1].set(wrong_weights=True)
    assert front.post("/pause?mode=keep").ok
    assert front.load("trl-policy-v1", adapter(tmp_path, "v1")).ok
    with ThreadPoolExecutor() as pool:
        held = pool.submit(front.complete, "trl-policy-v1")  # held until the check, never answered from either
        front.until(lambda stats: stats["requests"] == 1)
        answer = front.post("/resume")
        assert (answer.status_code, "does not serve the weights" in answer.text) == (500, True)
        assert held.result().status_code == 404
    assert front.complete("trl-policy-v1").status_code == 404


def test_concurrent_control_calls_leave_all_replicas_alike(front, fakes, tmp_path):
    """E25"""
    assert front.load("run-a1-v1", adapter(tmp_path, "v1")).ok
    v5 = adapter(tmp_path, "v5")
    for _ in range(3):
        with ThreadPoolExecutor() as pool:
            calls = [
                pool.submit(front.load, "run-a1-v5", v5), pool.submit(front.post, UNLOAD, {"lora_name": "run-a1-v1"}),
                pool.submit(front.post, "/pause?mode=keep"), pool.submit(front.post, "/resume"),
            ]  # fmt: skip
        assert calls[0].result().status_code == 200
        states = [fake.state() for fake in fakes]
        assert states[0]["adapters"] == states[1]["adapters"] == {"run-a1-v5": str(v5)}
        assert states[0]["paused"] == states[1]["paused"] == front.stats()["paused"]
        assert front.post("/resume").ok


def test_prefix_cache_reset_reaches_all_and_forgets_the_routing(front, fakes):
    front.complete("base", range(64))
    assert front.stats()["router"]["tracked_blocks"] == 4
    assert front.post("/reset_prefix_cache").ok
    assert [fake.state()["arrived"]["/reset_prefix_cache"] for fake in fakes] == [1, 1]
    assert front.stats()["router"]["tracked_blocks"] == 0


# Requests


def test_request_without_a_model_or_for_an_unknown_one_reaches_no_replica(front, fakes):
    """A14, A18"""
    answer = front.post(COMPLETIONS, {"prompt": [1, 2]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400)
    for path in (COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/tokenize"):
        answer = front.post(path, {"model": "gone", "prompt": [1]})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "The model `gone` does not exist."
    assert front.post(COMPLETIONS, data="{").status_code == front.post(COMPLETIONS, [1]).status_code == 400
    assert [fake.bodies(COMPLETIONS) for fake in fakes] == [[], []]


@pytest.mark.parametrize("status", [400, 404, 500])
def test_errors_of_replicas_are_passed_on_unchanged(front, fakes, status):
    """E21"""
    body = {"error": {"message": "some reason", "type": "T", "param": None, "code": status}}
    for fake in fakes:
        fake.fault(COMPLETIONS, status=status, body=body, headers={"X-Own": "1"})
    answer = front.complete("base")
    assert (answer.status_code, answer.json(), answer.headers["X-Own"]) == (status, body, "1")
    assert sum(len(fake.bodies(COMPLETIONS)) for fake in fakes) == 1
    assert set(front.states().values()) == {"ready"}


def test_client_errors_cost_the_replica_nothing(front, fakes):
    """E13: 20 prompts of 300 tokens in a context of 256."""
    for _ in range(20):
        answer = front.complete("base", [1] * 300)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("This model's maximum context length is 256 tokens")
    assert set(front.states().values()) == {"ready"}
    assert sum(len(fake.bodies(COMPLETIONS)) for fake in fakes) == 20


def test_server_errors_of_a_healthy_replica_do_not_take_it_down(front, fakes):
    for fake in fakes:
        fake.fault(COMPLETIONS, status=500, body="a bug that this prompt shows", times=-1)
    assert {front.complete("base").status_code for _ in range(10)} == {500}
    assert set(front.states().values()) == {"ready"}


def test_upstream_that_is_too_slow_is_asked_once(fakes, start, tmp_path):
    """E10, E21: 504, one generation, which is stopped."""
    front = start(Proxy, [fake.url for fake in fakes], tmp_path, "--request-timeout-s=0.5")
    front.until_ready(2)
    for fake in fakes:
        fake.set(wedged=True)
    assert front.complete("base").status_code == 504
    assert sum(len(fake.bodies(COMPLETIONS)) for fake in fakes) == 1
    front.until(lambda _: sum(fake.state()["aborted"] for fake in fakes) == 1)


def test_dead_replica_costs_its_requests_a_resend_and_nothing_else(fakes, start, tmp_path):
    dying = start(Fake)
    front = start(Proxy, [fakes[0].url, dying.url], tmp_path)
    front.until_ready(2)
    path = adapter(tmp_path, "v1")
    assert front.load("run-a1-v1", path).ok
    for fake in (fakes[0], dying):
        fake.set(wedged=True)
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(front.complete, "run-a1-v1", [i, 2, 3]) for i in range(8)]
        front.until(lambda stats: [replica["inflight"] for replica in stats["replicas"]] == [4, 4])
        dying.kill()
        fakes[0].set(wedged=False)
        for i, answer in enumerate(running):
            assert answered_by(answer.result(), path, [i, 2, 3])
    stats = front.stats()
    assert stats["replicas"][1]["state"] == "down"
    assert stats["counts"]["sent again"] == 4
    assert [replica["inflight"] for replica in stats["replicas"]] == [0, 0]
    assert len(fakes[0].bodies(COMPLETIONS)) == 8


def test_dead_engine_is_down_and_its_requests_are_sent_elsewhere(front, fakes):
    """A18: what a bystander gets when another request killed the engine."""
    fakes[0].fault(COMPLETIONS, status=500, body=DEAD, times=-1)
    fakes[0].fault("/health", status=503, times=-1)
    assert {front.complete("base").status_code for _ in range(4)} == {200}
    front.until(lambda stats: stats["replicas"][0]["state"] == "down")


def test_request_is_sent_again_to_a_replica_that_has_not_failed_it(front, fakes):
    """One that fails at once has the least in flight, and may hold the prefix too."""
    ids = [1] * 64
    owner = fakes[int(front.complete("base", ids).headers["X-Replica"])]
    owner.fault(COMPLETIONS, status=503, times=4)
    answer = front.complete("base", ids)
    assert (answer.status_code, answer.headers["X-Replica"]) == (200, str(1 - fakes.index(owner)))
    assert len(owner.bodies(COMPLETIONS)) == 2


def test_request_that_kills_engines_is_given_up(fakes, start, tmp_path):
    """A18: a poisonous request must not be sent round and round."""
    front = start(Proxy, [fakes[0].url], tmp_path, "--max-sends=2")
    front.until_ready(1)
    fakes[0].fault(COMPLETIONS, status=500, body=DEAD, times=2)
    answer = front.complete("base")
    assert (answer.status_code, "EngineCore" in answer.text) == (500, True)
    front.until_ready(1)


def test_wedged_replica_is_found_by_progress(fakes, start, tmp_path):
    """E12: /health is green, nothing finishes."""
    front = start(Proxy, [fake.url for fake in fakes], tmp_path, "--stall-s=1", "--control-timeout-s=3")
    front.until_ready(2)
    fakes[0].set(wedged=True)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: front.complete("base", [i]), range(4)))
    assert {answer.status_code for answer in answers} == {200}
    stats = front.until(lambda stats: stats["replicas"][0]["state"] == "down")
    assert any("nothing finished for" in event["text"] for event in stats["events"])
    assert fakes[0].get("/health").ok
    fakes[0].set(wedged=False)
    front.until_ready(2)


def test_pause_is_no_stall(fakes, start, tmp_path):
    """E12: /health is 200 while paused, and nothing finishes, as asked."""
    front = start(Proxy, [fakes[0].url], tmp_path, "--stall-s=1")
    front.until_ready(1)
    assert front.post("/pause?mode=keep").ok
    with ThreadPoolExecutor() as pool:
        running = pool.submit(front.complete, "base")
        fakes[0].wait("/health", fakes[0].state()["arrived"]["/health"] + 20)
        assert front.post("/resume").ok
        assert running.result().ok
    assert not any("down" in event["text"] for event in front.stats()["events"])


def test_inflight_returns_to_zero_on_every_path(front, fakes):
    """E06: refused, client error, server error, dropped, cut, client gone."""
    faults = [{"status": 400}, {"status": 500, "body": "x"}, {"drop": True}, {"cut": 10}, {"status": 503},
              {"status": 429, "headers": {"Retry-After": "0"}}]  # fmt: skip
    for fault in faults * 3:
        fakes[0].fault(COMPLETIONS, **fault)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: front.complete("base", [i], n=2), range(60)))
        for i in range(5):
            send_raw(front, {"model": "base", "prompt": [i]}).close()
    assert {answer.status_code for answer in answers} <= {200, 400, 500}
    stats = front.until(lambda stats: stats["requests"] == 0)
    assert [replica["inflight"] for replica in stats["replicas"]] == [0, 0]
    fakes[0].set(faults=[])
    front.until_ready(2)
    before = [replica["routed"] for replica in stats["replicas"]]
    for i in range(10):
        assert front.complete("base", [i]).ok
    after = [replica["routed"] for replica in front.stats()["replicas"]]
    assert [b - a for a, b in zip(before, after, strict=True)] == [5, 5]


def send_raw(front: Server, body: dict) -> socket.socket:
    """Send a completion request; the connection it went out on."""
    host, port = front.url.removeprefix("http://").split(":")
    sock, data = socket.create_connection((host, int(port)), timeout=30), json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    sock.sendall(head.format(len(data)).encode() + data)
    return sock


def test_request_whose_body_ends_early_is_refused(front, fakes):
    host, port = front.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        sock.sendall(head.encode() + b'{"model": "base"')
        sock.shutdown(socket.SHUT_WR)
        assert b" 400 " in sock.recv(100)
    assert front.until(lambda stats: stats["requests"] == 0)
    assert [fake.bodies(COMPLETIONS) for fake in fakes] == [[], []]


@pytest.mark.parametrize("stream", [False, True])
def test_generation_stops_when_the_client_leaves(front, fakes, stream):
    for fake in fakes:
        fake.set(wedged=not stream, stepwise=stream)
    with send_raw(front, {"model": "base", "prompt": [1], "stream": stream}) as sock:
        front.until(lambda _: sum(fake.state()["running"] for fake in fakes) == 1)
        if stream:
            next(fake for fake in fakes if fake.state()["running"]).release()
            assert b"200 OK" in sock.recv(100)
    front.until(lambda _: sum(fake.state()["aborted"] for fake in fakes) == 1)
    stats = front.until(lambda stats: stats["requests"] == 0)
    assert sum(replica["inflight"] for replica in stats["replicas"]) == 0


def test_many_requests_run_at_once_and_control_calls_pass_them(fakes, start, tmp_path):
    """E11: 384 in flight; a load does not queue behind them."""
    front = start(Proxy, [fake.url for fake in fakes], tmp_path)
    front.until_ready(2)
    for fake in fakes:
        fake.set(wedged=True)
    with ThreadPoolExecutor(384) as pool:
        running = [pool.submit(front.complete, "base", [i % 500, i // 500]) for i in range(384)]
        front.until(lambda stats: [replica["inflight"] for replica in stats["replicas"]] == [192, 192])
        front.until(lambda _: [fake.state()["running"] for fake in fakes] == [192, 192])
        assert front.post("/pause?mode=keep").ok
        assert front.load("run-a1-v1", adapter(tmp_path, "v1")).ok
        for fake in fakes:
            fake.set(wedged=False)
        assert front.post("/resume").ok
        assert {answer.result().status_code for answer in running} == {200}
    assert [replica["inflight"] for replica in front.stats()["replicas"]] == [0, 0]


def test_more_requests_than_max_inflight_are_refused(fakes, start, tmp_path):
    front = start(Proxy, [fakes[0].url], tmp_path, "--max-inflight=2")
    front.until_ready(1)
    fakes[0].set(wedged=True)
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(front.complete, "base") for _ in range(2)]
        front.until(lambda stats: stats["requests"] == 2)
        answer = front.complete("base")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        fakes[0].set(wedged=False)
        assert all(answer.result().ok for answer in running)


def stream_from(front: Proxy, fakes: list[Fake]) -> tuple[Fake, requests.Response]:
    """A streaming request whose first chunk was released: the replica that answers, and the answer to read on."""
    body = {"model": "base", "prompt": [1], "stream": True}
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(front.post, COMPLETIONS, body, stream=True)
        front.until(lambda _: any(fake.state()["running"] for fake in fakes))
        one = next(fake for fake in fakes if fake.state()["running"])
        one.release()
        return one, starting.result()


def test_stream_passes_through_chunk_by_chunk(front, fakes):
    """E20: each chunk is read before the replica is told to send the next."""
    for fake in fakes:
        fake.set(stepwise=True)
    one, answer = stream_from(front, fakes)
    lines = (line for line in answer.iter_lines(chunk_size=1) if line)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    for index in range(5):
        assert json.loads(next(lines).removeprefix(b"data: "))["chunk"] == index
        one.release()
    assert list(lines) == [b"data: [DONE]"]
    assert front.until(lambda stats: stats["requests"] == 0)


def test_stream_that_breaks_off_ends_with_an_error(front, fakes):
    """E20"""
    for fake in fakes:
        fake.set(stepwise="break")
    one, answer = stream_from(front, fakes)
    one.release()
    one.release()
    lines = answer.iter_lines(chunk_size=1)
    seen = [json.loads(next(line for line in lines if line).removeprefix(b"data: ")) for _ in range(3)]
    assert [event.get("chunk") for event in seen] == [0, 1, None]
    assert "broke off" in seen[2]["error"]["message"]
    with pytest.raises(requests.exceptions.ChunkedEncodingError):
        list(lines)
    stats = front.until(lambda stats: stats["requests"] == 0)
    assert [replica["inflight"] for replica in stats["replicas"]] == [0, 0]


def test_stale_connections_are_replaced_unnoticed(start, tmp_path):
    """The replica closes idle connections; the request that finds one closed is answered, by one generation."""
    fake = start(Fake, "--keep-alive-s=0.3")
    front = start(Proxy, [fake.url], tmp_path, "--health-every-s=0.1")
    front.until_ready(1)
    for i in range(4):
        assert front.complete("base", [i]).ok
        fake.wait("/health", fake.state()["arrived"]["/health"] + 5)
    assert len(fake.bodies(COMPLETIONS)) == 4


def test_connection_that_breaks_without_an_answer_costs_a_resend(front, fakes):
    """A stale socket that closes under the request: sent again, and the replica stays."""
    for fake in fakes:
        fake.fault(COMPLETIONS, drop=True)
    assert answered_by(front.complete("base"), None)
    assert set(front.states().values()) == {"ready"}


def test_answer_that_is_cut_is_asked_for_again(front, fakes):
    for fake in fakes:
        fake.fault(COMPLETIONS, cut=50)
    assert answered_by(front.complete("base"), None)


def test_headers_fit_the_bytes_that_are_sent(front, fakes):
    """E07, E08: gzip stays gzip, or is not promised; never a length and chunks at once."""
    plain = json.dumps({"choices": ["x" * 1000]}).encode()
    for fake in fakes:
        fake.fault(COMPLETIONS, status=200, body="GZIP" + plain.decode(), times=-1)
    for accept in ("gzip", "identity"):
        headers = {"Accept-Encoding": accept}
        answer = front.post(COMPLETIONS, {"model": "base", "prompt": [1]}, headers=headers, stream=True)
        raw = answer.raw.read(decode_content=False)
        assert answer.headers["Content-Length"] == str(len(raw))
        assert "Transfer-Encoding" not in answer.headers
        assert "Keep-Alive" not in answer.headers
        assert (gzip.decompress(raw) if answer.headers.get("Content-Encoding") == "gzip" else raw) == plain


def test_upstream_gets_the_proxys_token_and_its_own_host(front, fakes):
    """E23, D14: one Authorization header, the proxy's; not the client's; the Host of the replica."""
    headers = {"Authorization": "Bearer client", "X-Mine": "1", "Connection": "keep-alive, X-Gone", "X-Gone": "1"}
    assert front.post(COMPLETIONS, {"model": "base", "prompt": [1]}, headers=headers).ok
    fake, seen = next((f, e["headers"]) for f in fakes for e in f.state()["log"] if "X-Mine" in e["headers"])
    assert seen["Authorization"] == f"Bearer {TOKEN}"
    assert seen["Host"] == fake.url.removeprefix("http://")
    assert "X-Gone" not in seen


def test_without_a_token_the_clients_own_is_not_sent_on(fakes, start, tmp_path):
    """E23: what a client authorises itself with is not the replicas' business."""
    front = start(Proxy, [fakes[0].url], tmp_path, env={"HF_TOKEN": ""})
    front.until_ready(1)
    headers = {"Authorization": "Bearer client"}
    assert front.post(COMPLETIONS, {"model": "base", "prompt": [1]}, headers=headers).ok
    assert not any("Authorization" in entry["headers"] for entry in fakes[0].state()["log"])


@pytest.mark.parametrize("target", ["http://other.host/v1/models", "//other.host:bad/v1/models", "v1/models"])
def test_targets_that_are_no_path_reach_no_replica(front, fakes, target):
    host, port = front.url.removeprefix("http://").split(":")
    before = [fake.state()["arrived"]["/v1/models"] for fake in fakes]
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert b" 400 " in sock.recv(100)
    assert [fake.state()["arrived"]["/v1/models"] for fake in fakes] == before
    assert set(front.states().values()) == {"ready"}


def test_replica_that_refuses_the_token_is_one_clear_error(start, tmp_path):
    """D14: no retries, no waiting for better times."""
    fake = start(Fake, "--token=another")
    front = start(Proxy, [fake.url], tmp_path)
    front.until(lambda stats: "refuses the token (401)" in stats["replicas"][0]["reason"])
    answer = front.complete("base")
    assert answer.status_code == 401
    assert "HF_TOKEN" in answer.json()["error"]["message"]
    assert fake.bodies(COMPLETIONS) == []


def test_gateway_that_starts_to_refuse_the_token_is_not_asked_again(front, fakes):
    for fake in fakes:
        fake.fault(COMPLETIONS, status=403, body="Forbidden")
    answer = front.complete("base")
    assert (answer.status_code, "refuses the token (403)" in answer.text) == (403, True)
    assert sum(len(fake.bodies(COMPLETIONS)) for fake in fakes) == 1


def test_redirects_are_not_followed(front, fakes, pool):
    """D14: the token must not reach another host."""
    for fake in fakes:
        fake.fault(COMPLETIONS, status=307, headers={"Location": pool[2].url + COMPLETIONS})
    answer = front.complete("base")
    assert (answer.status_code, "redirect" in answer.text) == (502, True)
    assert pool[2].bodies(COMPLETIONS) == []


def test_certificates_of_https_replicas_are_checked(start, tmp_path):
    """The Jobs gateway speaks https; the token must not go to whoever answers in its place."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert], check=True, capture_output=True,
    )  # fmt: skip
    fake = start(Fake, f"--cert={cert}", f"--key={key}")
    url = fake.url.replace("http://127.0.0.1", "https://localhost")
    trusting = start(Proxy, [url], tmp_path, env={"SSL_CERT_FILE": str(cert)})
    trusting.until_ready(1)
    assert answered_by(trusting.complete("base"), None)
    wary = start(Proxy, [url], tmp_path)
    wary.until(lambda stats: "certificate verify failed" in stats["replicas"][0]["reason"])


def test_busy_replica_is_left_alone_for_as_long_as_it_asks(front, fakes):
    """D17"""
    fakes[0].fault(COMPLETIONS, status=429, headers={"Retry-After": "60"}, times=-1)
    assert {front.complete("base", [i]).status_code for i in range(10)} == {200}
    assert len(fakes[0].bodies(COMPLETIONS)) == 1
    assert set(front.states().values()) == {"ready"}


def test_only_replica_that_is_busy_is_asked_again_later(fakes, start, tmp_path):
    """D17"""
    front = start(Proxy, [fakes[0].url], tmp_path)
    front.until_ready(1)
    fakes[0].fault(COMPLETIONS, status=429, headers={"Retry-After": "0.2"}, times=2)
    assert front.complete("base").status_code == 200
    fakes[0].fault(COMPLETIONS, status=429, headers={"Retry-After": "0.1"}, times=-1)
    answer = front.complete("base")
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "0.1")
    assert len(fakes[0].bodies(COMPLETIONS)) == 3 + 4  # max_sends


def test_busy_control_calls_are_repeated(front, fakes, tmp_path):
    """D17"""
    for path in (LOAD, UNLOAD):
        fakes[1].fault(path, status=429, headers={"Retry-After": "0.1"})
    assert front.load("run-a1-v1", adapter(tmp_path, "v1")).ok
    assert front.post(UNLOAD, {"lora_name": "run-a1-v1"}).ok
    assert set(front.states().values()) == {"ready"}


def test_token_appears_nowhere(fakes, start, tmp_path):
    """D15: every kind of error is provoked, with replicas that echo the token."""
    dying = start(Fake)
    front = start(Proxy, [fakes[0].url, dying.url], tmp_path, "--load-deadline-s=0.3", "--no-replica-wait-s=0.3")
    front.until_ready(2)
    echo = {"error": {"message": f"you sent Bearer {TOKEN}"}}
    seen = []
    for path, status in ((COMPLETIONS, 500), (COMPLETIONS, 400), (COMPLETIONS, 403), (COMPLETIONS, 307), (LOAD, 500),
                         (LOAD, 404), ("/pause", 500), ("/tokenize", 400)):  # fmt: skip
        for fake in (fakes[0], dying):
            fake.fault(path, status=status, body=echo)
        body = {"model": "base", "prompt": [1]}
        if path == LOAD:
            body = {"lora_name": f"run-a1-v{len(seen)}", "lora_path": str(adapter(tmp_path, f"v{len(seen)}"))}
        seen.append(front.post(path, body))
        for fake in (fakes[0], dying):
            fake.post("/fake/set", {"faults": []})
    fakes[0].fault("/health", status=500, body=echo, times=-1)
    dying.kill()
    front.until_ready(0)
    seen += [front.complete("base"), *(front.get(path) for path in ("/", "/proxy/stats", "/metrics", "/health"))]
    assert front.process.poll() is None
    everything = front.kill() + "".join(answer.text + str(answer.headers) for answer in seen)
    assert TOKEN not in everything
    assert "***" in everything


def test_get_requests_are_answered_by_a_living_replica(fakes, start, tmp_path):
    """E15"""
    dying = start(Fake)
    front = start(Proxy, [dying.url, fakes[0].url], tmp_path, "--health-every-s=5")
    front.until_ready(2)
    dying.kill()
    for _ in range(4):
        assert front.get("/v1/models").json()["data"][0]["id"] == "base"
    assert front.post("/tokenize", {"prompt": "ab"}).json()["tokens"] == [97, 98]


def test_groups_of_one_prompt_stay_on_one_replica(front, fakes):
    """Eight requests for one prompt, one after the other: the replica that has its blocks answers all of them."""
    for prompt in range(6):
        ids = [prompt] * 64
        assert len({front.complete("base", ids).headers["X-Replica"] for _ in range(8)}) == 1
    stats = front.stats()
    assert stats["router"] == {"affinity": 42, "spilled": 0, "unmatched": 6, "tracked_blocks": 24}
    assert [replica["routed"] for replica in stats["replicas"]] == [24, 24]


# Replicas


def test_replica_that_returns_gets_every_live_policy_before_its_first_request(fakes, start, tmp_path):
    """D19: a restarted vLLM has no adapters."""
    dying = start(Fake)
    port = dying.url.rsplit(":", 1)[1]
    front = start(Proxy, [fakes[0].url, dying.url], tmp_path)
    front.until_ready(2)
    paths = {f"run-a1-v{i}": adapter(tmp_path, f"v{i}") for i in (1, 2)}
    for name, path in paths.items():
        assert front.load(name, path, canary=canary_for(path)).ok
    dying.kill()
    front.until_ready(1)
    back = start(Fake, "--port", port)
    stats = front.until_ready(2)
    assert stats["replicas"][1]["policies"] == ["run-a1-v1", "run-a1-v2"]
    log = [entry["path"] for entry in back.state()["log"]]
    assert log.count(LOAD) == 2
    for name, path in paths.items():
        assert all(answered_by(front.complete(name), path) for _ in range(4))


def test_replica_that_forgot_a_policy_is_caught_up_and_the_request_sent_elsewhere(front, fakes, tmp_path):
    """D19, E22: it restarted between two probes."""
    path = adapter(tmp_path, "v1")
    assert front.load("run-a1-v1", path).ok
    fakes[0].post(UNLOAD, {"lora_name": "run-a1-v1"})
    assert all(answered_by(front.complete("run-a1-v1"), path) for _ in range(4))
    front.until_ready(2)
    assert list(fakes[0].state()["adapters"]) == ["run-a1-v1"]


def test_replica_with_wrong_weights_does_not_become_ready(front, fakes, pool, tmp_path):
    path = adapter(tmp_path, "v1")
    assert front.load("run-a1-v1", path, canary=canary_for(path)).ok
    pool[2].set(wrong_weights=True)
    front.post("/proxy/replicas", {"url": pool[2].url, "id": "late", "job": "68f0"}).raise_for_status()
    stats = front.until(lambda stats: "does not serve the weights" in stats["replicas"][2]["reason"])
    assert (stats["replicas"][2]["id"], stats["replicas"][2]["job"], stats["ready"]) == ("late", "68f0", 2)


def test_replica_with_several_engines_is_refused(fakes, start, tmp_path):
    """A23: a load reaches one of them."""
    fakes[0].set(data_parallel_size=2)
    front = start(Proxy, [fakes[0].url], tmp_path)
    front.until(lambda stats: "data_parallel_size 2" in stats["replicas"][0]["reason"])
    assert front.stats()["ready"] == 0


def test_replicas_come_and_go_while_it_runs(fakes, start, tmp_path):
    front = start(Proxy, [], tmp_path)
    assert front.get("/health").status_code == 503
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(front.complete, "base")  # with no replica, requests wait
        front.until(lambda stats: stats["requests"] == 1)
        assert front.post("/proxy/replicas", {"url": fakes[0].url}).json() == {"id": "0"}
        assert waiting.result().ok
    assert front.post("/proxy/replicas", {"url": fakes[1].url, "id": "b"}).json() == {"id": "b"}
    front.until_ready(2)
    fakes[0].fault(COMPLETIONS, hold=True)
    fakes[1].fault(COMPLETIONS, hold=True)
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(front.complete, "base") for _ in range(2)]
        front.until(lambda _: [fake.state()["running"] for fake in fakes] == [1, 1])
        assert requests.delete(front.url + "/proxy/replicas/0", timeout=30).json() == {"id": "0", "inflight": 1}
        assert front.states() == {"0": "draining", "b": "ready"}
        for fake in fakes:
            fake.release()
        assert all(answer.result().ok for answer in running)
    front.until(lambda stats: [replica["id"] for replica in stats["replicas"]] == ["b"])
    assert {front.complete("base").headers["X-Replica"] for _ in range(4)} == {"b"}
    assert requests.delete(front.url + "/proxy/replicas/0", timeout=30).status_code == 404


@pytest.mark.parametrize(
    ("replica", "status"),
    [
        ({"url": "ftp://x"}, 400),
        ({"url": "http://user:pass@x:1"}, 400),
        ({}, 400),
        ({"url": "http://127.0.0.1:1", "id": "0"}, 409),
        ({"url": "{known}"}, 409),
    ],
)
def test_replicas_that_make_no_sense_are_not_added(front, fakes, replica, status):
    replica = {key: value.replace("{known}", fakes[0].url) for key, value in replica.items()}
    assert front.post("/proxy/replicas", replica).status_code == status
    assert len(front.states()) == 2


def test_replicas_are_only_added_as_json(front):
    """A web page can post forms and text to 127.0.0.1, and the token would be sent to what it adds."""
    answer = front.post("/proxy/replicas", data='{"url": "http://127.0.0.1:1"}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415


def test_without_a_ready_replica_requests_get_503_in_the_end(start, tmp_path):
    front = start(Proxy, ["http://127.0.0.1:9"], tmp_path, "--no-replica-wait-s=0.3", "--load-deadline-s=0.3")
    for answer in (front.complete("base"), front.load("run-a1-v1", adapter(tmp_path, "v1")), front.post("/pause")):
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert "replica 0 (http://127.0.0.1:9) is joining" in answer.json()["error"]["message"]


def test_health_counts_the_ready_replicas_and_names_the_others(fakes, start, tmp_path):
    front = start(Proxy, [fakes[0].url, "http://127.0.0.1:9"], tmp_path, "--min-ready=1")
    strict = start(Proxy, [fakes[0].url, "http://127.0.0.1:9"], tmp_path, "--min-ready=2")
    for one, status in ((front, 200), (strict, 503)):
        one.until_ready(1)
        answer = one.get("/health")
        assert (answer.status_code, answer.json()["ready"]) == (status, 1)
        assert "Connection refused" in answer.json()["others"]["replica 1 (http://127.0.0.1:9)"]
        assert one.get("/ping").status_code == status


def test_live_policies_are_found_again_after_a_restart_of_the_proxy(fakes, start, tmp_path):
    """The newest attempt's live on, also where a replica lacks them; other attempts' and those without files go."""
    paths = {name: adapter(tmp_path, name) for name in ("run-a1-v9", "run-a2-v1", "run-a2-v2", "trl-policy-v1")}
    gone = adapter(tmp_path, "run-a2-v0")
    for name, path in [*paths.items(), ("run-a2-v0", gone)]:
        fakes[0].post(LOAD, {"lora_name": name, "lora_path": str(path)}).raise_for_status()
    (gone / "adapter_config.json").unlink()
    front = start(Proxy, [fake.url for fake in fakes], tmp_path)
    front.until_ready(2)
    for fake in fakes:
        assert sorted(fake.state()["adapters"]) == ["run-a2-v1", "run-a2-v2", "trl-policy-v1"]
    assert all(answered_by(front.complete("run-a2-v1"), paths["run-a2-v1"]) for _ in range(4))
    assert front.load("run-a1-v10", paths["run-a1-v9"]).status_code == 409
    assert front.load("run-a2-v3", adapter(tmp_path, "run-a2-v3")).ok


# The process


def test_signals_end_it_at_once_and_quietly(fakes, start, tmp_path):
    for number in (signal.SIGTERM, signal.SIGINT):
        front = start(Proxy, [fakes[0].url], tmp_path)
        front.until_ready(1)
        fakes[0].set(wedged=True)
        with ThreadPoolExecutor() as pool:
            running = pool.submit(front.complete, "base")
            front.until(lambda stats: stats["requests"] == 1)
            front.process.send_signal(number)
            assert front.process.wait(30) == 0
            assert isinstance(running.exception(), requests.ConnectionError)
        assert "Traceback" not in front.kill()
        fakes[0].post("/fake/reset")


@pytest.mark.parametrize(
    ("flag", "token"), [("--replicas=nonsense", ""), ("--port=99999", ""), ("--stall-s=0", ""), ("--replicas=", "a b")]
)
def test_bad_flags_are_one_line_and_nothing_starts(tmp_path, flag, token):
    ended = subprocess.run([sys.executable, str(HERE.parent / "proxy.py"), flag], capture_output=True, text=True,
                           timeout=60, env=os.environ | {"HF_TOKEN": token}, cwd=tmp_path, check=False)  # fmt: skip
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1


def test_taken_port_is_one_line(fakes, tmp_path):
    port = fakes[0].url.rsplit(":", 1)[1]
    ended = subprocess.run([sys.executable, str(HERE.parent / "proxy.py"), f"--port={port}"], capture_output=True,
                           text=True, timeout=60, cwd=tmp_path, check=False)  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr == f"error: --host 127.0.0.1 --port {port}: Address already in use\n"


def test_importing_it_patches_nothing_and_loads_no_torch():
    code = "import socket, sys, proxy; print(socket.socket.__module__, 'torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=HERE.parent,
                           check=True)  # fmt: skip
    assert ended.stdout == "socket False\n"


def test_pages_show_the_replicas_the_policies_and_what_happened(front, fakes, tmp_path):
    path = adapter(tmp_path, "v1")
    assert front.load("run-a1-v1", path).ok
    assert front.complete("run-a1-v1", n=8).ok
    fakes[1].set(dead=True)
    front.until_ready(1)
    page = front.get("/")
    assert page.headers["Content-Type"].startswith("text/html")
    for text in ("1 of 2 replicas ready", "run-a1-v1", "/health says 503", "is live on 2 replicas"):
        assert text in page.text
    text = front.get("/metrics").text
    assert 'proxy_ready{replica="1"} 0.0' in text
    assert 'proxy_routed_total{replica="0"} 8.0' in text or 'proxy_routed_total{replica="1"} 8.0' in text
    assert 'proxy_events_total{kind="loads"} 1.0' in text
    stats = front.stats()
    assert set(stats["replicas"][0]) >= {"id", "url", "state", "inflight", "policies", "routed"}
    assert stats["policies"] == ["run-a1-v1"]
    assert set(stats["router"]) == {"affinity", "spilled", "unmatched", "tracked_blocks"}


def test_memory_does_not_grow_with_requests(front, fakes):
    """Bounded tables: 600 requests after a warm-up of 600 leave no more than 20 MiB behind."""
    process = psutil.Process(front.process.pid)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: front.complete("base", [i % 500] * 128), range(600)))
        before = process.memory_info().rss
        list(pool.map(lambda i: front.complete("base", [i % 500, 1] * 64), range(600)))
    assert process.memory_info().rss - before < 20 * 2**20
