"""The NumPy executor: runs a loop nest as it stands, with no compiler and no GPU."""
