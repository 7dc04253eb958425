"""Programs that use a trained model: python -m tools.sample, tools.probe, ..."""
