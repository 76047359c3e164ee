"""config.py: what can be set, and what is refused before anything starts."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from config import (
    LOCAL,
    Config,
    config_from,
    demo_settings,
    make_parser,
    max_loras,
    problems,
    queue_size,
    served_rank,
    to_flags,
)

ROOT = Path(__file__).resolve().parent.parent


def with_(**changes) -> Config:
    return dataclasses.replace(Config(), **changes)


def test_both_default_configurations_can_run_and_are_the_recipe_of_the_post():
    assert problems(Config()) == problems(with_(**LOCAL)) == []
    cfg = Config()
    assert (cfg.model, cfg.dataset) == ("Qwen/Qwen2.5-Math-1.5B", "sail/Sanity-Test-R1D-1.5B")
    assert (cfg.lora_rank, cfg.lora_alpha, cfg.learning_rate) == (1, 2, 4e-5)
    assert (cfg.adam_beta1, cfg.adam_beta2) == (0.9, 0.95)
    assert (cfg.group_size, cfg.batch_size, cfg.temperature) == (8, 128, 1.0)
    assert (cfg.max_completion_tokens, cfg.max_model_len) == (3000, 4096)
    assert (cfg.max_staleness, cfg.sync_every, cfg.token_budget) == (4, 4, 16384)
    assert (cfg.gradient_checkpointing, cfg.inflight_per_replica) == (False, 128)
    assert (cfg.max_steps, cfg.save_every) == (500, 50)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"group_size": 1}, "--group-size"),
        ({"batch_size": 100}, "--group-size 8"),
        ({"replicas": -1}, "--replicas"),
        ({"lora_rank": 513}, "--lora-rank"),
        ({"track": "wandb"}, "--track"),
        ({"track_space": "me/curves"}, "--track trackio"),
        ({"temperature": 0.0}, "--temperature"),
        ({"learning_rate": float("nan")}, "--learning-rate"),
        ({"max_completion_tokens": 4096}, "--max-completion-tokens"),
        ({"token_budget": 4095}, "--token-budget"),
        ({"queue_size": 64}, "--queue-size"),
        ({"inflight_per_replica": 7}, "--inflight-per-replica"),
        ({"loss_type": "mean"}, "--loss-type"),
        ({"run": "a/b"}, "--run"),
        ({"port": 70000}, "--port"),
        ({"idle_shutdown_min": 0.1}, "--idle-shutdown-min"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_the_name_of_its_flag(changes, named):
    (found,) = problems(with_(**changes))
    assert named in found


def test_slots_ranks_and_queue_are_what_staleness_and_vllm_allow():
    # A08, A21: four stale versions, the newest, and the one being loaded
    assert [served_rank(rank) for rank in (1, 2, 8, 12, 512, 513)] == [1, 8, 8, 16, 512, None]
    assert max_loras(with_(max_staleness=4)) == 6
    assert queue_size(with_(max_staleness=4, sync_every=4)) == 4 * 128  # 9 more batches would stay fresh, 4 are enough
    assert queue_size(with_(max_staleness=4, sync_every=1)) == 128  # another one is in flight
    assert queue_size(with_(max_staleness=0, sync_every=1)) == 128
    assert queue_size(with_(queue_size=200)) == 200


def test_flags_make_the_same_configuration_again_and_every_field_has_one():
    cfg = with_(run="r1", max_steps=7, takeover=True, compile=True, learning_rate=1e-3, model="/a b/c")
    assert config_from(make_parser("").parse_args(to_flags(cfg))) == cfg
    text = make_parser("").format_help()
    assert all("--" + field.name.replace("_", "-") in text for field in dataclasses.fields(Config))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--max-step 5", "--max-step: there is no such flag: did you mean --max-steps?"),  # F21; no abbreviations
        ("--learning_rate=1", "--learning_rate: there is no such flag: did you mean --learning-rate?"),
        ("--qqqq", "--qqqq: there is no such flag: --help lists them"),
        ("--top-p=0.9", "--top-p: truncated sampling gives logprobs that the trainer cannot reproduce"),  # B10
        ("--max-steps many", "argument --max-steps: invalid int value"),
        ("--group-size=1", "--group-size 1"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(flags, said):
    code = f"import config; config.config_from(config.make_parser('').parse_args({flags.split()!r}))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert ended.stderr.startswith(f"error: {said}")


def test_f23_what_local_brings_is_named_and_what_was_given_is_not():
    said = demo_settings(Config(**LOCAL | {"model": "mine", "lora_rank": 4}))
    assert "--learning-rate 0.003, " in said
    assert "--lora-rank" not in said
