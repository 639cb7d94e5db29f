"""Preference pairs of joint completions: how they are made, whom they compare with and which ones are learned from."""
