"""The engine process: stored requests in, device work, stored results out."""
