"""The forward and backward functions of this package's operations: `contract.py`, one file per kind, `patterns.py`."""
