"""The endpoints, grouped as the SDK's resources are."""
