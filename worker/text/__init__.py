"""Between text and tokens: templates, detokenising, stop strings, and the choice of tokens."""
