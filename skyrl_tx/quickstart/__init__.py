"""The first run: a tiny model trained through the Tinker SDK."""
