"""Speculative decoding with DFlash beside the text engine; see docs/speculation.md."""
