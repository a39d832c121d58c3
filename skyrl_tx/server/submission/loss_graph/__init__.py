"""Compiles the graph of a custom loss, as recorded by `torch.fx`, to operations of the contract.

The server never executes code from the graph. Every function must be listed by its exact name in
`torch_functions`, and all other functions are refused.
"""
