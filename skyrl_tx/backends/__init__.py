"""Implementations of `skyrl_tx.contract.backend`, and their lookup by name."""
