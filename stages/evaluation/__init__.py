"""How a language model is measured: scoring, generation, pairing with a baseline, intervals."""
