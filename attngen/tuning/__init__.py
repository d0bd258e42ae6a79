"""Which schedule is fastest: what was measured, where, and how it is found again."""
