"""Our loss, metrics and LoRA gradients are those of TRL's own code: advantages, packing, `compute_loss`, backward.

trl_objective.py runs TRL 1.16.0 on rollouts made here, as one micro-batch. Where we differ by choice:

- Advantages: our std has ddof 1 and eps 1e-4, TRL's ddof 0 and eps 1e-8 (async_rollout_worker.py, `_score_group`). In
  groups of G ours are smaller by sqrt(1 - 1/G), a constant of the whole run; the gradients are compared with TRL's.
- Normaliser: our tokens of the optimizer step; TRL averages the means of micro-batches (async_grpo_trainer.py,
  `compute_loss`), so there a token's weight depends on how the step is cut. With one micro-batch both are the same.
- Unscorable rollouts (reward None) do not exist for us; TRL gives them no advantage and keeps their tokens in the mean.
- Zero advantages are not forwarded by us: the gradient is the same, and TRL's metrics are those with them.
- Tokens without a finite old logprob do not count for us; TRL would make the loss nan.
- Truncated completions score 0 with us; TRL leaves that to the reward.
"""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_trainer import ARCHITECTURES, assert_same, cfg_with, gradient, sampled_rollouts, tiny_base, tiny_policy
from test_trl import run_trl, trl_python

import bucket
import trainer
from rollouts import Rollout

CFG = cfg_with(temperature=0.7, eps_high=0.28)
OPTIONS = {"temperature": CFG.temperature, "epsilon": CFG.eps_low, "epsilon_high": CFG.eps_high}
GROUP = 4  # of sampled_rollouts


def as_trl_has_it(rollout: Rollout) -> dict:
    """One row of TRL's: prompt and completion in one sequence."""
    before = [0] * len(rollout.prompt)
    mask, old_logprobs = before + [1] * len(rollout.completion), before + rollout.old_logprobs
    ids = rollout.prompt + rollout.completion
    return {"reward": rollout.reward, "input_ids": ids, "completion_mask": mask, "old_log_probs": old_logprobs}


@pytest.fixture(scope="module")
def parity(toy_dir, tmp_path_factory) -> dict[str, SimpleNamespace]:
    """By architecture: our policy, rollouts with TRL's advantages, and what TRL made of them."""
    trl_python()
    root, cases = tmp_path_factory.mktemp("parity"), {}
    for architecture in ARCHITECTURES:
        base, case = tiny_base(architecture), root / architecture
        base.save_pretrained(case / "base")
        (case / "adapter").mkdir()
        model = tiny_policy(base=base)
        files = bucket.adapter_files(trainer.numpy_state(model), trainer.adapter_config(model))
        for name, data in files.items():
            (case / "adapter" / name).write_bytes(data)
        rollouts = sampled_rollouts(model, num_groups=6)
        groups = [list(map(as_trl_has_it, rollouts[i : i + GROUP])) for i in range(0, len(rollouts), GROUP)]
        (case / "rollouts.json").write_text(json.dumps({"groups": groups, "options": OPTIONS}))
        cases[architecture] = SimpleNamespace(model=model, rollouts=rollouts, directory=case)
    run_trl("trl_objective.py", toy_dir, *(case.directory for case in cases.values()))
    for case in cases.values():
        case.trl = json.loads((case.directory / "seen.json").read_text())
        case.gradient = torch.cat(
            [grad.flatten() for _, grad in sorted(load_file(case.directory / "gradient.safetensors").items())]
        )
        case.rollouts = [
            dataclasses.replace(rollout, advantage=advantage)
            for rollout, advantage in zip(case.rollouts, case.trl["advantages"], strict=True)
        ]
    return cases


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_and_gradient_are_trls(parity, architecture, skip):
    case = parity[architecture]
    metrics = trainer.policy_gradient(case.model, case.rollouts, dataclasses.replace(CFG, skip_zero_advantage=skip))
    found = gradient(case.model)
    error = ((found - case.gradient).abs().max() / case.gradient.abs().max()).item()
    print(f"{architecture}: loss {metrics['loss'] / case.trl['loss'] - 1:+.1e}, gradient {error:.1e} off TRL's")
    assert metrics["loss"] == pytest.approx(case.trl["loss"], rel=1e-5)
    assert_same(found, case.gradient)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_metrics_are_trls(parity, architecture):
    case = parity[architecture]
    metrics = trainer.policy_gradient(case.model, case.rollouts, dataclasses.replace(CFG, skip_zero_advantage=False))
    for name in ("ratio", "kl", "entropy"):
        assert metrics[name] == pytest.approx(case.trl[name], rel=1e-5), name
    for side in ("clip_ratio/low", "clip_ratio/high"):
        assert 0 < metrics[side] == pytest.approx(case.trl[side + "_mean"], rel=1e-5)


def test_advantages_are_trls_but_for_a_constant(parity):
    case = parity["qwen2"]
    for i in range(0, len(case.rollouts), GROUP):
        group = case.rollouts[i : i + GROUP]
        ours = trainer.group_advantages([rollout.reward for rollout in group], "group")
        theirs = [rollout.advantage * math.sqrt(1 - 1 / GROUP) for rollout in group]
        assert ours == pytest.approx(theirs, rel=1e-3)
    assert any(rollout.advantage == 0 for rollout in case.rollouts)  # a group without signal is among them
