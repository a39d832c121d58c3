"""The database shared by the API and the engine: modules of functions that run in a transaction."""
