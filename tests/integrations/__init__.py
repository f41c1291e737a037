"""Tests of the integrations with Hugging Face and Megatron."""
