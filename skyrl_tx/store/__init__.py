"""One database file, shared by the API and the engine: modules of functions over a transaction."""
