"""Collectives, issued and counted in one place."""
