"""Rows of equal length from texts: padded, packed, windows over tokens, and those of fine-tuning."""
