"""The protocol package: bytes, checks, grammar, codes, and the document that describes them."""
