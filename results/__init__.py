"""The raw results, and the programs that make and show them: python -m results.run."""
