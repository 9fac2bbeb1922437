"""Alerts as Block Kit, built and checked by Slack's own models: what, since when, cause, evidence, what Foreshock does.

Limits (https://docs.slack.dev/reference/block-kit): 50 blocks, 3000 characters a section, 150 a header, 75 a button,
2000 its value. All text of one message together is refused from about 12,000 characters on, which Slack does not
document (https://github.com/slackapi/bolt-js/issues/2509), hence the budget. What came from elsewhere is escaped and
sent `verbatim`: no mention, link or channel name in it comes to life.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from slack_sdk.errors import SlackObjectFormationError
from slack_sdk.models.blocks import ActionsBlock, Block, ButtonElement, ContextBlock, HeaderBlock, SectionBlock
from slack_sdk.models.blocks.basic_components import ConfirmObject, MarkdownTextObject, PlainTextObject

from foreshock_service.alerts.base import Message, Never
from foreshock_service.alerts.words import number, one_line, tame, verb_of

MAX_BLOCKS: Final = 50
HEADER_LIMIT: Final = 150
SECTION_LIMIT: Final = 3000
TEXT_BUDGET: Final = 10_000
PART_LIMIT: Final = 2000
"""What, cause, evidence, commands: four of them stay within the budget."""
RUNS_LIMIT: Final = 700
"""Characters of run names, and of what happened to them, in one line of a digest."""
SHOWN_NUMBERS: Final = 5
SHOWN_COMMANDS: Final = 6
MARKS: Final = {"critical": ":rotating_light:", "warning": ":warning:"}
APPROVE, REJECT = "foreshock_approve", "foreshock_reject"
_SLACK_USER: Final = re.compile(r"slack:([UW][A-Z0-9]{2,20})")


def escaped(text: object) -> str:
    """Tamed, and with Slack's three control characters spelled out."""
    return tame(str(text)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def code(text: object) -> str:
    """In a code span that its content cannot leave."""
    return f"`{' '.join(escaped(text).replace('`', 'ˋ').split())}`"


def person(name: object) -> str:
    """Who decided: a mention where they are known by their Slack id, else their name."""
    found = _SLACK_USER.fullmatch(str(name or ""))
    return f"<@{found[1]}>" if found else escaped(name)


def headline(message: Message) -> str:
    """One line, escaped: what happened to which run."""
    payload = message.payload
    incident: Mapping[str, Any] = payload.get("incident") or {}
    run, verb = escaped(payload.get("run", "")), verb_of(message.event)
    if message.event.startswith("command."):
        command: Mapping[str, Any] = (payload.get("commands") or [{}])[0]
        about = f" for {escaped(incident['rule'])}" if incident else ""
        text = f"{run}: command {escaped(command.get('kind', ''))} {verb}{about}"
    else:
        mark = MARKS.get(str(incident.get("severity")), "") if verb != "resolved" else ":white_check_mark:"
        text = f"{mark} {run}: {escaped(incident.get('rule', ''))} {verb}"
    return " ".join(text.split())


def alert(message: Message, link: str | None, *, buttons: bool = False) -> list[dict[str, Any]]:
    """The blocks of one alert. Raises Never where Slack's models refuse them."""
    payload = message.payload
    incident: Mapping[str, Any] = payload.get("incident") or {}
    blocks: list[Block] = [_header(headline(message))]
    if incident:
        since = f"since step {incident.get('onset_step')}, seen at step {incident.get('opened_step')}"
        said = f"*{escaped(incident.get('severity'))}* {since}, attempt {incident.get('attempt')}{_standing(incident)}"
        blocks.append(_section(f"{said}\n{escaped(incident.get('message'))}", PART_LIMIT))
    if cause := payload.get("cause"):
        blocks.append(_section(f"*Likely cause*\n{escaped(cause)}{_confidence(incident)}", PART_LIMIT))
    if numbers := [e for e in incident.get("evidence", ()) if "signal" in e][:SHOWN_NUMBERS]:
        blocks.append(
            _section("*Evidence*\n" + "\n".join(f"• {number(e, code, escaped)}" for e in numbers), PART_LIMIT)
        )
    commands = list(payload.get("commands") or ())[:SHOWN_COMMANDS]
    if commands:
        blocks.append(_section("*Foreshock*\n" + "\n".join(_command(c) for c in commands), PART_LIMIT))
    if buttons and payload.get("mode") != "observe":
        blocks += [_buttons(c) for c in commands if c.get("state") == "proposed" and not c.get("advisory")]
    if link:
        blocks.append(_section(_link(link, "Open in Foreshock")))
    blocks.append(ContextBlock(elements=[_text(f"delivery {message.delivery_id}")]))
    return checked(blocks)


def digest(messages: Sequence[Message], delivery: str, link: str | None) -> tuple[str, list[dict[str, Any]]]:
    """(title, blocks) of many alerts: every run with what happened to it, as far as Slack's limits reach."""
    counts = Counter(m.event for m in messages)
    title = f"{len(messages)} alerts: " + ", ".join(f"{n} x {event}" for event, n in counts.most_common())
    by_run: dict[str, list[Message]] = defaultdict(list)
    for message in messages:
        by_run[str(message.payload.get("run", ""))].append(message)
    blocks: list[Block] = [_header(title)]
    text, spent, shown = "", 0, 0
    for line, runs in _lines(by_run):
        if spent + len(line) > TEXT_BUDGET:
            break
        if len(text) + len(line) + 1 > SECTION_LIMIT:
            blocks.append(_section(text))
            text = ""
        text, spent, shown = f"{text}\n{line}".lstrip("\n"), spent + len(line) + 1, shown + runs
    if text:
        blocks.append(_section(text))
    if rest := len(by_run) - shown:
        blocks.append(_section(f"… and {rest} more runs"))
    if link:
        blocks.append(_section(_link(link, "All in Foreshock")))
    blocks.append(ContextBlock(elements=[_text(f"digest {delivery}")]))
    return title, checked(blocks)


def checked(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """As JSON, after Slack's models have had their say. Raises Never."""
    if len(blocks) > MAX_BLOCKS:
        raise Never(f"{len(blocks)} blocks are more than Slack takes")
    try:
        made = [block.to_dict() for block in blocks]
    except SlackObjectFormationError as error:
        raise Never(f"not a message that Slack takes: {error}") from error
    return made


def note(text: str) -> list[dict[str, Any]]:
    """One section of text that is escaped already."""
    return checked([_section(text)])


def _lines(by_run: Mapping[str, Sequence[Message]]) -> Iterator[tuple[str, int]]:
    """(line, how many runs it tells of): runs to which the same happened share one, the worst come first."""
    alike: dict[str, list[str]] = defaultdict(list)
    rank: dict[str, tuple[int, int]] = {}
    for run, messages in by_run.items():
        told = _of_run(messages)
        alike[told].append(run)
        worst = (_criticals(messages), len(messages))
        rank[told] = max(rank.get(told, (0, 0)), worst)
    for told in sorted(alike, key=lambda told: (*(-n for n in rank[told]), told)):
        mark = MARKS["critical" if rank[told][0] else "warning"]
        runs = sorted(alike[told])
        while runs:
            some = [runs.pop(0)]
            while runs and sum(len(run) + 4 for run in some) + len(runs[0]) < RUNS_LIMIT:
                some.append(runs.pop(0))
            yield _cut(f"{mark} {', '.join(f'*{escaped(run)}*' for run in some)}: {told}", 2 * RUNS_LIMIT), len(some)


def _of_run(messages: Sequence[Message]) -> str:
    by_event: dict[str, list[str]] = defaultdict(list)
    for message in messages:
        payload = message.payload
        about = (payload.get("incident") or {}).get("rule", "")
        if message.event.startswith("command."):
            about = (payload.get("commands") or [{}])[0].get("kind", "")
        by_event[verb_of(message.event)].append(escaped(about))
    return _cut("; ".join(f"{verb} {', '.join(abouts)}" for verb, abouts in by_event.items()), RUNS_LIMIT)


def _criticals(messages: Sequence[Message]) -> int:
    return sum((m.payload.get("incident") or {}).get("severity") == "critical" for m in messages)


def _standing(incident: Mapping[str, Any]) -> str:
    status = incident.get("status")
    if status == "acknowledged":
        return f" · acknowledged by {person(incident.get('acknowledged_by'))}"
    if status == "resolved":
        return f" · resolved at step {incident.get('resolved_step')}"
    return f" · {escaped(status)}" if status == "mitigated" else ""


def _confidence(incident: Mapping[str, Any]) -> str:
    scored = [c for c in incident.get("causes") or () if isinstance(c.get("score"), int | float)]
    return "".join(f"\n• {escaped(c.get('title') or c.get('name'))}: {c['score']:.0%}" for c in scored)


def _command(command: Mapping[str, Any]) -> str:
    what = "would do (the run only observes)" if command.get("advisory") else escaped(command.get("became"))
    by = command.get("decided_by")
    open_still = command.get("state") in ("proposed", "expired", "cancelled")
    decided = f" (decided by {person(by)})" if by and by != "policy" and not open_still else ""
    return f"• {code(command.get('kind'))}: {what}{decided}. {escaped(command.get('reason', ''))}".rstrip()


def _buttons(command: Mapping[str, Any]) -> Block:
    kind, value = one_line(str(command.get("kind"))), str(command.get("id"))
    ask = ConfirmObject(
        title="Send it to the trainer?",
        text=PlainTextObject(text=_cut(f"{kind} is carried out at the next step boundary.", 300)),
        confirm="Approve",
        deny="Not yet",
    )
    approve = ButtonElement(
        text=_cut(f"Approve {kind}", 75), action_id=APPROVE, value=value, style="primary", confirm=ask
    )
    return ActionsBlock(
        block_id=f"command:{value}",
        elements=[approve, ButtonElement(text="Reject", action_id=REJECT, value=value, style="danger")],
    )


def _header(text: str) -> Block:
    return HeaderBlock(text=PlainTextObject(text=_cut(text, HEADER_LIMIT), emoji=True))


def _section(text: str, limit: int = SECTION_LIMIT) -> Block:
    return SectionBlock(text=_text(_cut(text, limit)))


def _text(text: str) -> MarkdownTextObject:
    return MarkdownTextObject(text=text, verbatim=True)


def _link(url: str, text: str) -> str:
    """Our own, so it is not tamed; its characters are those of the settings' URL and of a run's name."""
    for character, spelled in (("&", "&amp;"), ("<", "%3C"), (">", "%3E"), ("|", "%7C")):
        url = url.replace(character, spelled)
    return f"<{url}|{text}>"


def _cut(text: str, limit: int) -> str:
    """At most `limit` characters, and never half of an `&amp;`."""
    if len(text) <= limit:
        return text
    return re.sub(r"&[a-z]{0,3}$", "", text[: limit - 1]) + "…"
