"""Compiles the graph of a custom loss, as `torch.fx` records it, to the closed vocabulary of the contract.

Nothing of the graph is executed: a function is found by its exact name in `vocabulary`, or refused.
"""
