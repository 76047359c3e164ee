"""What the trainer Job runs: the proxy and the trainer, both watched.

The proxy is restarted if it dies, on the same port, and told which replicas there are, as the launcher writes into
replicas.json in the bucket: nothing outside can reach this Job. A new proxy knows no policy; the trainer loads its own
again. trainer.py starts once a replica is ready. At the end the replica Jobs are cancelled from here too, in case the
launcher's machine is gone.

    ATTEMPT=1 python -m jobs.trainer_job --run R    # ATTEMPT: the launch's number, as in replicas.json

With --network-group the URLs are of the private network: they begin with its prefix, which only Jobs of the group
know, and the proxy gets no token to send along.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import requests

from config import Config, config_from, make_parser, to_flags
from jobs.hub import API_ERRORS, one_line, open_hub, patiently
from jobs.local import TERMINAL, call_this_machine_directly, free_port

CODE = Path(__file__).resolve().parent.parent


def run(cfg: Config) -> int:
    """Run the proxy and, once a replica is ready, the trainer: its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    proxy, trainer, replicas = start_proxy(cfg), None, []
    deadline = time.monotonic() + 60 * cfg.ready_wait_min
    try:
        while trainer is None or trainer.poll() is None:
            if proxy.poll() is not None:
                if proxy.returncode == 2 and trainer is None:  # bad input, as it has just said
                    return 2
                print(f"the proxy ended with code {proxy.returncode}: starting it again", flush=True)
                proxy = start_proxy(cfg)
            replicas = announced_replicas(cfg) or replicas
            ready = tell_proxy(f"http://{cfg.host}:{cfg.port}/proxy", replicas)
            if trainer is None and ready:
                trainer = subprocess.Popen([sys.executable, str(CODE / "trainer.py"), *to_flags(cfg)])
            if trainer is None and time.monotonic() > deadline:
                print(f"error: no replica became ready within --ready-wait-min {cfg.ready_wait_min:g}", flush=True)
                return 1
            time.sleep(0.3)
        return trainer.returncode if trainer.returncode >= 0 else 128 - trainer.returncode
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: this is the clean-up
        stop([process for process in (trainer, proxy) if process])
        if cfg.namespace:  # on one machine, where there is none, the launcher does it
            cancel_replicas(cfg)


def start_proxy(cfg: Config) -> subprocess.Popen:
    """The proxy of this run as a child process, with no replicas yet."""
    env = {name: value for name, value in os.environ.items() if name != "HF_TOKEN" or not cfg.network_group}
    flags = [text for text in to_flags(cfg) if not text.startswith("--replicas=")]  # which means URLs there
    return subprocess.Popen([sys.executable, str(CODE / "proxy.py"), *flags], env=env)


def announced_replicas(cfg: Config) -> list[dict]:
    """The replicas of this launch in replicas.json; [] while it cannot be read, or is an earlier launch's."""
    try:
        document = json.loads(Path(cfg.bucket, cfg.run, "replicas.json").read_text())
        replicas = document["replicas"] if document["attempt"] == os.environ["ATTEMPT"] else []
    except (OSError, ValueError, KeyError):
        return []
    return [{**replica, "url": os.path.expandvars(replica["url"])} for replica in replicas]


def tell_proxy(route: str, wanted: list[dict]) -> int:
    """Make the proxy's replicas the wanted ones, told apart by URL; how many are ready, 0 while it does not answer."""
    try:
        stats = requests.get(f"{route}/stats", timeout=5).json()
        has = {replica["url"]: replica for replica in stats["replicas"]}
        gone = has.keys() - {replica["url"] for replica in wanted}
        for replica in [has[url] for url in gone if has[url]["state"] != "draining"]:
            requests.delete(f"{route}/replicas/{replica['id']}", timeout=30)
        for replica in [replica for replica in wanted if replica["url"] not in has]:
            requests.post(f"{route}/replicas", json=replica, timeout=30)
        return stats["ready"]
    except (requests.RequestException, ValueError, KeyError):
        return 0  # it starts, or is busy: the next look is soon


def cancel_replicas(cfg: Config) -> None:
    """Cancel the replica Jobs of this launch; what cannot be stops itself, without the trainer's heartbeat."""
    api, here = open_hub(), {"namespace": cfg.namespace}
    labels = {"run": cfg.run, "role": "replica", "attempt": os.environ["ATTEMPT"]}
    try:
        jobs = patiently(120, "the Hub to list the replicas", lambda: [*api.list_jobs(labels=labels, **here)])
        for job in [job for job in jobs if job.status.stage not in TERMINAL]:
            patiently(120, "the Hub to cancel a replica", lambda job=job: api.cancel_job(job_id=job.id, **here))
    except API_ERRORS as error:
        print(f"the replicas could not be cancelled: {one_line(error)}", flush=True)


def stop(processes: list[subprocess.Popen], grace_s: float = 20.0) -> None:
    """SIGTERM in the order given, SIGKILL to what is left after grace_s."""
    for process in processes:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> int:
    cfg = config_from(make_parser(__doc__).parse_args())
    call_this_machine_directly()
    if cfg.port == 0:
        cfg = dataclasses.replace(cfg, port=free_port())
        print(f"the proxy's page: http://{cfg.host}:{cfg.port}/", flush=True)
    return run(cfg)


if __name__ == "__main__":
    sys.exit(main())
