"""Quantization beside llm-compressor."""
