"""The curves of runs: steps folded from points, and warnings, for the console and the commands."""
