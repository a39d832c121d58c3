"""`make chaos`: hundreds of kills while clients train, and what came of it as a table."""
