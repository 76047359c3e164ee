"""The laptop's stand-ins: a small server that answers as vLLM does, and a toy model."""
