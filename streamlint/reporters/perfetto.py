"""A trace for ui.perfetto.dev: every lane as a track, findings on tracks of their own.

Chrome's JSON trace format, gzipped; times in microseconds with three decimals, so
nothing is rounded.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator

from streamlint.engine import Report
from streamlint.escape import printable
from streamlint.reporters.lanes import KINDS, Details, Lane, build
from streamlint.reporters.text import cost_words
from streamlint.trace.model import Trace

_FINDINGS = 1
"""Perfetto's process of the findings; those of the lanes follow."""
_CHUNK = 20_000


def render(trace: Trace, report: Report) -> bytes:
    """The gzipped trace."""
    lanes, details, _ = build(trace)
    buffer = io.BytesIO()
    # A fixed time and no file name: the same trace gives the same bytes.
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as file:
        file.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
        chunk: list[str] = []
        separator = ""
        for event in _events(report, lanes, details):
            chunk.append(event)
            if len(chunk) == _CHUNK:
                file.write((separator + ",\n".join(chunk)).encode("ascii"))
                separator = ",\n"
                chunk.clear()
        if chunk:
            file.write((separator + ",\n".join(chunk)).encode("ascii"))
        file.write(b"\n]}\n")
    return buffer.getvalue()


def _events(report: Report, lanes: list[Lane], details: Details) -> Iterator[str]:
    yield _named("process_name", _FINDINGS, 0, "streamlint findings")
    yield json.dumps(_order("process_sort_index", _FINDINGS, 0, -1))
    for number, (rule, finding) in enumerate(report.findings, start=1):
        name = f"{finding.severity.value} {rule.name}"
        yield _named("thread_name", _FINDINGS, number, name)
        yield json.dumps(_order("thread_sort_index", _FINDINGS, number, number))
        about = json.dumps(
            {
                "message": printable(finding.message),
                "cost": printable(cost_words(finding.cost, finding)),
                "fix": printable(finding.fix),
                "fingerprint": finding.fingerprint(rule.name),
            }
        )
        for item in finding.evidence:
            what = json.dumps(printable(item.what, 300))
            length = item.end_ns - item.start_ns
            yield _slice(what, _FINDINGS, number, item.start_ns, length, about)
    names = [json.dumps(name) for name in details.names]
    about_kind = [f'{{"kind":"{kind}"' for kind in KINDS]
    headings: dict[str, int] = {}
    for thread, lane in enumerate(lanes):
        process = headings.setdefault(lane.heading, _FINDINGS + 1 + len(headings))
        if process == _FINDINGS + len(headings):
            yield _named("process_name", process, 0, lane.heading)
        yield _named("thread_name", process, thread, lane.label)
        yield json.dumps(_order("thread_sort_index", process, thread, thread))
        ids = lane.correlation
        for i, (start, end, code) in enumerate(
            zip(
                lane.starts.tolist(),
                lane.ends.tolist(),
                lane.code.tolist(),
                strict=True,
            )
        ):
            about = about_kind[details.kinds[code]]
            about += f',"correlation":{ids[i]}}}' if ids is not None else "}"
            name = names[details.name_ids[code]]
            yield _slice(name, process, thread, start, end - start, about)


def _slice(
    name: str, process: int, thread: int, start: int, length: int, about: str
) -> str:
    return (
        f'{{"ph":"X","name":{name},"pid":{process},"tid":{thread},'
        f'"ts":{_us(start)},"dur":{_us(length)},"args":{about}}}'
    )


def _us(ns: int) -> str:
    whole, rest = divmod(abs(ns), 1000)
    return f"{'-' if ns < 0 else ''}{whole}.{rest:03d}"


def _named(what: str, process: int, thread: int, name: str) -> str:
    event = {"ph": "M", "name": what, "pid": process, "tid": thread}
    return json.dumps({**event, "args": {"name": name}})


def _order(what: str, process: int, thread: int, index: int) -> dict[str, object]:
    event: dict[str, object] = {"ph": "M", "name": what, "pid": process, "tid": thread}
    return {**event, "args": {"sort_index": index}}
