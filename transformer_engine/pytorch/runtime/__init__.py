"""What stands between torch and everything else: the device, tracing, threads, starting kernels, checks of values."""
