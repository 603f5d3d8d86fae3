"""Images with labels: arrays in memory, and folders of files."""
