"""TRL works unchanged: its client, its rollout worker and its trainer, through the proxy, see one server.

trl_client.py runs in TRL's environment: the python that TRL_PYTHON names, or this one if it has TRL. The servers are
two stubs, and with `-m vllm` two real ones.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from test_proxy import Proxy
from test_stub_vllm import KINDS, end, start
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(600)  # two real servers need a minute and a half to start, more on a busy machine

NO_TRL = (
    "no TRL: python3 -m venv ~/trl && ~/trl/bin/pip install trl==1.16.0 torch==2.13.0 peft==0.21.2 aiohttp requests, "
    "then set TRL_PYTHON=~/trl/bin/python"
)


def trl_python() -> str:
    """A python that has TRL; without one the test is skipped."""
    here = sys.executable if importlib.util.find_spec("trl") else ""
    return os.path.expanduser(os.environ.get("TRL_PYTHON", here)) or pytest.skip(NO_TRL)


def run_trl(script: str, *arguments: object) -> None:
    """Run a script of this directory in TRL's environment, to its end."""
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [trl_python(), "-W", "ignore", str(Path(__file__).parent / script), *map(str, arguments)]
    ended = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]


@pytest.fixture(scope="module", params=KINDS)
def fleet(request, toy_dir, tmp_path_factory):
    """A proxy before two servers, and the directory that stands for the bucket."""
    trl_python()
    bucket, servers, proxy = tmp_path_factory.mktemp("bucket"), [], None
    try:
        for _ in range(2):
            servers.append(start(request.param, toy_dir, bucket, tmp_path_factory.mktemp("replica")))
        urls = [server.url for server in servers]
        proxy = Proxy(urls, bucket, "--dtype=float32", "--canary-atol=1e-3", "--control-timeout-s=60")
        proxy.until_ready(2)
        yield SimpleNamespace(proxy=proxy, bucket=bucket)
    finally:
        if proxy:
            proxy.kill()
        for server in servers:
            end(server.process)


@pytest.fixture(scope="module")
def seen(fleet, toy_dir) -> SimpleNamespace:
    """What TRL saw, and the proxy's stats when nothing is in flight any more."""
    run_trl("trl_client.py", fleet.proxy.url, toy_dir, fleet.bucket)
    seen = json.loads((fleet.bucket / "seen.json").read_text())
    stats = fleet.proxy.until(lambda stats: not any(replica["inflight"] for replica in stats["replicas"]))
    return SimpleNamespace(**seen, bucket=fleet.bucket, stats=stats)


def test_trl_finds_one_server_and_its_figures(seen):
    assert (seen.max_model_len, seen.dtype) == (64, "torch.float32")


def test_trl_chooses_to_sync_the_adapter_alone_if_its_rank_is_served(seen):
    assert seen.adapter_sync["8"] is True
    assert "Restart it with `--max-lora-rank 16`" in seen.adapter_sync["16"]


@pytest.mark.parametrize("version", ["1", "2"])
def test_every_sample_of_trls_worker_is_of_the_policy_it_names(seen, toy_dir, version):
    policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(toy_dir), seen.bucket / f"v{version}")
    for sample in seen.samples[version]:
        ids, trained = torch.tensor(sample["input_ids"]), torch.tensor(sample["completion_mask"]).bool()
        with torch.no_grad():
            logits = policy(input_ids=ids[None]).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0][trained[1:]]
        torch.testing.assert_close(torch.tensor(sample["old_log_probs"])[trained], logprobs, atol=1e-3, rtol=0)


def test_both_replicas_answer_and_trl_repeats_no_request(seen):
    assert all(replica["routed"] > 0 for replica in seen.stats["replicas"])
    assert seen.retries == 0
    assert not any("rollout/vllm_retry_total" in step for step in seen.steps)  # TRL logs it when there was one


def test_pause_silences_every_replica_and_resume_lets_what_was_in_flight_end(seen):
    assert seen.silent_while_paused
    assert seen.resumed


def test_trls_trainer_learns_on_policy_over_the_proxy(seen):
    assert seen.adapter_only
    assert len(seen.steps) == 3
    assert seen.version == 4  # one sync before the first step, one after each
    assert seen.steps[0]["ratio"] == pytest.approx(1, abs=1e-3)
    assert all(math.isfinite(step["loss"]) and abs(step["ratio"] - 1) < 0.1 for step in seen.steps)


def test_what_trl_unloaded_is_gone_everywhere_and_the_rest_is_live_everywhere(seen):
    live = {"worker-v2", "trl-policy-v2", "trl-policy-v3", "trl-policy-v4"}  # max_staleness 2
    assert set(seen.stats["policies"]) == live
    assert [set(replica["policies"]) for replica in seen.stats["replicas"]] == [live, live]
