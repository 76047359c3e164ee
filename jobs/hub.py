"""Calls to the Hub, made again while it is busy or broken; what Jobs see of it: the bucket at /lora, the code at /code.

Importing this file imports no huggingface_hub.
"""

import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
from tqdm import tqdm

from config import Config, fail

CODE_IN_JOB, BUCKET_IN_JOB = "/code", "/lora"
CODE_FOLDER = "async-grpo-lora-{}"  # of a run, in the namespace's bucket of scripts
SHIPPED_FOLDERS = ("policy", "jobs", "report", "offline", "serving", "grading")
API_ERRORS = (OSError, httpx2.TransportError)  # what a call to the Hub raises: HfHubHTTPError is an OSError
CALL_TIMEOUT_S = 60
say = tqdm.write  # a line on stdout, above the progress bar where there is one


def clock(until: float) -> str:
    """The time of day of a time.monotonic()."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() + until - time.monotonic()))


def one_line(error: Exception) -> str:
    """An error in one line, with the cure where the token is the cause."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    cure = " (is the token still valid, and may it run Jobs? `hf auth login`)" if status in (401, 403) else ""
    return " ".join(str(error).split())[:300] + cure


def retry_after_s(error: Exception, tried: int) -> float | None:
    """Seconds to wait before a call is made again: 429 may say so, 5xx and broken connections back off; else None."""
    response = getattr(error, "response", None)
    if response is not None and response.status_code != 429 and response.status_code < 500:
        return None
    told = response.headers.get("Retry-After", "") if response is not None else ""
    return float(told) if told.isdigit() else min(2.0**tried, 30)


def patiently(patience_s: float, what: str, call: Callable[[], Any]) -> Any:
    """call(), made again while the Hub is busy or broken, for patience_s at most; the last error is raised.

    After 2 s it says what is waited for, until when, and why.
    """
    until, tried, why = time.monotonic() + patience_s, 0, ""
    told = threading.Timer(2, lambda: say(f"waiting for {what} until {clock(until + CALL_TIMEOUT_S)}{why}"))
    told.daemon = True
    told.start()
    try:
        while True:
            try:
                return call()
            except API_ERRORS as error:
                wait_s = retry_after_s(error, tried)
                if wait_s is None or time.monotonic() + wait_s > until:
                    raise
                why = f": {one_line(error)}"
            time.sleep(wait_s * random.uniform(1, 1.25))  # so that many that were refused do not all come back at once
            tried += 1
    finally:
        told.cancel()


def open_hub() -> Any:
    """The Hub's client, quiet and with a timeout, which it does not have of its own; exits if there is no token."""
    from huggingface_hub import HfApi, get_token, set_client_factory
    from huggingface_hub.utils import disable_progress_bars, logging

    token = get_token()
    if not token:
        fail("no Hugging Face token: run `hf auth login` or set HF_TOKEN; without an account: launch.py --local")
    # The client drops the token where a redirect leads to another host.
    set_client_factory(lambda: httpx2.Client(follow_redirects=True, timeout=CALL_TIMEOUT_S))
    disable_progress_bars()
    logging.set_verbosity_error()
    return HfApi(token=token)


def volumes_of(cfg: Config) -> dict[str, list]:
    """What Jobs mount, by role: the bucket, which only the trainer may write to, and the code."""
    from huggingface_hub import Volume, constants

    bucket = {"type": "bucket", "source": cfg.bucket, "mount_path": BUCKET_IN_JOB}
    artifacts = f"{cfg.namespace}/{constants.HF_JOBS_ARTIFACTS_BUCKET_NAME}"
    folder = CODE_FOLDER.format(cfg.run)
    code = Volume(type="bucket", source=artifacts, mount_path=CODE_IN_JOB, path=folder, read_only=True)
    return {"trainer": [Volume(**bucket), code], "replica": [Volume(**bucket, read_only=True), code]}


def ship_code(cfg: Config, api: Any, directory: Path) -> None:
    """Create the bucket, and copy what Jobs run, nothing else of the directory, to where they mount it."""
    api.create_bucket(cfg.bucket, private=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as copy:
        for path in [*directory.glob("*.py"), *directory.glob("*.sh"), directory / "requirements.txt"]:
            shutil.copy(path, copy)
        for name in SHIPPED_FOLDERS:
            shutil.copytree(directory / name, Path(copy, name), ignore=shutil.ignore_patterns("__pycache__"))
        api.sync_job_volume(copy, CODE_IN_JOB, remote_name=CODE_FOLDER.format(cfg.run), namespace=cfg.namespace)
