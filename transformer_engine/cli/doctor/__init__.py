"""`te doctor`: problems of this installation, and their remedies."""
