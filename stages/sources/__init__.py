"""Where models and data come from: one module for each kind of place."""
