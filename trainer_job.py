"""What the trainer Job runs: the proxy and the trainer, both watched.

The proxy is restarted if it dies and told of replicas that the launcher replaced (it reads replicas.json in the bucket:
nothing outside can reach this Job). trainer.py starts once a replica is ready, under torchrun where there are several
GPUs. At the end the replica Jobs are cancelled from here too, in case the launcher's machine is gone.

    REPLICAS='[{"id": "0", "url": "http://127.0.0.1:9001", "job": "..."}]' python trainer_job.py --run NAME ...

With --network-group the URLs are of the private network: they begin with its prefix, which only Jobs of the group
know, and the proxy gets no token to send along.
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
from hub_jobs import API_ERRORS, one_line, open_hub, patiently

HERE = Path(__file__).resolve().parent


def run(cfg: Config) -> int:
    """Run the proxy and the trainer; the proxy is restarted if it dies, and told of replicas that were replaced."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    replicas = wanted_replicas(cfg, os.environ["REPLICAS"])
    proxy, trainer = start_proxy(cfg, []), None  # told of the replicas below, by the names they have as Jobs
    try:
        deadline = time.monotonic() + 60 * cfg.ready_wait_min
        while trainer is None or trainer.poll() is None:
            if proxy.poll() is not None:
                if proxy.returncode == 2 and trainer is None:  # bad input, as it has just said: no restart mends that
                    return 2
                print(f"the proxy ended with code {proxy.returncode}: starting it again", flush=True)
                proxy = start_proxy(cfg, replicas)
            stats = get_json(f"http://{cfg.host}:{cfg.port}/proxy/stats")
            if trainer is None and stats.get("ready"):
                trainer = subprocess.Popen(trainer_command(cfg, num_gpus()))
            if trainer is None and time.monotonic() > deadline:
                print(f"error: no replica became ready within {cfg.ready_wait_min:g} min", flush=True)
                return 1
            replicas = announced_replicas(cfg) or replicas
            tell_proxy(cfg, stats, replicas)
            time.sleep(0.3)
        return trainer.returncode if trainer.returncode >= 0 else 128 - trainer.returncode
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: this is the clean-up
        stop([p for p in (trainer, proxy) if p])
        cancel_replicas(cfg)


def wanted_replicas(cfg: Config, text: str) -> list[dict]:
    """Replicas as the launcher wrote them, with the prefix of the network group in their URLs filled in."""
    replicas = [{**replica, "url": os.path.expandvars(replica["url"])} for replica in json.loads(text)]
    if any("$" in replica["url"] for replica in replicas):
        raise SystemExit(f"error: HF_NETWORK_GROUP_PREFIX is not set: is this Job in the group {cfg.network_group}?")
    return replicas


def announced_replicas(cfg: Config) -> list[dict]:
    """The replicas of this launch in replicas.json; [] while it cannot be read, or is an earlier launch's."""
    try:
        document = json.loads(Path(cfg.bucket, cfg.run, "replicas.json").read_text())
        if document["attempt"] != os.environ["ATTEMPT"]:
            return []
        return wanted_replicas(cfg, json.dumps(document["replicas"]))
    except (OSError, ValueError, KeyError):
        return []


def start_proxy(cfg: Config, replicas: list[dict]) -> subprocess.Popen:
    """The proxy as a child process; one that starts again finds the live policies on the replicas it is given."""
    urls = ",".join(replica["url"] for replica in replicas)
    env = {name: value for name, value in os.environ.items() if name != "HF_TOKEN" or not cfg.network_group}
    command = [sys.executable, str(HERE / "proxy.py"), f"--replicas={urls}", *proxy_flags(cfg)]
    return subprocess.Popen(command, env=env)


def proxy_flags(cfg: Config) -> list[str]:
    """The flags of a configuration that proxy.py takes: all but --replicas, which means URLs there."""
    return [text for text in to_flags(cfg) if not text.startswith("--replicas=")]


def num_gpus() -> int:
    """How many GPUs this Job has."""
    if not shutil.which("nvidia-smi"):
        return 0
    return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())


def trainer_command(cfg: Config, num_processes: int) -> list[str]:
    """How trainer.py is run: under torchrun if there is to be more than one process."""
    command = [str(HERE / "trainer.py"), *to_flags(cfg)]
    if num_processes > 1:  # without the -- torchrun would take --run for one of its own flags
        command = ["-m", "torch.distributed.run", f"--nproc-per-node={num_processes}", "--", *command]
    return [sys.executable, *command]


def tell_proxy(cfg: Config, stats: dict, wanted: list[dict]) -> None:
    """Make the proxy's replicas the wanted ones; they are told apart by URL, for a restarted proxy numbers anew."""
    if "replicas" not in stats:
        return  # the proxy is not up yet
    route = f"http://{cfg.host}:{cfg.port}/proxy/replicas"
    has = {replica["url"]: replica for replica in stats["replicas"]}
    urls = {replica["url"] for replica in wanted}
    try:
        for replica in [r for url, r in has.items() if url not in urls and r["state"] != "draining"]:
            requests.delete(f"{route}/{replica['id']}", timeout=30)
        for replica in [r for r in wanted if r["url"] not in has]:
            if requests.post(route, json=replica, timeout=30).status_code == 409:  # its id is still in use
                requests.post(route, json={"url": replica["url"], "job": replica["job"]}, timeout=30)
    except requests.RequestException as error:
        print(f"the proxy could not be told of its replicas, trying again: {type(error).__name__}", flush=True)


def cancel_replicas(cfg: Config) -> None:
    """Cancel the replica Jobs of this launch; on one machine, where there is no namespace, the launcher does it."""
    if not cfg.namespace:
        return
    api, here = open_hub(), {"namespace": cfg.namespace}
    labels = {"run": cfg.run, "role": "replica", "attempt": os.environ["ATTEMPT"]}
    for tried in (1, 2, 3):
        try:
            jobs = patiently(60, lambda: [*api.list_jobs(labels=labels, **here)])
            for job in [job for job in jobs if job.status.stage in ("SCHEDULING", "RUNNING")]:
                patiently(60, lambda job=job: api.cancel_job(job_id=job.id, **here))
            return
        except API_ERRORS as error:
            print(f"error: the replicas could not be cancelled (try {tried} of 3): {one_line(error)}", flush=True)


def get_json(url: str) -> dict:
    """A small JSON document of the proxy; {} while it cannot be had."""
    try:
        return requests.get(url, timeout=5).json()
    except (requests.RequestException, ValueError):
        return {}


def stop(processes: list[subprocess.Popen], grace_s: float = 20.0) -> None:
    """SIGTERM in the order given, SIGKILL to what is left after grace_s."""
    for process in processes:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == "__main__":
    sys.exit(run(config_from(make_parser(__doc__).parse_args())))
