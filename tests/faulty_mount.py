"""A bucket mount that lies, on a seed: one store in memory, and a view of it for every machine.

A view is a Path. Code that touches files only by the methods of the Path it was given runs on it unchanged, and fails
loudly where it makes a call that an object mount may lack (rename, chmod, truncate, exclusive create, stat).

- a machine sees its own writes at once, and those of others up to lag_s later, each file at a time of its own, so in
  any order; a listing and the content behind it come at different times; deleted files stay listed for a while
- a file is half visible for a moment before it is whole
- a path that was asked for too early stays "not found" for negative_s
- on request: overwriting is refused, one call fails, hangs or keeps other bytes than it was given, a machine vanishes

    bucket.claim(FaultyMount(seed=1).view("trainer") / "run", cfg)
"""

import errno
import io
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = "/bucket"


class Vanished(BaseException):
    """The machine is gone: nothing after this instruction is run there."""


class Version(NamedTuple):
    """One write or deletion of a path."""

    at_s: float
    machine: str
    data: bytes | None  # None: deleted


@dataclass
class Fault:
    """What goes wrong once: at the machine's `after`-th next call of this kind on a path that ends so."""

    machine: str
    call: str  # open, close, unlink, mkdir, rmdir, any
    ends: str
    what: str  # fail, hang, corrupt, vanish
    after: int = 0


class FaultyMount:
    """The store, its clock, and what is wrong with it."""

    def __init__(self, seed: int, lag_s: float = 10.0, negative_s: float = 30.0, clock: Callable = time.monotonic):
        self.seed, self.lag_s, self.negative_s, self.clock = seed, lag_s, negative_s, clock
        self.versions: dict[str, list[Version]] = defaultdict(list)
        self.directories: dict[str, set[str]] = defaultdict(lambda: {ROOT})  # those a machine has made itself
        self.missed: dict[tuple[str, str], float] = {}  # (machine, path) -> until when it is "not found"
        self.faults: list[Fault] = []
        self.gone: set[str] = set()  # machines that have vanished
        self.overwriting = True  # False: opening a file that exists for writing is refused
        self.thawed = threading.Event()  # what hangs goes on when it is set
        self.lock = threading.RLock()

    def view(self, machine: str) -> Path:
        """The mount's root as this machine sees it."""
        return type("MountPath", (MountPath,), {"mount": self, "machine": machine})(ROOT)

    def truth(self, path: str) -> bytes | None:
        """What a path holds in the store; None if nothing."""
        versions = self.versions.get(path)
        return versions[-1].data if versions else None

    def writers(self, path: str) -> set[str]:
        """The machines that have ever written a path."""
        return {version.machine for version in self.versions[path] if version.data is not None}

    def chance(self, *what: object) -> float:
        """A number in [0, 1) that depends on the seed and on `what` alone, not on the order of calls."""
        return zlib.crc32(repr((self.seed, *what)).encode()) / 2**32

    def seen(self, machine: str, path: str, kind: str) -> bytes | None:
        """The content (kind "data") or the presence (kind "list") of a path for a machine, now; None: not there."""
        now = self.clock()
        for index, version in reversed(list(enumerate(self.versions.get(path, ())))):
            if now >= version.at_s + self.lag_s:
                return version.data
            late_s = self.lag_s * self.chance(machine, path, index, kind)
            if version.machine == machine or now >= version.at_s + late_s:
                return version.data
            half = now >= version.at_s + late_s * self.chance(machine, path, index, "half")
            if half and version.data and kind == "data":
                return version.data[: len(version.data) // 2]
        return None

    def enter(self, machine: str, call: str, path: str) -> str:
        """Begin a call: whatever goes wrong with it happens here; "corrupt" is left to the caller."""
        if machine in self.gone:
            raise Vanished(machine)
        fault = next((f for f in self.faults if f.machine == machine and f.call in (call, "any")
                      and path.endswith(f.ends)), None)  # fmt: skip
        if fault and fault.after:
            fault.after -= 1
        elif fault:
            self.faults.remove(fault)
            if fault.what == "vanish":
                self.gone.add(machine)
                raise Vanished(machine)
            if fault.what == "fail":
                raise OSError(errno.EIO, "input/output error", path)
            if fault.what == "hang":
                self.thawed.wait(60)
                if machine in self.gone:
                    raise Vanished(machine)
            return fault.what
        return ""

    def commit(self, machine: str, path: str, data: bytes | None) -> None:
        """A write or deletion reaches the store."""
        with self.lock:
            self.versions[path].append(Version(self.clock(), machine, data))
            self.missed.pop((machine, path), None)


class Writing(io.BytesIO):
    """A file being written: it exists once it is closed."""

    def __init__(self, path: "MountPath"):
        super().__init__()
        self.path = path

    def close(self) -> None:
        if self.closed:
            return
        data = self.getvalue()
        super().close()
        path, mount, machine = str(self.path), self.path.mount, self.path.machine
        if mount.enter(machine, "close", path) == "corrupt":
            data = data[:-1]
        mount.commit(machine, path, data)


class MountPath(type(Path())):
    """A path on a machine's view of the mount, with the calls that every object mount has."""

    mount: FaultyMount
    machine: str

    def open(self, mode: str = "r", *_, **__) -> io.BytesIO:
        self.mount.enter(self.machine, "open", str(self))
        if mode == "rb":
            return io.BytesIO(self._content())
        if mode != "wb":
            raise OSError(errno.ENOTSUP, f"this mount has no open for {mode!r}", str(self))
        if not self.parent._is_directory():
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(self.parent))
        if not self.mount.overwriting and self.mount.seen(self.machine, str(self), "data") is not None:
            raise PermissionError(errno.EPERM, "a file is written once here", str(self))
        return Writing(self)

    def read_bytes(self) -> bytes:
        with self.open("rb") as file:
            return file.read()

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        self.mount.enter(self.machine, "mkdir", str(self))
        if self._is_directory() and not exist_ok:
            raise FileExistsError(errno.EEXIST, "directory exists", str(self))
        self.mount.directories[self.machine] |= {str(self), *map(str, self.parents)}

    def iterdir(self) -> Iterator["MountPath"]:
        self.mount.enter(self.machine, "iterdir", str(self))
        if not self._is_directory():
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(self))
        return iter([self / name for name in sorted(self._children())])

    def unlink(self, missing_ok: bool = False) -> None:
        self.mount.enter(self.machine, "unlink", str(self))
        if self.mount.seen(self.machine, str(self), "data") is not None:
            self.mount.commit(self.machine, str(self), None)
        elif not missing_ok:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(self))

    def rmdir(self) -> None:
        self.mount.enter(self.machine, "rmdir", str(self))
        if not self._is_directory():
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(self))
        if self._children():
            raise OSError(errno.ENOTEMPTY, "directory not empty", str(self))
        self.mount.directories[self.machine].discard(str(self))

    def _content(self) -> bytes:
        key, now = (self.machine, str(self)), self.mount.clock()
        data = None if now < self.mount.missed.get(key, now) else self.mount.seen(*key, "data")
        if data is None:
            if now >= self.mount.missed.get(key, now):
                self.mount.missed[key] = now + self.mount.negative_s
            raise FileNotFoundError(errno.ENOENT, "no such file", str(self))
        self.mount.missed.pop(key, None)
        return data

    def _children(self) -> set[str]:
        """Names listed here: files that show, and directories that were made here or hold a file that shows."""
        mount, prefix = self.mount, f"{self}/"
        with mount.lock:
            names = {p[len(prefix) :].split("/")[0] for p in mount.directories[self.machine] if p.startswith(prefix)}
            for path in mount.versions:
                name = path[len(prefix) :].split("/")[0] if path.startswith(prefix) else ""
                if name and name not in names and mount.seen(self.machine, path, "list") is not None:
                    names.add(name)
        return names

    def _is_directory(self) -> bool:
        return str(self) in self.mount.directories[self.machine] or bool(self._children())


for _name in ("stat", "exists", "is_file", "is_dir", "glob", "rename", "replace", "chmod", "touch", "read_text",
              "write_bytes", "write_text", "symlink_to"):  # fmt: skip
    setattr(MountPath, _name, property(lambda self: pytest.fail(f"an object mount may lack this call on {self}")))
