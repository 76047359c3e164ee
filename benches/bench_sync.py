"""How long a publish holds the trainer up, when the bucket is slow and one replica's mount lags behind.

The toy policy trains on fixed rollouts, once handing snapshots to the background publisher and once waiting for every
load, as TRL does. Files take --write-s to write; the second replica sees each adapter --lag-s late.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import requests
import torch

import bucket
import trainer
from benches.bench_proxy import start_proxy
from benches.bench_trainer import toy_rollouts
from benches.figures import figure
from config import LOCAL, Config
from offline import toy
from tests.conftest import free_port

ROOT = Path(__file__).resolve().parent.parent


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench.py sync`."""
    parser.add_argument("--write-s", type=float, default=3.0, help="how long the bucket takes to write an adapter")
    parser.add_argument("--lag-s", type=float, default=5.0, help="how late the second replica sees it")
    parser.add_argument("--train-s", type=float, default=60.0, help="how long to train, each way")


def start_replica(model: Path, lag_s: float) -> tuple[subprocess.Popen, str]:
    """A stub replica that sees adapters lag_s late, and its URL."""
    port = free_port()
    env = {**os.environ, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    command = [sys.executable, str(ROOT / "offline/stub_vllm.py"), f"--model={model}", f"--port={port}",
               "--enable-lora", "--max-lora-rank=8", "--max-loras=6", f"--hidden-s={lag_s}"]  # fmt: skip
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
        try:
            requests.get(f"http://127.0.0.1:{port}/health", timeout=5).raise_for_status()
            return process, f"http://127.0.0.1:{port}"
        except requests.RequestException:
            time.sleep(0.1)
    raise TimeoutError("the stub replica did not start within a minute")


def stalls(cfg: Config, model, rollouts: list, args: argparse.Namespace, wait: bool) -> tuple[list[float], float, int]:
    """Train for train_s: seconds that each sync held the trainer up, wall clock, and number of publishes."""
    optimizer = trainer.optimizer_for(model, cfg)
    directory = Path(cfg.bucket) / "sync"  # the second way is a second attempt: a proxy serves one run
    lease = bucket.claim(directory, cfg)
    shapes = {name: tuple(p.shape) for name, p in trainer.lora_parameters(model).items()}
    publisher = bucket.Publisher(directory, lease, cfg, trainer.adapter_config(model), shapes)
    taken, step, began = [], 0, time.perf_counter()
    while time.perf_counter() - began < args.train_s:
        trainer.policy_gradient(model, rollouts, cfg)
        trainer.optimizer_step(model, optimizer, cfg)
        step += 1
        sync_began = time.perf_counter()
        if wait or not publisher.worker.busy:  # as Run.publish_if_due
            snapshot = (step, trainer.adapter_state(model), trainer.canary(model, rollouts[0], cfg))
            publisher.publish(*snapshot) if wait else publisher.submit(*snapshot)
            taken.append(time.perf_counter() - sync_began)
    wall_s = time.perf_counter() - began
    publisher.worker.flush(60)
    lease.release()
    return taken, wall_s, len(publisher.seconds)


def run(args: argparse.Namespace) -> list[dict]:
    """In the background, and waiting for every load, in one run."""
    torch.set_num_threads(1)
    write_files = bucket.write_files

    def write_slowly(directory: Path, files: dict[str, bytes]) -> None:
        time.sleep(args.write_s)
        write_files(directory, files)

    bucket.write_files = write_slowly
    model_dir = toy.cached_model()
    replicas = [start_replica(model_dir, lag_s) for lag_s in (0.0, args.lag_s)]
    with tempfile.TemporaryDirectory() as directory:
        proxy, url = start_proxy([url for _, url in replicas], directory)
        try:
            changes = {"model": str(model_dir), "bucket": directory, "port": int(url.rsplit(":", 1)[1])}
            cfg = dataclasses.replace(Config(**LOCAL), **changes)
            model = trainer.add_lora(trainer.load_base(cfg), cfg, "cpu")
            rollouts = toy_rollouts(model_dir, 16)
            ours, wall_s, num = stalls(cfg, model, rollouts, args, wait=False)
            theirs, waiting_s, num_waiting = stalls(cfg, model, rollouts, args, wait=True)
        finally:
            for process in (proxy, *(process for process, _ in replicas)):
                process.kill()
    share, share_waiting = 100 * sum(ours) / wall_s, 100 * sum(theirs) / waiting_s
    slow = f"bucket {args.write_s:g} s slow, a mount {args.lag_s:g} s behind"
    return [
        figure(f"{slow}: stall per publish, mean", 1000 * sum(ours) / len(ours), 20, "ms",
               max_ms=1000 * max(ours), waiting_ms=1000 * sum(theirs) / len(theirs)),
        figure("share of the wall clock", share, 1, "%", waiting=share_waiting, publishes=num,
               publishes_waiting=num_waiting),
    ]  # fmt: skip
