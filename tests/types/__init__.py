"""Programs as type checkers see them."""
