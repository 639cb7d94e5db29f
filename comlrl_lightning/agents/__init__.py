"""The language models: what they are, how they sample, how they score."""
