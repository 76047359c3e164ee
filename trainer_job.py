"""What the trainer Job runs: the proxy and the trainer, both watched.

The proxy is restarted if it dies and told of replicas that the launcher replaced (it reads replicas.json in the bucket:
nothing outside can reach this Job). trainer.py starts once a replica is ready, under torchrun where there are several
GPUs. At the end the replica Jobs are cancelled from here too, in case the launcher's machine is gone.

    REPLICAS='[{"id": "0", "url": "http://127.0.0.1:9001", "job": "..."}]' python trainer_job.py --run NAME ...
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import requests

from config import Config, config_from, make_parser, to_flags

HERE = Path(__file__).resolve().parent


def run(cfg: Config) -> int:
    """Run the proxy and the trainer; the proxy is restarted if it dies, and told of replicas that were replaced."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    replicas = json.loads(os.environ["REPLICAS"])
    announcement = Path(cfg.bucket, cfg.run, "replicas.json")
    proxy, trainer = start_proxy(cfg, replicas), None
    try:
        deadline = time.monotonic() + 60 * cfg.ready_wait_min
        while trainer is None or trainer.poll() is None:
            if proxy.poll() is not None:
                print(f"the proxy ended with code {proxy.returncode}: starting it again", flush=True)
                proxy = start_proxy(cfg, replicas)
            if trainer is None and get_json(f"http://{cfg.host}:{cfg.port}/proxy/stats").get("ready"):
                trainer = subprocess.Popen([*trainer_command(), *to_flags(cfg)])
            if trainer is None and time.monotonic() > deadline:
                print(f"error: no replica became ready within {cfg.ready_wait_min:g} min", flush=True)
                return 1
            replicas = tell_proxy(cfg, announcement, replicas)
            time.sleep(0.3)
        return trainer.returncode if trainer.returncode >= 0 else 128 - trainer.returncode
    finally:
        stop([p for p in (trainer, proxy) if p])
        cancel_replicas(cfg)


def start_proxy(cfg: Config, replicas: list[dict]) -> subprocess.Popen:
    """The proxy as a child process, with the replicas known so far."""
    urls = ",".join(replica["url"] for replica in replicas)
    return subprocess.Popen([sys.executable, str(HERE / "proxy.py"), f"--replicas={urls}", *proxy_flags(cfg)])


def proxy_flags(cfg: Config) -> list[str]:
    """The flags of a configuration that proxy.py takes: all but --replicas, which means URLs there."""
    return [text for text in to_flags(cfg) if not text.startswith("--replicas=")]


def trainer_command() -> list[str]:
    """How trainer.py is run here: under torchrun where there are several GPUs."""
    gpus = 0
    if shutil.which("nvidia-smi"):
        gpus = len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())
    if gpus > 1:
        return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={gpus}", str(HERE / "trainer.py")]
    return [sys.executable, str(HERE / "trainer.py")]


def tell_proxy(cfg: Config, announcement: Path, known: list[dict]) -> list[dict]:
    """Pass on replicas.json if it names other replicas than the proxy knows; returns what it knows now."""
    try:
        wanted = json.loads(announcement.read_text())["replicas"]
    except (OSError, ValueError, KeyError):
        return known
    route = f"http://{cfg.host}:{cfg.port}/proxy/replicas"
    for replica in [r for r in known if r not in wanted and r["id"] in {w["id"] for w in wanted}]:
        requests.delete(f"{route}/{replica['id']}", timeout=30)
        known = [r for r in known if r != replica]
    for replica in [w for w in wanted if w not in known]:
        if requests.post(route, json=replica, timeout=30).ok:
            known = [*known, replica]
    return known


def cancel_replicas(cfg: Config) -> None:
    """Cancel the replica Jobs of this run; on one machine the launcher does it."""
    if not os.environ.get("HF_TOKEN") or not os.environ.get("JOB_ID"):
        return
    from huggingface_hub import HfApi

    api, namespace = HfApi(), cfg.namespace or None
    for job in api.list_jobs(labels={"run": cfg.run, "role": "replica"}, namespace=namespace):
        if job.status.stage in ("SCHEDULING", "RUNNING"):
            api.cancel_job(job_id=job.id, namespace=namespace)


def get_json(url: str) -> dict:
    """A small JSON document of the proxy; {} while it cannot be had."""
    try:
        return requests.get(url, timeout=5).json()
    except (requests.RequestException, ValueError):
        return {}


def stop(processes: list[subprocess.Popen], grace_s: float = 5.0) -> None:
    """SIGTERM in the order given, SIGKILL to what is left after grace_s."""
    for process in processes:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    sys.exit(run(config_from(make_parser(__doc__).parse_args())))
