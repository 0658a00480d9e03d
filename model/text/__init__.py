"""Text to tokens and back: tokenizers, chat templates, streamed decoding."""
