"""What was recorded: versions, options and completeness of one capture."""

from __future__ import annotations

from typing import NamedTuple


class Capture(NamedTuple):
    """Facts about a capture; None means that the export doesn't say.

    ``exporter`` and ``schema`` are of the nsys that wrote the SQLite file, which
    may be newer than the one that captured.
    """

    exporter: str | None = None
    schema: str | None = None
    cuda_traced: bool | None = None
    nvtx_traced: bool | None = None
    all_apis: bool | None = None
    graph_mode: str | None = None
    memory_usage: bool | None = None
    python_backtraces: bool | None = None
    native_backtraces: bool | None = None
    forks_traced: bool | None = None
    filtered: bool = False
    environment: dict[str, str] = {}  # noqa: RUF012 - never changed


def read_capture(export_meta: dict[str, str], options: dict[str, list[str]]) -> Capture:
    """Capture facts from the two metadata tables (allow-listed rows only)."""

    def flag(name: str) -> bool | None:
        values = [value.lower() for value in options.get(name, ())]
        known = [value == "true" for value in values if value in ("true", "false")]
        return known[0] if known else None

    def any_flag(*names: str) -> bool | None:
        known = [value for name in names if (value := flag(name)) is not None]
        return any(known) if known else None

    def traced(event_type: str, option: str) -> bool | None:
        # 2026 exports say COLLECT_CUDA_TRACE=false of captures with CUDA.
        types = options.get("CAPTURE_EVENT_TYPE")
        return event_type in types if types else flag(option)

    backtraces = "CUDA_BACKTRACE_OPTIONS:COLLECT_{}_BACKTRACES"
    skipping = flag("CUDA_SKIP_SOME_API_CALLS")
    mode = options.get("CUDA_GRAPH_TRACE_OPTIONS:MODE", [""])[0].lower()
    environment = {
        name.partition(":")[2]: values[0]
        for name, values in options.items()
        if name.startswith("ENVIRONMENT_VARIABLE:")
    }
    return Capture(
        exporter=export_meta.get("EXPORT_PRODUCT_VERSION"),
        schema=export_meta.get("EXPORT_SCHEMA_VERSION"),
        cuda_traced=traced("Cuda", "COLLECT_CUDA_TRACE"),
        nvtx_traced=traced("NvtxEvents", "COLLECT_NVTX_TRACE"),
        all_apis=None if skipping is None else not skipping,
        graph_mode=mode if mode in ("graph", "node") else None,
        memory_usage=flag("COLLECT_GPU_MEMORY_USAGE"),
        python_backtraces=flag(backtraces.format("PYTHON")),
        native_backtraces=any_flag(
            *(
                backtraces.format(kind)
                for kind in ("KERNEL", "MEMORY", "SYNCHRONOIZATION")
            )
        ),
        forks_traced=flag("TRACE_AFTER_FORK_BEFORE_EXEC"),
        filtered=any(
            export_meta.get(f"EXPORT_PARAM_{what}_TO_EXPORT")
            for what in ("TABLES", "TIMES")
        ),
        environment=environment,
    )
