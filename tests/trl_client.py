"""TRL 1.16.0 at work before a server, for test_trl.py: runs in TRL's own environment and imports nothing of ours.

    python tests/trl_client.py URL MODEL DIRECTORY

What is seen goes to DIRECTORY/seen.json. TRL's code runs as it is; `fit_a_cpu` says what stands in for its CUDA parts.
"""

import json
import queue
import sys
from pathlib import Path
from types import SimpleNamespace

import peft
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl.experimental.async_grpo import async_grpo_trainer as trl_trainer
from trl.experimental.async_grpo import async_rollout_worker as trl_worker
from trl.experimental.async_grpo.vllm_client import VLLMClient

GROUP = 4
CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no"}


def fit_a_cpu() -> None:
    """Replace what needs a GPU: a kernel, and two questions about hardware and environment."""
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    trl_trainer.get_peak_flops_per_device = lambda *_: None  # it asks CUDA
    trl_worker.is_vllm_available = lambda: True  # the worker wants vLLM installed beside it, and uses nothing of it


def attention(query, key, value, query_ends, key_ends, max_query, max_key, softmax_scale, causal, window_size):
    """Flash attention over segments of (T, H, D): causal, the last query of a segment sees its last key."""
    outputs = []
    for i in range(len(query_ends) - 1):
        q, k, v = (
            x[ends[i] : ends[i + 1]].transpose(0, 1)[None]  # (1, H, T, D)
            for x, ends in ((query, query_ends), (key, key_ends), (value, key_ends))
        )
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        output = F.scaled_dot_product_attention(q, k, v, visible, scale=softmax_scale, enable_gqa=True)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def length(completion_ids, **_) -> list[float]:
    """A reward that differs within most groups."""
    return [float(len(ids)) for ids in completion_ids]


def lora(rank: int = 8) -> peft.LoraConfig:
    """An adapter that changes what the model says from the start."""
    return peft.LoraConfig(
        r=rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )


def new_policy(model: str, rank: int = 8) -> peft.PeftModel:
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora(rank))


def chat_tokenizer(model: str):
    """The toy's tokenizer with what TRL asks of a chat model's."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    content = {"close_pattern": "<eos>", "content": "text"}
    template = {"defaults": {"role": "assistant"}, "start_anchor": "=", "fields": {"content": content}}
    tokenizer.response_template = template
    return tokenizer


def ask(client: VLLMClient, model: str, args: AsyncGRPOConfig) -> dict:
    """What TRL reads from the server, and how it decides to sync adapters of rank 8 and 16."""
    client.wait_for_server_ready(poll_interval_s=0.2)
    info, sync = client.get_server_info(), {}
    for rank in (8, 16):
        try:
            sync[rank] = trl_trainer.select_adapter_sync(info, new_policy(model, rank), args)
        except ValueError as error:
            sync[rank] = str(error)
    return {"max_model_len": client.get_max_model_len(), "dtype": client.get_dtype(), "adapter_sync": sync}


def work(client: VLLMClient, model: str, args: AsyncGRPOConfig, tokenizer, data: Dataset, directory: Path) -> dict:
    """TRL's worker samples from one policy, then from another, then through a pause."""
    for version in (1, 2):
        path = str(directory / f"v{version}")
        trl_trainer.save_lora_adapter(new_policy(model), Accelerator(), "default", path)
        client.load_lora_adapter(f"worker-v{version}", path)
    worker = trl_worker.AsyncRolloutWorker(
        model_name=model, lora_name="worker", dataset=data, reward_funcs=[length], processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id], num_generations=GROUP, max_inflight_tasks=16, queue_maxsize=8,
        vllm_server_url=client.server_url, max_tokens=args.max_completion_length,
    )  # fmt: skip
    seen = {"samples": {}}
    worker.update_model_version(1)
    worker.start()
    try:
        seen["samples"][1] = take(worker, 1)
        worker.update_model_version(2)
        seen["samples"][2] = take(worker, 2)
        client.pause()
        while received(worker, timeout_s=1):
            pass
        seen["silent_while_paused"] = not received(worker, timeout_s=1)
        client.resume()
        seen["resumed"] = received(worker, timeout_s=30)
        worker.check_health(stale_after_s=30)
    finally:
        worker.stop()
    client.unload_lora_adapter("worker-v1")
    return seen | {"retries": retries(worker)}


def take(worker: trl_worker.AsyncRolloutWorker, version: int) -> list[dict]:
    """16 samples of groups begun under a version."""
    taken, keys = [], ("input_ids", "completion_mask", "old_log_probs")
    while len(taken) < 16:
        sample = worker.rollout_buffer.get(timeout=60)
        if sample.model_version == version:
            taken.append({key: getattr(sample, key).tolist() for key in keys})
    return taken


def received(worker: trl_worker.AsyncRolloutWorker, timeout_s: float) -> bool:
    try:
        return worker.rollout_buffer.get(timeout=timeout_s) is not None
    except queue.Empty:
        return False


def retries(worker: trl_worker.AsyncRolloutWorker) -> float:
    """How many requests the worker has had to repeat."""
    total = 0.0
    while not worker.metrics_queue.empty():
        total += worker.metrics_queue.get(timeout=5).get("rollout/vllm_retry_total", 0.0)
    return total


def train(model: str, args: AsyncGRPOConfig, tokenizer, data: Dataset) -> dict:
    """The whole trainer: it probes, syncs, samples and steps by itself."""
    trainer = AsyncGRPOTrainer(model, length, args, data, tokenizer, peft_config=lora())
    trainer.train()
    steps = [row for row in trainer.state.log_history if "ratio" in row]
    return {"adapter_only": trainer.weight_transfer is None, "version": trainer.model_version, "steps": steps}


def main() -> None:
    url, model, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    fit_a_cpu()
    torch.manual_seed(0)
    args = AsyncGRPOConfig(
        str(directory / "trainer"), max_steps=3, learning_rate=1e-4, per_device_train_batch_size=16, token_budget=0,
        num_generations=GROUP, max_completion_length=40, max_inflight_tasks=16, queue_maxsize=16, max_staleness=2,
        vllm_server_base_url=url, **CPU,
    )  # fmt: skip
    client, tokenizer = VLLMClient(url, server_timeout=60), chat_tokenizer(model)
    prompts = [[{"role": "user", "content": f"{first}+{first + 8}="}] for first in range(10, 90)]
    data = Dataset.from_dict({"prompt": prompts})
    seen = ask(client, model, args)
    seen |= work(client, model, args, tokenizer, data, directory)
    seen |= train(model, args, tokenizer, data)
    (directory / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
