"""Tools that inspect the engine: chosen backends, memory of a step, tensor statistics, algorithm timing."""
