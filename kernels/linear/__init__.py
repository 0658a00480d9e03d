"""Matrix products: dense, over quantized weights, with adapters."""
