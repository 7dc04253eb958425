"""Plumbing that the five files import: flags, devices, files, text sources, formats and metrics."""
