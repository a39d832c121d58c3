"""One backend on several hosts: rank 0 leads, the other ranks follow its calls. Knows the contract and no backend."""
