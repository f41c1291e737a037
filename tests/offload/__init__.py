"""Tests of activation offloading."""
