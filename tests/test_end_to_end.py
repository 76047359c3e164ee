"""The whole system as a user runs it: launch.py --local with real processes, HTTP, adapters and a bucket directory."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from conftest import is_near
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import bucket

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--batch-size=32", "--save-every=2", "--diagnose-every=2", "--port=0"]


def command(runs: Path, run: str, *flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "launch.py"), "--local", f"--bucket={runs}", f"--run={run}", *SMALL, *flags]


def launch(runs: Path, run: str, *flags: str) -> str:
    ended = subprocess.run(command(runs, run, *flags), capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def rows_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Every process that any Job of the run has started and that still lives."""
    groups = {json.loads(path.read_text())["pid"] for path in (run_dir / "jobs").glob("*.json")}
    found = []
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) in groups and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(psutil.Process(pid))
        except (ProcessLookupError, psutil.NoSuchProcess):
            pass
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory, toy_dir) -> tuple[Path, str]:
    """A run of three steps on two replicas, tracked: its directory and what it printed."""
    runs = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRACKIO_DIR", str(runs / "trackio"))
        flags = ("--max-steps=3", "--max-staleness=1", "--queue-size=32", "--track=trackio")
        return runs / "whole", launch(runs, "whole", *flags)


def test_a_run_leaves_everything_it_promises(finished):
    run_dir, _ = finished
    for name in ("metrics.jsonl", "summary.json", "curves.png", "adapters", "checkpoints", "final", "attempts"):
        assert (run_dir / name).exists(), name
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert list(summary) == [
        "steps", "reward_first", "reward_last", "ratio_mean", "ratio_min", "ratio_max", "dropped_stale",
        "num_publishes", "publish_s_p50", "wall_s", "trained_tokens", "generated_tokens", "replica_restarts",
    ]  # fmt: skip
    assert summary["steps"] == 3
    assert summary["replica_restarts"] == 0
    assert summary["trained_tokens"] == sum(
        round(row["completions/mean_length"] * row["batch/samples"]) for row in rows_of(run_dir)
    )


def test_progress_and_the_end_are_said_in_plain_lines(finished):
    run_dir, output = finished
    assert re.search(r"step 3/3  reward 0\.\d+  ratio [01]\.\d+  staleness", output)
    assert re.search(r"done: 3 steps in \d+ s, mean reward", output)
    assert str(run_dir / "final") in output


def test_on_policy_ratios_are_one(finished):
    run_dir, _ = finished
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["sample/on_policy_frac"] == 1.0
    for row in rows:
        assert is_near(row)
        assert abs(row["ratio"] - 1) < 1e-3 or row["sample/on_policy_frac"] < 1.0


def test_without_staleness_every_step_is_on_policy(tmp_path, toy_dir):
    launch(tmp_path, "fresh", "--max-steps=4", "--max-staleness=0")
    rows = rows_of(tmp_path / "fresh")
    assert [row["sample/on_policy_frac"] for row in rows] == [1.0] * 4
    assert all(abs(row["ratio"] - 1) < 1e-3 for row in rows)


def versions_that_went_live(run_dir: Path) -> list[tuple[str, str]]:
    """(version, number of replicas) in the order of the loads."""
    (log,) = run_dir.glob("jobs/trainer*.log")
    return re.findall(r"-v(\d+) is live on (\d+) replicas", log.read_text())


def test_every_policy_version_goes_live_on_both_replicas(finished):
    live = versions_that_went_live(finished[0])
    assert live[:2] == [("0", "2"), ("1", "2")]
    assert live[2:] in ([("2", "2")], [])  # none if the publish of 1 outlasted the second step


def test_retired_policies_are_gone_and_live_ones_are_kept(finished):
    run_dir, _ = finished
    kept = sorted(path.name.rsplit("-v", 1)[1] for path in (run_dir / "adapters").iterdir())
    assert kept == [version for version, _ in versions_that_went_live(run_dir)][-2:]  # max_staleness 1


def test_the_final_adapter_loads_with_peft_and_differs_from_the_base(finished, toy_dir):
    run_dir, _ = finished
    base = AutoModelForCausalLM.from_pretrained(toy_dir)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        before = base(ids).logits.clone()
        model = PeftModel.from_pretrained(base, run_dir / "final")
        after = model(ids).logits
        with model.disable_adapter():
            without = model(ids).logits
    assert not torch.equal(before, after)
    assert torch.equal(before, without)
    assert "base_model" in (run_dir / "final" / "README.md").read_text()


def test_trackio_has_the_metrics_of_every_step(finished):
    run_dir, _ = finished
    code = "import json; from trackio.sqlite_storage import SQLiteStorage as s; print(json.dumps(s.get_logs(*%r)))"
    code %= (("async-grpo-lora", "whole"),)
    env = {**os.environ, "TRACKIO_DIR": str(run_dir.parent / "trackio")}
    logged = json.loads(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stdout)
    assert [row["step"] for row in logged] == [1, 2, 3]
    assert [row["reward/mean"] for row in logged] == [row["reward/mean"] for row in rows_of(run_dir)]


def test_nothing_is_left_running_after_a_run(finished):
    run_dir, _ = finished
    assert processes_of(run_dir) == []


def test_a_complete_run_started_again_has_nothing_left_to_do(finished):
    run_dir, _ = finished
    output = launch(run_dir.parent, "whole", "--max-steps=3")
    assert "resuming from" in output
    assert [row["step"] for row in rows_of(run_dir)] == [1, 2, 3]


def test_a_checkpoint_is_itself_an_adapter(finished):
    run_dir, _ = finished
    saved, _ = bucket.newest_checkpoint(run_dir)
    final = load_file(run_dir / "final" / "adapter_model.safetensors")
    checkpoint = load_file(saved / "adapter_model.safetensors")
    assert final.keys() == checkpoint.keys()
    assert all(torch.equal(final[name], checkpoint[name]) for name in final)
