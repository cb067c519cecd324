"""Turns raw recordings into samples: redacted traces, each pair with its provenance."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamlint.errors import StreamlintError, UsageError
from streamlint.files import replacing
from streamlint.harness.nsys import Say
from streamlint.harness.results import (
    DEFAULT,
    FULL,
    PLAIN,
    median_export,
    stored,
    times,
)
from streamlint.harness.workloads import VARIANTS, find

SAMPLES = Path("sample_traces")
PROVENANCE = "provenance.json"
_SAME = ("gpu", "compute_capability", "driver", "cuda", "silent", "nvcc_flags")
"""Facts of a result that go into the provenance as they are, if there are any."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What became of one pair; ``problem`` says why it is no sample."""

    name: str
    changed: bool
    problem: str = ""


def can_redact() -> bool:
    """Whether this machine has what redaction needs; a capture machine may not."""
    try:
        import streamlint.trace.redact  # noqa: F401
    except ImportError:
        return False
    return True


def collect(
    raw: Path, samples: Path, say: Say, *, again: bool = False
) -> list[Collected]:
    """Store every recorded pair below ``raw`` in ``samples``.

    A pair that is stored already is left alone unless ``again``. What the source of
    a pair says of it is taken from the source as it is now. Raises `UsageError` if
    ``raw`` holds no results or nothing can be written.
    """
    found: list[Collected] = []
    sources = {pair.name: workload for workload in find()[0] for pair in workload.pairs}
    for folder, result in stored(raw):
        name = str(result.get("pair"))
        if result.get("probe"):
            say(f"{name}: a probe; its answers are in {folder}")
            continue
        if workload := sources.get(name):
            result |= {"shows": workload.expects, "silent": workload.silent}
        try:
            changed = _collect(folder, result, samples / name, again=again)
        except StreamlintError as error:
            found.append(Collected(name, False, f"{error.message}; {error.hint}"))
            say(f"{name}: {error.message}")
            continue
        except OSError as error:
            raise UsageError(
                f"{samples} can't be written ({error.strerror})",
                hint="name a folder that can be: --samples",
            ) from error
        found.append(Collected(name, changed))
        say(f"{name}: {'stored' if changed else 'is stored already'}")
    return found


def _collect(
    folder: Path, result: dict[str, Any], target: Path, *, again: bool
) -> bool:
    from streamlint.trace.redact import redact

    exports: dict[str, Path] = {}
    stored_us: dict[str, float] = {}
    for variant in VARIANTS:
        take = median_export(result, variant)
        if take is None or times(result, variant, PLAIN) is None:
            raise StreamlintError(
                f"{variant} is not timed and recorded yet",
                hint="run it again: what is done is not repeated",
            )
        exports[variant], stored_us[variant] = folder / take[0], take[1]
    facts = {f"{v}.sqlite": provenance(result, v, stored_us[v]) for v in VARIANTS}
    text = json.dumps(facts, indent=2) + "\n"
    note = target / PROVENANCE
    files = {variant: target / f"{variant}.sqlite" for variant in VARIANTS}
    there = all(file.is_file() for file in files.values()) and note.is_file()
    if there and not again and note.read_text(encoding="utf-8") == text:
        return False
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".part-") as part:
        for variant, export in exports.items():
            redact(export, Path(part) / files[variant].name)
        for file in files.values():
            (Path(part) / file.name).replace(file)
    with replacing(note) as new:
        new.write_text(text, encoding="utf-8")
    return True


def provenance(
    result: dict[str, Any], variant: str, stored_us: float
) -> dict[str, Any]:
    """What is told of one trace: machine, flags and region times; nothing is empty.

    ``stored_us`` is the region time in the trace itself.
    """
    regions: dict[str, Any] = {}
    for mode in (PLAIN, FULL, DEFAULT):
        if found := times(result, variant, mode):
            regions[mode] = found.as_dict()
    facts = {
        "shows": "; ".join(result["shows"]),
        "variant": variant,
        "source": result["source"],
        "source_sha256": result["source_sha256"],
        **{name: result[name] for name in _SAME},
        "options": ["--variant", variant, *result["options"]],
        "environment": result["environment"][variant],
        "captured": result["recorded"],
        "nsys_exporter": result["nsys"],
        "nsys_flags": result["nsys_flags"][FULL],
        "region_us": {**regions, "stored": stored_us},
        "redacted": "by streamlint.trace.redact",
    }
    return {name: value for name, value in facts.items() if value}
