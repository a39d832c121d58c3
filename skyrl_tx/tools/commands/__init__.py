"""Commands that work on a data directory, with or without a running server."""
