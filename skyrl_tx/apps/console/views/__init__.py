"""View models: pure functions from rows to what templates show."""
