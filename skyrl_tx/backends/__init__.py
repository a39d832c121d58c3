"""Ways to compute: each a subpackage behind `skyrl_tx.contract.backend`."""
