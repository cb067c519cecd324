"""The timeline of a trace as a plotly figure: one row a stream, thread or engine."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from streamlint.escape import printable
from streamlint.intervals import Bools, Int64, union
from streamlint.reporters.html import PAGE
from streamlint.reporters.lanes import KINDS, Lane, build
from streamlint.trace.model import Trace

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from streamlint.engine import Report

BARS = 4_000
"""Bars of one kind in one row; where there are more, near ones are drawn as one."""
_WORDS = {
    "graph": "CUDA graph",
    "copy": "other copy",
    "wait": "call that waits",
    "launch": "call that issues work",
    "call": "other CUDA call",
    "range": "NVTX range",
    "mark": "NVTX mark",
    "merged": "several",
    "idle-wait": "idle: host waits",
    "idle-call": "idle: host in a call",
    "idle-host": "idle: host elsewhere",
    "idle-queued": "idle: work issued",
    "idle-unknown": "idle: not known",
}
_ROW_PX, _FRAME_PX = 26, 160


def figure(
    trace: Trace, report: Report, start_ns: int | None, end_ns: int | None
) -> Figure:
    """The lanes of ``trace`` between two times, with the evidence of all findings.

    Times of the arguments are those of the export, in ns; the axis counts ms from
    the first interval of the whole trace.
    """
    # Half a second that nothing else needs.
    import plotly.graph_objects as go

    lanes, details, _ = build(trace)
    used = [lane for lane in lanes if len(lane.starts)]
    origin = min((int(lane.starts[0]) for lane in used), default=0)
    last = max((int(lane.ends.max()) for lane in used), default=origin + 1)
    low = origin if start_ns is None else start_ns
    high = last if end_ns is None else end_ns
    drawn = go.Figure()
    names = [_escaped(printable(name, 120)) for name in details.names]
    rows: list[str] = []
    legend: set[str] = set()
    for lane in used:
        inside = (lane.starts < high) & (lane.ends >= low)
        if not inside.any():
            continue
        rows.append(f"{lane.heading}, {lane.label}")
        kinds = np.array(details.kinds, dtype=np.int64)[lane.code]
        for kind in np.unique(kinds[inside]).tolist():
            name = KINDS[kind]
            bars = _bars(lane, inside & (kinds == kind), high - low)
            texts = bars.texts or [names[details.name_ids[code]] for code in bars.codes]
            drawn.add_trace(
                go.Bar(
                    orientation="h",
                    base=(bars.starts - origin) / 1e6,
                    x=(bars.ends - bars.starts) / 1e6,
                    y=np.full(len(texts), len(rows) - 1),
                    marker={"color": _colour(name), "line": {"width": 0}},
                    name=_WORDS.get(name, name),
                    legendgroup=name,
                    legendrank=kind,
                    showlegend=name not in legend,
                    customdata=texts,
                    hovertemplate="%{customdata}<br>from %{base:.6f} ms "
                    "for %{x:.6f} ms<extra></extra>",
                )
            )
            legend.add(name)
    evidence = [item for _, finding in report.findings for item in finding.evidence]
    drawn.update_layout(
        shapes=[
            {
                "type": "rect",
                "yref": "paper",
                "x0": (item.start_ns - origin) / 1e6,
                "x1": (item.end_ns - origin) / 1e6,
                "y0": 0,
                "y1": 1,
                "fillcolor": _colours()["accent"],
                "opacity": 0.12,
                "line": {"width": 0},
                "layer": "below",
            }
            for item in evidence
            if item.start_ns < high and item.end_ns > low
        ],
        title_text=_escaped(printable(trace.path.name, 100)),
        template="plotly_white",
        height=_FRAME_PX + _ROW_PX * len(rows),
        barmode="overlay",
        bargap=0.15,
        xaxis={
            "ticksuffix": " ms",
            "range": [(low - origin) / 1e6, (high - origin) / 1e6],
        },
        yaxis={
            "tickvals": list(range(len(rows))),
            "ticktext": [_short(row) for row in rows],
            "range": [len(rows) - 0.5, -0.5],
            "automargin": True,
        },
        title_y=0.98,
        title_yanchor="top",
        margin_t=100,
        legend={"orientation": "h", "y": 1, "yanchor": "bottom"},
    )
    return drawn


class _Bars(NamedTuple):
    """Bars of one row: what each shows, or the texts of several drawn as one."""

    starts: Int64
    ends: Int64
    codes: list[int]
    texts: list[str]


def _bars(lane: Lane, chosen: Bools, span: int) -> _Bars:
    starts, ends = lane.starts[chosen], lane.ends[chosen]
    if len(starts) <= BARS:
        return _Bars(starts, ends, lane.code[chosen].tolist(), [])
    # What is nearer than a pixel of a wide screen can't be told apart.
    whole = union(starts, np.maximum(ends, starts + max(1, span // BARS)))
    counts = np.diff(np.append(np.searchsorted(starts, whole.starts), len(starts)))
    texts = [f"{count} intervals" for count in counts.tolist()]
    return _Bars(whole.starts, whole.ends, [], texts)


def _short(text: str) -> str:
    return _escaped(text if len(text) <= 60 else f"{text[:28]}…{text[-31:]}")


def _escaped(text: str) -> str:
    """Plotly reads some HTML in texts: names of a trace must stay text."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


@cache
def _colours() -> dict[str, str]:
    """The page's own colours, for a light background."""
    css = (PAGE / "report.css").read_text(encoding="utf-8").partition("@media")[0]
    return dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6})", css))


def _colour(kind: str) -> str:
    return _colours()["mark-nvtx" if kind == "mark" else kind]
