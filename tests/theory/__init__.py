"""A package, so that files named like others in tests/ do not clash."""
