"""The implementations of attention; `choose.TABLE` orders them."""
