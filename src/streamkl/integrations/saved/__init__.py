"""Indexers and selectors as files and as JSON, for every integration; it imports neither transformers nor vLLM."""
