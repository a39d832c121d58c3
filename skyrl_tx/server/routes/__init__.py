"""The endpoints, grouped like the SDK's resources."""
