"""What was computed for earlier prompts, kept in memory and on disk."""
