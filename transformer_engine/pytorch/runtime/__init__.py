"""The interface to torch: devices, tracing, threads, kernel launches, and value checks."""
