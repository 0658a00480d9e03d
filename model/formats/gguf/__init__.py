"""GGUF, llama.cpp's single-file format: key-value metadata, then tensors, dense or in ggml's blocks.

`reader.py` makes a Hugging Face folder of a file, `writer.py` a file of a folder; `names.py` holds what they share, and
`blocks.py` ggml's quantized blocks.
"""
