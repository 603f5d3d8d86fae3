"""Readers: batches of sources, mixtures, streams and DataLoaders, and the threads that read them ahead."""
