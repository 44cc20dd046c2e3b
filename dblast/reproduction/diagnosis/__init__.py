"""Notebook 01: why independent blocks fail when the target samples."""
