"""What changed between two results, as text, JSON or Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from streamlint import __version__
from streamlint.diff import Device, Diff, Fate, Item, Kind, Side
from streamlint.escape import printable
from streamlint.findings import Claim
from streamlint.reporters import View
from streamlint.reporters.markdown import MAX_CHARACTERS, escaped
from streamlint.reporters.text import STYLES, Page, brief_cost, duration

FORMAT_VERSION = 1
"""Grows when a reader of the JSON document would have to change."""
MARK = "<!-- streamlint diff -->"
_HEADINGS = {
    Kind.NEW: "new",
    Kind.GROWN: "grown",
    Kind.SHRUNK: "shrunk",
    Kind.GONE: "gone",
    Kind.SUPPRESSED: "suppressed now",
    Kind.UNTOLD: "can't be told any more",
}


class _Measure(NamedTuple):
    """One line of the comparison: name, before, after, change."""

    name: str
    before: str
    after: str
    change: str


def renderer(name: str) -> Callable[[Diff, View], str]:
    """The renderer of this format."""
    return {"json": _json, "markdown": _markdown}.get(name, _text)


def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of the document."""
    path = Path(__file__).with_name("diff.schema.json")
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def _text(diff: Diff, view: View) -> str:
    page = Page(view.width)
    page.line(f"{_name(diff.before)} -> {_name(diff.after)}", "bold")
    page.line()
    rows = [_Measure("", "before", "after", "change"), *_measures(diff)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        before, after = f"{row.before:>{widths[1]}}", f"{row.after:>{widths[2]}}"
        cells = f"{row.name:<{widths[0]}}  {before}  {after}  {row.change}"
        page.line(cells.rstrip(), "" if row.name else "dim")
    for kind, heading in _HEADINGS.items():
        fates = diff.of(kind)
        if fates:
            page.line()
            page.line(f"{heading} ({len(fates)})", "bold")
        for fate in fates:
            style = STYLES[fate.item.severity] if kind is not Kind.GONE else ""
            rule = printable(fate.item.rule, 100)
            page.line(f"  {rule} ({fate.item.severity.value})", style)
            page.field("what", printable(fate.item.message))
            page.field("cost", _costs(fate))
            if fate.note:
                page.field("note", printable(fate.note))
    page.line()
    page.paragraph(_total(diff), "bold")
    return page.text(color=view.color)


def _markdown(diff: Diff, view: View) -> str:
    del view
    count = len(diff.fates)
    while True:
        text = _comment(diff, count)
        if len(text) <= MAX_CHARACTERS or not count:
            return text
        count //= 2


def _comment(diff: Diff, count: int) -> str:
    lines = [
        MARK,
        f"### streamlint: {_total(diff)}",
        "",
        f"**{escaped(_name(diff.before))}** to **{escaped(_name(diff.after))}**",
        "",
        "| | before | after | change |",
        "|---|---:|---:|---:|",
    ]
    lines += [f"| {' | '.join(map(escaped, row))} |" for row in _measures(diff)]
    shown = [fate for fate in diff.fates if fate.kind is not Kind.SAME]
    if shown[:count]:
        lines += ["", "| | Severity | Rule | What | Costs |", "|---|---|---|---|---|"]
    for fate in shown[:count]:
        what = fate.item.message + (f" ({fate.note})" if fate.note else "")
        cells = [_HEADINGS[fate.kind], fate.item.severity.value, fate.item.rule]
        cells += [printable(what, 600), _costs(fate)]
        lines.append(f"| {' | '.join(map(escaped, cells))} |")
    if shown[count:]:
        lines += ["", f"{len(shown[count:])} more."]
    return "\n".join(lines) + "\n"


def _json(diff: Diff, view: View) -> str:
    del view
    document = {
        "format": FORMAT_VERSION,
        "tool": {"name": "streamlint", "version": __version__},
        "before": _side(diff.before),
        "after": _side(diff.after),
        "findings": [
            {
                "change": fate.kind.value,
                "rule": fate.item.rule,
                "fingerprint": fate.item.fingerprint,
                "severity": fate.item.severity.value,
                "message": fate.item.message,
                "note": fate.note or None,
                "before": _measured(fate.before),
                "after": _measured(fate.after),
            }
            for fate in diff.fates
        ],
        "summary": {kind.value: len(diff.of(kind)) for kind in Kind},
    }
    return json.dumps(document, indent=2, ensure_ascii=True) + "\n"


def _side(side: Side) -> dict[str, Any]:
    return {
        "path": side.path,
        "span_ns": side.span_ns,
        "devices": [
            {
                **device._asdict(),
                "busy_share": _rounded(device.busy_ns, side.span_ns),
                "kernels_share": _rounded(device.kernels_ns, side.span_ns),
                "copies_share": _rounded(device.copies_ns, side.span_ns),
            }
            for device in side.devices
        ],
    }


def _measured(item: Item | None) -> dict[str, Any] | None:
    return None if item is None else item.measure._asdict()


def _rounded(part: int, span_ns: int | None) -> float | None:
    return round(part / span_ns, 6) if span_ns else None


def _measures(diff: Diff) -> Iterator[_Measure]:
    """The spans, and how busy each GPU was in them."""
    before, after = diff.before, diff.after
    yield _Measure("GPU span", *_times(before.span_ns, after.span_ns))
    for old, new in _pairs(before.devices, after.devices):
        device = new or old
        assert device is not None
        name = printable(device.name or "GPU", 40)
        if len(before.devices) > 1 or len(after.devices) > 1:
            name += "" if device.gpu is None else f" {device.gpu}"
        for what in ("busy", "kernels", "copies"):
            shares = [
                None
                if one is None or not side.span_ns
                else getattr(one, f"{what}_ns") / side.span_ns
                for one, side in ((old, before), (new, after))
            ]
            yield _Measure(f"{name}: {what}", *_shares(*shares))
        idle = [None if one is None else one.idle_ns for one in (old, new)]
        yield _Measure(f"{name}: idle", *_times(*idle))


def _pairs(
    before: tuple[Device, ...], after: tuple[Device, ...]
) -> Iterator[tuple[Device | None, Device | None]]:
    """Devices in their order: another machine may number its GPUs otherwise."""
    for i in range(max(len(before), len(after))):
        yield (
            before[i] if i < len(before) else None,
            after[i] if i < len(after) else None,
        )


def _times(before: int | None, after: int | None) -> tuple[str, str, str]:
    shown = ["-" if ns is None else duration(ns) for ns in (before, after)]
    if before is None or after is None:
        return shown[0], shown[1], ""
    sign = "-" if after < before else "+"
    change = f"{sign}{duration(abs(after - before))}"
    if before:
        percent = 100 * (after - before) / before
        change += f" ({percent:+.{1 if abs(percent) < 100 else 0}f} %)"
    return shown[0], shown[1], change


def _shares(before: float | None, after: float | None) -> tuple[str, str, str]:
    shown = ["-" if s is None else f"{100 * s:.1f} %" for s in (before, after)]
    if before is None or after is None:
        return shown[0], shown[1], ""
    return shown[0], shown[1], f"{100 * (after - before):+.1f} points"


def _costs(fate: Fate) -> str:
    """The cost, and for a finding of both sides the one before."""
    costs = [_cost(item) for item in (fate.before, fate.after) if item is not None]
    if fate.kind in (Kind.GROWN, Kind.SHRUNK):
        return f"{costs[0]} before, now {costs[1]}"
    return costs[-1]


def _cost(item: Item) -> str:
    measure = item.measure
    if measure.ns is None or measure.share is None:
        return f"not priced, {measure.occurrences} times"
    return brief_cost(Claim(measure.claim), measure.ns, measure.share)


def _total(diff: Diff) -> str:
    counts = {kind: len(diff.of(kind)) for kind in Kind}
    words = [f"{counts[k]} {k.value}" for k in (Kind.NEW, Kind.GROWN)]
    words += [f"{counts[k]} {k.value}" for k in (Kind.SHRUNK, Kind.GONE)]
    words += [f"{counts[Kind.SAME]} unchanged"]
    if counts[Kind.SUPPRESSED]:
        words += [f"{counts[Kind.SUPPRESSED]} suppressed now"]
    if counts[Kind.UNTOLD]:
        words += [f"{counts[Kind.UNTOLD]} that can't be told any more"]
    return ", ".join(words)


def _name(side: Side) -> str:
    return printable(side.path.replace("\\", "/").rpartition("/")[2])
