"""The endpoints, in the same groups as the resources of the SDK."""
