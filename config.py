"""What can be set, and what is the default.

One frozen dataclass holds every default once; each field is a flag of the same name (`max_steps` is `--max-steps`), and
the comment behind it is the flag's help text. The plain defaults are the recipe for HF Jobs; LOCAL holds the few
overrides of the offline demo. Bad values are one line on stderr and exit code 2, before anything starts. What no user
has a reason to set is a constant in the script that uses it.

    python launch.py --replicas 4 --lora-rank 8        # flags of launch.py are the flags of every script
    python trainer.py --help
"""

import argparse
import dataclasses
import difflib
import inspect
import math
import re
import sys
from dataclasses import dataclass
from typing import NoReturn

SERVED_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank accepts


@dataclass(frozen=True)
class Config:
    # What to train
    run: str = ""  # name of the run; the same name again resumes it (default: one is made up)
    model: str = "Qwen/Qwen2.5-Math-1.5B"  # base model: a Hub name or a local directory
    dtype: str = "bfloat16"  # dtype of the frozen base on trainer and replicas: bfloat16, float16 or float32
    dataset: str = "sail/Sanity-Test-R1D-1.5B"  # a Hub dataset, or a local .csv, .json, .jsonl or .parquet file
    dataset_split: str = "train"  # which split of a Hub dataset
    prompt_column: str = "prompt"  # text, or a list of chat messages
    answer_column: str = "reward_model.ground_truth"  # the gold answer; dots reach into nested columns
    system_prompt: str = ""  # goes before every prompt, as the system's message; text is then the user's
    reward: str = "rewards:math_reward"  # module:function or file.py:function, several joined by commas are summed
    reward_weights: str = ""  # one number per reward function, joined by commas (default: 1 each)
    reward_workers: int = 2  # processes that score completions
    reward_timeout_s: float = 10.0  # a completion that takes longer to score gets 0
    seed: int = 0  # order of the prompts, LoRA initialisation
    lora_rank: int = 1  # rank of the adapter
    lora_alpha: int = 2  # the update is scaled by lora_alpha / lora_rank

    # Sampling
    group_size: int = 8  # completions per prompt
    temperature: float = 1.0  # of sampling and of the trainer's logprobs alike
    max_completion_tokens: int = 3000  # a completion that needs more is cut
    truncated: str = "score"  # what a cut completion gets: score (the reward decides), zero, or mask (not trained on)
    max_model_len: int = 4096  # context of the replicas: prompt and completion together
    inflight_per_replica: int = 128  # completions that each ready replica generates at a time
    queue_size: int = 0  # completions that may wait for the trainer; 0: up to 4 batches, fewer if they would grow stale
    max_staleness: int = 4  # older rollouts, in policy versions, are dropped; 0: on-policy

    # Learning
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
    sync_every: int = 4  # optimizer steps between two publishes
    token_budget: int = 16384  # tokens per packed row
    gradient_checkpointing: bool = False  # recompute the forward in the backward: slower, less memory
    compile: bool = False  # torch.compile the base model (CUDA only)
    diagnose_every: int = 10  # steps between two lines that name the bottleneck
    log_completions_every: int = 10  # steps between two files of completions to read
    track: str = ""  # trackio: metrics go there too (pip install trackio)
    track_space: str = ""  # Hub Space, private, in which trackio shows them; without one they stay on the machine

    # Jobs
    replicas: int = 2  # vLLM Jobs
    namespace: str = ""  # user or organisation that owns Jobs and bucket (default: the token's user)
    bucket: str = "grpo-lora"  # Storage Bucket, [namespace/]name; with --local the directory that stands for it
    image: str = "vllm/vllm-openai:v0.27.1"  # of trainer and replicas alike
    trainer_flavor: str = "h200x2"  # hardware of the trainer Job
    replica_flavor: str = "h200"  # hardware of one replica Job
    engine: str = "vllm"  # what a replica runs: vllm, or stub (offline/stub_vllm.py, for CPUs)
    network_group: str = ""  # private network of the Jobs, instead of an exposed port
    host: str = "127.0.0.1"  # the proxy's address
    port: int = 8000  # the proxy's port; 0: any free one
    takeover: bool = False  # supersede a trainer of the same run that is still alive

    # Limits
    max_steps_without_signal: int = 30  # stop after this many steps in a row in which no group had a signal
    timeout_h: float = 8.0  # the trainer Job is ended after this long, the replicas half an hour later
    replica_restarts: int = 10  # replicas that ended early and are replaced, in one launch
    schedule_wait_min: float = 30.0  # give up on Jobs that are still SCHEDULING after this long
    ready_wait_min: float = 20.0  # give up on a replica that runs but is not healthy after this long
    idle_shutdown_min: float = 15.0  # a replica without a trainer's heartbeat for this long stops itself
    save_every: int = 50  # optimizer steps between two checkpoints
    heartbeat_s: float = 10.0  # how often a trainer says that it is alive
    settle_s: float = 25.0  # wait after a claim until others can see it; longer than twice the mount is stale
    publish_timeout_s: float = 300.0  # a publish that takes longer is given up; the old policy stays in service
    load_deadline_s: float = 120.0  # how long a replica may not see a new adapter's files yet
    no_replica_wait_s: float = 300.0  # how long a request waits for a ready replica
    request_timeout_s: float = 1800.0  # for one generation
    stall_s: float = 300.0  # a busy replica on which nothing finishes for this long is down
    max_imbalance: int = 16  # completions the owner of a prefix may be ahead of the least loaded replica
    max_inflight: int = 2048  # requests at a time; sizes pools and backlog


# The offline demo, for two CPU cores: `python launch.py --local`.
LOCAL = {
    "model": "toy",
    "dtype": "float32",
    "dataset": "toy",
    "answer_column": "answer",
    "reward_workers": 1,
    "lora_rank": 8,
    "lora_alpha": 16,
    "max_completion_tokens": 40,
    "max_model_len": 64,
    "inflight_per_replica": 32,
    "max_steps": 60,
    "learning_rate": 3e-3,
    "adam_beta2": 0.99,
    "max_grad_norm": 0.2,  # the usual norm is 0.1; at this learning rate a rare 1 or 3 costs ten steps
    "sync_every": 1,
    "token_budget": 4096,
    "bucket": "runs",
    "engine": "stub",
    "port": 0,
    "idle_shutdown_min": 1.0,
    "save_every": 10,
    "heartbeat_s": 1.0,
    "settle_s": 0.5,
}

CHOICES = {
    "dtype": ("bfloat16", "float16", "float32"),
    "loss_type": ("token", "sequence", "dr_grpo"),
    "scale_rewards": ("group", "none"),
    "truncated": ("score", "zero", "mask"),
    "engine": ("vllm", "stub"),
    "track": ("", "trackio"),
}
# Numbers are above 0, but for these, which may be 0.
MAY_BE_ZERO = (
    "seed", "queue_size", "max_staleness", "adam_beta1", "adam_beta2", "weight_decay", "port", "replica_restarts",
    "settle_s", "no_replica_wait_s", "max_imbalance",
)  # fmt: skip


def served_rank(rank: int) -> int | None:
    """The smallest --max-lora-rank of vLLM that serves `rank`; None above 512."""
    return min((served for served in SERVED_LORA_RANKS if served >= rank), default=None)


def max_loras(cfg: Config) -> int:
    """Adapter slots of a replica: the staleness window, the newest policy, and the one being loaded."""
    return cfg.max_staleness + 2


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


def problems(cfg: Config) -> list[str]:
    """What is wrong with a configuration, one line each, naming the flag and the cure; empty if it can run."""
    found = []

    def need(ok: bool, name: str, cure: str) -> None:
        if not ok:
            found.append(f"{flag(name)} {getattr(cfg, name)}: {cure}")

    for field in dataclasses.fields(cfg):
        value, zero = getattr(cfg, field.name), field.name in MAY_BE_ZERO
        if field.type in (int, float):
            ok = math.isfinite(value) and (value > 0 or (zero and value == 0))
            need(ok, field.name, f"must be {'0 or more' if zero else 'above 0'}")
        if field.name in CHOICES:
            choices = CHOICES[field.name]
            need(value in choices, field.name, "choose from " + ", ".join(choice or '""' for choice in choices))
    if found:
        return found

    need(served_rank(cfg.lora_rank) is not None, "lora_rank", "vLLM serves ranks up to 512")
    need(cfg.group_size > 1, "group_size", "must be 2 or more: a completion is compared with its group")
    need(cfg.batch_size % cfg.group_size == 0, "batch_size", f"must be a multiple of --group-size {cfg.group_size}")
    need(queue_size(cfg) >= cfg.batch_size, "queue_size", f"must hold a batch: {cfg.batch_size} or more (or 0)")
    need(cfg.inflight_per_replica >= cfg.group_size, "inflight_per_replica", "must hold a group: raise it")
    need(cfg.max_completion_tokens < cfg.max_model_len, "max_completion_tokens", "must leave room for the prompt "
         f"in --max-model-len {cfg.max_model_len}")  # fmt: skip
    need(cfg.token_budget >= cfg.max_model_len, "token_budget", "a row must hold the longest sample: use "
         f"--max-model-len {cfg.max_model_len} or more")  # fmt: skip
    need(cfg.track or not cfg.track_space, "track_space", "needs --track trackio")
    for name in ("eps_low", "adam_beta1", "adam_beta2"):
        need(getattr(cfg, name) < 1, name, "must be below 1")
    need(cfg.port <= 65535, "port", "must be 65535 or less")
    need(cfg.idle_shutdown_min * 60 > 3 * cfg.heartbeat_s, "idle_shutdown_min", "must be longer than 3 heartbeats of "
         f"--heartbeat-s {cfg.heartbeat_s}")  # fmt: skip
    need(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}|", cfg.run) is not None, "run", "use up to 63 letters, digits, "
         "dots, dashes and underscores, beginning with a letter or digit")  # fmt: skip
    parts = cfg.reward.split(",")
    need(all(re.fullmatch(r".+:\w+", part) for part in parts), "reward", "must be module:function or file.py:function")
    weights = cfg.reward_weights.split(",") if cfg.reward_weights else parts
    numbers = not cfg.reward_weights or all(re.fullmatch(r"-?\d*\.?\d+", weight.strip()) for weight in weights)
    need(numbers and len(weights) == len(parts), "reward_weights", f"needs {len(parts)} numbers joined by commas, one "
         "for each function of --reward")  # fmt: skip
    return found


# A resumed run must have these unchanged; others are used as they are now. These say nothing of what is learned:
FIXED = ("model", "dataset", "seed", "lora_rank", "lora_alpha", "group_size")
OF_THE_MACHINE = ("bucket", "namespace", "host", "port", "takeover", "engine", "replicas")


def changed_settings(before: dict, cfg: Config) -> list[str]:
    """Settings of a resumed run that differ from those before; ValueError with both values for one that cannot."""
    changed = {}
    for name, value in dataclasses.asdict(cfg).items():
        if name in before and before[name] != value and name not in OF_THE_MACHINE:
            changed[name] = f"{flag(name)} {before[name]} -> {value}"
            if name in FIXED:
                raise ValueError(f"{flag(name)} {value}: run {cfg.run} was started with {before[name]}; use that, or "
                                 "another --run")  # fmt: skip
    return list(changed.values())


def fail(message: str) -> NoReturn:
    """End the script with one line and exit code 2: bad input, nothing started."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def did_you_mean(name: str, names: list[str]) -> str:
    """A question about the name that is most like it, or nothing."""
    return "".join(f"did you mean {near}? " for near in difflib.get_close_matches(name, names, 1))


def refuse(message: str, flags: list[str]) -> NoReturn:
    """What a parser complains of, with the cure where it is a flag that does not exist."""
    for word in message.partition("unrecognized arguments: ")[2].split():
        name = word.partition("=")[0]
        if name in ("--top-p", "--top-k", "--min-p"):
            fail(f"{name}: truncated sampling gives logprobs that the trainer cannot reproduce: leave it out")
        if name.startswith("-"):
            fail(f"{name}: there is no such flag: {did_you_mean(name, flags)}--help lists them")
    fail(f"{message} (--help lists the flags)")


def make_parser(doc: str, without: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    """A parser with one flag per field of Config, but for those in `without`; `doc` is the script's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.error = lambda message: refuse(message, list(parser._option_string_actions))
    types = {field.name: field.type for field in dataclasses.fields(Config)}
    for line in inspect.getsource(Config).splitlines():
        if title := re.fullmatch(r"    # (.*)", line):
            group = parser.add_argument_group(title[1])
        if (match := re.fullmatch(r"    (\w+): \w+ = (.*?)  # (.*)", line)) and match[1] not in without:
            name, text = match[1], match[3]
            default = LOCAL.get(name, match[2].strip('"')) if "--local" in sys.argv else match[2].strip('"')
            kind = {"action": argparse.BooleanOptionalAction} if types[name] is bool else {"type": types[name]}
            text = f"{text} [{default}]".replace("%", "%%")
            group.add_argument(flag(name), default=argparse.SUPPRESS, help=text, **kind)
    return parser


def config_from(args: argparse.Namespace, local: bool = False) -> Config:
    """The configuration that parsed flags describe, on top of LOCAL if `local`; exits with code 2 if it cannot run."""
    names = {field.name for field in dataclasses.fields(Config)}
    given = {name: value for name, value in vars(args).items() if name in names}
    cfg = Config(**{**(LOCAL if local else {}), **given})
    for problem in problems(cfg):
        fail(problem)
    return cfg


def demo_settings(cfg: Config) -> str:
    """The settings that --local takes from the demo's recipe, not from the plain defaults; a user's model gets them."""
    same = {name: value for name, value in LOCAL.items() if name not in ("model", "dataset", "bucket", "engine")}
    return ", ".join(f"{flag(name)} {value}" for name, value in same.items() if getattr(cfg, name) == value)


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
