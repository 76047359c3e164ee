"""Faults on real vLLM servers: under launch.py --local while it trains, and behind the proxy.

Deselected by default: `pytest tests/test_real_vllm.py -m vllm -n 0` takes about eight minutes on two cores. What is
claimed of answers is checked with the logprobs of transformers and PEFT under the policy that the request named.
"""

import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import requests
import torch
from conftest import ROOT, free_port, wait_for
from peft import PeftModel
from test_end_to_end import processes_of, rows_of
from test_proxy import COMPLETIONS, UNLOAD, Proxy
from test_stub_vllm import BEYOND_EOS, CONFIG, LONG, WEIGHTS, Server, is_healthy, make_adapter, vllm_python, wait_until
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

import toy
from benches.bench_vllm import NO_VLLM, kill, start_replica

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

START_S = 240  # a server needs half a minute, on a busy machine more
SAME = 1e-4  # logprobs of the same weights differ by less
LOAD_DEADLINE_S = 10
STEPS = 150  # long enough for a replica to start beside them


@pytest.fixture(scope="module", autouse=True)
def vllm():
    """replica.sh and launch.py find the vLLM that is installed; without one everything here is skipped."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_PYTHON", vllm_python() or pytest.skip(NO_VLLM))
        yield


# Runs


def launch(runs: Path, run: str, **flags: object) -> subprocess.Popen:
    """launch.py --local on two real servers."""
    flags = {"bucket": runs, "run": run, "replicas": 2, "engine": "vllm", "batch-size": 32, "port": 0} | flags
    command = [sys.executable, str(ROOT / "launch.py"), "--local", *(f"--{k}={value}" for k, value in flags.items())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(launcher: subprocess.Popen) -> None:
    """Wait for the end of a run, and be sure that it is a good one."""
    output, _ = launcher.communicate(timeout=480)
    assert launcher.returncode == 0, output[-3000:]


def trainer_log(run_dir: Path) -> str:
    return "".join(path.read_text() for path in run_dir.glob("jobs/trainer*.log"))


def is_on_policy(row: dict) -> bool:
    """Whether the rollouts of a step were sampled from the very weights that it trained (none had to be computed if
    there was no signal in them)."""
    exact = "ratio" in row and abs(row["ratio"] - 1) < 1e-3 and row["kl"] < 1e-6
    return row["sample/on_policy_frac"] == 1 and (exact or row["batch/zero_advantage_frac"] == 1)


@pytest.fixture(scope="module")
def survived(tmp_path_factory, toy_dir) -> Path:
    """The directory of an on-policy run of which one replica is killed, and which ends after the new one is ready."""
    run_dir = tmp_path_factory.mktemp("runs") / "killed"
    launcher = launch(run_dir.parent, "killed", **{"max-steps": STEPS, "max-staleness": 0})
    wait_for(lambda: "step 3/" in trainer_log(run_dir), START_S)
    job = json.loads(next(run_dir.glob("jobs/replica1*.json")).read_text())
    os.killpg(job["pid"], signal.SIGKILL)
    finish(launcher)
    return run_dir


def test_replica_that_is_killed_is_replaced_and_the_run_completes(survived):
    summary = json.loads((survived / "summary.json").read_text())
    assert (summary["steps"], summary["replica_restarts"]) == (STEPS, 1)
    told = re.findall(r"proxy: replica \S+ \(job \S+\) is (down|ready with \d+)", trainer_log(survived))
    assert told.count("down") == 1
    assert len(told) == 4  # two were ready, one was lost, the new one is ready
    assert processes_of(survived) == []


def test_every_step_is_on_policy_whatever_happens_to_replicas(survived):
    rows = rows_of(survived)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if not is_on_policy(row)] == []
    assert rows[-1]["publish/failed_total"] == 0


VOCABULARY_SIZE = 151_936  # Qwen2's


def make_larger_model(directory: Path) -> None:
    """A random model of 0.1 billion parameters with Qwen2's vocabulary, which ends one completion in ten tokens or so.

    The tokenizer has the toy's tokens, so the toy's prompts fit, and a name for every other one.
    """
    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE, hidden_size=512, intermediate_size=1408, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=None, pad_token_id=0,
        eos_token_id=1, dtype="float32", max_position_embeddings=256, initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        shift = torch.randn(512)
        model.model.embed_tokens.weight += 0.1 * shift  # a direction that all hidden states share
        hidden = model.model(torch.randint(17, VOCABULARY_SIZE, (1, 64))).last_hidden_state.mean((0, 1))
        others = model.lm_head(hidden).logsumexp(0)
        model.lm_head.weight[1] = hidden * (others - 2.3) / hidden.square().sum()  # 10 % eos
    model.save_pretrained(directory)
    tokens = [*toy.VOCABULARY, *(f"<{i}>" for i in range(len(toy.VOCABULARY), VOCABULARY_SIZE))]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Qwen2Tokenizer(vocab=ids, merges=[], unk_token=toy.PAD, pad_token=toy.PAD, eos_token=toy.EOS)
    tokenizer.save_pretrained(directory)


def test_larger_model_with_a_real_vocabulary_trains_on_policy(tmp_path, toy_dir, monkeypatch):
    make_larger_model(tmp_path / "model")
    (tmp_path / "brevity.py").write_text(
        "def brevity(completions, **_):\n    return [1 / (9 + len(c)) for c in completions]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = {"model": tmp_path / "model", "dataset": toy_dir / "train.jsonl", "reward": "brevity:brevity",
             "learning-rate": 3e-4, "max-completion-tokens": 32, "max-steps": 3, "max-staleness": 0}  # fmt: skip
    finish(launch(tmp_path, "larger", **flags))
    rows = rows_of(tmp_path / "larger")
    assert [row["step"] for row in rows if is_on_policy(row)] == [1, 2, 3]
    assert all(row["grad_norm"] > 0 for row in rows)


# Two servers behind the proxy


class Replica:
    """A real server on a port of its own: `start` starts it there, `kill` is kill -9 of all its processes."""

    def __init__(self, model: Path, directory: Path):
        self.model, self.log, self.port = model, directory / "log", free_port()
        self.server = Server(f"http://127.0.0.1:{self.port}", directory, directory, kind="vllm")
        self.start()

    def start(self) -> None:
        self.process = start_replica(self.model, self.port, self.log)

    def kill(self) -> None:
        kill(self.process)

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        return is_healthy(self.server.url)


class Fleet:
    """The replicas, the proxy, and what transformers and PEFT say of every policy."""

    def __init__(
        self, proxy: Proxy, replicas: list[Replica], bucket: Path, adapters: dict[str, tuple[Path, PeftModel]]
    ):
        self.proxy, self.replicas, self.bucket, self.adapters = proxy, replicas, bucket, adapters
        self.servers = [replica.server for replica in replicas]
        self.adapter_of: dict[str, str] = {}  # policy -> which adapter it is
        self.versions = itertools.count()

    def write(self, adapter: str, *files: str) -> str:
        """A new policy's directory with these files of an adapter; the policy's name."""
        name = f"faults-a1-v{next(self.versions)}"
        (self.bucket / name).mkdir()
        for file in files:
            shutil.copy(self.adapters[adapter][0] / file, self.bucket / name)
        self.adapter_of[name] = adapter
        return name

    def load(self, name: str) -> requests.Response:
        return self.proxy.load(name, self.bucket / name)

    def live(self, adapter: str) -> str:
        """A new policy, loaded."""
        name = self.write(adapter, WEIGHTS, CONFIG)
        answer = self.load(name)
        assert answer.status_code == 200, answer.text
        return name

    def retire(self, name: str) -> None:
        answer = self.proxy.post(UNLOAD, {"lora_name": name})
        assert answer.status_code == 200, answer.text

    def ask(self, policy: str, seed: int = 0, **more) -> requests.Response:
        """A group of 8."""
        return self.proxy.complete(policy, prompt_of(seed), **{"n": 8, "max_tokens": 40} | more)

    def gap(self, policy: str, answer: requests.Response) -> float:
        """The largest difference of an answer's logprobs from PEFT's under this policy."""
        assert answer.status_code == 200, answer.text
        model = self.adapters[self.adapter_of[policy]][1]
        return max(choice_gap(model, choice) for choice in answer.json()["choices"])

    def gap_on(self, server: Server, policy: str) -> float:
        """The same of the logprobs that one replica gives for a prompt."""
        tokens = prompt_of(47)
        found = torch.tensor(server.prompt_logprobs(policy, tokens))
        return (found - peft_logprobs(self.adapters[self.adapter_of[policy]][1], tokens)).abs().max().item()

    def num_running(self) -> list[float]:
        return [server.num_running() for server in self.servers]

    def said(self, *words: str) -> bool:
        """Whether the proxy has said something of both replicas that has these words in it."""
        events = [event["text"] for event in self.proxy.stats()["events"]]
        return len({text.split()[1] for text in events if all(word in text for word in words)}) == 2


def prompt_of(seed: int) -> list[int]:
    """Token ids of a sum, such as 47+85=."""
    digits = random.Random(seed).choices(range(3, 12), k=4)
    return [*digits[:2], 12, *digits[2:], 13]


@torch.inference_mode()
def peft_logprobs(model: PeftModel, tokens: list[int]) -> torch.Tensor:
    """(T - 1,) of the tokens after the first."""
    logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def choice_gap(model: PeftModel, choice: dict) -> float:
    tokens, found = choice["token_ids"], torch.tensor(choice["logprobs"]["token_logprobs"])
    assert len(tokens) == len(found) > 0
    return (found - peft_logprobs(model, choice["prompt_token_ids"] + tokens)[-len(tokens) :]).abs().max().item()


@pytest.fixture(scope="module")
def started(toy_dir, tmp_path_factory):
    """Two servers, a proxy before them, and three adapters that differ."""
    bucket, adapters, proxy = tmp_path_factory.mktemp("bucket"), {}, None
    for name, rank, seed in (("first", 8, 1), ("second", 1, 2), ("third", 8, 3)):
        directory = tmp_path_factory.mktemp(name)
        make_adapter(toy_dir, directory, rank, seed)
        adapters[name] = directory, PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(toy_dir), directory)
    replicas = [Replica(toy_dir, tmp_path_factory.mktemp("replica")) for _ in range(2)]
    try:
        wait_until(lambda: all(replica.is_up() for replica in replicas), "two healthy replicas", START_S)
        flags = (f"--load-deadline-s={LOAD_DEADLINE_S}", "--control-timeout-s=30", "--canary-atol=1e-3")
        proxy = Proxy([replica.server.url for replica in replicas], bucket, *flags)
        yield Fleet(proxy, replicas, bucket, adapters)
    finally:
        for replica in replicas:
            replica.kill()
        if proxy:
            proxy.kill()


@pytest.fixture
def fleet(started):
    """The fleet with both replicas ready, and without any policy."""
    started.proxy.until_ready(2)
    yield started
    started.proxy.post("/resume")
    for name in started.proxy.stats()["policies"]:
        started.retire(name)


def test_group_of_every_policy_is_sampled_with_its_own_weights(fleet):
    policies = [fleet.live(adapter) for adapter in fleet.adapters]
    for policy in policies:
        answer = fleet.ask(policy)
        assert fleet.gap(policy, answer) < SAME
        others = [other for other in policies if other != policy]
        assert all(fleet.gap(other, answer) > 1000 * SAME for other in others)  # so a wrong policy would show


@pytest.mark.parametrize("partly", ["complete in the end", "never complete"])
def test_half_copied_adapter_goes_live_when_it_is_complete_and_never_before(fleet, partly):
    old, name = fleet.live("first"), fleet.write("second", CONFIG)
    weights, target = (fleet.adapters["second"][0] / WEIGHTS).read_bytes(), fleet.bucket / name / WEIGHTS
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(fleet.load, name)
        wait_until(lambda: fleet.said(name, "doesn't contain tensors"), "no weights", LOAD_DEADLINE_S)
        target.write_bytes(weights[: len(weights) // 2])
        wait_until(lambda: fleet.said(name, "incomplete metadata"), "half the weights", LOAD_DEADLINE_S)
        assert fleet.ask(name).status_code == 404
        assert not load.done()
        if partly == "complete in the end":
            target.write_bytes(weights)
        answer = load.result(LOAD_DEADLINE_S + 5)
    served = [old] if partly == "never complete" else [old, name]
    assert answer.status_code == (504 if partly == "never complete" else 200), answer.text
    assert fleet.proxy.stats()["policies"] == served
    assert all(fleet.gap_on(server, policy) < SAME for server in fleet.servers for policy in served)
    assert partly != "never complete" or "incomplete metadata" in answer.text
    assert fleet.ask(name).status_code == (404 if partly == "never complete" else 200)


def test_retired_policy_asked_for_by_name_is_a_404_and_costs_no_engine(fleet):
    kept, retired = fleet.live("first"), fleet.live("second")
    assert fleet.gap(retired, fleet.ask(retired)) < SAME
    fleet.retire(retired)
    shutil.rmtree(fleet.bucket / retired)
    answers = [fleet.ask(retired, seed) for seed in range(4)]
    assert {answer.status_code for answer in answers} == {404}
    assert answers[0].json()["error"]["message"] == f"The model `{retired}` does not exist."
    assert all(replica.is_up() for replica in fleet.replicas)
    assert all(fleet.gap_on(server, kept) < SAME for server in fleet.servers)


def test_what_is_in_flight_when_a_pause_comes_ends_after_the_resume(fleet):
    policies = [fleet.live("first"), fleet.live("second")]
    with ThreadPoolExecutor(8) as pool:
        asked = [(policies[i % 2], pool.submit(fleet.ask, policies[i % 2], i, n=64, **LONG)) for i in range(8)]
        wait_until(lambda: min(fleet.num_running()) > 0, "completions on both replicas")
        assert fleet.proxy.post("/pause?mode=keep").json() == {"status": "paused"}
        frozen = fleet.num_running()
        assert not all(answer.done() for _, answer in asked)
        assert fleet.proxy.stats()["paused"]
        assert fleet.num_running() == frozen
        assert fleet.proxy.post("/resume").json() == {"status": "resumed"}
        for policy, answer in asked:
            choices = answer.result().json()["choices"]
            assert {(choice["finish_reason"], len(choice["token_ids"])) for choice in choices} == {("length", 58)}
            assert fleet.gap(policy, answer.result()) < BEYOND_EOS


def test_client_that_leaves_stops_its_completions_on_the_engine(fleet):
    policy = fleet.live("first")
    body = json.dumps(
        {"model": policy, "prompt": prompt_of(0), "n": 192, "ignore_eos": True, "max_tokens": 58}
    ).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    host, port = fleet.proxy.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: sum(fleet.num_running()) > 0, "running completions")
        fleet.proxy.post("/pause?mode=keep")  # so that they cannot end by themselves
        assert sum(fleet.num_running()) > 0
    wait_until(lambda: sum(fleet.num_running()) == 0, "no running completion", 5)
    fleet.proxy.until(lambda stats: not any(replica["inflight"] for replica in stats["replicas"]), 5)


@dataclass
class Traffic:
    """Clients that ask for groups of the policies in `names`, in turn, until `stopped`; what they got."""

    fleet: Fleet
    names: list[str]
    stopped: threading.Event = field(default_factory=threading.Event)
    answers: list[tuple[str, requests.Response]] = field(default_factory=list)

    def client(self, number: int) -> None:
        for turn in itertools.count(number):
            if self.stopped.is_set():
                return
            policy = self.names[turn % len(self.names)]
            self.answers.append((policy, self.fleet.ask(policy, turn)))

    def answered_by(self, replica: str) -> int:
        return sum(answer.headers.get("X-Replica") == replica for _, answer in self.answers)


def test_killed_replica_loses_no_request_and_comes_back_with_the_live_policies_and_no_other(fleet):
    retired, kept = fleet.live("second"), fleet.live("first")
    traffic = Traffic(fleet, [kept])
    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(traffic.client, 1000 * number) for number in range(4)]
        try:
            fleet.proxy.until(lambda stats: stats["replicas"][1]["inflight"] > 0)
            fleet.replicas[1].kill()
            fleet.proxy.until_ready(1)
            traffic.names = [kept, fleet.live("third")]
            fleet.retire(retired)
            fleet.replicas[1].start()
            wait_until(fleet.replicas[1].is_up, "the replica serves again", START_S)
            ready = fleet.proxy.until_ready(2)
            before = traffic.answered_by("1")
            wait_until(lambda: traffic.answered_by("1") > before + 10, "answers of the replica that is back")
        finally:
            traffic.stopped.set()
    for client in clients:
        client.result()
    assert ready["counts"]["sent again"] > 0
    assert [set(replica["policies"]) for replica in ready["replicas"]] == [set(traffic.names)] * 2
    assert set(fleet.servers[1].models()) == {fleet.servers[1].base(), *traffic.names}
    assert all(fleet.gap(policy, answer) < SAME for policy, answer in traffic.answers)
