"""What is looked at before anything starts: names, hardware, model, this machine. Each exits naming the cure."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

from config import Config, did_you_mean, fail, flag
from jobs.hub import API_ERRORS, BUCKET_IN_JOB, one_line, patiently
from jobs.local import is_taken

HOURS = {"second": 1 / 3600, "minute": 1 / 60, "hour": 1.0}


def with_names(cfg: Config, user: dict) -> Config:
    """The configuration with namespace and bucket in full. user: the answer of whoami()."""
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        fail("the token may only read: make one that may run Jobs at https://huggingface.co/settings/tokens")
    if cfg.track and not cfg.track_space:
        fail(f"--track {cfg.track}: what it keeps would vanish with the Job: name a Space with --track-space")
    names = [user["name"], *(org["name"] for org in user.get("orgs", []))]
    namespace = cfg.namespace or names[0]
    if namespace not in names:
        fail(f"--namespace {namespace}: the token is of {', '.join(names)}; choose one of these")
    for name, pattern in (("run", r"[\w-]*"), ("network_group", r"[a-z0-9-]{0,46}")):
        if not re.fullmatch(pattern, getattr(cfg, name), re.ASCII):
            fail(f"{flag(name)} {getattr(cfg, name)}: on HF Jobs it must match {pattern}")
    bucket = cfg.bucket if "/" in cfg.bucket else f"{namespace}/{cfg.bucket}"
    return dataclasses.replace(cfg, namespace=namespace, bucket=bucket)


def check_flavors(cfg: Config, hardware: list) -> dict[str, float]:
    """Dollars per hour by flavor. hardware: the answer of list_jobs_hardware()."""
    prices = {kind.name: kind.unit_cost_usd / HOURS[kind.unit_label] for kind in hardware}
    for name in ("trainer_flavor", "replica_flavor"):
        value = getattr(cfg, name)
        if value not in prices:
            fail(f"{flag(name)} {value}: {did_you_mean(value, list(prices))}choose from {', '.join(prices)}")
    return prices


def is_path(name: str) -> bool:
    """Whether a model or dataset is meant as a path: Hub names have at most one slash and do not begin with . or ~."""
    data_file = Path(name).suffix in (".csv", ".json", ".jsonl", ".parquet")
    return data_file or name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_dir()


def check_readable(cfg: Config, api: Any) -> None:
    """Jobs can read model and dataset: from the Hub, or from the bucket, which is not looked into."""
    for name, list_names in (("model", api.list_models), ("dataset", api.list_datasets)):
        value = getattr(cfg, name)
        if value.startswith(f"{BUCKET_IN_JOB}/"):
            continue
        if is_path(value):
            fail(f"{flag(name)} {value}: Jobs cannot see this machine's files; copy it into the bucket {cfg.bucket} "
                 f"and name it {BUCKET_IN_JOB}/...")  # fmt: skip
        if name == "model":
            check_model(cfg, api)
        else:
            ask_for(name, value, list_names, lambda: api.dataset_info(cfg.dataset))


def check_model(cfg: Config, api: Any) -> None:
    """The model, a directory or on the Hub, can be had, and has a context of --max-model-len. api: None locally."""
    config_file = Path(cfg.model, "config.json")
    if not is_path(cfg.model):
        from huggingface_hub import HfApi

        api = api or HfApi()
        download = lambda: api.hf_hub_download(cfg.model, "config.json")  # noqa: E731
        config_file = Path(ask_for("model", cfg.model, api.list_models, download))
    elif not config_file.exists():
        fail(f"--model {cfg.model}: no config.json there; give a model directory or a Hub name")
    context = json.loads(config_file.read_text()).get("max_position_embeddings", cfg.max_model_len)
    if context < cfg.max_model_len:
        fail(f"--max-model-len {cfg.max_model_len}: {cfg.model} has a context of {context} tokens; use that or less")


def ask_for(name: str, value: str, list_names: Any, call: Any) -> Any:
    """What the Hub answers about a model or dataset; if it has none, the nearest name of the same owner is named."""
    try:
        return patiently(0, f"the Hub to find the {name} {value}", call)
    except API_ERRORS as error:
        near, reason = "", one_line(error)
    try:
        near = did_you_mean(value, [found.id for found in list_names(author=value.partition("/")[0], limit=200)])
    except API_ERRORS:
        pass  # then there is no such owner either
    fail(f"--{name} {value}: the Hub does not give it to you: {near}{reason}")


def check_machine(cfg: Config) -> None:
    """Flags, engine, port and bucket directory can be used for a local run."""
    for name in ("namespace", "network_group"):
        if getattr(cfg, name):
            fail(f"{flag(name)} {getattr(cfg, name)}: is for HF Jobs; leave it out with --local")
    if cfg.engine == "vllm" and not shutil.which("vllm"):
        fail("--engine vllm: there is no vllm command here: pip install -r requirements-replica.txt, or --engine stub")
    if cfg.port and is_taken(cfg.port):
        fail(f"--port {cfg.port}: something listens there; leave it out for any free one")
    try:
        Path(cfg.bucket, cfg.run, "jobs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--bucket {cfg.bucket}: cannot write there ({error.strerror}); name a directory you own")
