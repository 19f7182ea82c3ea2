"""Training data on its way from files to token ids: one module for each step."""
