"""What tests of this project, and of other people's backends, are built from."""
