"""The vocabulary: all that the API, the engine and an outside backend share."""
