"""From text to batches of tokens: builders, tokenizers, token streams on disk, windows."""
