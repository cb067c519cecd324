"""What a CUDA API call does, by its name as the user typed it."""

from __future__ import annotations

import re

import polars as pl

_SUFFIX = re.compile(r"(?:_v\d+|_ptsz|_ptds)+$")

# By the start of the name without its cu or cuda; the first that fits wins.
_BY_PREFIX: tuple[tuple[tuple[str, ...], str], ...] = (
    (("LaunchHostFunc", "StreamAddCallback"), "host func"),
    (("GraphLaunch",), "graph launch"),
    (("Launch",), "kernel launch"),
    (("MemPrefetch",), "prefetch"),
    (("DeviceSynchronize", "ThreadSynchronize", "CtxSynchronize"), "device sync"),
    (("StreamSynchronize",), "stream sync"),
    (("EventSynchronize",), "event sync"),
    (("StreamWaitEvent",), "stream wait"),
    (("EventRecord",), "event record"),
    (("StreamQuery", "EventQuery"), "query"),
    (("StreamBeginCapture",), "begin capture"),
    (("StreamEndCapture",), "end capture"),
    (("GraphInstantiate",), "graph instantiate"),
    (("GraphExecUpdate",), "graph update"),
    (("GraphExecDestroy",), "graph exec destroy"),
    (
        (
            "MallocAsync",
            "MallocFromPoolAsync",
            "MemAllocAsync",
            "MemAllocFromPoolAsync",
        ),
        "async alloc",
    ),
    (("FreeAsync", "MemFreeAsync"), "async free"),
    (("MallocManaged", "MemAllocManaged"), "managed alloc"),
    (("HostAlloc", "MallocHost", "MemHostAlloc", "MemAllocHost"), "host alloc"),
    (("FreeHost", "MemFreeHost"), "host free"),
    (("HostRegister", "MemHostRegister"), "host register"),
    (("HostUnregister", "MemHostUnregister"), "host unregister"),
    (("Malloc", "MemAlloc"), "device alloc"),
    (("Free", "MemFree", "ArrayDestroy"), "device free"),
    (("StreamCreate",), "stream create"),
    (("StreamDestroy",), "stream destroy"),
    (("EventCreate",), "event create"),
    (("EventDestroy",), "event destroy"),
    (("ModuleLoad", "LibraryLoad"), "module load"),
    (("CtxResetPersistingL2Cache",), "L2 reset"),
    (("DeviceSetLimit", "CtxSetLimit"), "set limit"),
    (("StreamSetAttribute",), "stream attribute"),
    (("GraphKernelNodeSetAttribute",), "node attribute"),
)
# The profiler and the runtime make these themselves, one or more per launch.
_NOISE = (
    *("cuKernelGet", "cuLibraryGet", "cuModuleGet", "cuGetProcAddress"),
    *("cuFuncGetName", "cuFuncGetModule"),
)

GPU_WORK = (
    "kernel launch",
    "graph launch",
    "async memcpy",
    "sync memcpy",
    "async memset",
    "sync memset",
)
"""Kinds of calls that put work on the GPU."""
HOST_WAITS = ("device sync", "stream sync", "event sync")
"""Kinds of calls that do nothing but block the host until GPU work is done."""

L2_CALLS = ("set limit", "stream attribute", "node attribute", "L2 reset")
"""Kinds of calls that control L2, among other things."""


def plain_name(name: str) -> str:
    """The name without ABI suffixes: `cudaMemcpyAsync_ptsz_v7000` is the plain one."""
    return _SUFFIX.sub("", name)


def call_kind(plain: str) -> str:
    """What a call of this plain name does; "noise" and "other" included."""
    if plain.startswith(_NOISE):
        return "noise"
    stem = plain.removeprefix("cuda") if plain.startswith("cuda") else plain[2:]
    for prefix, noun in (("Memcpy", "memcpy"), ("Memset", "memset")):
        if stem.startswith(prefix):
            return f"{'async' if 'Async' in stem else 'sync'} {noun}"
    return next((kind for start, kind in _BY_PREFIX if stem.startswith(start)), "other")


def describe_names(names: pl.Series) -> pl.DataFrame:
    """Frame with one row a distinct name: raw_name, name, kind, per_thread.

    ``per_thread`` tells code compiled with a per-thread default stream; it does
    not prove that the call used that stream.
    """
    raw = names.drop_nulls().unique().to_list()
    plain = [plain_name(name) for name in raw]
    return pl.DataFrame(
        {
            "raw_name": raw,
            "name": plain,
            "kind": [call_kind(name) for name in plain],
            "per_thread": ["_pts" in name or "_ptd" in name for name in raw],
        },
        schema={
            "raw_name": pl.Categorical,
            "name": pl.Categorical,
            "kind": pl.Categorical,
            "per_thread": pl.Boolean,
        },
    )
