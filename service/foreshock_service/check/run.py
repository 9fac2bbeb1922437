"""One log from file to report: read, assemble, translate, judge, tell the story."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from foreshock_service.check.assemble import Assembler, RawStep
from foreshock_service.check.judge import Incident, Judge, Report
from foreshock_service.check.readers import Log, open_log
from foreshock_service.check.readers.base import Unreadable
from foreshock_service.check.story import link
from foreshock_service.rules.pack import Pack

Watch = Callable[[str, Incident, int], None]
"""Called with ('open' | 'escalate' | 'close', incident, step) as things happen."""


def check(
    path: Path,
    pack: Pack,
    *,
    interval: int = 1,
    follow_idle_s: float | None = None,
    trace: bool = False,
    watch: Watch | None = None,
    hidden: frozenset[str] = frozenset(),
) -> Report:
    """The report on one log; one that cannot be read is a report too, with verdict `unreadable`.

    `interval`: steps between two lines where the log has no numbers. Interrupting a followed log ends it. `hidden`:
    signals taken for not logged.
    """
    judge = Judge(pack, trace=trace, hidden=hidden)
    log: Log | None = None
    try:
        log = open_log(path, follow_idle_s=follow_idle_s)
        assembler = Assembler(log.notes, interval)
        try:
            for row in log.rows:
                for raw in assembler.feed(row):
                    _judge(judge, raw, watch)
        except KeyboardInterrupt:
            if follow_idle_s is None:
                raise
        for raw in assembler.flush():
            _judge(judge, raw, watch)
    except (Unreadable, OSError) as error:
        return _unreadable(log, str(error))
    if not any(not signal.startswith("host.") for signal in judge.signals):
        return _unreadable(log, "no training step was found in it: no line names a series that is known here")
    report = judge.report(log.format, log.notes.sentences())
    link(report.incidents)
    return report


def _judge(judge: Judge, raw: RawStep, watch: Watch | None) -> None:
    for what, incident in judge.feed(raw):
        if watch is not None:
            watch(what, incident, raw.step)


def _unreadable(log: Log | None, problem: str) -> Report:
    notes = log.notes.sentences() if log else []
    return Report("unreadable", log.format if log else None, 0, [], notes=notes, problem=problem)
