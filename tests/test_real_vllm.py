"""Faults on real vLLM servers: under launch.py --local while it trains, and behind the proxy.

Deselected by default: `pytest tests/test_real_vllm.py -m vllm -n 0` takes about eight minutes on two cores. What is
claimed of answers is checked with the logprobs of transformers and PEFT under the policy that the request named.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import ROOT, wait_for
from replicas import (
    BEYOND_EOS,
    LONG,
    NO_VLLM,
    PROMPT,
    SAMPLED,
    WEIGHTS,
    make_adapters,
    proxied,
    reference,
    started,
    tokens_and_logprobs,
    vllm_python,
)
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from offline import toy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

STEPS = 150  # long enough for a replica to start beside them
LOAD_DEADLINE_S = 10


@pytest.fixture(scope="module", autouse=True)
def vllm():
    """replica.sh and launch.py find the vLLM that is installed; without one everything here is skipped."""
    with pytest.MonkeyPatch.context() as patched:
        python = vllm_python() or pytest.skip(NO_VLLM)
        patched.setenv("VLLM_PYTHON", python)
        patched.setenv("PATH", f"{os.environ['PATH']}:{Path(python).parent}")  # launch.py looks for the vllm command
        yield


# Runs


def launch(run_dir: Path, **flags: object) -> subprocess.Popen:
    """launch.py --local on two real servers, on-policy."""
    flags = {"bucket": run_dir.parent, "run": run_dir.name, "replicas": 2, "engine": "vllm", "batch-size": 32,
             "port": 0, "max-staleness": 0} | flags  # fmt: skip
    command = [sys.executable, str(ROOT / "launch.py"), "--local", *(f"--{k}={value}" for k, value in flags.items())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(launcher: subprocess.Popen, run_dir: Path) -> list[dict]:
    """Wait for the end of a run, be sure that it is a good one, and return its metrics."""
    output, _ = launcher.communicate(timeout=480)
    assert launcher.returncode == 0, output[-3000:]
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def trainer_log(run_dir: Path) -> str:
    return "".join(path.read_text() for path in run_dir.glob("jobs/trainer*.log"))


def is_on_policy(row: dict) -> bool:
    """Whether the rollouts of a step were sampled from the very weights that it trained (none had to be computed if
    there was no signal in them)."""
    exact = "ratio" in row and abs(row["ratio"] - 1) < 1e-3 and row["kl"] < 1e-6
    return row["sample/on_policy_frac"] == 1 and (exact or row["batch/zero_advantage_frac"] == 1)


def test_replica_that_is_killed_is_replaced_and_every_step_is_on_policy(tmp_path):
    run_dir = tmp_path / "killed"
    launcher = launch(run_dir, **{"max-steps": STEPS})
    wait_for(lambda: "step 3/" in trainer_log(run_dir), 240)
    job = json.loads(next(run_dir.glob("jobs/replica1*.json")).read_text())
    os.killpg(job["pid"], signal.SIGKILL)
    rows = finish(launcher, run_dir)
    assert [row["step"] for row in rows if is_on_policy(row)] == list(range(1, STEPS + 1))
    assert rows[-1]["publish/failed_total"] == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["replica_restarts"]) == (STEPS, 1)
    told = re.findall(r"proxy: replica \S+ \(job \S+\) is (down|ready with \d+)", trainer_log(run_dir))
    assert (len(told), told.count("down")) == (4, 1)  # two were ready, one was lost, the new one is ready


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
        model.model.embed_tokens.weight += 0.1 * torch.randn(512)  # a direction that all hidden states share
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
    reward = "def brevity(completions, **_):\n    return [1 / (9 + len(c)) for c in completions]\n"
    (tmp_path / "brevity.py").write_text(reward)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = {"model": tmp_path / "model", "dataset": toy_dir / "train.jsonl", "reward": "brevity:brevity",
             "learning-rate": 3e-4, "max-completion-tokens": 32, "max-steps": 3}  # fmt: skip
    rows = finish(launch(tmp_path / "larger", **flags), tmp_path / "larger")
    assert [row["step"] for row in rows if is_on_policy(row)] == [1, 2, 3]
    assert all(row["grad_norm"] > 0 for row in rows)


# Two servers behind the proxy


@pytest.fixture(scope="module")
def pair(toy_dir, tmp_path_factory):
    """The proxy before two servers, the servers, and what transformers and PEFT say of the adapters."""
    adapters, bucket = make_adapters(toy_dir, tmp_path_factory.mktemp("adapters")), tmp_path_factory.mktemp("bucket")
    with contextlib.ExitStack() as stack:
        made = [started("vllm", toy_dir, adapters, tmp_path_factory.mktemp("replica")) for _ in range(2)]
        servers = [stack.enter_context(server) for server in made]
        urls = [server.url for server in servers]
        front = stack.enter_context(proxied(urls, bucket, f"--load-deadline-s={LOAD_DEADLINE_S}"))
        front.adapters = adapters
        yield SimpleNamespace(front=front, servers=servers, peft=reference(toy_dir, adapters))


@pytest.fixture
def fleet(pair):
    """The next test finds no policy and no pause."""
    yield pair
    pair.front.post("/resume")
    for name in pair.front.stats()["policies"]:
        assert pair.front.unload(name).status_code == 200


def is_sampled_from(fleet, adapter: str, choices: list[dict], atol: float = SAMPLED) -> bool:
    pairs = map(tokens_and_logprobs, choices)
    return all(logprobs == fleet.peft(adapter, PROMPT, tokens, atol=atol) for tokens, logprobs in pairs)


def test_group_of_every_policy_is_sampled_with_its_own_weights(fleet):
    policies = {fleet.front.loaded(adapter): adapter for adapter in ("good", "other")}
    for policy, adapter in policies.items():
        choices = fleet.front.choices(policy, n=8, max_tokens=40)
        assert [is_sampled_from(fleet, other, choices) for other in policies.values()] == [
            other == adapter for other in policies.values()
        ]


@pytest.mark.parametrize("is_completed", [True, False])
def test_half_copied_adapter_goes_live_when_it_is_complete_and_never_before(fleet, is_completed):
    front, old, name = fleet.front, fleet.front.loaded(), fleet.front.publish("other", WEIGHTS, None)
    weights, path = (front.adapters / "other" / WEIGHTS).read_bytes(), front.bucket / name / WEIGHTS
    with ThreadPoolExecutor(2) as pool:
        load = pool.submit(front.load, name)
        for visible, cause in ((0, "doesn't contain tensors"), (len(weights) // 2, "incomplete metadata")):
            if visible:
                path.write_bytes(weights[:visible])
            told = re.compile(f"{name} .*{cause}")
            wait_for(lambda told=told: any(told.search(event["text"]) for event in front.stats()["events"]))
        early = pool.submit(front.complete, name, n=8)
        assert not load.done()
        if is_completed:
            path.write_bytes(weights)
        answer = load.result(LOAD_DEADLINE_S + 5)
    assert answer.status_code == (200 if is_completed else 504), answer.text
    assert is_completed or "incomplete metadata" in answer.text
    assert early.result().status_code == front.complete(name).status_code == (200 if is_completed else 404)
    assert not is_completed or is_sampled_from(fleet, "other", early.result().json()["choices"])
    for server in fleet.servers:
        assert server.prompt_logprobs(old) == fleet.peft("good")
        assert not is_completed or server.prompt_logprobs(name) == fleet.peft("other")


def num_running(fleet) -> list[float]:
    return [server.num_running() for server in fleet.servers]


def test_what_is_in_flight_when_a_pause_comes_ends_after_the_resume(fleet):
    front, policies = fleet.front, {fleet.front.loaded(adapter): adapter for adapter in ("good", "other")}
    with ThreadPoolExecutor(8) as pool:
        asked = [(name, pool.submit(front.choices, name, n=64, **LONG)) for name in [*policies] * 4]
        wait_for(lambda: min(num_running(fleet)) > 0)
        assert front.post("/pause?mode=keep").json() == {"status": "paused"}
        frozen = num_running(fleet)
        assert front.stats()["paused"]
        assert not all(answer.done() for _, answer in asked)
        assert num_running(fleet) == frozen
        assert front.post("/resume").json() == {"status": "resumed"}
        for name, answer in asked:
            assert {choice["finish_reason"] for choice in answer.result()} == {"length"}
            assert is_sampled_from(fleet, policies[name], answer.result(), BEYOND_EOS)


def test_client_that_leaves_stops_its_completions_on_the_engine(fleet):
    with fleet.front.asking(fleet.front.loaded(), n=192, **LONG):
        wait_for(lambda: sum(num_running(fleet)) > 0)
        fleet.front.post("/pause?mode=keep")  # so that they cannot end by themselves
    wait_for(lambda: sum(num_running(fleet)) == 0, 5)
    wait_for(lambda: not any(replica["inflight"] for replica in fleet.front.stats()["replicas"]), 5)


def test_killed_replica_loses_no_request_and_comes_back_with_the_live_policies_and_no_other(fleet, toy_dir, tmp_path):
    front, retired, names, answers = fleet.front, fleet.front.loaded("other"), [fleet.front.loaded()], []
    stopped = threading.Event()

    def client(number: int) -> None:
        for turn in itertools.takewhile(lambda _: not stopped.is_set(), itertools.count(number)):
            answers.append((name := names[turn % len(names)], front.choices(name, n=8, max_tokens=40)))

    with ThreadPoolExecutor(4) as pool, contextlib.ExitStack() as stack:
        stack.callback(stopped.set)
        clients = [pool.submit(client, number) for number in range(4)]
        wait_for(lambda: front.stats()["replicas"][1]["inflight"] > 0)
        engine = psutil.Process(fleet.servers[1].process.pid)
        for process in [*engine.children(recursive=True), engine]:
            process.kill()
        wait_for(lambda: front.stats()["ready"] == 1)
        names.append(front.loaded("other"))
        front.unload(retired)
        port = int(fleet.servers[1].url.split(":")[-1])
        again = stack.enter_context(started("vllm", toy_dir, front.adapters, tmp_path, port=port))
        wait_for(lambda: front.stats()["ready"] == 2)
        wait_for(lambda: again.num_running() > 0)
        assert set(again.models()) == {again.base(), *names}
        stopped.set()
        for each in clients:
            each.result()
    assert front.complete(retired).status_code == 404
    adapters = dict(zip(names, ("good", "other"), strict=True))
    assert all(is_sampled_from(fleet, adapters[name], choices) for name, choices in answers)
