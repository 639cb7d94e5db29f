"""The user's functions: prompts, reward, transition, and how one model answers for several agents."""
