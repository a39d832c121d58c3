"""`skyrl-tx doctor`: check a machine, the settings of a server and its data directory, and suggest fixes."""
