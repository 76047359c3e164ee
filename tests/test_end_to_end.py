"""The whole system as a user runs it: launch.py --local with real processes, HTTP, adapters and a bucket directory."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from conftest import is_near
from safetensors.torch import load_file

import bucket

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--batch-size=32", "--save-every=2", "--diagnose-every=2", "--log-completions-every=2"]


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
    for name in ("metrics.jsonl", "summary.json", "curves.png", "adapters", "checkpoints", "final", "attempts",
                 "config.json", "completions/step-2.jsonl"):  # fmt: skip
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


@pytest.mark.slow
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


LOAD_ALONE = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
directory, base = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(directory)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory)
assert model.peft_config["default"].base_model_name_or_path == base
ids = tokenizer("47+85=", return_tensors="pt").input_ids
with torch.no_grad():
    after = model(ids).logits
    with model.disable_adapter():
        assert not torch.equal(after, model(ids).logits)
"""


def test_f24_what_a_run_leaves_is_usable_alone_in_another_process(finished, toy_dir, tmp_path):
    shutil.copytree(finished[0] / "final", tmp_path / "final")
    command = [sys.executable, "-c", LOAD_ALONE, str(tmp_path / "final"), str(toy_dir)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    card = (tmp_path / "final" / "README.md").read_text()
    assert f"vllm serve {toy_dir} --enable-lora --max-lora-rank 8" in card


def test_completions_can_be_read(finished):
    run_dir, _ = finished
    rows = [json.loads(line) for line in (run_dir / "completions/step-2.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    assert rows[0].keys() == {"prompt", "text", "gold", "reward", "rewards", "policy", "finish_reason"}
    shown = subprocess.run(
        [*command(run_dir.parent, "whole"), "--show=whole"], capture_output=True, text=True, timeout=60
    )
    assert shown.stdout.count("--- step 2, whole-a") == 3
    row = rows_of(run_dir)[1]
    assert row["rewards/math_reward/mean"] == pytest.approx(row["reward/mean"])


@pytest.mark.slow
def test_f15_a_run_that_cannot_learn_says_why_and_stops(tmp_path, toy_dir):
    (tmp_path / "mute.py").write_text("def same(completions, **columns):\n    return [0.25] * len(completions)\n")
    flags = (f"--reward={tmp_path}/mute.py:same", "--max-steps=60", "--max-steps-without-signal=3")
    ended = subprocess.run(command(tmp_path, "mute", *flags), capture_output=True, text=True, timeout=150)
    assert ended.returncode == 1
    assert "no group had a signal in 2 steps: mean reward 0.250" in ended.stdout  # the diagnosis, before the end
    last = ended.stderr.strip().splitlines()[-1]  # F32
    assert last.startswith("error: stopped at step 3: no group had a signal in 3 steps: mean reward 0.250")
    assert "scores alike" in last


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
    output = launch(
        run_dir.parent, "whole", "--max-steps=3", "--learning-rate=1e-4", "--queue-size=32", "--max-staleness=1"
    )
    assert "resuming from" in output
    assert "since step 3 these settings have changed: --learning-rate 0.003 -> 0.0001" in output  # F09
    assert [row["step"] for row in rows_of(run_dir)] == [1, 2, 3]


def test_f09_a_run_is_not_resumed_with_another_model_or_shape(finished):
    flags = ("--max-steps=9", "--lora-rank=1")
    ended = subprocess.run(command(finished[0].parent, "whole", *flags), capture_output=True, text=True, timeout=60)
    assert (ended.returncode, "was started with 8" in ended.stderr) == (2, True), ended.stderr
    assert ended.stderr.startswith("error: --lora-rank 1: run whole was started with 8; use that, or another --run")


def test_a_checkpoint_is_itself_an_adapter(finished):
    run_dir, _ = finished
    saved, _ = bucket.newest_checkpoint(run_dir)
    final = load_file(run_dir / "final" / "adapter_model.safetensors")
    checkpoint = load_file(saved / "adapter_model.safetensors")
    assert final.keys() == checkpoint.keys()
    assert all(torch.equal(final[name], checkpoint[name]) for name in final)
