"""What a model is: configuration, transformer, attention over packed and paged batches, tokenizer, files."""
