"""Damaged and hostile traces, made from a few bytes, and what must hold for each."""
