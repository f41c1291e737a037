"""Tests for the Hugging Face and Megatron integrations."""
