"""The local run with real processes, under seeded kill -9 of replicas, proxy and trainer.

The same run is made twice, calm and under kills; a trainer that was killed is started again with the same --run.
"""

import argparse
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import requests

from benches.figures import figure
from tests.conftest import is_near

ROOT = Path(__file__).resolve().parent.parent
STEP = re.compile(r"^step (\d+)/\d+  reward", re.MULTILINE)


def run(args: argparse.Namespace) -> list[dict]:
    """Run calm and under kills, and compare."""
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    calm = chaos_run(out, "calm", args, [])
    kills = chaos_kills(args)
    chaos = chaos_run(out, "chaos", args, kills)
    return [
        figure("kills survived", len(chaos["killed"]), len(kills), "", True,
               **{kind: chaos["killed"].count(kind) for kind in sorted(set(kills))}),
        figure("reward of the last 10 steps over the calm run's", chaos["reward_last"] / calm["reward_last"], 0.95, "x",
               True, calm=calm["reward_last"], chaos=chaos["reward_last"]),
        figure("answers of a wrong policy", chaos["wrong_policy"] + calm["wrong_policy"], 0),
        figure("groups trained twice", chaos["trained_twice"], 0),
        figure("steps repeated after a trainer's kill, at most", max(chaos["repeated"], default=0), args.save_every),
        figure("steps per minute over the calm run's", chaos["steps_per_min"] / calm["steps_per_min"], args.aim_speed,
               "x", True, calm=calm["steps_per_min"], chaos=chaos["steps_per_min"],
               groups_failed=chaos["groups_failed"], stale_dropped=chaos["stale_dropped"],
               publishes_failed=chaos["publishes_failed"]),
    ]  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench.py chaos`."""
    parser.add_argument(
        "--out", type=Path, default=Path("runs-chaos"), help="directory that stands for the bucket; a new one"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of the kills and the pauses between them")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="the demo's 3e-3 wanders in runs this long")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--kill-replicas", type=int, default=30)
    parser.add_argument("--kill-proxy", type=int, default=5)
    parser.add_argument("--kill-trainer", type=int, default=5)
    parser.add_argument("--kill-every-s", type=float, default=15.0, help="mean pause between two kills")
    parser.add_argument("--lag-s", type=float, default=0.0, help="how late each replica's mount shows a new adapter")
    parser.add_argument("--aim-speed", type=float, default=0.75, help="steps per minute wanted, over the calm run's")
    parser.add_argument("--max-minutes", type=float, default=30.0, help="give up on either run after this long")


def chaos_kills(args) -> list[str]:
    """What is killed, in a seeded order."""
    kills = ["replica"] * args.kill_replicas + ["proxy"] * args.kill_proxy + ["trainer"] * args.kill_trainer
    random.Random(args.seed).shuffle(kills)
    return kills


# --- one run ---------------------------------------------------------------------------------------------------------


def chaos_run(out: Path, name: str, args, kills: list[str]) -> dict:
    """One run to its last step, started again whenever its trainer was killed; what happened in it."""
    rng, run_dir, killed, lagging = random.Random(args.seed + 1), out / name, [], set()
    left, deadline = list(kills), time.monotonic() + 60 * args.max_minutes
    launcher = chaos_launch(out, name, args)
    next_kill = None
    try:
        while time.monotonic() < deadline:
            if launcher.poll() is not None:
                if launcher.returncode == 0:
                    break
                if killed.count("trainer") < len(list(run_dir.glob("jobs/trainer*.json"))):
                    raise RuntimeError(f"{name} ended by itself, with code {launcher.returncode}: see {out}/{name}.log")
                launcher, next_kill = chaos_launch(out, name, args), None
            make_mounts_late(run_dir, args.lag_s, lagging)
            training = bool(STEP.search(trainer_log(run_dir, -1)))  # kills count from the first step after a start
            if training and next_kill is None:
                next_kill = time.monotonic() + args.kill_every_s * rng.uniform(0.5, 1.5)
            if training and left and time.monotonic() >= next_kill and kill_one(run_dir, left[0], rng):
                killed.append(left.pop(0))
                next_kill = time.monotonic() + args.kill_every_s * rng.uniform(0.5, 1.5)
                print(f"{name}: killed a {killed[-1]}, {len(left)} kills left", flush=True)
            time.sleep(0.2)
        else:
            raise RuntimeError(f"{run_dir} did not end within {args.max_minutes:g} min: see {out}/{name}.log")
    finally:
        end_launcher(launcher)
    return {"killed": killed, **chaos_figures(run_dir)}


def chaos_launch(out: Path, name: str, args) -> subprocess.Popen:
    """launch.py --local of this run, its output appended to a file."""
    flags = {
        "bucket": out, "run": name, "replicas": args.replicas, "max-steps": args.steps, "batch-size": args.batch_size,
        "save-every": args.save_every, "diagnose-every": 5, "port": 0, "replica-restarts": 10_000,
        "learning-rate": args.learning_rate,
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "launch.py"), "--local", *(f"--{k}={value}" for k, value in flags.items())]
    with open(out / f"{name}.log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def end_launcher(launcher: subprocess.Popen) -> None:
    """Ctrl-C, on which it cancels all Jobs of the run."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGINT)
        try:
            launcher.wait(60)
        except subprocess.TimeoutExpired:
            launcher.kill()


def job_processes(run_dir: Path, role: str) -> dict[str, list[psutil.Process]]:
    """The living processes of every Job of this role, by the Job's id."""
    found = {}
    for path in sorted(run_dir.glob(f"jobs/{role}*.json")):
        document = json.loads(path.read_text() or "{}")
        if document and not path.with_suffix(".exit").exists() and psutil.pid_exists(document["pid"]):
            wrapper = psutil.Process(document["pid"])
            if wrapper.create_time() == document["started"]:
                found[path.stem] = [wrapper, *wrapper.children(recursive=True)]
    return {job: processes for job, processes in found.items() if processes}


def kill_one(run_dir: Path, kind: str, rng: random.Random) -> bool:
    """kill -9 of one replica Job with all its processes, or of the proxy or the trainer; False if there is none now."""
    try:
        if kind == "replica":
            jobs = job_processes(run_dir, "replica")
            if not jobs:
                return False
            os.killpg(jobs[rng.choice(sorted(jobs))][0].pid, signal.SIGKILL)
            return True
        script = str(ROOT / f"{kind}.py")
        for process in itertools.chain.from_iterable(job_processes(run_dir, "trainer").values()):
            if script in process.cmdline():
                process.kill()
                return True
    except (psutil.NoSuchProcess, ProcessLookupError, ValueError):
        pass  # it has just ended by itself
    return False


def make_mounts_late(run_dir: Path, lag_s: float, done: set[str]) -> None:
    """Tell every stub replica that has come up since to show new adapters lag_s late."""
    for path in run_dir.glob("jobs/replica*.json") if lag_s else []:
        if path.stem in done:
            continue
        try:
            url = json.loads(path.read_text())["urls"][0]
            requests.post(f"{url}/stub/faults", json={"hidden_s": lag_s}, timeout=2).raise_for_status()
            done.add(path.stem)
        except (OSError, ValueError):
            pass  # it is not up yet, or gone


# --- what happened ---------------------------------------------------------------------------------------------------


def trainer_log(run_dir: Path, index: int) -> str:
    """The log of one of the run's trainer Jobs, in the order of their starts; '' if there is none yet."""
    logs = sorted(run_dir.glob("jobs/trainer*.log"), key=lambda path: int(path.stem.rsplit("-", 1)[1], 16))
    return logs[index].read_text(errors="replace") if logs else ""


def chaos_figures(run_dir: Path) -> dict:
    """The figures of a finished run, from its metrics, its newest checkpoint and the logs of all its trainers."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    logs = [trainer_log(run_dir, i) for i in range(len(list(run_dir.glob("jobs/trainer*.log"))))]
    printed = [steps for log in logs if (steps := [int(step) for step in STEP.findall(log)])]
    began = min(path.stat().st_ctime for path in run_dir.glob("jobs/trainer*.json"))
    ended = max(path.stat().st_mtime for path in run_dir.glob("jobs/trainer*.log"))
    seconds = ended - began
    last = rows[-1]
    return {
        "steps": last["step"],
        "steps_per_min": 60 * last["step"] / seconds,
        "reward_last": round(sum(row["reward/mean"] for row in rows[-10:]) / len(rows[-10:]), 3),
        "wrong_policy": wrong_policy(rows + lost_rows(run_dir, rows)),
        "groups_failed": sum(len(re.findall(r"^rollouts: group \d+ failed", log, re.MULTILINE)) for log in logs),
        "trained_twice": trained_twice(run_dir, rows),
        "stale_dropped": last["sample/dropped_stale_total"],
        "publishes_failed": sum(len(re.findall(r"^publish of \S+ failed", log, re.MULTILINE)) for log in logs),
        "repeated": [before[-1] - after[0] + 1 for before, after in itertools.pairwise(printed)],
    }


def lost_rows(run_dir: Path, rows: list[dict]) -> list[dict]:
    """Metrics of the steps that a trainer's kill undid, as far as its attempt had written them."""
    written = [line for path in run_dir.glob("metrics/*.jsonl") for line in path.read_text().splitlines()]
    kept = {json.dumps(row) for row in rows}
    return [json.loads(line) for line in sorted(set(written) - kept)]


def wrong_policy(rows: list[dict]) -> int:
    """Steps that say that a replica answered from other weights than its policy's.

    On-policy the ratio is 1 to rounding; while policies are at most max_staleness apart, few tokens are clipped.
    """
    trained = [row for row in rows if "ratio" in row]
    return sum(
        abs(row["ratio"] - 1) > 1e-3 if row["sample/on_policy_frac"] == 1 else not is_near(row) for row in trained
    )


def trained_twice(run_dir: Path, rows: list[dict]) -> int:
    """Groups that steps were made of beyond those that the prompt cursor has counted as done: 0, or some came twice."""
    checkpoints = [path.parent for path in run_dir.glob("checkpoints/*/complete")]
    newest = max(checkpoints, key=lambda path: json.loads((path / "state.json").read_text())["step"])
    state = json.loads((newest / "state.json").read_text())
    size = state["config"]["group_size"]
    trained = state["step"] * state["config"]["batch_size"] // size
    row = next(row for row in rows if row["step"] == state["step"])
    done = state["cursor"]["next"] - len(state["cursor"]["pending"])
    gone = row["sample/dropped_stale_total"] // size
    return max(0, trained + gone - done)
