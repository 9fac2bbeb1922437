"""What happens to one rollout engine's weights and cache: pushes, labels, flushes; told once a push has settled.

A push may come in many buckets, before or after its label and its flush. It has settled when the engine is asked for
the next response: then one notice `weights` tells of it, with `clean` where no state of the old weights can be in the
cache, and a notice `flush` follows where one came. Labels prove nothing, so the engine's own checksums are asked for
where it has them.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from foreshock.monitor import Monitor

Digests = Mapping[str, str]
"""Tensor → digest."""
Ask = Callable[[bool], tuple[Digests | None, str | None]]
OUTAGE: Final = "after an outage it has other weights than were pushed: it was restarted, or pushed by another client"
EMPTY: Final = hashlib.sha256(b"").hexdigest()
"""Digest of a tensor without bytes: an engine that packed its weights away shows this, moved or not."""


class WeightWatch:
    """One engine. `ask(with_digests)` returns its digests and its label, each None where it does not tell; may raise.

    Digests cost the engine a pass over its weights: they take at most `checksum_share` of the time (0: never asked).
    `run` carries out what asks the engine, in order: at once, or on a thread where asking would wait for a network.
    """

    def __init__(
        self,
        monitor: Monitor,
        engine: str,
        ask: Ask | None,
        checksum_share: float = 0.01,
        run: Callable[[Callable[[], Any]], None] | None = None,
    ) -> None:
        self.engine = engine
        self._monitor = monitor
        self._ask = ask
        self._share = checksum_share
        self._run = _at_once if run is None else run
        self._lock = threading.RLock()
        self._digests: Digests | None = None
        self._label: str | None = None
        self._next_ask_s = 0.0
        self._pair_open = False
        self._epoch = 0
        """Rises with every call that changes weights or labels, when it begins and when it ends."""
        self._updates = 0
        self._failures: list[str] = []
        self._pushed: str | None = None
        self._labelled = False
        self._dirty = False
        """The cache may hold states of responses since the last flush."""
        self._flushed = False
        """A flush came after the push."""
        self._caching = False
        """Cached tokens were ever seen."""
        self._lost = False
        """An answer did not come, and none has come since that was looked after."""
        self._told_epoch = self._digests_epoch = -1
        """The epochs of the last push that was told, and of the digests."""

    def changing(self) -> None:
        """A call that changes weights or labels is on its way: digests asked for from now on may be after it."""
        with self._lock:
            self._epoch += 1

    def updated(self, ok: bool, *, label: str | None = None, flushed: bool = False, message: str = "") -> None:
        """A push, or a bucket of one, was answered; `flushed` where the engine emptied its cache with it."""
        with self._lock:
            self._epoch += 1
            self._updates += 1
            self._flushed = False
            if label is not None:
                self._pushed = label
            if not ok:
                self._failures.append(message[:300])
            elif flushed:
                self.flushed()

    def labelled(self, label: str) -> None:
        """The engine was given a version label by itself."""
        with self._lock:
            self._epoch += 1
            self._pushed, self._labelled = label, True

    def flushed(self) -> None:
        """The engine emptied its cache."""
        with self._lock:
            self._dirty, self._flushed = False, True
            if not self._updates and not self._labelled:
                self._monitor.notice("flush", engine=self.engine)

    def cached(self) -> None:
        """A response found tokens in the cache: the engine keeps one."""
        self._caching = True

    def lost(self) -> None:
        """An answer did not come: the engine may come back with the weights that it was started with."""
        self._lost = True

    def answered(self) -> None:
        """The engine has answered: after an outage it is asked whether it still has what was pushed last."""
        if not self._lost:
            return
        with self._lock:
            if self._updates or self._labelled or time.monotonic() < self._next_ask_s:
                return
            self._lost, epoch = False, self._epoch
            if self._told_epoch != epoch:
                return
        self._run(lambda: self._look_after_outage(epoch))

    def event(self, kind: str, **data: Any) -> None:
        """Something else that happened to the engine: pause, resume, sleep, wake."""
        self._monitor.notice(kind, engine=self.engine, **data)

    def generating(self) -> None:
        """A response is about to be asked for: what was pushed has settled."""
        with self._lock:
            self.settle()
            self._dirty = True

    def baseline(self) -> None:
        """Asks for the digests before any push, so that the first one can be judged."""
        self._run(self._look)

    def settle(self) -> None:
        """Tells of the pushes since the last time, if there were any."""
        with self._lock:
            if not self._updates and not self._labelled:
                return
            data: dict[str, Any] = {"side": "engine", "engine": self.engine, "ok": not self._failures}
            data["updates"] = self._updates
            if self._pushed is not None:
                data["pushed"] = self._pushed
            if self._failures:
                data["message"] = self._failures[0]
            data["clean"] = not self._dirty
            if self._caching:
                data["caching"] = True
            flushed = self._flushed
            self._updates, self._failures, self._pushed = 0, [], None
            self._labelled = self._flushed = self._lost = False
            epoch = self._epoch
        self._run(lambda: self._tell(data, flushed, epoch))

    def _tell(self, data: dict[str, Any], flushed: bool, epoch: int) -> None:
        before, checked = self._digests, self._look()
        if epoch != self._epoch:
            # Another push began meanwhile: whose digests these are, nobody knows.
            checked = self._digests = self._label = None
        else:
            self._told_epoch = epoch
            self._digests_epoch = self._digests_epoch if checked is None else epoch
        data["version"] = self._label if self._label is not None else str(data.get("pushed", ""))
        if checked is not None:
            data["checksum"] = combined(checked)
            if before:
                data["changed_share"] = changed_share(before, checked)
        self._monitor.notice("weights", **data)
        if flushed:
            self._monitor.notice("flush", engine=self.engine)

    def _look_after_outage(self, epoch: int) -> None:
        """Tells of weights that are not those of the last push, by the engine's label or by its digests."""
        label, before = self._label, self._digests if self._digests_epoch == epoch else None
        checked = self._look()
        if epoch != self._epoch:
            self._digests = None
            return
        self._digests_epoch = self._digests_epoch if checked is None else epoch
        relabelled = None not in (label, self._label) and label != self._label
        moved = bool(before and checked and changed_share(before, checked))
        if not relabelled and not moved:
            return
        data: dict[str, Any] = {"side": "engine", "engine": self.engine, "ok": False, "updates": 0, "message": OUTAGE}
        # Whatever was started anew has an empty cache.
        data |= {"pushed": label or "", "version": self._label or "", "clean": True}
        self._monitor.notice("weights", **data | ({"checksum": combined(checked)} if checked else {}))

    def _look(self) -> Digests | None:
        """Fresh digests, or None where they are not told or not due; the label with them."""
        began_s = time.monotonic()
        due = self._share > 0 and (self._pair_open or began_s >= self._next_ask_s)
        # Always of two pushes in a row: weights may return (a rollback), so that others say nothing of each other.
        self._pair_open = due and not self._pair_open
        digests, label = (None, None) if self._ask is None else self._ask(due)
        self._label = label
        if due and self._share < 1:
            now_s = time.monotonic()
            self._next_ask_s = now_s + (now_s - began_s) / self._share
        if digests:
            self._digests = digests
        return digests or None


def _at_once(work: Callable[[], Any]) -> None:
    work()


def combined(digests: Digests) -> str:
    """One digest of all, in the order of their names."""
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(f"{name}={digests[name]};".encode())
    return whole.hexdigest()[:16]


def changed_share(before: Digests, after: Digests) -> float:
    """Share of tensors whose digest moved, over those that show any bytes; 0 where none does."""
    names = [n for n in after if not EMPTY.startswith(after[n]) or not EMPTY.startswith(before.get(n, EMPTY))]
    return sum(after[name] != before.get(name) for name in names) / len(names) if names else 0.0
