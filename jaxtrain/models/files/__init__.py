"""Models in files: folders in Hugging Face layout, read and written."""
