"""Recordings of runs, beside what was predicted."""
