"""The trainer's log as the launcher shows it, and the cause of a failure in the log of any Job."""

import contextlib
import itertools
import re
import threading
from typing import Any

from tqdm import tqdm

from jobs.hub import API_ERRORS, say
from jobs.local import TERMINAL

STEP = re.compile(r"step (\d+)/(\d+)  (.*)")  # what trainer.py prints after every step, the time left at its end


def cause_in(lines: list[str]) -> str:
    """The line of a log that says why its Job failed: the last of ours, `error: ...`, or exception, or any."""
    for pattern in ("error: .+", r".*\w(Error|Exception)\b(?!.*See root cause)", r".*\S"):
        if found := [line for line in lines if re.match(pattern, line)]:
            return found[-1].strip()
    return "its log is empty"


class TrainerLog:
    """Shows the trainer's log from a thread: a progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, fleet: Any):
        self.fleet, self.closed = fleet, threading.Event()
        self.bar = tqdm(total=fleet.cfg.max_steps, disable=None, dynamic_ncols=True,
                        bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}")  # fmt: skip
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def close(self, patience_s: float) -> None:
        """Show no more; the last lines may be on their way for patience_s."""
        self.thread.join(patience_s)
        self.closed.set()
        self.bar.close()

    def _show(self, line: str) -> None:
        step, spent = STEP.match(line), self.fleet.spent()
        if step and not self.bar.disable:
            self.bar.n = int(step[1])
            self.bar.set_postfix_str(step[3] + spent)
        elif not line.startswith("proxy:"):
            say(line + (spent if step else ""))

    def _read(self) -> None:
        """A log stream that ends is not a Job that ended: read on, past what was seen, until it has."""
        seen, ended, fleet = 0, False, self.fleet
        while not (ended or self.closed.is_set()):
            ended = fleet.jobs[fleet.trainer].status.stage in TERMINAL
            with contextlib.suppress(*API_ERRORS):  # the launcher's own looks at the Job tell of them
                for line in itertools.islice(
                    fleet.api.fetch_job_logs(job_id=fleet.trainer, follow=True, **fleet.here()), seen, None
                ):
                    if not self.closed.is_set():
                        self._show(line)
                    seen += 1
            self.closed.wait(fleet.place.poll_s)
