"""The planner: which backend fits and is fastest, computed from a model's config; no torch."""
