"""What tests of several folders share: layers and recipes, comparisons, tolerances, oracles, settings to change."""
