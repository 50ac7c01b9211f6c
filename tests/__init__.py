"""Tests. Run them with `make test`, or with pytest from the root of the repository."""
