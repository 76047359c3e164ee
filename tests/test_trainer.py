"""trainer.py: the mathematics of a step, and that its gradient does not depend on how it is computed.

The reference is written here from the papers' formulas: one rollout per forward, transformers' own attention, PEFT's
own LoRA, autograd through the whole loss.
"""

import copy
import dataclasses
import json
import math
import random

import peft
import pytest
import safetensors.torch
import torch
import transformers

import trainer
from config import Config
from policy import head, lora
from policy.packing import pack
from rollouts import Rollout

CPU = torch.device("cpu")
CFG = Config(dtype="float32", lora_rank=4, lora_alpha=8, token_budget=512, max_model_len=64, max_completion_tokens=20)
TINY = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
ARCHITECTURES = {
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TINY, tie_word_embeddings=True)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TINY, head_dim=16)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)),
}


def cfg_with(**changes) -> Config:
    return dataclasses.replace(CFG, **changes)


def tiny_base(architecture: str = "qwen2") -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    return ARCHITECTURES[architecture]()


def tiny_policy(cfg: Config = CFG, base: transformers.PreTrainedModel | None = None, moved: bool = True):
    """A policy on the tiny model; moved: its LoRA weights are not the initial ones, so that B is not zero."""
    model = lora.add_lora(base or tiny_base(), cfg, CPU)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in lora.lora_parameters(model).values() if moved else ():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


def sampled_rollouts(model, seed: int = 0, num_groups: int = 4, noise: float = 0.3) -> list[Rollout]:
    """Groups of random tokens and rewards; the old logprobs are the policy's, moved so that both clip sides are hit."""
    rng = random.Random(seed)
    rollouts = []
    for group in range(num_groups):
        prompt = [rng.randrange(40) for _ in range(rng.randint(1, 9))]
        rewards = [float(rng.random() < 0.5) for _ in range(4)]
        advantages = trainer.group_advantages(rewards, "group")
        for reward, advantage in zip(rewards, advantages, strict=True):
            completion = [rng.randrange(40) for _ in range(rng.randint(1, 12))]
            rollouts.append(Rollout(group, prompt, completion, [0.0] * len(completion), reward, advantage, 0))
    logprobs = completion_logprobs(model, rollouts, CFG)
    old = [[value + rng.gauss(0, noise) for value in values.tolist()] for values in logprobs]
    return [dataclasses.replace(r, old_logprobs=values) for r, values in zip(rollouts, old, strict=True)]


def on_policy(model, rollouts: list[Rollout], cfg: Config = CFG) -> list[Rollout]:
    """The rollouts with the policy's own logprobs as old ones: every ratio is 1."""
    logprobs = completion_logprobs(model, rollouts, cfg)
    return [dataclasses.replace(r, old_logprobs=v.tolist()) for r, v in zip(rollouts, logprobs, strict=True)]


def completion_logprobs(model, rollouts: list[Rollout], cfg: Config) -> list[torch.Tensor]:
    """Logprobs (T,) of each rollout's completion by packed rows."""
    found = {}
    for row in pack(rollouts, [0.0] * len(rollouts), cfg.token_budget):
        found |= zip(row.members.tolist(), head.row_logprobs(model, row, cfg, cfg.temperature), strict=True)
    return [found[i] for i in range(len(rollouts))]


def load_policy(cfg: Config):
    """As open_run does."""
    model = lora.add_lora(lora.load_base(cfg), cfg, CPU)
    head.check_packing(model, cfg)
    return model


def gradient(model) -> torch.Tensor:
    """All LoRA gradients in one vector, ordered by name."""
    return torch.cat([parameter.grad.flatten() for _, parameter in sorted(lora.lora_parameters(model).items())])


def assert_same(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert expected.abs().max() > 0
    assert (found - expected).abs().max() / expected.abs().max() < tolerance


# --- the reference ---------------------------------------------------------------------------------------------------


def reference_policy(model, base: transformers.PreTrainedModel):
    """The same policy by PEFT and transformers alone, on a copy of the untouched base model."""
    options = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    reference = peft.get_peft_model(copy.deepcopy(base), options)
    peft.set_peft_model_state_dict(reference, tensors(model))
    return reference


def reference_logprobs(reference, rollouts: list[Rollout], cfg: Config, padded: bool) -> list[torch.Tensor]:
    """Logprobs (T,) of each completion, one sequence per forward or all in one batch padded on the right."""
    samples = [rollout.prompt + rollout.completion for rollout in rollouts]
    width = max(map(len, samples))
    if padded:
        ids = torch.tensor([sample + [0] * (width - len(sample)) for sample in samples])
        mask = torch.tensor([[1] * len(sample) + [0] * (width - len(sample)) for sample in samples])
        all_logits = reference(input_ids=ids, attention_mask=mask).logits
    else:
        all_logits = [reference(input_ids=torch.tensor([sample])).logits[0] for sample in samples]
    result = []
    for rollout, logits in zip(rollouts, all_logits, strict=True):
        start = len(rollout.prompt) - 1
        logprobs = torch.log_softmax(logits[start : start + len(rollout.completion)] / cfg.temperature, -1)
        result.append(logprobs[range(len(rollout.completion)), rollout.completion])
    return result


def reference_loss(logprobs: list[torch.Tensor], rollouts: list[Rollout], cfg: Config) -> torch.Tensor:
    """The step's loss by the formulas: J of arXiv:2402.03300 eq. 3 without KL, its variants by cfg.loss_type."""
    sequence_sums, lengths = [], []
    for values, rollout in zip(logprobs, rollouts, strict=True):
        terms = []
        for now, old in zip(values, rollout.old_logprobs, strict=True):
            ratio, advantage = torch.exp(now - old), rollout.advantage
            bounded = torch.clip(ratio, 1 - cfg.eps_low, 1 + cfg.eps_high)
            terms.append(torch.min(ratio * advantage, bounded * advantage))
        sequence_sums.append(sum(terms))
        lengths.append(len(terms))
    if cfg.loss_type == "sequence":
        return -sum(total / length for total, length in zip(sequence_sums, lengths, strict=True)) / len(lengths)
    if cfg.loss_type == "dr_grpo":
        return -sum(sequence_sums) / (len(lengths) * cfg.max_completion_tokens)
    return -sum(sequence_sums) / sum(lengths)


def reference_gradient(model, base, rollouts: list[Rollout], cfg: Config, padded: bool = False):
    """Loss and LoRA gradient (one vector, ordered by name) of the reference."""
    reference = reference_policy(model, base)
    loss = reference_loss(reference_logprobs(reference, rollouts, cfg, padded), rollouts, cfg)
    loss.backward()
    return loss.item(), gradient(reference)


def tensors(model) -> dict[str, torch.Tensor]:
    """Copies of the adapter's tensors."""
    return {name: torch.from_numpy(value) for name, value in lora.adapter_state(model).items()}


# --- advantages and loss: the numbers --------------------------------------------------------------------------------


def test_b01_the_std_has_one_degree_of_freedom_less_and_eps_1e_4():
    assert trainer.group_advantages([1, 0, 0, 0], "group") == pytest.approx([1.4997, *[-0.4999] * 3], abs=5e-5)
    assert trainer.group_advantages([1, 0, 0, 0], "none") == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("scale", ["group", "none"])
def test_b02_equal_rewards_have_exactly_no_advantage(scale):
    reward = torch.tensor(0.35).item()
    assert trainer.group_advantages([reward] * 8, scale) == [0.0] * 8


def test_b03_statistics_are_those_of_the_prompts_own_group():
    assert trainer.group_advantages([1, 1, 1, 1], "group") == [0.0] * 4
    assert trainer.group_advantages([0, 0, 0, 1], "group") == pytest.approx([*[-0.4999] * 3, 1.4997], abs=5e-5)


def test_unscorable_rewards_are_out_of_the_statistics():
    found = trainer.group_advantages([1, None, 0, 0, 0], "group")
    assert found == pytest.approx([1.4997, 0.0, *[-0.4999] * 3], abs=5e-5)
    assert trainer.group_advantages([1, None, None], "group") == [0.0, 0.0, 0.0]
    assert trainer.group_advantages([None, None], "none") == [0.0, 0.0]


def test_b30_a_group_with_a_failed_member_is_scored_with_the_others():
    # mean 1/7, squared deviations (6/7)² + 6 (1/7)² = 42/49, variance 42/49/6 = 1/7, std 0.37796
    found = trainer.group_advantages([1, 0, 0, 0, 0, 0, 0], "group")
    assert found == pytest.approx([6 / 7 / 0.37806, *[-1 / 7 / 0.37806] * 6], abs=1e-4)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "objective", "slope"),
    [
        (0.5, 1, 1.2, 0.0),
        (0.5, -1, -1.64872, -1.64872),  # not clipped: the pessimistic side
        (-0.5, -1, -0.8, 0.0),
        (-0.5, 1, 0.60653, 0.60653),
        (0.0, -2, -2.0, -2.0),
        (4.0, 1, 1.2, 0.0),  # B23: a rare token of ratio 54.6 neither weighs nor pulls more
    ],
)
def test_b24_each_sign_of_the_advantage_is_clipped_on_its_own_side(log_ratio, advantage, objective, slope):
    found = trainer.clipped_objective(torch.tensor([log_ratio]), torch.tensor([float(advantage)]), CFG)
    assert [value.item() for value in found] == pytest.approx([objective, slope], abs=1e-5)


def test_clip_higher_moves_the_upper_bound_only():
    cfg = cfg_with(eps_high=0.28)
    objective, _ = trainer.clipped_objective(torch.tensor([0.5, -0.5]), torch.tensor([1.0, -1.0]), cfg)
    assert objective.tolist() == pytest.approx([1.28, -0.8])


@pytest.mark.parametrize(("loss_type", "loss"), [("sequence", 0.0), ("token", 0.6), ("dr_grpo", 0.3)])
def test_b08_what_a_long_completion_weighs_by_loss_type(policy, loss_type, loss):
    rollouts = [
        Rollout(0, [1, 2], [3] * 2, [0.0] * 2, 1.0, 1.0, 0),
        Rollout(0, [1, 2], [4] * 8, [0.0] * 8, 0.0, -1.0, 0),
    ]
    rollouts = on_policy(policy, rollouts)
    cfg = cfg_with(loss_type=loss_type, max_completion_tokens=10)
    assert trainer.policy_gradient(policy, rollouts, cfg)["loss"] == pytest.approx(loss, abs=1e-5)


def test_b06_unscorable_rollouts_leave_the_denominator(policy):
    rollouts = [
        Rollout(0, [1, 2], [3] * 4, [0.0] * 4, 0.0, -1.0, 0),
        Rollout(0, [1, 2], [4] * 4, [0.0] * 4, None, 0.0, 0),
    ]
    metrics = trainer.policy_gradient(policy, on_policy(policy, rollouts), CFG)
    assert metrics["loss"] == pytest.approx(1.0, abs=1e-5)
    assert (metrics["batch/samples"], metrics["batch/trained_tokens"]) == (1, 4)


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (0.5, [-0.14293, -2.14293, -4.14293]),
        (1.0, [-0.40761, -1.40761, -2.40761]),
        (2.0, [-0.68027, -1.18027, -1.68027]),
    ],
)
def test_b09_the_temperature_divides_the_logits(temperature, expected):
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    logprobs, entropies, probs = head.token_stats(logits.clone(), torch.arange(3), temperature)
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-5)
    assert probs[0].tolist() == pytest.approx([math.exp(value) for value in expected], abs=1e-5)
    assert entropies[0].item() == pytest.approx(-sum(math.exp(v) * v for v in expected), abs=1e-5)


# --- logprobs --------------------------------------------------------------------------------------------------------


def successor_policy(share: float):
    """A policy whose next token is the last one plus 1 with probability `share`, else any other of 8 alike."""
    size = 8
    config = transformers.Qwen2Config(**TINY | {"vocab_size": size, "hidden_size": size, "num_hidden_layers": 1})
    base = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in base.model.layers.parameters():
            parameter.zero_()  # every layer passes its input on
        base.model.embed_tokens.weight.copy_(torch.eye(size))
        scale = math.log(share * (size - 1) / (1 - share)) / math.sqrt(size)  # the final norm makes 1 of 8 be sqrt(8)
        base.lm_head.weight.copy_(scale * torch.eye(size).roll(1, 0))
    return tiny_policy(base=base, moved=False)


def test_b12_each_token_is_predicted_by_the_one_before_it():
    model = successor_policy(0.9)
    (logprobs,) = completion_logprobs(model, [Rollout(0, [1, 2], [3, 4], [0.0] * 2, 1.0, 1.0, 0)], CFG)
    assert logprobs.tolist() == pytest.approx([math.log(0.9)] * 2, abs=1e-4)


def test_b13_the_final_eos_is_trained_on_though_it_is_the_pad_token():
    model = successor_policy(0.9)
    eos = model.config.pad_token_id = model.config.eos_token_id = 7
    rollouts = [
        Rollout(0, [4], [5, 6, eos], [math.log(0.9)] * 2 + [math.log(0.45)], 1.0, 1.0, 0),
        Rollout(0, [4], [5, 6, 0, 0, 0], [math.log(0.9)] * 5, 0.0, -1.0, 0),
    ]
    metrics = trainer.policy_gradient(model, rollouts, cfg_with(eps_high=9.0))
    assert metrics["batch/trained_tokens"] == 8
    # the ratios are 1, 1, 2 and 1, 1, then three times that of an unlikely token, 0.1 / 7, to 0.9
    assert metrics["ratio"] == pytest.approx((1 + 1 + 2 + 1 + 1 + 3 * 0.1 / 7 / 0.9) / 8, abs=1e-4)


def test_b14_b15_a_rollouts_logprobs_do_not_depend_on_what_shares_its_row(policy):
    rollouts = sampled_rollouts(policy)
    alone = [completion_logprobs(policy, [rollout], CFG)[0] for rollout in rollouts]
    together = completion_logprobs(policy, rollouts, CFG)
    backwards = completion_logprobs(policy, rollouts[::-1], CFG)[::-1]
    for one, other, another in zip(alone, together, backwards, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=0)
        torch.testing.assert_close(another, one, atol=1e-5, rtol=0)


def test_b17_a_lone_eos_is_one_token(policy):
    (rollout,) = on_policy(policy, [Rollout(0, [1, 2, 3], [39], [0.0], 0.0, -1.0, 0)])
    metrics = trainer.policy_gradient(policy, [rollout], CFG)
    assert (metrics["batch/trained_tokens"], metrics["loss"]) == (1, pytest.approx(1.0, abs=1e-5))


def test_b28_the_ratio_is_1_on_the_same_weights(policy):
    metrics = trainer.policy_gradient(policy, sampled_rollouts(policy, noise=0.0), CFG)
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_ratio/low"] == metrics["clip_ratio/high"] == 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_what_sdpa_sees(policy):
    rollouts = sampled_rollouts(policy)
    (row,) = pack(rollouts, [1.0] * len(rollouts), CFG.token_budget)
    with torch.no_grad():  # flex attention has no backward on a CPU
        flex, sdpa = (head.row_hidden(policy, row, CFG, flex=flex) for flex in (True, False))
    torch.testing.assert_close(flex, sdpa, atol=1e-5, rtol=0)


# --- the gradient is one number, however it is computed --------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("loss_type", ["token", "sequence", "dr_grpo"])
def test_the_gradient_is_that_of_the_papers_formulas(architecture, loss_type):
    base = tiny_base(architecture)
    model = tiny_policy(base=copy.deepcopy(base))
    rollouts = sampled_rollouts(model)
    cfg = cfg_with(loss_type=loss_type, temperature=0.7, eps_high=0.28)
    loss, expected = reference_gradient(model, base, rollouts, cfg)
    metrics = trainer.policy_gradient(model, rollouts, cfg)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert_same(gradient(model), expected)


@pytest.fixture(scope="module")
def step():
    """A policy, the rollouts of a step that hit both clip sides and leave a group without signal, and its gradient."""
    base = tiny_base()
    model = tiny_policy(base=copy.deepcopy(base))
    rollouts = sampled_rollouts(model)
    rollouts += [dataclasses.replace(r, group=9, reward=1.0, advantage=0.0) for r in sampled_rollouts(model, 1, 1)]
    return model, rollouts, base, reference_gradient(model, base, rollouts, CFG)[1]


@pytest.mark.parametrize(("token_budget", "chunk"), [(24, 2048), (40, 3), (512, 1), (512, 2048)])
def test_the_gradient_does_not_depend_on_rows_or_chunks(step, token_budget, chunk, monkeypatch):
    model, rollouts, _, expected = step  # at 24 tokens groups are split
    monkeypatch.setattr(head, "LOGITS_CHUNK", chunk)
    trainer.policy_gradient(model, rollouts, cfg_with(token_budget=token_budget))
    assert_same(gradient(model), expected)


def test_the_gradient_does_not_depend_on_the_order_of_the_rollouts(step):
    model, rollouts, _, expected = step
    for seed in range(3):
        trainer.policy_gradient(model, random.Random(seed).sample(rollouts, len(rollouts)), CFG)
        assert_same(gradient(model), expected)


def test_the_gradient_is_that_of_a_padded_batch(step):
    model, rollouts, base, _ = step
    _, expected = reference_gradient(model, base, rollouts, CFG, padded=True)
    trainer.policy_gradient(model, rollouts, CFG)
    assert_same(gradient(model), expected)


def test_b26_gradient_checkpointing_changes_nothing(step):
    _, rollouts, base, expected = step
    model = tiny_policy(cfg_with(gradient_checkpointing=True), copy.deepcopy(base))
    forwards = []
    model.get_base_model().model.layers[0].mlp.register_forward_pre_hook(lambda *_: forwards.append(1))
    trainer.policy_gradient(model, rollouts, CFG)
    assert len(forwards) == 2  # one row: once, and once more in the backward
    assert_same(gradient(model), expected)
    moved = [name for name, p in lora.lora_parameters(model).items() if "lora_B" in name and p.grad.norm() > 0]
    assert len(moved) == 2 * 7  # every linear layer of both blocks


def test_another_call_replaces_the_gradient_and_does_not_add_to_it(step):
    model, rollouts, _, expected = step
    for _ in range(2):
        trainer.policy_gradient(model, rollouts, CFG)
    assert_same(gradient(model), expected)


# --- what is and is not in a step ------------------------------------------------------------------------------------


def test_b05_a_step_in_which_everything_is_masked_has_loss_0_and_gradient_0(policy):
    rollouts = [dataclasses.replace(r, reward=None, truncated=True) for r in sampled_rollouts(policy)]
    metrics = trainer.policy_gradient(policy, rollouts, CFG)
    assert metrics["loss"] == 0.0
    assert torch.equal(gradient(policy), torch.zeros_like(gradient(policy)))


def test_a_step_without_any_advantage_forwards_nothing_and_reports_no_ratio(policy):
    rollouts = [dataclasses.replace(r, advantage=0.0) for r in sampled_rollouts(policy)]
    metrics = trainer.policy_gradient(policy, rollouts, CFG)
    assert (metrics["loss"], metrics["batch/rows"], metrics["batch/zero_advantage_frac"]) == (0.0, 0, 1.0)
    assert not {"ratio", "kl", "entropy"} & metrics.keys()
    assert not gradient(policy).any()


def test_b22_a_token_without_a_finite_old_logprob_is_masked(step):
    model, rollouts, base, _ = step
    rollouts = [r for r in rollouts if len(r.completion) > 1 and r.advantage]
    reference = reference_policy(model, base)
    logprobs = reference_logprobs(reference, rollouts, CFG, padded=False)
    for rollout, hole in zip(rollouts, [-math.inf, math.nan] * len(rollouts), strict=False):
        rollout.old_logprobs[0] = hole
    cut = [dataclasses.replace(r, old_logprobs=r.old_logprobs[1:]) for r in rollouts]
    loss = reference_loss([values[1:] for values in logprobs], cut, CFG)
    loss.backward()
    metrics = trainer.policy_gradient(model, rollouts, CFG)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert math.isfinite(metrics["ratio"])
    assert_same(gradient(model), gradient(reference))


def test_b25_a_fresh_adapter_with_loss_0_trains_b_first():
    model = tiny_policy(moved=False)
    rollouts = sampled_rollouts(model, noise=0.0)
    metrics = trainer.policy_gradient(model, rollouts, cfg_with(loss_type="sequence"))
    assert metrics["loss"] == pytest.approx(0.0, abs=1e-5)
    for name, parameter in lora.lora_parameters(model).items():
        assert (parameter.grad.abs().max() > 0) == ("lora_B" in name)
    assert trainer.optimizer_step(model, trainer.optimizer_for(model, CFG), CFG)[1]
    assert all(p.abs().max() > 0 for name, p in lora.lora_parameters(model).items() if "lora_B" in name)


def test_the_head_sees_completion_tokens_only_and_a_chunk_at_a_time(policy, monkeypatch):
    rollouts, seen = sampled_rollouts(policy), []
    monkeypatch.setattr(head, "LOGITS_CHUNK", 5)
    outer = policy.get_base_model().get_output_embeddings()
    hook = outer.register_forward_hook(lambda module, args, output: seen.append(output.shape[0]))
    trainer.policy_gradient(policy, rollouts, CFG)
    hook.remove()
    assert max(seen) == 5
    assert sum(seen) == sum(len(rollout.completion) for rollout in rollouts if rollout.advantage)


def test_metrics_of_a_step_worked_out_by_hand():
    model = successor_policy(0.9)
    likely, odd = math.log(0.9), math.log(0.1 / 7)
    rollouts = [
        Rollout(0, [1, 2], [3, 4], [likely - math.log(2), likely + 1], 1.0, 1.0, 0),  # ratio 2 is clipped, 1 / e is not
        Rollout(0, [1, 2], [0, 1], [odd + 1, likely - math.log(2)], 0.0, -1.0, 0),  # ratio 1 / e is clipped, 2 is not
        Rollout(1, [5, 6, 7], [0, 1], [0.0, 0.0], 1.0, 0.0, 0),  # no signal
        Rollout(1, [5, 6, 7], [1], [0.0], None, 0.0, 0),  # unscorable
    ]
    metrics = trainer.policy_gradient(model, rollouts, cfg_with(token_budget=100))
    expected = {
        "loss": -(1.2 + 1 / math.e - 0.8 - 2) / 6,
        "ratio": (2 + 1 / math.e) / 2,
        "kl": (2 - 1 - math.log(2) + 1 / math.e - 1 + 1) / 2,
        "entropy": -(0.9 * likely + 0.1 * odd),
        "clip_ratio/low": 1 / 4,
        "clip_ratio/high": 1 / 4,
        "batch/samples": 3,
        "batch/trained_tokens": 6,
        "batch/rows": 1,
        "batch/samples_per_row": 2,
        "batch/row_fill": 6 / 100,
        "batch/zero_advantage_frac": 1 / 3,
        "batch/prefix_shared_frac": 1 / 2,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert metrics["perf/fwd_bwd_s"] > 0


def test_flops_are_4_for_each_weight_and_token_and_12_for_each_pair_and_channel(policy):
    rollouts = [Rollout(0, [1, 2, 3], [4, 5], [0.0] * 2, 1.0, 1.0, 0)]
    blocks = policy.get_base_model().model.layers
    weights = sum(p.numel() for name, p in blocks.named_parameters() if name.endswith("weight") and p.dim() == 2)
    # 5 tokens through the blocks, 2 through the head, 15 pairs in each of 2 layers of 4 heads of 8
    expected = 4 * weights * 5 + 4 * 40 * 32 * 2 + 12 * 2 * 4 * 8 * 15
    assert trainer.policy_gradient(policy, rollouts, CFG)["perf/flops"] == expected


# --- the policy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "bias"),
        ({"lora_dropout": 0.1}, "lora_dropout 0.1"),
        ({"r": 513}, "rank 513: vLLM serves 1 to 512"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.up"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "pissa: it changes the base"),
        ({"target_modules": ["q_proj", "lm_head"]}, "on lm_head"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens"),
    ],
)
def test_a09_b28_adapters_that_cannot_be_served_or_reproduced_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        lora.check_lora(peft.LoraConfig(**{"r": 8, "target_modules": ["q_proj"]} | options), tiny_base())


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"r": 512}, {"target_modules": "all-linear"}])
def test_adapters_that_vllm_serves_are_accepted(options):
    lora.check_lora(peft.LoraConfig(**{"r": 8, "target_modules": ["q_proj"]} | options), tiny_base())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_b27_only_lora_is_trained_in_fp32_whatever_the_dtype_of_the_base(dtype, tmp_path):
    tiny_base().save_pretrained(tmp_path)
    cfg = cfg_with(model=str(tmp_path), dtype=dtype)
    model = load_policy(cfg)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert {p.dtype for p in frozen.values()} == {getattr(torch, dtype)}
    rollouts = sampled_rollouts(model, noise=0.0)
    metrics = trainer.policy_gradient(model, rollouts, cfg)
    assert metrics["ratio"] == pytest.approx(1, abs=1e-5)
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert {name.replace(".default", "") for name in with_gradient} == lora.lora_parameters(model).keys()
    optimizer = trainer.optimizer_for(model, cfg)
    assert trainer.optimizer_step(model, optimizer, cfg)[1]
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert {tensor.dtype for tensor in [*moments, *lora.lora_parameters(model).values()]} == {torch.float32}
    assert len(optimizer.state) == len(with_gradient)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter, frozen[name])


def test_the_gradient_of_a_half_precision_base_points_the_same_way():
    expected, rollouts = None, sampled_rollouts(tiny_policy())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = tiny_policy(base=tiny_base().to(dtype))
        trainer.policy_gradient(model, rollouts, cfg_with(eps_low=0.9, eps_high=9.0))
        expected = gradient(model) if expected is None else expected
        assert torch.cosine_similarity(gradient(model), expected, dim=0) > 0.98


def test_the_fused_lora_layer_is_pefts():
    layer = tiny_policy().get_base_model().model.layers[0].mlp.up_proj
    fused, own = copy.deepcopy(layer), copy.deepcopy(layer)
    own.__class__ = peft.tuners.lora.Linear
    results = []
    for module in (fused, own):
        x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = module(x)
        y.square().sum().backward()
        results.append([y, x.grad, module.lora_A["default"].weight.grad, module.lora_B["default"].weight.grad])
    assert type(layer) is lora.LoraLinear
    for found, expected in zip(*results, strict=True):
        assert_same(found, expected)


def test_the_initial_adapter_depends_on_the_seed_only():
    first, again, other = (tensors(tiny_policy(cfg_with(seed=seed), moved=False)) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_adapter_state_is_what_peft_saves_and_loads_back(policy, tmp_path):
    policy.save_pretrained(tmp_path)
    saved = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    state = tensors(policy)
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in saved)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    fresh = tiny_policy(moved=False)
    lora.load_adapter_state(fresh, saved)
    assert all(torch.equal(value, state[name]) for name, value in tensors(fresh).items())


def test_adapter_state_is_a_copy(policy):
    state = tensors(policy)
    before = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        for parameter in lora.lora_parameters(policy).values():
            parameter.add_(1).sub_(1)
            assert all(value.data_ptr() != parameter.data_ptr() for value in state.values())
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_an_adapter_of_another_rank_is_refused(policy):
    other = tensors(tiny_policy(cfg_with(lora_rank=2)))
    with pytest.raises(ValueError, match=r"tensors differ, such as base_model\..* the LoRA flags"):
        lora.load_adapter_state(policy, other)


def test_models_with_sliding_windows_are_refused_at_load(tmp_path):
    config = transformers.MistralConfig(**TINY, sliding_window=8)
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="MistralAttention uses sliding_window"):
        load_policy(cfg_with(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=4, n_positions=128), "Conv1D"),
        (
            lambda: transformers.Qwen3MoeConfig(**TINY, num_experts=4, moe_intermediate_size=16, head_dim=8),
            "holds all experts in one parameter",
        ),
    ],
)
def test_f14_f16_models_whose_layers_lora_cannot_reach_are_refused_in_one_line(config, reason):
    base = transformers.AutoModelForCausalLM.from_config(config())
    with pytest.raises(ValueError, match=reason):
        lora.add_lora(base, CFG, CPU)


@pytest.mark.parametrize("scaling", [
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0,
     "original_max_position_embeddings": 32},
])  # fmt: skip
def test_f14_positions_that_are_scaled_by_the_longest_of_a_row_are_refused_by_name(scaling):
    config = transformers.Qwen2Config(
        **TINY | {"max_position_embeddings": 32},
        initializer_range=0.5,
        rope_parameters={"rope_theta": 100.0, **scaling},
    )
    torch.manual_seed(1)
    model = lora.add_lora(transformers.Qwen2ForCausalLM(config), CFG, CPU)
    with pytest.raises(ValueError, match=f"rotary positions are scaled \\({scaling['rope_type']}\\)"):
        head.check_packing(model, CFG)


def test_f14_static_scaling_of_positions_is_trained():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 100.0}
    model = lora.add_lora(
        transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TINY, rope_parameters=yarn)), CFG, CPU
    )
    head.check_packing(model, CFG)


def test_models_that_scale_their_logits_are_refused_at_load(tmp_path):
    config = transformers.GraniteConfig(**TINY, logits_scaling=8.0)
    torch.manual_seed(0)
    model = transformers.GraniteForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"GraniteForCausalLM: the logprobs of packed rows are off by"):
        load_policy(cfg_with(model=str(tmp_path)))


# --- the optimizer step ----------------------------------------------------------------------------------------------


def test_a_gradient_above_max_grad_norm_is_clipped(policy):
    cfg = cfg_with(max_grad_norm=0.5)
    trainer.policy_gradient(policy, sampled_rollouts(policy), CFG)
    for parameter in lora.lora_parameters(policy).values():
        parameter.grad.fill_(1.0)
    count = gradient(policy).numel()
    seen = []
    optimizer = torch.optim.SGD(lora.lora_parameters(policy).values(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradient(policy).norm().item()))
    norm, ok = trainer.optimizer_step(policy, optimizer, cfg)
    assert ok
    assert norm == pytest.approx(math.sqrt(count), rel=1e-5)
    assert seen == [pytest.approx(0.5, rel=1e-4)]


@pytest.mark.parametrize(("poison", "loss"), [(math.nan, 0.0), (math.inf, 0.0), (1.0, math.nan), (1.0, -math.inf)])
def test_a_step_that_is_not_finite_is_skipped_and_leaves_no_gradient(poison, loss):
    model = tiny_policy()
    optimizer = trainer.optimizer_for(model, CFG)
    before = tensors(model)
    trainer.policy_gradient(model, sampled_rollouts(model), CFG)
    next(iter(lora.lora_parameters(model).values())).grad[0, 0] = poison
    _, ok = trainer.optimizer_step(model, optimizer, CFG, loss)
    assert not ok
    assert not optimizer.state
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in tensors(model).items())


def test_a_step_resumed_from_saved_state_is_bit_identical(tmp_path):
    def train(model, optimizer, steps):
        for seed in steps:
            trainer.policy_gradient(model, sampled_rollouts(reference, seed), CFG)
            trainer.optimizer_step(model, optimizer, CFG)

    reference, unbroken, before = tiny_policy(), tiny_policy(), tiny_policy()
    train(unbroken, trainer.optimizer_for(unbroken, CFG), range(4))
    optimizer = trainer.optimizer_for(before, CFG)
    train(before, optimizer, range(2))
    torch.save((tensors(before), optimizer.state_dict()), tmp_path / "saved")
    adapter, moments = torch.load(tmp_path / "saved")
    resumed = tiny_policy(moved=False)
    lora.load_adapter_state(resumed, adapter)
    optimizer = trainer.optimizer_for(resumed, CFG)
    optimizer.load_state_dict(moments)
    train(resumed, optimizer, range(2, 4))
    expected = tensors(unbroken)
    assert all(torch.equal(value, expected[name]) for name, value in tensors(resumed).items())
