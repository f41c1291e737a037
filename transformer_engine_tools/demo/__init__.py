"""The demonstration: a byte-level GPT under a recipe and in high precision, side by side."""
