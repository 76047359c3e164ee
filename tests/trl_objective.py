"""TRL 1.16.0's objective, for test_trl_parity.py: runs in TRL's own environment and imports nothing of ours.

    python tests/trl_objective.py TOKENIZER CASE...

CASE holds a base model, an adapter and rollouts.json; TRL's advantages, loss and metrics go to CASE/seen.json and its
gradients to CASE/gradient.safetensors.
"""

import asyncio
import itertools
import json
import queue
import sys
from pathlib import Path
from types import SimpleNamespace

from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, TrainingSequence, _AsyncRolloutLoop
from trl_client import CPU, fit_a_cpu, length


def objective(tokenizer, case: Path) -> dict:
    """One optimizer step's advantages, loss and metrics; the gradients go to a file."""
    given = json.loads((case / "rollouts.json").read_text())
    samples = [sample for number, group in enumerate(given["groups"]) for sample in scored(group, number)]
    worker = SimpleNamespace(rollout_buffer=queue.Queue(), metrics_queue=queue.Queue(), check_health=lambda _: None)
    for sample in samples * 2:  # the loader fetches the next batch before it gives this one
        worker.rollout_buffer.put(sample)
    args = AsyncGRPOConfig(
        str(case / "trainer"), per_device_train_batch_size=len(samples), token_budget=0, max_steps=1, **CPU,
        **given["options"],
    )  # fmt: skip
    lora = LoraConfig.from_pretrained(case / "adapter")
    lora.inference_mode = False
    trainer = AsyncGRPOTrainer(
        str(case / "base"), length, args, Dataset.from_dict({"prompt": [""]}), tokenizer, peft_config=lora,
        rollout_worker=worker, weight_transfer=SimpleNamespace(),
    )  # fmt: skip
    set_peft_model_state_dict(trainer.model, load_file(case / "adapter" / "adapter_model.safetensors"))
    trainer.current_gradient_accumulation_steps = 1  # as Trainer.train sets it
    (batch,) = itertools.islice(trainer.get_train_dataloader(), 1)
    loss = trainer.training_step(trainer.model, batch, None).item()
    trained = {name: p.grad for name, p in trainer.model.named_parameters() if p.requires_grad}
    save_file({name.replace(".default", ""): grad for name, grad in trained.items()}, case / "gradient.safetensors")
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return metrics | {"loss": loss, "advantages": [sample.advantage for sample in samples]}


def scored(group: list[dict], number: int) -> list:
    """The samples of a group, with TRL's advantages for their rewards."""
    size = len(group)
    sequences = [[TrainingSequence(r["input_ids"], r["completion_mask"], r["old_log_probs"], "")] for r in group]
    whole = RolloutGroup(
        prompts=[[]] * size, reward_kwargs={}, completions=[[]] * size, completions_ids=[[]] * size,
        completions_sequences=sequences, tool_call_counts=[0] * size, tool_failure_counts=[0] * size, model_version=0,
        group_id=number, env_rewards=[None] * size, rollout_rewards=[r["reward"] for r in group],
    )  # fmt: skip
    loop = SimpleNamespace(
        reward_funcs=[], reward_func_names=["reward"], _env_reward_types=[], _provides_rollout_reward=True
    )
    return asyncio.run(_AsyncRolloutLoop._score_group(loop, whole))


def main() -> None:
    fit_a_cpu()
    PartialState()  # its loggers want one
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    for case in map(Path, sys.argv[2:]):
        (case / "seen.json").write_text(json.dumps(objective(tokenizer, case)))


if __name__ == "__main__":
    main()
