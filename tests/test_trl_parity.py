"""Our loss, metrics and LoRA gradients are those of TRL's own code: advantages, packing, `compute_loss`, backward.

trl_objective.py runs TRL 1.16.0 on rollouts made here, as one micro-batch. Where we differ by choice:

- Advantages: our std has ddof 1 and eps 1e-4, TRL's ddof 0 and eps 1e-8 (async_rollout_worker.py, `_score_group`). In
  groups of G ours are smaller by sqrt(1 - 1/G), a constant of the whole run; the gradients are compared with TRL's.
- Normaliser: our tokens of the optimizer step; TRL averages the means of micro-batches (async_grpo_trainer.py,
  `compute_loss`), so there a token's weight depends on how the step is cut. With one micro-batch both are the same.
- Unscorable rollouts (reward None) do not exist for us; TRL gives them no advantage and keeps their tokens in the mean.
- Zero advantages are not forwarded by us: the gradient is the same, and TRL's metrics are those with them, so the
  metrics are compared on rollouts that all have one.
- Tokens without a finite old logprob do not count for us; TRL would make the loss nan.
- Truncated completions score 0 with us; TRL leaves that to the reward.
"""

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from test_trainer import ARCHITECTURES, assert_same, cfg_with, gradient, sampled_rollouts, tiny_base, tiny_policy
from test_trl import run_trl, trl_python

import bucket
import trainer
from policy import lora

pytestmark = pytest.mark.slow
CFG = cfg_with(temperature=0.7, eps_high=0.28)
OPTIONS = {"temperature": CFG.temperature, "epsilon": CFG.eps_low, "epsilon_high": CFG.eps_high}
GROUP = 4  # of sampled_rollouts


def write_case(directory, model, rollouts) -> None:
    """What trl_objective.py reads: TRL has prompt and completion in one sequence."""
    (directory / "adapter").mkdir(parents=True)
    for name, data in bucket.adapter_files(lora.adapter_state(model), lora.adapter_config(model)).items():
        (directory / "adapter" / name).write_bytes(data)
    rows = []
    for r in rollouts:
        mask, old = ([0] * len(r.prompt) + values for values in ([1] * len(r.completion), r.old_logprobs))
        ids = r.prompt + r.completion
        rows.append({"reward": r.reward, "input_ids": ids, "completion_mask": mask, "old_log_probs": old})
    groups = [rows[i : i + GROUP] for i in range(0, len(rows), GROUP)]
    (directory / "rollouts.json").write_text(json.dumps({"groups": groups, "options": OPTIONS}))


@pytest.fixture(scope="module")
def cases(toy_dir, tmp_path_factory) -> dict:
    """By architecture and whether every group has signal: our policy, rollouts with TRL's advantages, TRL's results."""
    trl_python()
    root, cases = tmp_path_factory.mktemp("parity"), {}
    for name in ARCHITECTURES:
        base = tiny_base(name)
        for number in range(2):
            base.save_pretrained(root / f"{name}{number}" / "base")  # before it becomes a part of the policy
        model = tiny_policy(base=base)
        rollouts = sampled_rollouts(model, num_groups=6)
        signal = [r for r in rollouts if r.advantage != 0]
        assert 0 < len(signal) < len(rollouts)
        for number, given in enumerate((rollouts, signal)):
            write_case(root / f"{name}{number}", model, given)
            cases[name, bool(number)] = model, given, root / f"{name}{number}"
    run_trl("trl_objective.py", toy_dir, *(directory for _, _, directory in cases.values()))
    for key, (model, rollouts, directory) in cases.items():
        seen = json.loads((directory / "seen.json").read_text())
        pairs = zip(rollouts, seen["advantages"], strict=True)
        cases[key] = model, [dataclasses.replace(r, advantage=a) for r, a in pairs], seen, directory
    return cases


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_gradient_and_metrics_are_trls(cases, architecture):
    for all_signal in (False, True):
        model, rollouts, seen, directory = cases[architecture, all_signal]
        metrics = trainer.policy_gradient(model, rollouts, CFG)
        theirs = load_file(directory / "gradient.safetensors")
        assert_same(gradient(model), torch.cat([grad.flatten() for _, grad in sorted(theirs.items())]))
        assert metrics["loss"] == pytest.approx(seen["loss"], rel=1e-5)
        names = {"ratio": "ratio", "kl": "kl", "entropy": "entropy"}
        names |= {side: side + "_mean" for side in ("clip_ratio/low", "clip_ratio/high")}
        for ours, name in names.items() if all_signal else ():
            assert 0 < metrics[ours] == pytest.approx(seen[name], rel=1e-5), ours


def test_advantages_are_trls_but_for_a_constant(cases):
    _, rollouts, _, _ = cases["qwen2", False]
    for i in range(0, len(rollouts), GROUP):
        group = rollouts[i : i + GROUP]
        ours = trainer.group_advantages([rollout.reward for rollout in group], "group")
        assert ours == pytest.approx([rollout.advantage * math.sqrt(1 - 1 / GROUP) for rollout in group], rel=1e-3)
