"""One program with a known fault for each rule, as the tests of the rule build it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import test_l2_rules as l2
import test_rules_allocation_launches as allocation
import test_rules_launches_events as events
import test_rules_memory as memory
import test_rules_streams_sync as streams
import test_rules_transfers as transfers
from tracebuilder import TraceBuilder

MIB = 1 << 20


def barrier(b: TraceBuilder) -> None:
    """Two blocking streams, and a kernel of the NULL stream between their kernels."""
    b.stream(13)
    b.stream(14)
    end = 1000.0
    for i in range(30):
        at, stream = 900 + 5 * i, (13, 7, 14, 7)[i % 4]
        start = end + 2
        end = start + 100
        b.kernel("step", stream=stream, start=start, end=end, issue=(at, at + 4))


def chunks(b: TraceBuilder) -> None:
    memory.pipeline(b)


def clamped(b: TraceBuilder) -> None:
    memory.mark(b, f"l2.props persistMax={16 * MIB} maxWindow={128 * MIB}", 5)
    memory.mark(b, f"l2.setaside bytes={20 * MIB}", 10)
    memory.walk(b, 100)


def failed(b: TraceBuilder) -> None:
    memory.walk(b, 100)
    b.call("cudaMalloc", 80, return_value=2)


def lossy(b: TraceBuilder) -> None:
    memory.walk(b, 100)
    for i in range(4):
        b.call("cudaLaunchKernel", 600 + 10 * i)


def not_reset(b: TraceBuilder) -> None:
    l2.set_aside(b, 16 * MIB)
    memory.walk(b, 100, 40)
    memory.window(b, 90, 300)


def oversubscribed(b: TraceBuilder) -> None:
    l2.set_aside(b, 16 * MIB)
    l2.kernels(b, 100)
    l2.window(b, 32 * MIB, 90, 600)


def pool(b: TraceBuilder) -> None:
    b.option("COLLECT_GPU_MEMORY_USAGE", "true")
    memory.pooling(b)


def storm(b: TraceBuilder) -> None:
    transfers.around(b)
    transfers.storm(b)


def churn(b: TraceBuilder) -> None:
    allocation.bounds(b)
    allocation.alternate(b, "cudaMalloc", "cudaFree")


def unused(b: TraceBuilder) -> None:
    l2.set_aside(b, 16 * MIB)
    l2.kernels(b, 100)


def use(build: Callable[..., Any], **how: Any) -> Callable[[TraceBuilder], object]:
    """The program that ``build`` makes, with two used streams and a first kernel."""

    def program(b: TraceBuilder) -> None:
        events.add_streams(b, 13, 14)
        build(b, **how)

    return program


FAULTS: dict[str, Callable[[TraceBuilder], object]] = {
    "allocation-implicit-sync": use(memory.freeing),
    "busy-poll": streams.polling,
    "capture-not-evaluable": lossy,
    "carveout-switch-serialization": use(events.two_configurations),
    "copy-compute-not-overlapped": transfers.chain,
    "cross-context-serialization": streams.two_processes,
    "depth-first-issue-order": streams.pieces,
    "device-sync-in-steady-state": lambda b: streams.reads_each_value(
        b, wait="cudaDeviceSynchronize"
    ),
    "failed-cuda-call": failed,
    "graph-blocked-by-pageable-copy": use(events.graph_copies),
    "graph-exec-self-serialization": use(events.exec_turns),
    "graph-reinstantiated": allocation.graph_loop,
    "host-function-stall": use(events.host_functions),
    "host-mediated-dependency": use(events.hand_overs),
    "host-sync-drains-gpu": streams.reads_each_value,
    "l2-persistence-not-reset": not_reset,
    "l2-request-clamped-or-unsupported": clamped,
    "l2-setaside-oversubscribed": oversubscribed,
    "l2-setaside-unused": unused,
    "launch-blocking": memory.blocking,
    "launch-bound-kernels": allocation.launch_run,
    "lazy-module-load-in-hot-path": lambda b: memory.looping(b, fresh=150.0),
    "legacy-null-stream-barrier": barrier,
    "mempool-trim-thrash": pool,
    "pageable-async-copy": transfers.loop_of_copies,
    "pdl-candidate": use(events.chain),
    "pipeline-chunk-size": memory.pipeline,
    "priority-without-effect": lambda b: streams.background_and_urgent(b, 1),
    "resource-churn-in-loop": churn,
    "small-copy-storm": storm,
    "stream-destroy-with-pending-work": streams.destroy_early,
    "stream-false-dependency": streams.independent_streams,
    "synchronous-memcpy-in-loop": transfers.synchronous_loop,
    "threads-share-legacy-stream": streams.threads_launch,
    "timing-event-as-dependency": use(events.ordering_events),
    "underfilled-serial-kernels": use(events.small_kernels),
    "unsynchronized-d2h-result": streams.copies_back,
    "wait-on-unrecorded-event": use(events.pairs_of_kernels),
}
