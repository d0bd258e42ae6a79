"""Choosing schedules: what can be tried, what it would cost, what was measured."""
