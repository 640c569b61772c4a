"""From text to the tokens of a batch: builders, tokenizers, streams on disk, windows."""
