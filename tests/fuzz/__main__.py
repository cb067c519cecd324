"""Coverage-guided fuzzing with atheris: `make fuzz`.

    python tests/fuzz [--seconds N] [--runs N] [--seed N] [FOLDER]

New inputs that reach new code are kept in FOLDER, a temporary one otherwise. An input
that breaks something is written to `crash-*`; put it into `tests/fuzz/seeds` once
the fault is mended.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["streamlint"]):
    from fuzz import edits, oracle

SEEDS = Path(__file__).with_name("seeds")


def main(arguments: Sequence[str]) -> None:
    """Run libFuzzer, which ends the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus", type=Path, nargs="?")
    parser.add_argument("--seconds", type=int, default=0, help="stop after this time")
    parser.add_argument("--runs", type=int, default=-1, help="stop after this many")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory(prefix="streamlint-fuzz-") as folder:
        path = Path(folder) / "input.sqlite"

        def one(raw: bytes) -> None:
            edits.build(raw, path)
            oracle.check(path)

        corpus = given.corpus or Path(folder) / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        options = [f"-max_total_time={given.seconds}", f"-runs={given.runs}"]
        options += [f"-seed={given.seed}", "-max_len=120", "-timeout=60"]
        options += ["-print_final_stats=1", "-rss_limit_mb=2000"]
        atheris.Setup([sys.argv[0], *options, str(corpus), str(SEEDS)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
