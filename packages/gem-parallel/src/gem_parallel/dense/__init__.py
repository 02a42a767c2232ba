"""The dense part on several ranks."""
