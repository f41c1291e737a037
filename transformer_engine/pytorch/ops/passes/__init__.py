"""Forward and backward functions for this package's operations: `contract.py`, one file per kind, `patterns.py`."""
