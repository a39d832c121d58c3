"""The database that the API process and the engine share.

Most modules here hold functions for one table or one concept, for example `futures` or
`checkpoints`. Their first argument `tx` is a session inside a transaction that `database.Store`
opened.
"""
