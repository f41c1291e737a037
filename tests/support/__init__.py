"""Code that several test folders share: layers, recipes, comparisons, tolerances, oracles, settings."""
