"""The engine process: reads stored requests, runs them on a backend and stores their results."""
