"""The rules of streamlint: one module per rule, grouped by family."""
