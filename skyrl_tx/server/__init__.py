"""The HTTP process: turns HTTP into stored requests and stored results into HTTP. Knows nothing of devices."""
