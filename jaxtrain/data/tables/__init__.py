"""Tables on disk: parquet and Arrow files, saved datasets, and JSON."""
