"""Looking at the engine from outside: why a backend was chosen, what a step will keep, which product is fastest."""
