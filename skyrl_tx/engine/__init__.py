"""The engine process. It reads stored requests, runs them on a backend and stores the results."""
