"""What a program says about its L2 cache control, in NVTX marks.

A trace never holds the arguments of CUDA calls: neither the size of the set-aside
(cudaDeviceSetLimit) nor the access policy window of a stream. A program can say both
in the NVTX domain ``streamlint``, one event each, a name and ``key=value`` pairs
with one space before each pair, values in decimal, keys in any order::

    mark   l2.props l2=62914560 persistMax=39321600 maxWindow=134217728
    mark   l2.setaside bytes=16777216     (or l2.setaside and an integer payload)
    range  l2.window base=139637976727552 bytes=33554432 hit=0.5 hitProp=persisting
           missProp=streaming             (one line)
    mark   l2.reset

A set-aside holds until the next one of its process. A window range encloses, on the
launching thread, the launches that run under that window; the innermost counts.
``hit`` is hitRatio, 0 to 1; the properties are persisting, streaming or normal;
``base`` and ``missProp`` may be left out, as may each key of ``l2.props``. Unknown
keys are skipped. An event of the domain whose text begins with ``l2.`` and does not
parse is counted as unreadable and means nothing else. docs/l2-marks.md shows it to
users.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from streamlint.findings import Claim, Cost, NotAssessed
from streamlint.trace.calls import L2_CALLS
from streamlint.trace.model import Trace, schema

DOMAIN = "streamlint"
MARKS_PAGE = "docs/l2-marks.md"
MIN_COMPUTE_MAJOR = 8
"""GPUs below compute capability 8.0 have no L2 set-aside."""

DEFAULT_LIMIT = "CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT"
"""Environment variable that reserves L2; the MPS server reads it when it starts."""

_MARK = f"mark the program's L2 control (NVTX, {MARKS_PAGE})"
_MAX_TEXT = 400
_PAIRS = r"(?: [A-Za-z0-9]+=[A-Za-z0-9.+-]*)*"
_NAMES = r"l2\.(?:props|setaside|window|reset)"
_NEVER = np.iinfo(np.int64).max


_PROPERTIES = schema(
    *("pid", "start_ns", "l2_bytes", "max_set_aside_bytes", "max_window_bytes")
)
_SET_ASIDES = schema("pid", "start_ns", "end_ns", "bytes", "requested_bytes")
_WINDOWS = schema(
    *("window", "pid", "tid", "start_ns", "end_ns", "base", "bytes"),
    hit_ratio=pl.Float64,
    hit_property=pl.String,
    miss_property=pl.String,
)
_RESETS = schema("pid", "tid", "start_ns")


class L2Marks(NamedTuple):
    """What the marks of a trace say; all frames are empty without marks.

    ``properties``: pid, start_ns, l2_bytes, max_set_aside_bytes, max_window_bytes
    (null where left out). ``set_asides``: pid, start_ns, end_ns (of the next one, or
    the end of time), bytes (as the driver grants it: at most max_set_aside_bytes),
    requested_bytes (as marked).
    ``windows``: window (its number), pid, tid, start_ns, end_ns, base, bytes,
    hit_ratio, hit_property, miss_property. ``resets``: pid, tid, start_ns.
    ``kernels``: the kernels and graphs of processes with marks, columns of
    `Trace.gpu_ops` with window (null outside of any), set_aside_bytes (when issued;
    null before the first mark) and requested_bytes. ``unreadable`` counts the rest.
    """

    properties: pl.DataFrame
    set_asides: pl.DataFrame
    windows: pl.DataFrame
    resets: pl.DataFrame
    kernels: pl.DataFrame
    unreadable: int

    @property
    def any(self) -> bool:
        """Whether the program says, or tries to say, what it set."""
        return self.unreadable + self.set_asides.height + self.windows.height > 0

    def unusable(self) -> NotAssessed | None:
        """Why the marks can't be judged; None where they can."""
        if self.unreadable:
            return NotAssessed(
                f"L2 marks of the NVTX domain {DOMAIN} that do not parse: "
                f"{self.unreadable}",
                f"write them as in {MARKS_PAGE}",
            )
        devices = self.kernels.group_by("pid").agg(pl.col("device_id").n_unique())
        if devices.filter(pl.col("device_id") > 1).height:
            return NotAssessed(
                "a process with L2 marks uses several devices, and the marks do not "
                "say which they are about",
                "record a process that uses one device",
            )
        return None


def l2_marks(trace: Trace) -> L2Marks:
    """What the marks of this trace say."""
    return trace.derived(_l2_marks)


def launched_during(set_asides: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """Kernels issued while these set-asides held (rows of `L2Marks.set_asides`).

    With at_ns (when issued), and bytes, requested_bytes, since_ns and until_ns of the
    set-aside.
    """
    held = set_asides.select(
        *("bytes", "requested_bytes"),
        pl.col("start_ns").alias("since_ns"),
        pl.col("end_ns").alias("until_ns"),
    ).sort("since_ns")
    return (
        kernels.drop("requested_bytes")
        .with_columns(pl.coalesce("issue_ns", "start_ns").alias("at_ns"))
        .sort("at_ns")
        .join_asof(held, left_on="at_ns", right_on="since_ns", coalesce=False)
        .filter(pl.col("at_ns") < pl.col("until_ns"))
    )


class L2Calls(NamedTuple):
    """Calls that control L2, perhaps: a trace does not hold their arguments.

    Rows of `Trace.runtime_calls`. ``limits`` set some limit of the device, ``windows``
    some attribute of a stream or graph node, ``resets`` end persistence; these
    succeeded. ``refused`` are calls for a limit or an attribute that failed.
    """

    limits: pl.DataFrame
    windows: pl.DataFrame
    resets: pl.DataFrame
    refused: pl.DataFrame

    @property
    def all(self) -> pl.DataFrame:
        """Those that succeeded, by start."""
        return pl.concat([self.limits, self.windows, self.resets]).sort("start_ns")


def l2_calls(trace: Trace) -> L2Calls:
    """The calls of this trace that may control L2."""
    return trace.derived(_l2_calls)


def _l2_calls(trace: Trace) -> L2Calls:
    if trace.call_kinds.isdisjoint(L2_CALLS):
        none = trace.runtime_calls.clear()
        return L2Calls(none, none, none, none)
    calls = trace.runtime_calls.filter(
        pl.col("kind").is_in(L2_CALLS) & ~pl.col("nested")
    )
    failed = pl.col("return_value").fill_null(0) != 0
    good = calls.filter(~failed)
    return L2Calls(
        limits=good.filter(pl.col("kind") == "set limit"),
        windows=good.filter(
            pl.col("kind").is_in(("stream attribute", "node attribute"))
        ),
        resets=good.filter(pl.col("kind") == "L2 reset"),
        refused=calls.filter(failed & (pl.col("kind") != "L2 reset")),
    )


def no_set_aside(trace: Trace) -> bool:
    """Whether no GPU of the trace can set aside L2."""
    majors = trace.gpus["compute_major"].drop_nulls()
    known = len(majors) == trace.gpus.height > 0
    return known and bool((majors < MIN_COMPUTE_MAJOR).all())


def set_aside_by_environment(trace: Trace) -> bool:
    """Whether the recorded environment reserves L2 by default."""
    return trace.capture.environment.get(DEFAULT_LIMIT, "0") not in ("", "0")


def unseen(trace: Trace) -> NotAssessed | None:
    """Whether a call that reserves L2 may have gone unrecorded; None where not."""
    if trace.capture.all_apis is True or l2_calls(trace).limits.height:
        return None
    return NotAssessed(
        "cudaDeviceSetLimit, which reserves L2, is not among the recorded APIs",
        "record with --cuda-trace-all-apis=true -t cuda,nvtx to see if the program "
        f"calls it; if so, {_MARK}",
    )


def without_marks(trace: Trace) -> NotAssessed | None:
    """Whether L2 control can be ruled out where the program has no marks.

    None where it can: no call for it was made, or no GPU of the trace has it.
    """
    if no_set_aside(trace):
        return None
    unable = unseen(trace)
    if unable is not None:
        return unable
    calls = l2_calls(trace).all
    if calls.height:
        names = ", ".join(calls["name"].unique().sort())
        return NotAssessed(
            f"{_counted(calls.height)} may control L2 ({names}), but a trace does not "
            "hold their arguments",
            f"{_MARK} and record with -t cuda,nvtx",
        )
    if set_aside_by_environment(trace):
        return NotAssessed(
            f"{DEFAULT_LIMIT} reserves L2, but a trace does not hold what uses it",
            f"{_MARK} and record with -t cuda,nvtx",
        )
    return None


def _counted(calls: int) -> str:
    return f"{calls} call{'s' if calls > 1 else ''}"


def _no_marks(trace: Trace) -> L2Marks:
    """What a trace without any marks says."""
    whole = dict.fromkeys(
        ("set_aside_bytes", "requested_bytes", "window"), pl.lit(None, dtype=pl.Int64)
    )
    return L2Marks(
        properties=pl.DataFrame(schema=_PROPERTIES),
        set_asides=pl.DataFrame(schema=_SET_ASIDES),
        windows=pl.DataFrame(schema=_WINDOWS),
        resets=pl.DataFrame(schema=_RESETS),
        kernels=trace.gpu_ops.clear().with_columns(**whole),
        unreadable=0,
    )


def _l2_marks(trace: Trace) -> L2Marks:
    ranges = trace.nvtx_ranges
    if not (ranges["domain"] == DOMAIN).any():
        return _no_marks(trace)
    events = ranges.filter(
        pl.col("domain").eq_missing(pl.lit(DOMAIN))
        & pl.col("text").str.starts_with("l2.")
    )
    short = events.filter(pl.col("text").str.len_bytes() <= _MAX_TEXT)
    whole = short.filter(
        pl.col("text").str.contains(rf"^{_NAMES}{_PAIRS}$")
    ).with_columns(pl.col("text").str.extract(rf"^({_NAMES})(?: |$)", 1).alias("name"))
    instants = whole.filter("mark")
    properties = _properties(instants.filter(pl.col("name") == "l2.props"))
    asides = _set_asides(instants.filter(pl.col("name") == "l2.setaside"))
    resets = instants.filter(pl.col("text") == "l2.reset").select(
        "pid", "tid", "start_ns"
    )
    windows = _windows(whole.filter(~pl.col("mark") & (pl.col("name") == "l2.window")))
    read = sum(frame.height for frame in (properties, asides, resets, windows))
    set_asides = _over_time(asides, properties)
    return L2Marks(
        properties=properties,
        set_asides=set_asides,
        windows=windows,
        resets=resets,
        kernels=_kernels(trace, set_asides, windows),
        unreadable=events.height - read,
    )


def _integer(key: str) -> pl.Expr:
    return (
        pl.col("text")
        .str.extract(rf" {key}=([0-9]{{1,18}})(?: |$)", 1)
        .cast(pl.Int64, strict=False)
    )


def _word(key: str) -> pl.Expr:
    return pl.col("text").str.extract(
        rf" {key}=(persisting|streaming|normal)(?: |$)", 1
    )


def _mentions(key: str) -> pl.Expr:
    return pl.col("text").str.contains(f" {key}=", literal=True)


def _properties(marks: pl.DataFrame) -> pl.DataFrame:
    keys = {
        "l2": "l2_bytes",
        "persistMax": "max_set_aside_bytes",
        "maxWindow": "max_window_bytes",
    }
    found = marks.select(
        "pid", "start_ns", "text", *(_integer(k).alias(n) for k, n in keys.items())
    )
    for key, name in keys.items():
        found = found.filter(pl.col(name).is_not_null() | ~_mentions(key))
    return found.drop("text")


def _set_asides(marks: pl.DataFrame) -> pl.DataFrame:
    stated = (
        pl.when(_mentions("bytes")).then(_integer("bytes")).otherwise(pl.col("value"))
    )
    return (
        marks.select("pid", "start_ns", stated.alias("bytes"))
        .filter(pl.col("bytes") >= 0)
        .sort("start_ns")
    )


def _windows(ranges: pl.DataFrame) -> pl.DataFrame:
    ratio = pl.col("text").str.extract(r" hit=([01](?:\.[0-9]{1,9})?)(?: |$)", 1)
    found = ranges.select(
        *("pid", "tid", "start_ns", "end_ns", "text"),
        _integer("base").alias("base"),
        _integer("bytes").alias("bytes"),
        ratio.cast(pl.Float64, strict=False).alias("hit_ratio"),
        _word("hitProp").alias("hit_property"),
        _word("missProp").alias("miss_property"),
    )
    return (
        found.filter(
            pl.col("bytes").is_not_null()
            & pl.col("hit_property").is_not_null()
            & pl.col("hit_ratio").is_between(0, 1)
            & (pl.col("base").is_not_null() | ~_mentions("base"))
            & (pl.col("miss_property").is_not_null() | ~_mentions("missProp"))
        )
        .drop("text")
        .sort("start_ns", "end_ns")
        .with_row_index("window")
        .with_columns(pl.col("window").cast(pl.Int64))
    )


def _over_time(marks: pl.DataFrame, properties: pl.DataFrame) -> pl.DataFrame:
    """Set-asides with the time they hold; a repeated one goes on."""
    largest = properties.group_by("pid").agg(pl.col("max_set_aside_bytes").max())
    granted = pl.min_horizontal("bytes", "max_set_aside_bytes")
    before = pl.col("requested_bytes").shift(1).over("pid")
    until = pl.col("start_ns").shift(-1).over("pid").fill_null(_NEVER)
    return (
        marks.join(largest, on="pid", how="left", validate="m:1", maintain_order="left")
        .with_columns(granted.alias("bytes"), pl.col("bytes").alias("requested_bytes"))
        .filter(pl.col("requested_bytes").ne_missing(before))
        .with_columns(until.alias("end_ns"))
        .select("pid", "start_ns", "end_ns", "bytes", "requested_bytes")
    )


def _kernels(
    trace: Trace, set_asides: pl.DataFrame, windows: pl.DataFrame
) -> pl.DataFrame:
    pids = pl.concat([set_asides.select("pid"), windows.select("pid")]).unique()
    kernels = trace.gpu_ops.filter(pl.col("kind").is_in(("kernel", "graph"))).join(
        pids, on="pid", how="semi"
    )
    at = pl.coalesce("issue_ns", "start_ns").alias("at_ns")
    reserved = set_asides.select(
        "pid",
        pl.col("start_ns").alias("at_ns"),
        pl.col("bytes").alias("set_aside_bytes"),
        "requested_bytes",
    ).sort("at_ns")
    return (
        kernels.with_columns(at)
        .sort("at_ns")
        .join_asof(reserved, on="at_ns", by="pid", check_sortedness=False)
        .join_asof(
            _innermost(windows).sort("at_ns"),
            on="at_ns",
            by=["pid", "tid"],
            check_sortedness=False,
        )
        .drop("at_ns")
        .sort("start_ns", "end_ns", maintain_order=True)
    )


def _innermost(windows: pl.DataFrame) -> pl.DataFrame:
    """Which window holds from each moment on, by thread: pid, tid, at_ns, window.

    ``window`` is null where none is open. Ranges of a thread are nested, so after an
    end at some depth, the last one begun at that depth is open again.
    """
    key = ["pid", "tid"]
    held = windows.filter(pl.col("end_ns") > pl.col("start_ns"))
    begins = held.select(*key, "window", pl.col("start_ns").alias("at_ns"), step=1)
    ends = held.select(*key, "window", pl.col("end_ns").alias("at_ns"), step=-1)
    # At one moment ends come first, and the outer of two ranges begins first.
    edges = (
        pl.concat([begins, ends])
        .join(
            held.select("window", pl.col("end_ns").alias("until_ns")),
            on="window",
            how="left",
            validate="m:1",
        )
        .sort(
            *("at_ns", "step", "until_ns", "window"),
            descending=[False, False, True, False],
        )
        .with_columns(pl.col("step").cum_sum().over(key).alias("depth"))
    )
    begun = pl.when(pl.col("step") > 0).then("window")
    return (
        edges.with_columns(begun.forward_fill().over(*key, "depth").alias("window"))
        .with_columns(
            pl.when(pl.col("depth") > 0).then("window").otherwise(None).alias("window")
        )
        .unique([*key, "at_ns"], keep="last", maintain_order=True)
        .select(*key, "at_ns", "window")
    )


def unknown_gain(of: str) -> Cost:
    """No cost: that of more L2 shows only beside a run without this (set-aside)."""
    return Cost(
        Claim.NONE,
        None,
        None,
        "what kernels gain from more L2 is not in a trace: compare their "
        f"durations with and without the {of}",
    )
