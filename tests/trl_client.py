"""TRL 1.16.0 at work before a server, for test_trl.py: runs in TRL's own environment and imports nothing of ours.

    python tests/trl_client.py URL MODEL DIRECTORY

What is seen goes to DIRECTORY/seen.json. TRL's code runs as it is; `fit_a_cpu` says what stands in for its CUDA parts.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import peft
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl.experimental.async_grpo import async_grpo_trainer as trl_trainer
from trl.experimental.async_grpo import async_rollout_worker as trl_worker
from trl.experimental.async_grpo.vllm_client import VLLMClient

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


def chat_tokenizer(model: str):
    """The toy's tokenizer with what TRL asks of a chat model's."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    content = {"close_pattern": "<eos>", "content": "text"}
    template = {"defaults": {"role": "assistant"}, "start_anchor": "=", "fields": {"content": content}}
    tokenizer.response_template = template
    return tokenizer


def ask(client: VLLMClient, model: str, args: AsyncGRPOConfig) -> dict:
    """What TRL reads from the server, how it decides to sync adapters of rank 8 and 16, and a pause."""
    client.wait_for_server_ready(poll_interval_s=0.2)
    info, sync = client.get_server_info(), {}
    for rank in (8, 16):
        policy = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora(rank))
        try:
            sync[rank] = trl_trainer.select_adapter_sync(info, policy, args)
        except ValueError as error:
            sync[rank] = str(error)
    client.pause()
    client.resume()
    return {"max_model_len": client.get_max_model_len(), "dtype": client.get_dtype(), "adapter_sync": sync}


def train(model: str, args: AsyncGRPOConfig) -> dict:
    """The whole trainer: it probes, syncs, samples and steps by itself."""
    prompts = [[{"role": "user", "content": f"{first}+{first + 8}="}] for first in range(10, 90)]
    data = Dataset.from_dict({"prompt": prompts})
    trainer = AsyncGRPOTrainer(model, length, args, data, chat_tokenizer(model), peft_config=lora())
    trainer.train()
    steps = [row for row in trainer.state.log_history if "ratio" in row]
    return {"adapter_only": trainer.weight_transfer is None, "version": trainer.model_version, "steps": steps}


def main() -> None:
    url, model, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    fit_a_cpu()
    torch.manual_seed(0)
    args = AsyncGRPOConfig(
        str(directory / "trainer"), max_steps=3, learning_rate=1e-4, per_device_train_batch_size=16, token_budget=0,
        num_generations=4, max_completion_length=40, max_inflight_tasks=16, queue_maxsize=16, max_staleness=2,
        vllm_server_base_url=url, **CPU,
    )  # fmt: skip
    seen = ask(VLLMClient(url, server_timeout=60), model, args) | train(model, args)
    (directory / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
