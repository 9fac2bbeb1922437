"""Keeps token records of a run: the step in progress, the ring of past steps, and the thread that writes them.

The training thread copies tensors and appends; turning them into a table, compressing and the disk are the thread's.
Whatever fails here costs a counter (`dump_…` in the losses) and at last the dumps alone, never the trainer or a frame.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from foreshock.dumps.files import Budget, write
from foreshock.dumps.plan import Place, Watch, sampled
from foreshock.dumps.schema import VERSION, About
from foreshock.frames.comparable import sides
from foreshock.settings import Settings
from foreshock.transport.losses import Losses

if TYPE_CHECKING:
    from foreshock.dumps.capture import Observed

_log = getLogger("foreshock")
FAILURES = 5
"""Failures in a row after which no more is kept."""
DEVICE_WAIT_S = 30.0
"""A copy from a device that has not arrived by then is given up."""


class Step(NamedTuple):
    """A captured step."""

    number: int
    place: Place
    observed: list[Observed]
    size: int


class Job(NamedTuple):
    """A step to write, and why."""

    step: Step
    reason: str
    verdict: str


class Keeper:
    """One process's dumps. Everything but `_run` and what it calls is called by the training and sender threads."""

    def __init__(self, settings: Settings, client: str, config: dict[str, Any], sdk: str, losses: Losses) -> None:
        self._settings = settings
        self._client = client
        self._config = config
        self._sdk = sdk
        self._losses = losses
        self._folder = Path(settings.dump_dir)
        self._budget = Budget(settings.dump_disk_bytes)
        self._watch = Watch(settings.dump_after)
        self._semantics: dict[str, dict[str, Any]] = {}
        self._next: tuple[str, int] | None = None
        """Run and number of the step in progress, as the last one lets expect."""
        self._current: list[Observed] = []
        self._ring: deque[Step] = deque()
        self._jobs: deque[Job] = deque()
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._writing = False
        self._closed = False
        self.off = not settings.dump_dir
        self.written: list[Path] = []
        """The files so far."""

    # --- the training thread ---------------------------------------------------------------------------------------

    def observe(self, pair: str, given: dict[str, Any], semantics: Any, **about: Any) -> None:
        """Copies an observation, where this or a later step may be kept. Raises nothing."""
        if self.off or not self._wanted():
            return
        try:
            from foreshock.dumps.capture import capture, size_of

            if self._held() + size_of(given["a"], given) > self._settings.dump_memory_bytes:
                self._lose("dump_memory")
                return
            self._current.append(capture(pair, given, **about))
            if semantics is not None and pair not in self._semantics:
                self._semantics[pair] = msgspec.to_builtins(sides(semantics))
        except Exception as error:
            self._failed("copying tokens", error)

    def end_step(self, number: int, place: Place) -> None:
        """Ends the step in progress: to the writer, into the ring, or away. Raises nothing."""
        if self.off:
            return
        observed, self._current = self._current, []
        self._next = (place.run, number + 1)
        step = Step(number, place, observed, sum(o.size for o in observed))
        with self._lock:
            spell = self._watch.open
            if observed:
                if spell:
                    self._queue(Job(step, self._watch.reason, self._watch.verdict))
                elif sampled(place.run, number, self._settings.dump_share):
                    self._queue(Job(step, "sampled", ""))
                    self._remember(step._replace(observed=[], size=0))
                else:
                    self._remember(step)
            if spell:
                self._watch.step_ended()

    def told(self, verdict: str) -> None:
        """The service's verdict on the run (the sender's thread)."""
        if self.off:
            return
        with self._lock:
            if self._watch.told(verdict):
                self._empty_ring()

    def ask(self, reason: str) -> None:
        """Keeps the ring and the next steps, because the host asks."""
        if self.off:
            return
        with self._lock:
            if self._watch.begin(reason):
                self._empty_ring()

    def close(self, timeout_s: float, crashed: bool = False) -> None:
        """Waits at most `timeout_s` for what is queued; a crash also keeps the ring."""
        if self.off:
            return
        with self._lock:
            if crashed:
                self._watch.begin("crashed")
                self._empty_ring()
            self._ring.clear()
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while (self._jobs or self._writing) and time.monotonic() < deadline and not self.off:
                self._lock.wait(0.05)
            self._closed = True
            self._lose("dump_unwritten", len(self._jobs))
            self._jobs.clear()
            self._lock.notify_all()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _wanted(self) -> bool:
        if self._settings.dump_ring > 0 or self._watch.open:
            return True
        return self._next is None or sampled(*self._next, self._settings.dump_share)

    def _held(self) -> int:
        with self._lock:
            waiting = sum(job.step.size for job in self._jobs)
            ring = sum(step.size for step in self._ring)
            now = sum(o.size for o in self._current)
            # The ring gives way before the step in progress does.
            while self._ring and waiting + ring + now > self._settings.dump_memory_bytes // 2:
                ring -= self._ring.popleft().size
            return waiting + ring + now

    def _remember(self, step: Step) -> None:
        self._ring.append(step)
        while len(self._ring) > self._settings.dump_ring:
            self._ring.popleft()

    def _empty_ring(self) -> None:
        while self._ring:
            step = self._ring.popleft()
            if step.observed:
                self._queue(Job(step, self._watch.reason, self._watch.verdict))

    def _queue(self, job: Job) -> None:
        self._jobs.append(job)
        self._lock.notify_all()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="foreshock-dumps", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # interpreter shutdown
                self._thread = None

    def _lose(self, reason: str, count: int = 1) -> None:
        if count:
            self._losses.add(reason, count)

    def _failed(self, what: str, error: BaseException) -> None:
        """Counts; the first failure of a row is logged, the last one ends the dumps."""
        self._failures += 1
        if self._failures == 1:
            _log.warning("foreshock: %s failed, training goes on (logged once): %r", what, error)
        if self._failures >= FAILURES or isinstance(error, ImportError):
            self.off = True
            with self._lock:
                self._current, self._ring = [], deque()
                self._lose("dump_unwritten", len(self._jobs))
                self._jobs.clear()
            _log.error("foreshock: no more token dumps: %r", error)

    # --- the dump's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._jobs and not self._closed:
                    self._lock.wait()
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._writing = True
            try:
                self._write(job)
                self._failures = 0
            except Exception as error:
                self._lose("dump_failed")
                self._failed("writing a token dump", error)
            finally:
                with self._lock:
                    self._writing = False
                    self._lock.notify_all()
            if self.off:
                return

    def _write(self, job: Job) -> None:
        deadline = time.monotonic() + DEVICE_WAIT_S
        while not all(o.ready() for o in job.step.observed):
            if time.monotonic() > deadline:
                raise TimeoutError("the device's copies have not arrived")
            time.sleep(0.005)
        place = job.step.place
        about = About(
            version=VERSION, run=place.run, sdk=self._sdk, reason=job.reason, verdict=job.verdict,
            config=self._config, semantics=dict(self._semantics),
        )  # fmt: skip
        path = write(self._folder, job.step.number, place, job.step.observed, about, self._client, self._budget)
        if path is None:
            self._lose("dump_disk")
        else:
            self.written.append(path)
