"""`te doctor`: problems in this installation, and their remedies."""
