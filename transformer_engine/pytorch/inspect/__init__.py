"""Tools that inspect the engine: chosen backends, memory of a step, statistics of tensors, timing of algorithms."""
