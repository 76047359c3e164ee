"""What launch.py and trainer_job.py need of huggingface_hub beyond its calls for Jobs.

Calls are made again while the Hub is busy or broken. Before anything starts, the token, the names and the hardware are
checked. Jobs see the run's bucket at /lora and the scripts at /code. Importing this file imports no huggingface_hub.
"""

import dataclasses
import json
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2

from config import Config, fail, flag

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SCRIPTS_IN_JOB, BUCKET_IN_JOB = "/code", "/lora"
API_ERRORS = (OSError, httpx2.TransportError)  # what a call to the Hub raises: HfHubHTTPError is an OSError
HOURS = {"second": 1 / 3600, "minute": 1 / 60, "hour": 1.0}


# --- calls that are made again ---------------------------------------------------------------------------------------


def one_line(error: Exception) -> str:
    """An error in one line, with the cure where the token is the cause."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    cure = " (is the token still valid, and may it run Jobs? `hf auth login`)" if status in (401, 403) else ""
    return " ".join(str(error).split())[:300] + cure


def retry_after_s(error: Exception, tried: int) -> float | None:
    """Seconds to wait before a call is made again: 429 says so, 5xx and broken connections back off; else None."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    backoff_s = min(2.0**tried, 30)
    if status == 429:
        return told_to_wait_s(response.headers.get("Retry-After", ""), response.headers.get("RateLimit", ""), backoff_s)
    broken = status is None and isinstance(error, API_ERRORS)
    return backoff_s if broken or (status or 0) >= 500 else None


def told_to_wait_s(retry_after: str, rate_limit: str, default_s: float) -> float:
    """Seconds that a 429 asks for: the header Retry-After, a number or a date, or RateLimit, like `"api";r=0;t=55`."""
    seconds = re.fullmatch(r"\s*(\d+)\s*", retry_after) or re.search(r"\br=0;\s*t=(\d+)", rate_limit)
    if seconds:
        return float(seconds.group(1))
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return default_s


def patiently(patience_s: float, call: Callable[[], Any]) -> Any:
    """call(), made again while the Hub is busy or broken, for patience_s at most; the last error is raised."""
    until, tried = time.monotonic() + patience_s, 0
    while True:
        try:
            return call()
        except API_ERRORS as error:
            wait_s = retry_after_s(error, tried)
            if wait_s is None or time.monotonic() + wait_s > until:
                raise
        time.sleep(wait_s * random.uniform(1, 1.25))  # so that many that were refused do not all come back at once
        tried += 1


# --- the Hub ---------------------------------------------------------------------------------------------------------


def open_hub(token: str | None = None) -> "HfApi":
    """The Hub's client, quiet and with a timeout, which it does not have of its own; exits if there is no token."""
    from huggingface_hub import HfApi, get_token, set_client_factory
    from huggingface_hub.utils import disable_progress_bars, logging

    token = token or get_token()
    if not token:
        fail("no Hugging Face token: run `hf auth login` or set HF_TOKEN; without an account: launch.py --local")
    # The client drops the token where a redirect leads to another host.
    set_client_factory(lambda: httpx2.Client(follow_redirects=True, timeout=60))
    disable_progress_bars()
    logging.set_verbosity_error()
    return HfApi(token=token)


def with_names(cfg: Config, user: dict) -> Config:
    """The configuration with namespace and bucket in full; exits if they cannot be. user: the answer of whoami()."""
    names = [user["name"], *(org["name"] for org in user.get("orgs", []))]
    namespace = cfg.namespace or names[0]
    if namespace not in names:
        fail(f"--namespace {namespace}: the token is of {', '.join(names)}; choose one of these")
    for name, pattern in (("run", r"[\w-]*"), ("network_group", r"[a-z0-9-]{0,46}")):
        if not re.fullmatch(pattern, getattr(cfg, name), re.ASCII):
            fail(f"{flag(name)} {getattr(cfg, name)}: on HF Jobs it must match {pattern}")
    bucket = cfg.bucket if "/" in cfg.bucket else f"{namespace}/{cfg.bucket}"
    return dataclasses.replace(cfg, namespace=namespace, bucket=bucket)


def scripts_folder(cfg: Config) -> str:
    """Where the scripts of a run lie in the namespace's bucket of scripts."""
    return f"async-grpo-lora-{cfg.run}"


def volumes_of(cfg: Config) -> dict[str, list]:
    """What Jobs mount, by role: the bucket, which only the trainer may write to, and the scripts."""
    from huggingface_hub import Volume, constants

    bucket = {"type": "bucket", "source": cfg.bucket, "mount_path": BUCKET_IN_JOB}
    scripts = Volume(
        type="bucket", source=f"{cfg.namespace}/{constants.HF_JOBS_ARTIFACTS_BUCKET_NAME}",
        mount_path=SCRIPTS_IN_JOB, path=scripts_folder(cfg), read_only=True,
    )  # fmt: skip
    return {"trainer": [Volume(**bucket), scripts], "replica": [Volume(**bucket, read_only=True), scripts]}


def ship_scripts(cfg: Config, api: "HfApi", directory: Path) -> None:
    """Create the bucket, and copy the scripts, nothing else of the directory, to where Jobs mount them."""
    api.create_bucket(cfg.bucket, private=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as copy:
        for path in [*directory.glob("*.py"), *directory.glob("*.sh"), directory / "requirements.txt"]:
            shutil.copy(path, copy)
        api.sync_job_volume(copy, SCRIPTS_IN_JOB, remote_name=scripts_folder(cfg), namespace=cfg.namespace)


# --- checks ----------------------------------------------------------------------------------------------------------


def check_token(user: dict) -> None:
    """Exit if the token can only read. user: the answer of whoami()."""
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        fail("the token may only read: make one that may run Jobs at https://huggingface.co/settings/tokens")


def check_flavors(cfg: Config, hardware: list) -> dict[str, float]:
    """Dollars per hour by flavor; exits if a flavor is not there. hardware: the answer of list_jobs_hardware()."""
    prices = {kind.name: kind.unit_cost_usd / HOURS[kind.unit_label] for kind in hardware}
    for name in ("trainer_flavor", "replica_flavor"):
        if getattr(cfg, name) not in prices:
            fail(f"{flag(name)} {getattr(cfg, name)}: choose from {', '.join(prices)}")
    return prices


def is_path(name: str) -> bool:
    """Whether a model or dataset is meant as a path: Hub names have at most one slash and do not begin with . or ~."""
    data_file = Path(name).suffix in (".jsonl", ".json", ".parquet")
    return data_file or name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_dir()


def check_context(cfg: Config, config_file: Path) -> None:
    """Exit if the model's context is shorter than --max-model-len."""
    context = json.loads(config_file.read_text()).get("max_position_embeddings", cfg.max_model_len)
    if context < cfg.max_model_len:
        fail(f"--max-model-len {cfg.max_model_len}: {cfg.model} has a context of {context} tokens; use that or less")


def check_readable(cfg: Config, api: "HfApi") -> None:
    """Exit unless Jobs can read model and dataset: from the Hub, or from the bucket, which is not looked into."""
    for name in ("model", "dataset"):
        value = getattr(cfg, name)
        if value.startswith(f"{BUCKET_IN_JOB}/"):
            continue
        if is_path(value):
            fail(f"{flag(name)} {value}: Jobs cannot see this machine's files; copy it into the bucket {cfg.bucket} "
                 f"and name it {BUCKET_IN_JOB}/...")  # fmt: skip
        try:
            if name == "model":
                check_context(cfg, Path(api.hf_hub_download(value, "config.json")))
            else:
                api.dataset_info(value)
        except API_ERRORS as error:
            fail(f"{flag(name)} {value}: the Hub does not give it to this token: {one_line(error)}")
