"""Forward and backward passes of layers as data, their rewrites and schedules; see `step.Pass`."""
