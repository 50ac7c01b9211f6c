"""Pictures in requests: where they come from, what they are decoded to, and where they stand in the prompt."""
