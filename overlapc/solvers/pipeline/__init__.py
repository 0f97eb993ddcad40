"""Schedules, their rows, and how layers are divided over stages."""
