"""Tests of everything around the five files."""
