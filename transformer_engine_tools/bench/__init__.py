"""What `te bench` measures, and how: cases as data, providers that run them, one way to measure, one to report."""
