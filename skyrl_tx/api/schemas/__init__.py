"""The wire as pydantic models: what clients send and what they get."""
