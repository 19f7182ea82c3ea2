"""Flows: the only code that knows Prefect, and the only code that composes stages."""
