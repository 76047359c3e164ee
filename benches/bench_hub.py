"""The demo on the fake Hub, with the real client and Jobs as processes, beside the same demo with --local."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import requests

from benches.figures import figure
from config import LOCAL, flag
from offline import toy
from tests import fake_hub

ROOT = Path(__file__).resolve().parent.parent
TOKEN = next(iter(fake_hub.TOKENS))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench.py hub`."""
    parser.add_argument("--steps", type=int, default=LOCAL["max_steps"])


def timed(command: list[str], **env: str) -> float:
    """Run a command to its end: seconds."""
    began = time.monotonic()
    subprocess.run(command, env={**os.environ, **env}, stdout=subprocess.DEVNULL, check=True, timeout=900)
    return time.monotonic() - began


def run(args: argparse.Namespace) -> list[dict]:
    """Both runs, one after the other, and a dry run."""
    steps = f"--max-steps={args.steps}"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        local_s = timed([sys.executable, str(ROOT / "launch.py"), "--local", "--run=demo", f"--bucket={directory}",
                         steps])  # fmt: skip
        hub = subprocess.Popen([sys.executable, fake_hub.__file__, str(directory / "hub")], stdout=subprocess.PIPE,
                               text=True)  # fmt: skip
        try:
            env = {"HF_ENDPOINT": hub.stdout.readline().strip(), "HF_TOKEN": TOKEN, "HF_HOME": str(directory / "hf")}
            bucket = directory / "hub" / "buckets" / "alice" / "grpo-lora"
            shutil.copytree(toy.cached_model(), bucket / "toy")
            launch = [sys.executable, fake_hub.__file__, "launch", "--run=demo", "--model=/lora/toy",
                      "--dataset=/lora/toy/train.jsonl", steps]  # fmt: skip
            same = [f"{flag(key)}={value}" for key, value in LOCAL.items() if key not in ("model", "dataset", "bucket")]
            same = [text for text in same if not text.startswith("--max-steps=")]
            hub_s = timed([*launch, *same], **env)
            dry_s = min(timed([*launch, *same, "--dry-run"], **env) for _ in range(3))
            jobs = requests.post(f"{env['HF_ENDPOINT']}/fake/state", timeout=30).json()["jobs"]
        finally:
            hub.terminate()
            hub.wait(20)
        ours, theirs = (json.loads((path / "demo" / "summary.json").read_text()) for path in (bucket, directory))
    alive = [job for job in jobs if job["processes"] or job["status"]["stage"] not in fake_hub.TERMINAL]
    return [
        figure("reward of the last 10 steps over that of --local", ours["reward_last"] / theirs["reward_last"], 0.95,
               "x", True, hub=ours["reward_last"], local=theirs["reward_last"], hub_s=hub_s, local_s=local_s),
        figure("Jobs created beyond a trainer and two replicas", len(jobs) - 3, 0),
        figure("Jobs that have not ended, or of which a process lives", len(alive), 0),
        figure("--dry-run", dry_s, 2, "s"),
    ]  # fmt: skip
