"""What can be set, and what is the default.

One frozen dataclass holds every default once; each field is a flag of the same name (`max_steps` is `--max-steps`), and
the comment behind it is the flag's help text. The plain defaults are the recipe for HF Jobs; LOCAL holds the few
overrides of the offline demo. Bad values are one line on stderr and exit code 2, before anything starts.

    python launch.py --replicas 4 --lora-rank 8        # flags of launch.py are the flags of every script
    python trainer.py --help
"""

import argparse
import dataclasses
import inspect
import math
import re
import sys
from dataclasses import dataclass
from typing import NoReturn

SERVED_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank accepts
LOSS_TYPES = ("token", "sequence", "dr_grpo")


@dataclass(frozen=True)
class Config:
    # The run and its data
    run: str = ""  # name of the run; the same name again resumes it (default: one is made up)
    model: str = "Qwen/Qwen2.5-Math-1.5B"  # base model: a Hub name or a local directory
    dtype: str = "bfloat16"  # dtype of the frozen base on trainer and replicas: bfloat16, float16 or float32
    dataset: str = "sail/Sanity-Test-R1D-1.5B"  # a Hub dataset, or a local .jsonl or .parquet file
    dataset_split: str = "train"  # which split of a Hub dataset
    prompt_column: str = "prompt"  # text, or a list of chat messages
    answer_column: str = "reward_model.ground_truth"  # the gold answer; dots reach into nested columns
    reward: str = "rewards:math_reward"  # module:function, several joined by commas are summed
    reward_workers: int = 2  # processes that score completions
    reward_timeout_s: float = 10.0  # a completion that takes longer to score gets 0
    reward_memory_mb: int = 1024  # a completion that needs more to be scored gets 0
    seed: int = 0  # order of the prompts, LoRA initialisation

    # GRPO
    group_size: int = 8  # completions per prompt
    batch_size: int = 128  # completions per optimizer step, a multiple of group_size
    max_steps: int = 500  # optimizer steps
    learning_rate: float = 4e-5  # constant
    adam_beta1: float = 0.9  # AdamW's first moment
    adam_beta2: float = 0.95  # AdamW's second moment
    weight_decay: float = 0.0  # AdamW's, on the LoRA parameters
    max_grad_norm: float = 1.0  # the gradient is clipped to this norm
    eps_low: float = 0.2  # ratio is clipped to [1 - eps_low, 1 + eps_high]
    eps_high: float = 0.2  # larger than eps_low is DAPO's clip-higher
    loss_type: str = "token"  # token, sequence or dr_grpo: what the loss is averaged over
    scale_rewards: str = "group"  # group: advantage is divided by the group's std; none: it is not
    max_bad_steps: int = 5  # stop after this many steps in a row with a non-finite loss or gradient

    # LoRA
    lora_rank: int = 1  # rank of the adapter
    lora_alpha: int = 2  # the update is scaled by lora_alpha / lora_rank

    # Sampling
    temperature: float = 1.0  # of sampling and of the trainer's logprobs alike
    top_p: float = 1.0  # only 1: the trainer cannot reproduce truncated logprobs
    top_k: int = 0  # only 0 (off), for the same reason
    min_p: float = 0.0  # only 0 (off), for the same reason
    max_completion_tokens: int = 3000  # a completion that needs more is cut and scores 0
    max_model_len: int = 4096  # context of the replicas: prompt and completion together
    inflight_per_replica: int = 128  # completions that each ready replica generates at a time
    queue_size: int = 0  # completions that may wait for the trainer; 0: up to 4 batches, fewer if they would grow stale
    max_staleness: int = 4  # older rollouts, in policy versions, are dropped; 0: on-policy
    max_failed_groups: int = 20  # stop after this many groups in a row without one usable completion

    # Speed and memory of the trainer
    token_budget: int = 16384  # tokens per packed row
    share_prompts: bool = True  # the completions of a group share one copy of their prompt in the row
    skip_zero_advantage: bool = True  # groups without signal are not forwarded (same gradient)
    logits_chunk: int = 2048  # completion tokens whose logits exist at a time
    gradient_checkpointing: bool = False  # recompute the forward in the backward: slower, less memory
    compile: bool = False  # torch.compile the base model (CUDA only)
    diagnose_every: int = 10  # steps between two lines that name the bottleneck

    # Watching
    track: str = ""  # trackio: metrics go there too (pip install trackio)
    track_space: str = ""  # Hub Space, private, in which trackio shows them; without one they stay on the machine

    # The bucket
    bucket: str = "grpo-lora"  # Storage Bucket, [namespace/]name; with --local the directory that stands for it
    sync_every: int = 4  # optimizer steps between two publishes
    publish_timeout_s: float = 300.0  # a publish that takes longer is given up; the old policy stays in service
    max_failed_publishes: int = 5  # stop after this many publishes failed in a row
    save_every: int = 50  # optimizer steps between two checkpoints
    keep_checkpoints: int = 3  # older ones are deleted
    heartbeat_s: float = 10.0  # how often a trainer says that it is alive
    settle_s: float = 25.0  # wait after a claim until others can see it; longer than twice the mount is stale
    takeover: bool = False  # supersede a trainer of the same run that is still alive

    # The proxy
    host: str = "127.0.0.1"  # the proxy's address
    port: int = 8000  # the proxy's port
    min_ready: int = 1  # /health is 200 when at least this many replicas are ready
    health_every_s: float = 2.0  # pause between two probes of a replica
    health_timeout_s: float = 5.0  # a probe without an answer for this long is a miss
    health_misses: int = 3  # missed probes in a row after which a replica is down
    no_replica_wait_s: float = 300.0  # how long a request waits for a ready replica
    connect_timeout_s: float = 10.0  # to open a connection to a replica
    request_timeout_s: float = 1800.0  # for one generation
    max_sends: int = 4  # how often a request is sent when replicas die under it
    stall_s: float = 300.0  # a busy replica on which nothing finishes for this long is down
    load_deadline_s: float = 120.0  # how long a replica may not see a new adapter's files yet
    load_retry_s: float = 0.5  # pause between two tries of a load
    control_timeout_s: float = 60.0  # for one load, unload, pause or resume on one replica
    canary_atol: float = 0.05  # how far a replica's logprobs may be from the trainer's after a load (float32: 1e-3)
    max_imbalance: int = 16  # completions the owner of a prefix may be ahead of the least loaded replica
    block_size: int = 16  # tokens per hashed block, as in vLLM's prefix cache
    max_tracked_blocks: int = 500_000  # size of the routing table
    max_inflight: int = 2048  # requests at a time; sizes pools and backlog

    # The Jobs
    replicas: int = 2  # vLLM Jobs
    namespace: str = ""  # user or organisation that owns Jobs and bucket (default: the token's user)
    image: str = "vllm/vllm-openai:v0.27.1"  # of trainer and replicas alike
    trainer_flavor: str = "h200x2"  # hardware of the trainer Job
    replica_flavor: str = "h200"  # hardware of one replica Job
    timeout_h: float = 8.0  # the trainer Job is ended after this long, the replicas half an hour later
    max_loras: int = 0  # adapter slots of a replica; 0: max_staleness + 2
    replica_restarts: int = 10  # replicas that ended early and are replaced, in the whole run
    schedule_wait_min: float = 30.0  # give up on Jobs that are still SCHEDULING after this long
    ready_wait_min: float = 20.0  # give up on a replica that runs but is not healthy after this long
    idle_shutdown_min: float = 15.0  # a replica without a trainer's heartbeat for this long stops itself
    network_group: str = ""  # private network of the Jobs, instead of an exposed port
    engine: str = "vllm"  # what a replica runs: vllm, or stub (stub_vllm.py, for CPUs)


# The offline demo, for two CPU cores: `python launch.py --local`.
LOCAL = {
    "model": "toy",
    "dtype": "float32",
    "dataset": "toy",
    "prompt_column": "prompt",
    "answer_column": "answer",
    "learning_rate": 3e-3,
    "max_grad_norm": 0.2,  # the usual norm is 0.1; at this learning rate a rare 1 or 3 costs ten steps
    "adam_beta2": 0.99,
    "lora_rank": 8,
    "lora_alpha": 16,
    "max_steps": 60,
    "max_completion_tokens": 40,
    "max_model_len": 64,
    "inflight_per_replica": 32,
    "token_budget": 4096,
    "sync_every": 1,
    "save_every": 10,
    "bucket": "runs",
    "heartbeat_s": 1.0,
    "settle_s": 0.5,
    "load_retry_s": 0.1,
    "health_every_s": 0.5,
    "canary_atol": 1e-3,
    "engine": "stub",
    "idle_shutdown_min": 1.0,
    "reward_workers": 1,
}


def served_rank(rank: int) -> int | None:
    """The smallest --max-lora-rank of vLLM that serves `rank`; None above 512."""
    return min((served for served in SERVED_LORA_RANKS if served >= rank), default=None)


def max_loras(cfg: Config) -> int:
    """Adapter slots of a replica: the staleness window, the newest policy, and the one being loaded."""
    return cfg.max_loras or cfg.max_staleness + 2


def fresh_samples(cfg: Config) -> int:
    """Completions that may be in flight or waiting at a time without growing stale before they are trained on.

    One and a half versions of the window are kept back: a policy is live some time after its step, and long completions
    take longer than others, and must not be those dropped.
    """
    return cfg.batch_size * max(1, int((cfg.max_staleness - 1.5) * cfg.sync_every))


def queue_size(cfg: Config) -> int:
    """Completions that may wait for the trainer: by default at most four batches, and fewer than stay fresh."""
    return cfg.queue_size or min(4 * cfg.batch_size, max(cfg.batch_size, fresh_samples(cfg) - cfg.batch_size))


def flag(name: str) -> str:
    """The flag of a field: `max_steps` is `--max-steps`."""
    return "--" + name.replace("_", "-")


# Fields with a smallest value other than 0 (for numbers that may not be negative), and those that must be above 0.
AT_LEAST = {
    "group_size": 2, "replicas": 1, "batch_size": 1, "max_steps": 1, "lora_rank": 1, "lora_alpha": 1, "sync_every": 1,
    "save_every": 1, "keep_checkpoints": 1, "logits_chunk": 1, "max_completion_tokens": 1, "diagnose_every": 1,
    "max_bad_steps": 1, "max_failed_groups": 1, "max_failed_publishes": 1, "reward_workers": 1, "health_misses": 1,
    "reward_memory_mb": 1, "block_size": 1, "max_inflight": 1, "max_tracked_blocks": 1, "min_ready": 1, "max_sends": 1,
}  # fmt: skip
ABOVE_ZERO = (
    "learning_rate", "temperature", "max_grad_norm", "eps_low", "eps_high", "reward_timeout_s", "publish_timeout_s",
    "heartbeat_s", "health_every_s", "health_timeout_s", "connect_timeout_s", "request_timeout_s", "stall_s",
    "load_deadline_s", "load_retry_s", "control_timeout_s", "canary_atol", "timeout_h", "schedule_wait_min",
    "ready_wait_min", "idle_shutdown_min",
)  # fmt: skip
CHOICES = {
    "dtype": ("bfloat16", "float16", "float32"),
    "loss_type": LOSS_TYPES,
    "scale_rewards": ("group", "none"),
    "engine": ("vllm", "stub"),
    "track": ("", "trackio"),
}


def problems(cfg: Config) -> list[str]:
    """What is wrong with a configuration, one line each, naming the flag and the cure; empty if it can run."""
    found = []

    def need(ok: bool, name: str, cure: str) -> None:
        if not ok:
            found.append(f"{flag(name)} {getattr(cfg, name)}: {cure}")

    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if field.type in (int, float):
            low = AT_LEAST.get(field.name, 0)
            above = field.name in ABOVE_ZERO
            enough = value > 0 if above else value >= low
            need(math.isfinite(value) and enough, field.name, "must be above 0" if above else f"must be {low} or more")
        if field.name in CHOICES:
            choices = CHOICES[field.name]
            need(value in choices, field.name, "choose from " + ", ".join(choice or '""' for choice in choices))
    if found:
        return found

    slots, rank = cfg.max_staleness + 2, cfg.lora_rank
    need(served_rank(rank) is not None, "lora_rank", "vLLM serves ranks up to 512")
    need(cfg.batch_size % cfg.group_size == 0, "batch_size", f"must be a multiple of --group-size {cfg.group_size}")
    need(max_loras(cfg) >= slots, "max_loras", f"--max-staleness {cfg.max_staleness} needs {slots} or more, or 0")
    need(queue_size(cfg) >= cfg.batch_size, "queue_size", f"must hold a batch: {cfg.batch_size} or more (or 0)")
    need(cfg.inflight_per_replica >= cfg.group_size, "inflight_per_replica", "must hold a group: raise it")
    need(cfg.max_completion_tokens < cfg.max_model_len, "max_completion_tokens", "must leave room for the prompt "
         f"in --max-model-len {cfg.max_model_len}")  # fmt: skip
    need(cfg.token_budget >= cfg.max_model_len, "token_budget", "a row must hold the longest sample: use "
         f"--max-model-len {cfg.max_model_len} or more")  # fmt: skip
    need(cfg.track or not cfg.track_space, "track_space", "needs --track trackio")
    need(cfg.eps_low < 1, "eps_low", "must be below 1")
    need(cfg.adam_beta1 < 1, "adam_beta1", "must be below 1")
    need(cfg.adam_beta2 < 1, "adam_beta2", "must be below 1")
    need(cfg.port <= 65535, "port", "must be 65535 or less")
    need(cfg.idle_shutdown_min * 60 > 3 * cfg.heartbeat_s, "idle_shutdown_min", "must be longer than 3 heartbeats of "
         f"--heartbeat-s {cfg.heartbeat_s}")  # fmt: skip
    for name, neutral in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
        need(getattr(cfg, name) == neutral, name, "truncated sampling gives logprobs that the trainer cannot "
             f"reproduce: use {neutral}")  # fmt: skip
    need(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}|", cfg.run) is not None, "run", "use up to 63 letters, digits, "
         "dots, dashes and underscores, beginning with a letter or digit")  # fmt: skip
    need(all(re.fullmatch(r"[\w.]+:\w+", part) for part in cfg.reward.split(",")), "reward", "must be module:function")
    return found


def fail(message: str) -> NoReturn:
    """End the script with one line and exit code 2: bad input, nothing started."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def make_parser(doc: str, without: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    """A parser with one flag per field of Config, but for those in `without`; `doc` is the script's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.error = lambda message: fail(f"{message} (--help lists the flags)")
    help_of = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Config), re.MULTILINE))
    for field in dataclasses.fields(Config):
        if field.name in without:
            continue
        text = f"{help_of[field.name]} [{field.default}]".replace("%", "%%")
        kind = {"action": argparse.BooleanOptionalAction} if field.type is bool else {"type": field.type}
        parser.add_argument(flag(field.name), default=argparse.SUPPRESS, help=text, **kind)
    return parser


def config_from(args: argparse.Namespace, local: bool = False) -> Config:
    """The configuration that parsed flags describe, on top of LOCAL if `local`; exits with code 2 if it cannot run."""
    names = {field.name for field in dataclasses.fields(Config)}
    given = {name: value for name, value in vars(args).items() if name in names}
    cfg = Config(**{**(LOCAL if local else {}), **given})
    for problem in problems(cfg):
        fail(problem)
    return cfg


def to_flags(cfg: Config) -> list[str]:
    """The flags that make any script parse to this configuration; defaults are left out."""
    flags = []
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if value == field.default:
            continue
        if field.type is bool:
            flags.append(flag(field.name) if value else flag("no_" + field.name))
        else:
            flags.append(f"{flag(field.name)}={value}")
    return flags
