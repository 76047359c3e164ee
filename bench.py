"""What each claim in the README rests on: figures measured side by side in one run, beside their aims.

    python bench.py rewards          # scoring: throughput, false positives, what hung and hungry answers cost
    python bench.py proxy            # the proxy: CPU, latency, capacity, and replicas killed under load
    python bench.py routing          # cold prefills and balance over 1,460 prompts, simulated with the proxy's router
    python bench.py scale            # what limits the system from 1 to 64 replicas, simulated
    python bench.py trainer          # the gradient step against plain transformers and PEFT (--model-shape on a GPU)
    python bench.py sync             # how long a publish holds the trainer up, on a slow bucket
    python bench.py hub              # the demo on the tests' fake Hub against --local
    python bench.py chaos            # the whole local run under kill -9 of replicas, proxy and trainer
    python bench.py vllm             # real vLLM servers: the demo on-policy, loads, and a replica killed (VLLM_PYTHON)

Prints a table and saves it as bench/<name>.json and bench/<name>.png. Run it on a machine that does nothing else.
"""

import argparse
import importlib
import sys
from pathlib import Path

NAMES = ("rewards", "proxy", "routing", "scale", "trainer", "sync", "hub", "chaos", "vllm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = parser.add_subparsers(dest="name", required=True)
    modules = {name: importlib.import_module(f"benches.bench_{name}") for name in NAMES if name in sys.argv}
    for name in NAMES:
        subparser = subparsers.add_parser(name)
        subparser.add_argument(
            "--save-to", type=Path, default=Path("bench"), help="directory of the JSON and the picture"
        )
        if name in modules:
            modules[name].add_flags(subparser)
    args = parser.parse_args()

    from benches.figures import save

    figures = modules[args.name].run(args)
    for path in save(args.name, figures, args.save_to):
        print(path)
    return 0 if all(figure["met"] for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
