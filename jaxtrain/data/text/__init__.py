"""Text: files, tokenizers, tokenized documents, and built-in texts."""
