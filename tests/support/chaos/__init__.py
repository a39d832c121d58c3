"""Kill tests (`make chaos`): processes are killed while clients train, and results are compared bitwise."""
