"""`skyrl-tx doctor`: examines a machine, a configuration and a data directory, and says what to do."""
