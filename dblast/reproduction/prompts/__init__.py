"""Which prompts a plan evaluates and trains on, and where they come from."""
