"""A linter for Nsight Systems traces: what is wrong, what it costs, how to fix it."""

__version__ = "0.1.0"
