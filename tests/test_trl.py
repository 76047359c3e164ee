"""TRL works unchanged: its client, its rollout worker and its trainer, through the proxy, see one server.

trl_client.py runs in TRL's environment: the python that TRL_PYTHON names, or this one if it has TRL. The servers are
two stubs, and with `-m vllm` two real ones.
"""

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import wait_for
from replicas import KINDS, proxied, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # two real servers take a minute and a half to start

NO_TRL = (
    "no TRL: python3 -m venv ~/trl && ~/trl/bin/pip install trl==1.16.0 torch==2.13.0 peft==0.21.2 aiohttp requests, "
    "then set TRL_PYTHON=~/trl/bin/python"
)


def run_trl(script: str, *arguments: object) -> None:
    """Run a script of this directory in TRL's environment, to its end."""
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [trl_python(), "-W", "ignore", str(Path(__file__).parent / script), *map(str, arguments)]
    ended = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]


def trl_python() -> str:
    """A python that has TRL; without one the test is skipped."""
    here = sys.executable if importlib.util.find_spec("trl") else ""
    return os.path.expanduser(os.environ.get("TRL_PYTHON", here)) or pytest.skip(NO_TRL)


@pytest.fixture(scope="module", params=KINDS)
def seen(request, toy_dir, tmp_path_factory) -> SimpleNamespace:
    """What TRL saw of a proxy before two servers, and the proxy's stats when nothing is in flight any more."""
    trl_python()
    bucket = tmp_path_factory.mktemp("bucket")
    with contextlib.ExitStack() as stack:
        pair = [started(request.param, toy_dir, bucket, tmp_path_factory.mktemp("replica")) for _ in range(2)]
        front = stack.enter_context(proxied([stack.enter_context(server).url for server in pair], bucket))
        run_trl("trl_client.py", front.url, toy_dir, bucket)
        wait_for(lambda: not any(replica["inflight"] for replica in front.stats()["replicas"]))
        return SimpleNamespace(**json.loads((bucket / "seen.json").read_text()), stats=front.stats())


def test_trl_finds_one_server_and_syncs_the_adapter_alone_if_its_rank_is_served(seen):
    assert (seen.max_model_len, seen.dtype) == (64, "torch.float32")
    assert seen.adapter_sync["8"] is True
    assert "Restart it with `--max-lora-rank 16`" in seen.adapter_sync["16"]


def test_trls_trainer_learns_on_policy_over_the_proxy(seen):
    assert (seen.adapter_only, len(seen.steps)) == (True, 3)
    assert seen.version == 4  # one sync before the first step, one after each
    assert seen.steps[0]["ratio"] == pytest.approx(1, abs=1e-3)
    assert abs(seen.steps[0]["kl"]) < 1e-6  # so each token is of the policy that its request named
    assert all(math.isfinite(step["loss"]) and abs(step["ratio"] - 1) < 0.1 for step in seen.steps)


def test_both_replicas_answer_trl_repeats_no_request_and_what_it_unloaded_is_gone_everywhere(seen):
    assert all(replica["routed"] > 0 for replica in seen.stats["replicas"])
    assert not any("rollout/vllm_retry_total" in step for step in seen.steps)  # TRL logs it when there was one
    live = {"trl-policy-v2", "trl-policy-v3", "trl-policy-v4"}  # max_staleness 2
    assert [set(replica["policies"]) for replica in seen.stats["replicas"]] == [live, live]
