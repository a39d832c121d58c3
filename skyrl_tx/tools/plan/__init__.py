"""`skyrl-tx plan`: whether a model fits devices that are not here, and how fast it can be at most."""
